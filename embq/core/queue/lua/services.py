"""Scripts of the producer, the writer and commands, and those about keys that belong to no run."""

from __future__ import annotations

# next(gen, room, queue_empty, reap_at, max_attempts, idle, fresh, own_ms) -> {number of urgent units, u ...}: units to
# hint now, urgent ones first; of the others as many as still fit in `room`, and `fresh` of them for the first time.
# Overdue leases are taken away only within two seconds of `reap_at`, the time of that decision: where the command was
# sent before an outage and is executed after it, the holders must get to send a heartbeat first.
NEXT = """
if get('gen') ~= ARGV[1] or get('state') ~= 'running' then return {0} end
-- The members of a set that are units; others are taken out of it.
local function units_among(members)
  local found = {}
  for _, u in ipairs(members) do
    if is_unit(u) then found[#found + 1] = u else redis.call('ZREM', hinted, u) end
  end
  return found
end
local MAX_STEPS, MAX_SHIFTED = 10000, 20000
local room, max_attempts, fresh = math.min(tonumber(ARGV[2]), MAX_STEPS), tonumber(ARGV[5]), tonumber(ARGV[7])
local reap = math.abs(now - tonumber(ARGV[4])) < 2000
-- The server's clock was set back: without this, everything due would wait for that long.
local back = num('fed_ms', 0) - now
if back > 2000 then
  for _, key in ipairs({due, hinted}) do
    local later = redis.call('ZRANGEBYSCORE', key, now, '+inf', 'WITHSCORES', 'LIMIT', 0, MAX_SHIFTED)
    for i = 1, #later, 2 do redis.call('ZADD', key, later[i + 1] - back, later[i]) end
  end
  redis.call('HDEL', meta, 'helped_ms')
end
-- The units of the entries that were looked up, false for one that is gone: each entry is read with all that it holds,
-- so none of them twice, and few that have many fields. A lost entry may have the id of a later one.
local unit_of, fields = {}, 0
for _, u in ipairs(redis.call('ZRANGEBYSCORE', due, '-inf', now, 'LIMIT', 0, 500)) do
  local there = stored(pub, u)
  local held = stored(owner, u)
  if not is_unit(u) then
    redis.call('ZREM', due, u)
  elseif there then
    local id = string.match(there, ' (%d+%-%d+)$') or '0-0'
    if unit_of[id] == nil and fields < 100000 then
      local found = redis.pcall('XRANGE', res, id, id)
      local entry = not found.err and found[1] and found[1][2] or {}
      fields, unit_of[id] = fields + #entry, entry[2] or false
    end
    if unit_of[id] == u then
      redis.call('ZADD', due, now + RECHECK, u)
    elseif unit_of[id] ~= nil then
      redis.call('HDEL', pub, u)
      hint_at_once(u)
    end
  elseif not held then
    hint_at_once(u)
  elseif reap then
    lapse(u, begun(held), max_attempts, 'crash', 'the worker was not heard of for one lease')
  end
end
-- A run whose results find no room gets no hints: its units could not be published, and its hints would take the place
-- of other runs'.
if math.abs(now - num('full_ms', 0)) < 2000 then return {0} end
if not has_room() then return {0} end
-- These were in hand and are urgent: they do not wait for room in the queue.
local units = redis.call('ZRANGEBYSCORE', hinted, 0, 0, 'LIMIT', 0, 500)
units = units_among(units)
local urgent = #units
local patience = ARGV[3] == '1' and 5000 or 600000
local stale = redis.call('ZRANGEBYSCORE', hinted, 1, now - patience, 'LIMIT', 0, math.max(0, room - #units))
for _, u in ipairs(units_among(stale)) do units[#units + 1] = u end
room = math.min(room, #units + fresh)
local cursor, total = num('cursor', 0), total()
-- Fewer units than the cursor has passed are done, hinted or due: a key was lost. Pass all of them again.
if num('done', 0) + redis.call('ZCARD', hinted) + redis.call('ZCARD', due) < cursor then cursor = 0 end
local last = cursor + MAX_STEPS
while #units < room and cursor < math.min(total, last) do
  if redis.call('GETBIT', done, cursor) == 1 then
    -- Millions of done units are passed in one step; the first byte may have a zero before the cursor.
    local open = redis.call('BITPOS', done, 0, math.floor(cursor / 8))
    last = last + math.max(0, open - cursor - 1)
    cursor = math.max(cursor + 1, open)
  else
    local u = tostring(cursor)
    if redis.call('HEXISTS', owner, u) == 1 or redis.call('HEXISTS', pub, u) == 1 then
      redis.call('ZADD', due, 'NX', now + RECHECK, u)
    elseif not redis.call('ZSCORE', hinted, u) and not redis.call('ZSCORE', due, u) then
      units[#units + 1] = u
    end
    cursor = cursor + 1
  end
end
redis.call('HSET', meta, 'cursor', cursor, 'fed_ms', now)
local answer = {urgent}
for _, u in ipairs(units) do
  redis.call('ZADD', hinted, now, u)
  answer[#answer + 1] = u
end
-- At the tail, once a second, hint units that idle workers may help with: first those that are not begun, then those
-- whose holders need longest; of a thousand leases, so that nobody waits for long. own_ms is the time that a usual unit
-- takes the fastest of the idle workers.
local idle, own_ms = tonumber(ARGV[6]), tonumber(ARGV[8])
if idle > 0 and #units == 0 and ARGV[3] == '1' and now - num('helped_ms', 0) > 1000 then
  local held, wanting = redis.call('HRANDFIELD', owner, 1000, 'WITHVALUES'), {}
  for i = 1, #held, 2 do
    local lane, left_ms
    if is_unit(held[i]) and #held[i + 1] <= MAX_STORED then
      lane, left_ms = may_help(held[i], held[i + 1], own_ms, true)
    end
    if lane then wanting[#wanting + 1] = {left_ms, tonumber(held[i])} end
  end
  table.sort(wanting, function(a, b) return a[1] > b[1] or (a[1] == b[1] and a[2] < b[2]) end)
  for i = 1, math.min(idle, #wanting) do answer[#answer + 1] = tostring(wanting[i][2]) end
  redis.call('HSET', meta, 'helped_ms', now)
end
return answer
"""

