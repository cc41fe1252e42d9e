-- progress: note how far jobs of many rows are, for readers; only of jobs that this worker still holds.
--
-- KEYS 1      held                                         (hash: tag -> `level:attempt:message`)
-- ARGV 1      TTL of the note, seconds
-- ARGV 2      channel that names the jobs of which there is news, by their result keys
-- ARGV 3..    four per job: tag, key of the note, note (`attempt:unix seconds:rows done:rows`), result key
-- returns     how many were noted

local news = {}
for i = 3, #ARGV, 4 do
  if redis.call('HEXISTS', KEYS[1], ARGV[i]) == 1 then
    redis.call('SET', ARGV[i + 1], ARGV[i + 2], 'EX', ARGV[1])
    news[#news + 1] = ARGV[i + 3]
  end
end
if #news > 0 then redis.call('PUBLISH', ARGV[2], table.concat(news, '\n')) end
return #news
