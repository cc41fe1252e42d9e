-- due: bring delayed messages whose time has come, by server time, to the front of their list. Atomic.
--
-- KEYS 1      delayed                                      (sorted set: tag -> due, ms)
-- KEYS 2      delayed messages                             (hash: tag -> `level:attempt:message`)
-- KEYS 3-6    returned lists, highest priority first      (list of `attempt:message`)
-- ARGV 1      most messages to move in this call
-- returns     how many became due

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local tags = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, tonumber(ARGV[1]))
for _, tag in ipairs(tags) do
  local entry = redis.call('HGET', KEYS[2], tag)
  redis.call('HDEL', KEYS[2], tag)
  redis.call('ZREM', KEYS[1], tag)
  redis.call('LPUSH', KEYS[2 + tonumber(string.sub(entry, 1, 1))], string.sub(entry, 3))
end
return #tags
