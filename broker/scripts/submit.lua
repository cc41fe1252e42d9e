-- submit: admit jobs to one queue. Atomic: a job is either stored and queued whole, or nothing of it remains.
--
-- KEYS 1-4    waiting lists, highest priority first       (list of messages)
-- KEYS 5-8    returned lists, highest priority first      (list of `attempt:message`)
-- KEYS 9      delayed                                      (sorted set)
-- KEYS 10     owned depths                                 (hash: level -> messages in the owners' lists)
-- KEYS 11-14  rotations, highest priority first           (list of owners; see lease)
-- KEYS 15-18  places, highest priority first              (sorted set: owner -> place of their last message in the
--                                                           waiting list; '' -> minus the places taken)
-- ARGV 1      depth limit of the queue; 0 = none
-- ARGV 2      record TTL, seconds
-- ARGV 3      idempotency TTL, seconds
-- ARGV 4      length of a waiting list from which on an owner's messages go to a list of the owner's own
-- ARGV 5..    eight per job: level (1-4), record key, record, message, idempotency key or '', fingerprint,
--             owner or '', key of the owner's list
-- returns     per job: 0 accepted (now, or before under the same id) | depth (> 0) refused, queue full | `fingerprint:job id` of the first job with this idempotency key

local limit, fair_from = tonumber(ARGV[1]), tonumber(ARGV[4])
local depth = redis.call('ZCARD', KEYS[9])
local waiting = {}
local owned = redis.call('HMGET', KEYS[10], 1, 2, 3, 4)
for level = 1, 4 do
  waiting[level] = redis.call('LLEN', KEYS[level])
  owned[level] = tonumber(owned[level] or 0)
  depth = depth + waiting[level] + redis.call('LLEN', KEYS[4 + level]) + owned[level]
end

-- Messages of an owner stay in their order: whoever has a list goes on with it, and it has no turns as long as something
-- of theirs is in the waiting list. Only a short one takes owners' messages, so that is never further back than its length.
local function push(level, message, owner, own_list)
  local rotation, places = KEYS[10 + level], KEYS[14 + level]
  local has_list = owner ~= '' and owned[level] > 0 and redis.call('EXISTS', own_list) == 1
  if owner == '' or not has_list and waiting[level] < fair_from then
    redis.call('LPUSH', KEYS[level], message)
    waiting[level] = waiting[level] + 1
    if owner ~= '' then
      local taken = redis.call('ZSCORE', places, '')
      if not taken then redis.call('ZADD', places, 0, '') end
      redis.call('ZADD', places, waiting[level] - tonumber(taken or 0), owner)
    end
    return
  end
  redis.call('LPUSH', own_list, message)
  if owned[level] == 0 then redis.call('RPUSH', rotation, '') end
  if not has_list and not redis.call('ZSCORE', places, owner) then redis.call('RPUSH', rotation, owner) end
  owned[level] = redis.call('HINCRBY', KEYS[10], level, 1)
end

local answers = {}
for i = 5, #ARGV, 8 do
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
      push(tonumber(ARGV[i]), ARGV[i + 3], ARGV[i + 6], ARGV[i + 7])
      if idempotency ~= '' then redis.call('SET', idempotency, ARGV[i + 5], 'EX', ARGV[3]) end
      depth = depth + 1
    end
    answers[#answers + 1] = 0
  end
end
return answers
