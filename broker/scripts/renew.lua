-- renew: extend the lease of everything that a worker holds, by server time. A holder that was reclaimed stays lost.
--
-- KEYS        holders, one per queue                       (sorted set: session -> expiry, ms)
-- ARGV 1      session
-- ARGV 2      lease, ms
-- returns     per queue: 1 renewed | 0 not a holder (nothing held, or reclaimed)

local time = redis.call('TIME')
local expiry = time[1] * 1000 + math.floor(time[2] / 1000) + tonumber(ARGV[2])
local answers = {}
for i, holders in ipairs(KEYS) do
  -- The removal is what lets a full server accept the ZADD.
  if redis.call('ZREM', holders, ARGV[1]) == 1 then
    redis.call('ZADD', holders, expiry, ARGV[1])
    answers[i] = 1
  else
    answers[i] = 0
  end
end
return answers
