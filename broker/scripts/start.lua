-- start: the last look before a batch runs. Tells for each job whether it may run, and notes the start of those with a record.
--
-- KEYS 1      held                                         (hash: tag -> `level:attempt:message`)
-- KEYS 2      revoked                                      (sorted set: job id -> unix seconds)
-- KEYS 3      watched                                      (sorted set: job id -> unix seconds until when)
-- ARGV 1      TTL of the note, seconds
-- ARGV 2      channel that names the jobs of which there is news, by their result keys
-- ARGV 3..    five per job: tag, job id, result key, key of the note or '', note (`attempt:unix seconds`)
-- returns     per job: 1 run it | 0 the lease is lost | 2 it has a result already; its lease is dropped |
--             3 it was revoked; it is still held, to be settled as dropped

local answers = {}
local any_revoked = redis.call('EXISTS', KEYS[2]) == 1
local any_watched = redis.call('EXISTS', KEYS[3]) == 1
local news = {}
for i = 3, #ARGV, 5 do
  local answer = redis.call('HEXISTS', KEYS[1], ARGV[i])
  if answer == 1 then
    if any_revoked and redis.call('ZSCORE', KEYS[2], ARGV[i + 1]) then
      answer = 3
    elseif redis.call('EXISTS', ARGV[i + 2]) == 1 then
      if string.find(redis.call('GET', ARGV[i + 2]), '^{"status": ?"REVOKED"') then
        answer = 3
      else
        redis.call('HDEL', KEYS[1], ARGV[i])
        answer = 2
      end
    elseif ARGV[i + 3] ~= '' then
      -- A full server refuses the note; the job runs all the same.
      redis.pcall('SET', ARGV[i + 3], ARGV[i + 4], 'EX', ARGV[1])
      if any_watched and redis.call('ZSCORE', KEYS[3], ARGV[i + 1]) then news[#news + 1] = ARGV[i + 2] end
    end
  end
  answers[#answers + 1] = answer
end
if #news > 0 then redis.call('PUBLISH', ARGV[2], table.concat(news, '\n')) end
return answers
