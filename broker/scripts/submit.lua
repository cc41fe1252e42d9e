-- submit: admit jobs to one queue. Atomic: a job is either stored and queued whole, or nothing of it remains.
--
-- KEYS 1-4    waiting lists, highest priority first       (list of messages)
-- KEYS 5-8    returned lists, highest priority first      (list of `attempt:message`)
-- KEYS 9      delayed                                      (sorted set)
-- KEYS 10     owned depths                                 (hash: level -> messages in the owners' lists)
-- KEYS 11-14  rotations, highest priority first           (list of owners; see lease)
-- KEYS 15-18  places, highest priority first              (sorted set: owner -> place of their last message in the
--                                                           waiting list; '' -> minus the places taken)
-- KEYS 19     served                                       (hash: level -> messages ever leased from waiting and owned)
-- KEYS 20     expiring                                     (sorted set: job id -> when it ends if it has not begun, unix ms)
-- ARGV 1      depth limit of the queue; 0 = none
-- ARGV 2      record TTL, seconds
-- ARGV 3      idempotency TTL, seconds
-- ARGV 4      length of a waiting list from which on an owner's messages go to a list of the owner's own
-- ARGV 5      how many jobs of an owner are listed, the newest
-- ARGV 6      prefix of records; a job id completes it
-- ARGV 7      prefix of results; a job id completes it
-- ARGV 8..    per job: job id, level (1-4), record (a JSON object), message, created (unix ms),
--             idempotency key or '', what is stored there,
--             owner or '', key of the owner's list, key of the owner's listing,
--             key of the set of open jobs or '', most open jobs,
--             key of the rate or '', microseconds between submits at that rate, most submits at once,
--             '1' = the id is the caller's: it may be taken,
--             unix ms at which it ends if it has not begun, or ''
-- returns     per job:
--             0 accepted (now, or before under the same id)
--             text: what the first job with this idempotency key stored there
--             {1, depth} queue full |
--             {2, open jobs} too many of them |
--             {3, microseconds to wait} too fast |
--             {4, record or ''} the caller's id is taken by the job of this record, or by another application's task
--             With a rate: {the above, submits left, microseconds until none is counted}

local limit, fair_from, most_listed = tonumber(ARGV[1]), tonumber(ARGV[4]), tonumber(ARGV[5])
local record_prefix, result_prefix = ARGV[6], ARGV[7]
local FIELDS = 17
-- Open jobs that are looked at when there are too many: some may have been lost to a server that lost its last writes.
local LOOKED_AT = 20

local depth = redis.call('ZCARD', KEYS[9])
local waiting = {}
local owned = redis.call('HMGET', KEYS[10], 1, 2, 3, 4)
local served = redis.call('HMGET', KEYS[19], 1, 2, 3, 4)
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

-- How many jobs are open, when that is `most` or more; else nil.
local function too_many_open(key, most)
  local count = redis.call('SCARD', key)
  if count < most then return nil end
  for _, id in ipairs(redis.call('SRANDMEMBER', key, LOOKED_AT)) do
    if redis.call('EXISTS', record_prefix .. id) == 0 or redis.call('EXISTS', result_prefix .. id) == 1 then
      redis.call('SREM', key, id)
      count = count - 1
    end
  end
  return count >= most and count or nil
end

-- The generic cell rate algorithm (ITU-T I.371): the time at which all submits so far would have come at the very rate,
-- as microseconds from now.
local now
local function ahead_of_now(key)
  if not now then
    local time = redis.call('TIME')
    now = time[1] * 1000000 + time[2]
  end
  return math.max(tonumber(redis.call('GET', key) or 0) - now, 0)
end

-- What the first job with an idempotency key stored there, as long as anything is kept of that job. A result may be kept
-- for less time than the key, and an answer that leads nowhere is of no use.
local function first_of(idempotency)
  local stored = redis.call('GET', idempotency)
  local id = stored and string.match(stored, '^[^:]*:%d+:(.*)$')
  return id and redis.call('EXISTS', record_prefix .. id, result_prefix .. id) > 0 and stored
end

local listings = {}
local expiring = false

local function submit(i)
  local id, level, created, idempotency = ARGV[i], tonumber(ARGV[i + 1]), ARGV[i + 4], ARGV[i + 5]
  local open, most_open, rate = ARGV[i + 10], tonumber(ARGV[i + 11]), ARGV[i + 12]
  local interval, burst = tonumber(ARGV[i + 13]), tonumber(ARGV[i + 14])
  local record_key = record_prefix .. id
  local first = idempotency ~= '' and first_of(idempotency)
  if first then return first end
  if ARGV[i + 15] == '1' then
    local taken = redis.call('GET', record_key)
    if taken then return {4, taken} end
    if redis.call('EXISTS', result_prefix .. id) == 1 then return {4, ''} end
  elseif redis.call('EXISTS', record_key) == 1 then
    -- This very job was accepted and its answer lost on the way.
    return 0
  end
  if limit > 0 and depth >= limit then return {1, depth} end
  local count = open ~= '' and too_many_open(open, most_open)
  if count then return {2, count} end
  if rate ~= '' then
    local ahead = ahead_of_now(rate)
    local wait = ahead + interval - burst * interval
    if wait > 0 then return {3, wait} end
    ahead = ahead + interval
    redis.call('SET', rate, string.format('%.0f', now + ahead), 'PX', math.ceil(ahead / 1000))
  end
  -- The record comes first: running out of memory here leaves a record without a job, never a job without a record.
  local ticket = tonumber(served[level] or 0) + waiting[level] + owned[level] + 1
  local record = string.sub(ARGV[i + 2], 1, -2) .. string.format(',"ticket":%.0f}', ticket)
  redis.call('SET', record_key, record, 'EX', ARGV[2])
  push(level, ARGV[i + 3], ARGV[i + 7], ARGV[i + 8])
  if idempotency ~= '' then redis.call('SET', idempotency, ARGV[i + 6], 'EX', ARGV[3]) end
  if open ~= '' then
    redis.call('SADD', open, id)
    redis.call('EXPIRE', open, ARGV[2])
  end
  if ARGV[i + 16] ~= '' then
    redis.call('ZADD', KEYS[20], ARGV[i + 16], id)
    expiring = true
  end
  redis.call('ZADD', ARGV[i + 9], created, id)
  listings[ARGV[i + 9]] = true
  depth = depth + 1
  return 0
end

-- The answer for a job, and where its caller stands after it.
local function answer_of(i)
  local answer, rate = submit(i), ARGV[i + 12]
  if rate == '' then return answer end
  local ahead = ahead_of_now(rate)
  return {answer, math.max(0, math.floor(tonumber(ARGV[i + 14]) - ahead / tonumber(ARGV[i + 13]))), ahead}
end

local answers = {}
for i = 8, #ARGV, FIELDS do answers[#answers + 1] = answer_of(i) end
for listing in pairs(listings) do
  redis.call('ZREMRANGEBYRANK', listing, 0, -1 - most_listed)
  redis.call('EXPIRE', listing, ARGV[2])
end
if expiring then redis.call('EXPIRE', KEYS[20], ARGV[2]) end
return answers
