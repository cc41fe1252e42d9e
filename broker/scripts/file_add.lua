-- file_add: keep the record of a file, new or in place of that with the same id. Atomic: what an owner's files take
-- together is never over the quota, however many come at once, and is always what the records say.
--
-- KEYS 1      record of the file                           (string: a JSON object)
-- KEYS 2      files of its owner                           (sorted set: id -> unix ms of its making)
-- KEYS 3      files by their end                           (sorted set: id -> unix ms of its end)
-- KEYS 4      bytes of files                               (hash: owner -> bytes of all their files)
-- ARGV 1      id
-- ARGV 2      record
-- ARGV 3      owner
-- ARGV 4      bytes
-- ARGV 5      unix ms of its making
-- ARGV 6      unix ms of its end, or '' for none
-- ARGV 7      most bytes of the owner's files; 0 = no limit
-- ARGV 8      '1' = it is there, and is listed; '0' = it is still coming
-- ARGV 9      most files of the owner that are listed; 0 = no limit
-- returns     -1 kept | -2 the owner has as many files as they may |
--             bytes of the owner's other files: it does not fit beside them

local before = redis.call('GET', KEYS[1])
local counted = before and cjson.decode(before)['bytes'] or 0
local others = tonumber(redis.call('HGET', KEYS[4], ARGV[3]) or 0) - counted
local most = tonumber(ARGV[9])
if most > 0 and not before and redis.call('ZCARD', KEYS[2]) >= most then return -2 end
local bytes, quota = tonumber(ARGV[4]), tonumber(ARGV[7])
if quota > 0 and others + bytes > quota then return others end

redis.call('SET', KEYS[1], ARGV[2])
redis.call('HSET', KEYS[4], ARGV[3], string.format('%.0f', others + bytes))
if ARGV[6] == '' then
  redis.call('ZREM', KEYS[3], ARGV[1])
else
  redis.call('ZADD', KEYS[3], ARGV[6], ARGV[1])
end
if ARGV[8] == '1' then redis.call('ZADD', KEYS[2], ARGV[5], ARGV[1]) end
return -1