# commit(rows, failures, quarantined, n, truncated, tokens, tokens_left, receipt, u, ...) -> units done. receipt '' sets
# the bit only, u '' acknowledges only. tokens_left is '' if it is not known. receipt: of an entry, see `Entry`.
COMMIT = """
for i = 8, #ARGV, 2 do
  local receipt, u = ARGV[i], ARGV[i + 1]
  if receipt ~= '' then take_off_stream(receipt) end
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

# reject(receipt, u, token, code, message, max_attempts) -> 1: drops a result that the writer cannot use; the unit runs
# again
REJECT = """
if not get('gen') then return 0 end
local receipt, u, token = ARGV[1], ARGV[2], ARGV[3]
take_off_stream(receipt)
local id = words(receipt)
if stored(pub, u) ~= token .. ' ' .. id then return 0 end
redis.call('HDEL', pub, u)
lapse(u, true, tonumber(ARGV[6]), ARGV[4], ARGV[5])
return 1
"""

# recheck() -> 1: the stream was lost, so `next` looks for each published result at its next call
RECHECK = """
for _, u in ipairs(redis.call('HRANDFIELD', pub, 20000)) do redis.call('ZADD', due, 'XX', 0, u) end
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

# writer_lock(writer id, ttl_ms, takeover) -> "" if the lock is taken or renewed, else the holder's id
WRITER_LOCK = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] and ARGV[3] ~= '1' then return holder end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return ''
"""

# control(durable, name, value, ...) -> {state, priority}: pause, resume, cancel or priority; KEYS[12] is `asked`.
# A change holds at once, and is kept in `asked` until the writer has it on disk and sends it again as durable; a later
# change takes precedence.
CONTROL = """
local asked, durable = KEYS[12], ARGV[1] == '1'
for i = 2, #ARGV, 2 do
  local name, wish = ARGV[i], ARGV[i + 1]
  local open = stored(asked, name)
  if durable and open == wish then
    redis.call('HDEL', asked, name)
    open = false
  elseif not durable and (name == 'priority' or get('state') ~= 'done') then
    -- The state of a finished run does not change, but its priority counts when units are added to it.
    redis.call('HSET', asked, name, wish)
    open = false
  end
  if get('gen') and not open and get(name) ~= wish and get('state') ~= 'done' then
    redis.call('HSET', meta, name, wish)
    if name == 'state' and wish ~= 'running' then
      -- No hint is left. After a resume the feeder passes all units again, and hints those neither done nor held.
      redis.call('DEL', hinted)
      redis.call('HSET', meta, 'cursor', 0)
    end
    if name == 'state' and wish == 'cancelled' then
      for _, lane in ipairs({owner, spare}) do
        -- Of more leases than fleets have, the attempts stay charged.
        local held = redis.call('HLEN', lane) <= 100000 and redis.call('HGETALL', lane) or {}
        for k = 1, #held, 2 do
          if begun(held[k + 1]) then charge(held[k], -1) end
        end
      end
      redis.call('DEL', due, owner, spare, busy)
    end
  end
end
return {get('state') or '', get('priority') or ''}
"""

# report(name, report, life_ms): KEYS are the set of workers or services, and the key of the report
REPORT = """
local t = redis.call('TIME')
redis.call('ZADD', KEYS[1], t[1] * 1000 + math.floor(t[2] / 1000), ARGV[1])
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
return 1
"""

# rate(field, measurement) -> 1; 0 where the hash has 256 fields, until a producer removes some
RATE = """
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 and redis.call('HLEN', KEYS[1]) >= 256 then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
return 1
"""

# swap(old, new) -> 1 if the key held `old` ('': nothing), or holds `new` already; 0 if another client was faster
SWAP = """
local there = redis.call('GET', KEYS[1]) or ''
if there ~= ARGV[1] and there ~= ARGV[2] then return 0 end
redis.call('SET', KEYS[1], ARGV[2])
return 1
"""

# forget(queue of a build, record) -> 1 where the record was still that one: it is removed with the keys of its stage
FORGET = """
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return 0 end
redis.call('HDEL', KEYS[1], ARGV[1])
for i = 2, #KEYS do redis.call('DEL', KEYS[i]) end
return 1
"""
