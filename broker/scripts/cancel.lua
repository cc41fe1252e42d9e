-- cancel: end a job that has no result yet. Whoever holds its message drops it: before it runs, or with its result.
--
-- KEYS 1      result key, and the channel of the same name
-- KEYS 2      record key
-- KEYS 3      key of the note that it has begun
-- KEYS 4      revoked                                      (sorted set: job id -> unix seconds)
-- KEYS 5      set of open jobs that it may be in
-- KEYS 6      waiting list of what webhooks are to be told  (list of messages)
-- KEYS 7      expiring                                     (sorted set: job id -> when it ends if it has not begun, unix ms)
-- ARGV 1      the stored form of a job that was dropped
-- ARGV 2      result TTL, seconds
-- ARGV 3      channel that names the jobs that have ended, by their result keys
-- ARGV 4      1 = only if it has not begun
-- ARGV 5      job id
-- ARGV 6      how long it is remembered that it was dropped, seconds
-- ARGV 7      how many such jobs are remembered
-- ARGV 8      what the job's webhook is to be told, or ''
-- returns     1 dropped | 0 it had a result already, or has begun

if ARGV[4] == '1' and redis.call('EXISTS', KEYS[3]) == 1 then return 0 end
if not redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2], 'NX') then return 0 end
local now = tonumber(redis.call('TIME')[1])
redis.call('ZADD', KEYS[4], now, ARGV[5])
redis.call('ZREMRANGEBYSCORE', KEYS[4], '-inf', now - tonumber(ARGV[6]))
redis.call('ZREMRANGEBYRANK', KEYS[4], 0, -1 - tonumber(ARGV[7]))
redis.call('EXPIRE', KEYS[4], ARGV[6])
redis.call('PUBLISH', KEYS[1], ARGV[1])
redis.call('PUBLISH', ARGV[3], KEYS[1])
redis.call('EXPIRE', KEYS[2], ARGV[2])
redis.call('SREM', KEYS[5], ARGV[5])
redis.call('ZREM', KEYS[7], ARGV[5])
if ARGV[8] ~= '' then redis.call('LPUSH', KEYS[6], ARGV[8]) end
return 1
