-- file_remove: forget a file. Atomic: it is in no list, and its bytes count no more.
--
-- KEYS 1      record of the file                           (string: a JSON object)
-- KEYS 2      files by their end                           (sorted set: id -> unix ms of its end)
-- KEYS 3      bytes of files                               (hash: owner -> bytes of all their files)
-- ARGV 1      id
-- ARGV 2      prefix of the sorted sets of owners' files; an owner completes it
-- returns     1 forgotten | 0 there was none

local record = redis.call('GET', KEYS[1])
if not record then
  redis.call('ZREM', KEYS[2], ARGV[1])
  return 0
end
local file = cjson.decode(record)
redis.call('DEL', KEYS[1])
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('ZREM', ARGV[2] .. file['owner'], ARGV[1])
local left = tonumber(redis.call('HGET', KEYS[3], file['owner']) or 0) - file['bytes']
if left > 0 then
  redis.call('HSET', KEYS[3], file['owner'], string.format('%.0f', left))
else
  redis.call('HDEL', KEYS[3], file['owner'])
end
return 1
