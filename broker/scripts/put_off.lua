-- put_off: put held deliveries aside until they are due, with no attempt noted, and keep for readers why. Atomic: a message
-- is held or delayed, never neither. Fenced: of a message that is no longer held nothing is kept.
--
-- KEYS 1      held                                         (hash: tag -> `level:attempt:message`)
-- KEYS 2      delayed                                      (sorted set: tag -> due, ms)
-- KEYS 3      delayed messages                             (hash: tag -> `level:attempt:message`)
-- ARGV        five per delivery: tag, due (unix ms), key of what readers see or '' (string: `due:tag:reason`), reason, TTL
--             of that, ms
-- returns     how many were put off; the others were no longer held

local count = 0
for i = 1, #ARGV, 5 do
  local tag, due, key = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  local entry = redis.call('HGET', KEYS[1], tag)
  if entry then
    redis.call('HDEL', KEYS[1], tag)
    redis.call('HSET', KEYS[3], tag, entry)
    redis.call('ZADD', KEYS[2], due, tag)
    if key ~= '' then
      redis.call('SET', key, due .. ':' .. tag .. ':' .. ARGV[i + 3], 'PX', ARGV[i + 4])
    end
    count = count + 1
  end
end
return count
