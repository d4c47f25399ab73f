"""Scripts of the writer: what is done, what has to be done again, what was added, and which writer is at work."""

from __future__ import annotations

# commit(rows, failures, quarantined, n, truncated, tokens, tokens_left, id, u, ...) -> units done. id '' sets the bit
# only, u '' acknowledges only. tokens_left is '' where it is not known.
COMMIT = """
for i = 8, #ARGV, 2 do
  local id, u = ARGV[i], ARGV[i + 1]
  if id ~= '' then take_off_stream(id) end
  if u ~= '' then
    redis.call('ZREM', due, u)
    redis.call('ZREM', hinted, u)
    end_leases(u)
    for _, key in ipairs({pub, att, poison}) do redis.call('HDEL', key, u) end
    redis.call('SETBIT', done, u, 1)
  end
end
local count = redis.call('BITCOUNT', done)
if not get('gen') then return count end
redis.call('HSET', meta, 'done', count, 'rows', ARGV[1], 'failures', ARGV[2], 'quarantined', ARGV[3], 'n', ARGV[4],
  'truncated', ARGV[5], 'tokens', ARGV[6], 'tokens_left', ARGV[7], 'last_commit_ms', now)
if count == total() and get('state') ~= 'done' then
  redis.call('HSET', meta, 'state', 'done')
  redis.call('DEL', hinted, due, owner, spare, busy, att, poison)
end
return count
"""

# reject(id, u, token, code, message, max_attempts) -> 1: the writer could not use this result, the unit runs again
REJECT = """
if not get('gen') then return 0 end
local id, u, token = ARGV[1], ARGV[2], ARGV[3]
take_off_stream(id)
if redis.call('HGET', pub, u) ~= token .. ' ' .. id then return 0 end
redis.call('HDEL', pub, u)
lapse(u, true, tonumber(ARGV[6]), ARGV[4], ARGV[5])
return 1
"""

# grow(gen, total) -> 1: units were added to the manifest; a run that was done goes on with them
GROW = """
if get('gen') ~= ARGV[1] then return 0 end
if tonumber(ARGV[2]) <= total() then return 1 end
redis.call('HSET', meta, 'total', ARGV[2])
if get('state') == 'done' then redis.call('HSET', meta, 'state', 'running') end
return 1
"""

# Renew or take the writer lock: (writer id, ttl_ms, takeover) -> "" when held by us, else the holder's id.
WRITER_LOCK = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] and ARGV[3] ~= '1' then return holder end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return ''
"""
