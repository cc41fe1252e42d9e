-- lease: move messages from the queue to what a worker holds. Atomic: a message is in a list or held, never neither.
--
-- KEYS 1-4    returned lists, highest priority first      (list of `attempt:message`)
-- KEYS 5-8    waiting lists, highest priority first       (list of messages)
-- KEYS 9      holders                                      (sorted set: session -> expiry, ms)
-- KEYS 10     held                                         (hash: tag -> `level:attempt:message`)
-- KEYS 11     lease sequence                               (counter)
-- KEYS 12     owned depths                                 (hash: level -> messages in the owners' lists)
-- KEYS 13-16  rotations, highest priority first           (list of owners, '' = the waiting list; the next one left)
-- KEYS 17-20  places, highest priority first              (sorted set: owner -> place of their last message in the
--                                                           waiting list; '' -> minus the places taken)
-- KEYS 21     served                                       (hash: level -> messages ever leased from waiting and owned)
-- ARGV 1      session
-- ARGV 2      lease, ms
-- ARGV 3      highest tag that this worker has seen of the queue; new ones are above it
-- ARGV 4-7    room: how many messages to take of each level at most
-- ARGV 8-11   prefixes of the owners' lists; an owner completes them
-- ARGV 12     '1' = one with an attempt above 1 comes together with others
-- returns     messages still waiting of each level, then four per lease: tag, attempt, level (1-4), message;
--             one with an attempt above 1 comes alone, unless told otherwise
--
-- A full server (maxmemory) refuses a script whose first write needs memory, and lets a script go on that has written.
-- A removal comes first here, and in every script of the drain, so a full queue can always be emptied.
--
-- Shares: what is left of a level's room after the returned list is dealt out, a slot at a time, to the waiting list and
-- to the owners in the rotation; whom a slot would come to next is first at the next call. An owner is in the rotation
-- while they have a list and nothing in the waiting list: what they queued there is older.
--
-- Waking: workers sleep over the waiting lists only. An owner's list is begun while the waiting list is long, which wakes
-- them, and counts among what this script says still waits, so whoever has leased comes again at once. If that worker
-- dies there, the others may sleep beside messages in owners' lists, until they look by themselves (each second).

-- Most sources that are dealt to in one round, a limit of `unpack`; another round follows.
local MOST_SOURCES = 4000

local returned, celery = {}, {}
local owned = redis.call('HMGET', KEYS[12], 1, 2, 3, 4)
for level = 1, 4 do
  returned[level] = redis.call('LLEN', KEYS[level])
  celery[level] = redis.call('LLEN', KEYS[4 + level])
  owned[level] = tonumber(owned[level] or 0)
end

-- A server that lost its last writes (kill -9, a failover) would give out tags again that the worker still holds, and one
-- job's end would drop the lease of another.
local tag = math.max(tonumber(redis.call('GET', KEYS[11]) or 0), tonumber(ARGV[3]))
local out = {0, 0, 0, 0}
local held = {}

local function keep(level, attempt, message)
  tag = tag + 1
  local name = string.format('%.0f', tag)
  held[#held + 1] = name
  held[#held + 1] = level .. ':' .. attempt .. ':' .. message
  out[#out + 1] = name
  out[#out + 1] = attempt
  out[#out + 1] = level
  out[#out + 1] = message
end

-- Takes what was given back. Returns how much room is left: none where the next message has to come alone, or has.
local closed = false
local together = ARGV[12] == '1'

local function take_returned(level, room)
  while room > 0 and returned[level] > 0 do
    local entry = redis.call('LINDEX', KEYS[level], -1)
    local colon = string.find(entry, ':', 1, true)
    local attempt = tonumber(string.sub(entry, 1, colon - 1))
    -- If this message was the cause that its worker was lost, nothing else is held beside it the next time.
    if attempt > 1 and not together and #held > 0 then return 0 end
    redis.call('RPOP', KEYS[level])
    keep(level, attempt, string.sub(entry, colon + 1))
    returned[level] = returned[level] - 1
    room = room - 1
    if attempt > 1 and not together then
      closed = true
      return 0
    end
  end
  return room
end

-- Notes that `count` places of the waiting list were taken. Owners who have nothing there any more get their turns.
local function advance(level, count)
  local places = KEYS[16 + level]
  local taken = redis.call('ZSCORE', places, '')
  if not taken then return end
  -- Nobody has a place in an empty list, whoever emptied it.
  local last = celery[level] > 0 and string.format('%.0f', count - tonumber(taken)) or '+inf'
  local through = redis.call('ZRANGEBYSCORE', places, '(0', last)
  redis.call('ZREMRANGEBYSCORE', places, '(0', last)
  if redis.call('ZCARD', places) == 1 then
    redis.call('DEL', places)
  elseif count > 0 then
    redis.call('ZINCRBY', places, -count, '')
  end
  if owned[level] == 0 then return end
  for _, owner in ipairs(through) do
    if redis.call('EXISTS', ARGV[7 + level] .. owner) == 1 then redis.call('RPUSH', KEYS[12 + level], owner) end
  end
end

local function take_celery(level, count)
  count = math.min(count, celery[level])
  if count == 0 then return end
  for _, message in ipairs(redis.call('RPOP', KEYS[4 + level], count)) do keep(level, 1, message) end
  celery[level] = celery[level] - count
  advance(level, count)
end

local function take_owned(level, owner, count)
  for _, message in ipairs(redis.call('RPOP', ARGV[7 + level] .. owner, count)) do keep(level, 1, message) end
  owned[level] = owned[level] - count
end

-- Equal shares of `room` for sources that have so many messages; one that cannot use its share leaves the rest to the
-- others. Returns the shares, and whom the last slot came to.
local function shares(have, room)
  local share, open, last = {}, {}, 0
  for i = 1, #have do
    share[i] = 0
    if have[i] > 0 then open[#open + 1] = i end
  end
  while room > 0 and #open > 0 do
    local each = math.max(1, math.floor(room / #open))
    local still = {}
    for _, i in ipairs(open) do
      local more = math.min(each, have[i] - share[i], room)
      if more > 0 then last = i end
      share[i] = share[i] + more
      room = room - more
      if share[i] < have[i] then still[#still + 1] = i end
    end
    open = still
  end
  return share, last
end

-- One round of the rotation. Returns how much room is left. One source more than there is room for is looked at: the
-- waiting list may be empty.
local function deal(level, room)
  local rotation = KEYS[12 + level]
  local sources = redis.call('LRANGE', rotation, 0, math.min(room, MOST_SOURCES - 1))
  local have = {}
  for i, owner in ipairs(sources) do
    have[i] = owner == '' and celery[level] or redis.call('LLEN', ARGV[7 + level] .. owner)
  end
  local share, last = shares(have, room)
  if last == 0 then return room end
  local front, back = {}, {}
  for i, owner in ipairs(sources) do
    if share[i] > 0 then
      if owner == '' then take_celery(level, share[i]) else take_owned(level, owner, share[i]) end
      room = room - share[i]
    end
    if i <= last and (owner == '' or share[i] < have[i]) then back[#back + 1] = owner end
  end
  for i = #sources, last + 1, -1 do
    if sources[i] == '' or share[i] < have[i] then front[#front + 1] = sources[i] end
  end
  redis.call('LPOP', rotation, #sources)
  if #front > 0 then redis.call('LPUSH', rotation, unpack(front)) end
  if #back > 0 then redis.call('RPUSH', rotation, unpack(back)) end
  return room
end

local function take_shares(level, room)
  local before = owned[level]
  if celery[level] == 0 then advance(level, 0) end
  local left
  repeat
    left = room
    -- Who gets their turns in this round is dealt to in the next.
    room = deal(level, left)
  until room == left or room == 0
  if owned[level] == 0 then
    redis.call('DEL', KEYS[12 + level])
    redis.call('HDEL', KEYS[12], level)
  elseif owned[level] < before then
    redis.call('HINCRBY', KEYS[12], level, owned[level] - before)
  end
end

for level = 1, 4 do
  local room = closed and 0 or take_returned(level, tonumber(ARGV[3 + level]))
  if room > 0 then
    local before = #held
    if owned[level] > 0 then take_shares(level, room) else take_celery(level, room) end
    if #held > before then redis.call('HINCRBY', KEYS[21], level, (#held - before) / 2) end
  end
end

if #held > 0 then
  local time = redis.call('TIME')
  redis.call('SET', KEYS[11], string.format('%.0f', tag))
  for i = 1, #held, 4000 do
    redis.call('HSET', KEYS[10], unpack(held, i, math.min(i + 3999, #held)))
  end
  redis.call('ZADD', KEYS[9], time[1] * 1000 + math.floor(time[2] / 1000) + tonumber(ARGV[2]), ARGV[1])
end
for level = 1, 4 do out[level] = returned[level] + celery[level] + owned[level] end
return out
