-- note: write down how deliveries went, and let each message go, or put it aside for the next attempt. Atomic for each:
-- what is written and what is still to be done never differ. Fenced: of a message that is no longer held nothing is noted.
--
-- KEYS 1      held                                         (hash: tag -> `level:attempt:message`)
-- KEYS 2      delayed                                      (sorted set: tag -> due, ms)
-- KEYS 3      delayed messages                             (hash: tag -> `level:attempt:message`)
-- KEYS 4      deliveries                                   (sorted set: id -> unix ms of its event)
-- ARGV 1      how many deliveries are listed, the newest
-- ARGV 2      TTL of the listing, seconds
-- ARGV 3..    eight per delivery: tag, id, key of its record (hash: round, record), round, record, TTL of the record,
--             unix ms of its event, due (unix ms) or '' for a delivery that has come to its end
-- returns     per delivery: 1 noted | 0 the lease is lost | 2 somebody has begun another round: the message is dropped

local answers = {}
for i = 3, #ARGV, 8 do
  local tag, key, round, due = ARGV[i], ARGV[i + 2], ARGV[i + 3], ARGV[i + 7]
  local entry, answer = redis.call('HGET', KEYS[1], tag), 0
  if entry then
    redis.call('HDEL', KEYS[1], tag)
    if tonumber(redis.call('HGET', key, 'round') or 0) > tonumber(round) then
      answer = 2
    else
      answer = 1
      redis.call('HSET', key, 'round', round, 'record', ARGV[i + 4])
      redis.call('EXPIRE', key, ARGV[i + 5])
      redis.call('ZADD', KEYS[4], ARGV[i + 6], ARGV[i + 1])
      if due ~= '' then
        redis.call('HSET', KEYS[3], tag, entry)
        redis.call('ZADD', KEYS[2], due, tag)
      end
    end
  end
  answers[#answers + 1] = answer
end
redis.call('ZREMRANGEBYRANK', KEYS[4], 0, -1 - tonumber(ARGV[1]))
redis.call('EXPIRE', KEYS[4], ARGV[2])
return answers
