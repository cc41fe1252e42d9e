-- forget: an idempotency key stands for no job any more, unless it stands for another one by now.
--
-- KEYS 1      idempotency key                              (string: `fingerprint:unix milliseconds:job id`)
-- ARGV 1      job id
-- returns     1 forgotten | 0 it stands for another job, or none

local stored = redis.call('GET', KEYS[1])
if not stored or string.match(stored, '^[^:]*:%d+:(.*)$') ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
