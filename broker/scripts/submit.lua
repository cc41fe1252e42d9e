-- submit: admit jobs to one queue. Atomic: a job is either stored and queued whole, or nothing of it remains.
--
-- KEYS 1-4    waiting lists, highest priority first       (list of messages)
-- KEYS 5-8    returned lists, highest priority first      (list of `attempt:message`)
-- KEYS 9      delayed                                      (sorted set)
-- ARGV 1      depth limit of the queue; 0 = none
-- ARGV 2      record TTL, seconds
-- ARGV 3      idempotency TTL, seconds
-- ARGV 4..    six per job: level (1-4), record key, record, message, idempotency key or '', fingerprint
-- returns     per job: 0 accepted (now, or before under the same id) | depth (> 0) refused, queue full | `fingerprint:job id` of the first job with this idempotency key

local limit = tonumber(ARGV[1])
local depth = redis.call('ZCARD', KEYS[9])
for i = 1, 8 do depth = depth + redis.call('LLEN', KEYS[i]) end

local answers = {}
for i = 4, #ARGV, 6 do
  local idempotency = ARGV[i + 4]
  local first = idempotency ~= '' and redis.call('GET', idempotency)
  if first then
    answers[#answers + 1] = first
  elseif limit > 0 and depth >= limit then
    answers[#answers + 1] = depth
  else
    -- The record comes first: running out of memory here leaves a record without a job, never a job without a record.
    -- A record that is there already means that this very job was accepted and its answer lost on the way.
    if redis.call('SET', ARGV[i + 1], ARGV[i + 2], 'EX', ARGV[2], 'NX') then
      redis.call('LPUSH', KEYS[tonumber(ARGV[i])], ARGV[i + 3])
      if idempotency ~= '' then redis.call('SET', idempotency, ARGV[i + 5], 'EX', ARGV[3]) end
      depth = depth + 1
    end
    answers[#answers + 1] = 0
  end
end
return answers
