-- settle: end jobs. Atomic for the whole batch; fenced: a job that this worker no longer holds is left alone.
-- A result that is there already (a cancelled job) is never overwritten.
--
-- KEYS 1      held                                         (hash: tag -> `level:attempt:message`)
-- KEYS 2      waiting list of what webhooks are to be told  (list of messages)
-- KEYS 3      expiring                                     (sorted set: job id -> when it ends if it has not begun, unix ms)
-- ARGV 1      result TTL, seconds
-- ARGV 2      channel that names the jobs that have ended, by their result keys
-- ARGV 3..    per job: tag, job id, result key, result ('' = store none), record key or '', key of the set of open jobs
--             that it is in or '', count of follow-ups, count of those for a job that was revoked meanwhile, then two
--             per follow-up, the former first: list, message (pushed left: webhooks, callbacks, dead letters)
-- returns     per job: 1 settled | 0 the lease is lost | 2 it had a result already; the lease is dropped |
--             3 it was revoked, and has that as its result; the lease is dropped
--
-- A settle whose answer was lost comes again. The lease is gone then, and the very result that is brought is stored.

local ttl = ARGV[1]
local answers, ended = {}, {}
local any_expiring = redis.call('EXISTS', KEYS[3]) == 1
local i = 3
while i <= #ARGV do
  local result_key, result, record, open = ARGV[i + 2], ARGV[i + 3], ARGV[i + 4], ARGV[i + 5]
  local first_if_revoked = i + 8 + 2 * tonumber(ARGV[i + 6])
  local last = first_if_revoked - 1 + 2 * tonumber(ARGV[i + 7])
  local answer = redis.call('HDEL', KEYS[1], ARGV[i])
  if answer == 1 then
    if open ~= '' then redis.call('SREM', open, ARGV[i + 1]) end
    if any_expiring then redis.call('ZREM', KEYS[3], ARGV[i + 1]) end
    if result ~= '' then
      if redis.call('SET', result_key, result, 'EX', ttl, 'NX') then
        redis.call('PUBLISH', result_key, result)
        ended[#ended + 1] = result_key
      else
        answer = string.find(redis.call('GET', result_key), '^{"status": ?"REVOKED"') and 3 or 2
      end
    end
    if answer == 1 and record ~= '' then redis.call('EXPIRE', record, ttl) end
    -- Whoever revoked it has stored that, and queued nothing of what follows it; `cancel` has queued what its webhook is
    -- told. A result of ours has the member "sheaf", Celery's own has not.
    local told = answer == 3 and string.find(redis.call('GET', result_key), '"sheaf":', 1, true)
    local from, to = i + 8, first_if_revoked
    if answer == 3 then from, to = first_if_revoked, last end
    if answer == 2 then to = from end
    for f = from, to - 1, 2 do
      if not (told and ARGV[f] == KEYS[2]) then redis.call('LPUSH', ARGV[f], ARGV[f + 1]) end
    end
  elseif result ~= '' and redis.call('GET', result_key) == result then
    answer = 1
  end
  answers[#answers + 1] = answer
  i = last + 1
end
if #ended > 0 then redis.call('PUBLISH', ARGV[2], table.concat(ended, '\n')) end
return answers
