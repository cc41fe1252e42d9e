-- start: the last look before a batch runs. Tells for each job whether it may run, and notes the start of those with a record.
--
-- KEYS 1      held                                         (hash: tag -> `level:attempt:message`)
-- KEYS 2      revoked                                      (sorted set: job id -> unix seconds)
-- ARGV 1      TTL of the note, seconds
-- ARGV 2..    five per job: tag, job id, result key, key of the note or '', note (`attempt:unix seconds`)
-- returns     per job: 1 run it | 0 the lease is lost | 2 it has a result already; its lease is dropped |
--             3 it was revoked; it is still held, to be settled as dropped

local answers = {}
local any_revoked = redis.call('EXISTS', KEYS[2]) == 1
for i = 2, #ARGV, 5 do
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
    end
  end
  answers[#answers + 1] = answer
end
return answers
