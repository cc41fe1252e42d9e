-- schedule: put held messages aside until they are due. Atomic: a message is held or delayed, never neither.
--
-- KEYS 1      held                                         (hash: tag -> `level:attempt:message`)
-- KEYS 2      delayed                                      (sorted set: tag -> due, ms)
-- KEYS 3      delayed messages                             (hash: tag -> `level:attempt:message`)
-- ARGV        two per message: tag, due time (unix ms)
-- returns     how many were put aside; the others were no longer held

local count = 0
for i = 1, #ARGV, 2 do
  local entry = redis.call('HGET', KEYS[1], ARGV[i])
  if entry then
    redis.call('HDEL', KEYS[1], ARGV[i])
    redis.call('HSET', KEYS[3], ARGV[i], entry)
    redis.call('ZADD', KEYS[2], ARGV[i + 1], ARGV[i])
    count = count + 1
  end
end
return count
