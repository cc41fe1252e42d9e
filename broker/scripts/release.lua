-- release: give unstarted messages back to the front of their list, attempt unchanged. Atomic.
--
-- KEYS 1      held                                         (hash: tag -> `level:attempt:message`)
-- KEYS 2-5    returned lists, highest priority first      (list of `attempt:message`)
-- ARGV        tags, newest first: the oldest ends up at the very front
-- returns     how many were given back; the others were no longer held

local count = 0
for _, tag in ipairs(ARGV) do
  local entry = redis.call('HGET', KEYS[1], tag)
  if entry then
    redis.call('HDEL', KEYS[1], tag)
    redis.call('RPUSH', KEYS[1 + tonumber(string.sub(entry, 1, 1))], string.sub(entry, 3))
    count = count + 1
  end
end
return count
