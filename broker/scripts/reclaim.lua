-- reclaim: take back what workers held whose lease is over, by server time. Messages return to the front of their list
-- with attempt + 1; those out of attempts pass to the caller, who holds them until it has stored their failure.
--
-- KEYS 1      holders                                      (sorted set: session -> expiry, ms)
-- KEYS 2-5    returned lists, highest priority first      (list of `attempt:message`)
-- KEYS 6      held by the caller                           (hash: tag -> `level:attempt:message`)
-- ARGV 1      prefix of the held hashes
-- ARGV 2      session of the caller
-- ARGV 3      lease, ms
-- ARGV 4      max attempts
-- ARGV 5      most messages to move in this call
-- returns     messages given back, then four per exhausted message: tag, attempts made, level, message

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local max_attempts, budget = tonumber(ARGV[4]), tonumber(ARGV[5])
local out = {0}

for _, session in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now)) do
  if session ~= ARGV[2] then
    local held = ARGV[1] .. session
    local tags = redis.call('HKEYS', held)
    table.sort(tags, function(a, b) return tonumber(a) > tonumber(b) end)
    for _, tag in ipairs(tags) do
      if budget == 0 then return out end
      budget = budget - 1
      local entry = redis.call('HGET', held, tag)
      redis.call('HDEL', held, tag)
      local level = tonumber(string.sub(entry, 1, 1))
      local colon = string.find(entry, ':', 3, true)
      local attempt = tonumber(string.sub(entry, 3, colon - 1))
      local message = string.sub(entry, colon + 1)
      if attempt >= max_attempts then
        redis.call('HSET', KEYS[6], tag, entry)
        redis.call('ZADD', KEYS[1], now + tonumber(ARGV[3]), ARGV[2])
        for _, value in ipairs({tag, attempt, level, message}) do out[#out + 1] = value end
      else
        redis.call('RPUSH', KEYS[1 + level], (attempt + 1) .. ':' .. message)
        out[1] = out[1] + 1
      end
    end
    redis.call('ZREM', KEYS[1], session)
  end
end
return out
