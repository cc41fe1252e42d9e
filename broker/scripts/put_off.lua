-- put_off: put held deliveries aside until they are due, with no attempt noted, and keep for readers why. Atomic: a message
-- is held or delayed, never neither. Fenced: of a message that is no longer held nothing is kept.
--
-- KEYS 1      held                                         (hash: tag -> `level:attempt:message`)
-- KEYS 2      delayed                                      (sorted set: tag -> due, ms)
-- KEYS 3      delayed messages                             (hash: tag -> `level:attempt:message`)
-- ARGV 1      for how long it is kept why, after the due time, ms
-- ARGV 2..    four per delivery: tag, due (unix ms), key of what readers see or '' (string with TTL: `due:tag:reason`),
--             reason
-- returns     how many were put off; the others were no longer held

local count, keep = 0, tonumber(ARGV[1])
for i = 2, #ARGV, 4 do
  local tag, due, key = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  local entry = redis.call('HGET', KEYS[1], tag)
  if entry then
    redis.call('HDEL', KEYS[1], tag)
    redis.call('HSET', KEYS[3], tag, entry)
    redis.call('ZADD', KEYS[2], due, tag)
    if key ~= '' then
      redis.call('SET', key, due .. ':' .. tag .. ':' .. ARGV[i + 3], 'PXAT', string.format('%d', due + keep))
    end
    count = count + 1
  end
end
return count
