-- submit_batch: make a batch known and queue its message, both or neither.
--
-- KEYS 1      batch                                        (hash: record, fingerprint, cancelling_at, paused)
-- KEYS 2      its owner's batches                          (sorted set: id -> unix ms of its making)
-- KEYS 3      its owner's batches that have not ended      (set of ids)
-- KEYS 4      everybody's batches                          (sorted set: id -> unix ms of its making)
-- KEYS 5      waiting list of the batches' queue           (list of messages)
-- ARGV 1      id
-- ARGV 2      record
-- ARGV 3      fingerprint of the request
-- ARGV 4      unix ms of its making
-- ARGV 5      TTL, seconds
-- ARGV 6      how many of an owner's may be open at a time
-- ARGV 7      how many of an owner's are listed, and of everybody's, the newest
-- ARGV 8      message
-- returns     'new' | 'other' = the id stands for another request | 'full' = too many are open | the record of the same
--             batch, which was there

local known = redis.call('HMGET', KEYS[1], 'record', 'fingerprint')
if known[1] then return known[2] == ARGV[3] and known[1] or 'other' end
if redis.call('SCARD', KEYS[3]) >= tonumber(ARGV[6]) then
  -- A server that lost its last writes may hold ids of batches that it does not know.
  for _, id in ipairs(redis.call('SMEMBERS', KEYS[3])) do
    if not redis.call('ZSCORE', KEYS[2], id) then redis.call('SREM', KEYS[3], id) end
  end
  if redis.call('SCARD', KEYS[3]) >= tonumber(ARGV[6]) then return 'full' end
end
redis.call('HSET', KEYS[1], 'record', ARGV[2], 'fingerprint', ARGV[3])
redis.call('EXPIRE', KEYS[1], ARGV[5])
for _, listing in ipairs({KEYS[2], KEYS[4]}) do
  redis.call('ZADD', listing, ARGV[4], ARGV[1])
  redis.call('ZREMRANGEBYRANK', listing, 0, -1 - tonumber(ARGV[7]))
  redis.call('EXPIRE', listing, ARGV[5])
end
redis.call('SADD', KEYS[3], ARGV[1])
redis.call('EXPIRE', KEYS[3], ARGV[5])
redis.call('LPUSH', KEYS[5], ARGV[8])
return 'new'
