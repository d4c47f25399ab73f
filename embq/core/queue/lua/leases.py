"""Scripts of workers and supervisors: a lease is claimed, begun, extended, and ends with or without a result."""

from __future__ import annotations

# claim(u, token, gen, lease_ms, fingerprint, idle, own_ms) -> {word, detail, ordinals to leave out}. own_ms: time
# that u takes the worker; 0 if unknown.
CLAIM = """
local u, token, lane = ARGV[1], ARGV[2], owner
if get('gen') ~= ARGV[3] then return {'gen', '', ''} end
local state = get('state')
if state ~= 'running' then return {'state', state or '', ''} end
if not is_unit(u) then return {'gen', '', ''} end
local attempts = tostring(attempts(u))
if holds(u, token) then return {'ok', attempts, stored(poison, u) or ''} end
if redis.call('GETBIT', done, u) == 1 or redis.call('HEXISTS', pub, u) == 1 then
  redis.call('ZREM', hinted, u)
  return {'dup', '', ''}
end
local held = stored(owner, u)
if held then
  redis.call('ZREM', hinted, u)
  lane = ARGV[6] == '1' and worker_of(held) ~= worker_of(token) and may_help(u, held, tonumber(ARGV[7]), false)
  if not lane then return {'leased', '', ''} end
else
  local later = redis.call('ZSCORE', due, u)
  if later and tonumber(later) > now then redis.call('ZREM', hinted, u) return {'later', '', ''} end
end
local fingerprint = get('fingerprint')
if not fingerprint or fingerprint == '' then
  redis.call('HSET', meta, 'fingerprint', ARGV[5])
elseif fingerprint ~= ARGV[5] then
  if not held then redis.call('ZADD', hinted, 0, u) end
  return {'fingerprint', fingerprint, ''}
end
redis.call('HSET', lane, u, token)
redis.call('ZADD', due, now + tonumber(ARGV[4]), u)
redis.call('ZREM', hinted, u)
return {'ok', lane == spare and '0' or attempts, stored(poison, u) or ''}
"""

# start(u, token, ...) -> the tokens whose lease is lost; their units must not be embedded
START = """
local lost, known, state = {}, get('gen'), get('state')
for i = 1, #ARGV, 2 do
  local u, token = ARGV[i], ARGV[i + 1]
  if not known or not holds(u, token) or (state ~= 'running' and give_back(u, token)) then
    lost[#lost + 1] = token
  elseif redis.call('HSETNX', busy, token, now) == 1 then
    charge(u, 1)
    redis.call('HSETNX', meta, 'began_ms', now)
  end
end
return lost
"""

# beat(gen, lease_ms, u, token, left_ms, size, ...) -> {state, token of each lost lease ...}. left_ms: time until the
# holder ends the unit, below 0 if it is late, '' if unknown; size: in percent of a unit of usual size.
BEAT = """
if get('gen') ~= ARGV[1] then
  local lost = {'gen'}
  for i = 4, #ARGV, 4 do lost[#lost + 1] = ARGV[i] end
  return lost
end
local state = get('state') or ''
local answer = {state}
for i = 3, #ARGV, 4 do
  local u, token, left_ms, size = ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2]), tonumber(ARGV[i + 3])
  if holds(u, token) and not (state ~= 'running' and give_back(u, token)) then
    redis.call('ZADD', due, now + tonumber(ARGV[2]), u)
    if left_ms and size and begun(token) then
      local since = outlook(token)
      redis.call('HSET', busy, token, string.format('%.0f %.0f %.0f', since, math.max(0, now + left_ms), size))
    end
  else
    answer[#answer + 1] = token
  end
end
return answer
"""

# publish(u, token, bytes, field, value, ...) -> 1 accepted, 2 another's result stands, 0 lease lost, -1 no room
PUBLISH = """
if not get('gen') then return 0 end
local u, token, bytes = ARGV[1], ARGV[2], tonumber(ARGV[3])
local there = stored(pub, u)
if there then
  if string.sub(there, 1, #token + 1) == token .. ' ' then return 1 end
  return 2
end
if redis.call('GETBIT', done, u) == 1 then return 2 end
if not holds(u, token) then return 0 end
-- An empty stream holds no bytes, also where it was lost with what it held.
if redis.call('XLEN', res) == 0 then redis.call('HSET', meta, 'bytes', 0, 'tokens_waiting', 0) end
if not has_room(bytes) then return -1 end
if begun(token) then
  local since = outlook(token)
  -- Moving average of the time of a unit.
  local usual = num('unit_ms', now - since)
  redis.call('HSET', meta, 'unit_ms', math.floor(usual + (now - since - usual) / 8 + 0.5))
end
local fields = {}
for i = 4, #ARGV do fields[#fields + 1] = ARGV[i] end
return publish_entry(u, token, fields, bytes) and 1 or 0
"""

# release(u, token, mode, code, message, max_attempts) -> 1 released, 0 lease was lost before. mode: undo | fail
RELEASE = """
if not get('gen') then return 0 end
local u, token, mode = ARGV[1], ARGV[2], ARGV[3]
if not holds(u, token) then return 0 end
if mode == 'undo' and begun(token) then charge(u, -1) end
if mode == 'fail' and not begun(token) then charge(u, 1) end
if not end_lease(u, token) then lapse(u, mode == 'fail', tonumber(ARGV[6]), ARGV[4], ARGV[5]) end
return 1
"""

# abandon(worker name, max_attempts, message, lane, cursor, token, ordinal or '', ...) -> {leases freed, next cursor}:
# of up to a thousand leases, so that nobody waits for long. Sent by the supervisor of a worker that died, for the lanes
# 'spare' and 'owner', until the cursor is '0'. The tokens are those of the units in hand; the begun ones among them are
# charged.
ABANDON = """
if not get('gen') then return {0, '0'} end
local freed, blamed, cursor, bytes = 0, {}, ARGV[5], 0
for i = 6, #ARGV, 2 do blamed[ARGV[i]] = ARGV[i + 1] end
repeat
  local found = redis.call('HSCAN', ARGV[4] == 'spare' and spare or owner, cursor, 'COUNT', 100)
  local held = found[2]
  cursor = found[1]
  for i = 1, #held, 2 do
    local u, token = held[i], held[i + 1]
    bytes = bytes + 64 + #u + #token
    if #token <= MAX_STORED and worker_of(token) == ARGV[1] then
      local charged = begun(token) and blamed[token] ~= nil
      if begun(token) and not charged then charge(u, -1) end
      if not end_lease(u, token) then lapse(u, charged, tonumber(ARGV[2]), 'crash', ARGV[3], blamed[token]) end
      freed = freed + 1
    end
  end
until cursor == '0' or bytes > 64000
return {freed, cursor}
"""
