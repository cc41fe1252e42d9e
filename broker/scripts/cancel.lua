-- cancel: end a job that has no result yet. Whoever holds its message drops it: before it runs, or with its result.
--
-- KEYS 1      result key, and the channel of the same name
-- KEYS 2      record key
-- ARGV 1      the stored form of a cancelled job
-- ARGV 2      result TTL, seconds
-- ARGV 3      channel that names the jobs that have ended, by their result keys
-- returns     1 cancelled | 0 it had a result already

if not redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2], 'NX') then return 0 end
redis.call('PUBLISH', KEYS[1], ARGV[1])
redis.call('PUBLISH', ARGV[3], KEYS[1])
redis.call('EXPIRE', KEYS[2], ARGV[2])
return 1
