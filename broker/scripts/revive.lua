-- revive: give one dead letter another life. Its stored failure goes, and its message waits again, with no attempt counted.
--
-- KEYS 1      dead letters        (list of JSON objects)
-- KEYS 2      waiting list of the letter's priority
-- KEYS 3      result key of its job
-- KEYS 4      revoked             (sorted set: job id -> unix seconds)
-- ARGV 1      the letter, as it stands in the list
-- ARGV 2      its message
-- ARGV 3      its job's id
-- returns     1 done | 0 the letter is not there any more

if redis.call('LREM', KEYS[1], 1, ARGV[1]) == 0 then return 0 end
redis.call('DEL', KEYS[3])
redis.call('ZREM', KEYS[4], ARGV[3])
redis.call('LPUSH', KEYS[2], ARGV[2])
return 1
