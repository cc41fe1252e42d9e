-- report_batch: write down how far a batch is. Fenced: only by whoever holds its message.
--
-- KEYS 1      held                                         (hash: tag -> `level:attempt:message`)
-- KEYS 2      batch                                        (hash: record, fingerprint, cancelling_at, paused)
-- KEYS 3      its owner's batches that have not ended      (set of ids)
-- ARGV 1      tag
-- ARGV 2      record
-- ARGV 3      TTL, seconds
-- ARGV 4      id of a batch that has ended, or ''
-- returns     'lost' = somebody else has it | {unix seconds since when it is to be cancelled | nil, '1' = it is to
--             pause | nil}

if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then return 'lost' end
redis.call('HSET', KEYS[2], 'record', ARGV[2])
redis.call('EXPIRE', KEYS[2], ARGV[3])
if ARGV[4] ~= '' then redis.call('SREM', KEYS[3], ARGV[4]) end
return redis.call('HMGET', KEYS[2], 'cancelling_at', 'paused')
