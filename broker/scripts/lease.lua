-- lease: move up to n messages from the queue to what a worker holds. Atomic: a message is in a list or held, never neither.
--
-- KEYS 1-4    returned lists, highest priority first      (list of `attempt:message`)
-- KEYS 5-8    waiting lists, highest priority first       (list of messages)
-- KEYS 9      holders                                      (sorted set: session -> expiry, ms)
-- KEYS 10     held                                         (hash: tag -> `level:attempt:message`)
-- KEYS 11     lease sequence                               (counter)
-- ARGV 1      session
-- ARGV 2      n
-- ARGV 3      lease, ms
-- ARGV 4      every how many slots one goes to the lowest waiting priority; 0 = never
-- ARGV 5      highest tag that this worker has seen of the queue; new ones are above it
-- returns     messages still waiting, then four per lease: tag, attempt, level (1-4), message;
--             one with an attempt above 1 comes alone
--
-- A full server (maxmemory) refuses a script whose first write needs memory, and lets a script go on that has written.
-- RPOP comes first here, and a removal comes first in every script of the drain, so a full queue can always be emptied.

local function waiting(level)
  return redis.call('LLEN', KEYS[level]) + redis.call('LLEN', KEYS[4 + level])
end

-- A server that lost its last writes (kill -9, a failover) would give out tags again that the worker still holds, and one
-- job's end would drop the lease of another.
local first = math.max(tonumber(redis.call('GET', KEYS[11]) or 0), tonumber(ARGV[3]))
local tag = first
local out = {0, 0, 0, 0}
local held = {}

local function keep(level, attempt, message)
  tag = tag + 1
  local name = string.format('%.0f', tag)
  held[#held + 1] = name
  held[#held + 1] = level .. ':' .. attempt .. ':' .. message
  out[#out + 1] = name
  out[#out + 1] = attempt
  out[#out + 1] = level
  out[#out + 1] = message
end

-- A message whose worker was lost is leased by itself: if it was the cause, nothing else is held beside it the next time.
local closed = false

local function take(level, count)
  if count <= 0 or closed then return 0 end
  local taken = 0
  while taken < count do
    local entry = redis.call('LINDEX', KEYS[level], -1)
    if not entry then break end
    local colon = string.find(entry, ':', 1, true)
    local attempt = tonumber(string.sub(entry, 1, colon - 1))
    if attempt > 1 then
      closed = true
      if #held > 0 then return taken end
    end
    redis.call('RPOP', KEYS[level])
    keep(level, attempt, string.sub(entry, colon + 1))
    taken = taken + 1
    if closed then return taken end
  end
  if taken < count then
    for _, message in ipairs(redis.call('RPOP', KEYS[4 + level], count - taken) or {}) do
      keep(level, 1, message)
      taken = taken + 1
    end
  end
  return taken
end

for level = 1, 4 do take(level, tonumber(ARGV[3 + level])) end

local time = redis.call('TIME')
if #held > 0 then
  redis.call('SET', KEYS[11], string.format('%.0f', tag))
  for i = 1, #held, 4000 do
    redis.call('HSET', KEYS[10], unpack(held, i, math.min(i + 3999, #held)))
  end
  redis.call('ZADD', KEYS[9], time[1] * 1000 + math.floor(time[2] / 1000) + tonumber(ARGV[2]), ARGV[1])
end
for level = 1, 4 do out[level] = waiting(level) end
return out
