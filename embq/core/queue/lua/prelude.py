"""Preludes of the scripts: bounds of every one; of those about a run the names of its keys, the server's time, the ends
of leases and results.

While a script runs, the server answers nobody, and a script that has written cannot be killed. So what a caller passes,
and what any user may have stored, costs time that is linear in its bytes at most: calls beyond the bounds of a script
are refused, longer values than embq stores count as empty, patterns do not backtrack, and no loop is without a bound.
"""

from __future__ import annotations

from embq.core.queue.keys import RUN_PARTS, VERSION

REFUSED = "LIMIT"
"""First word of the error for a call beyond the bounds of its script."""

BOUNDS = (
    f"local MAX_KEYS, MAX_KEY_BYTES = {len(RUN_PARTS) + 1}, 256"
    + f"""
local function refusal(most, bytes)
  if #KEYS > MAX_KEYS then return redis.error_reply('{REFUSED} more than ' .. MAX_KEYS .. ' keys') end
  for i = 1, #KEYS do
    if #KEYS[i] > MAX_KEY_BYTES then
      return redis.error_reply('{REFUSED} key ' .. i .. ' has more than ' .. MAX_KEY_BYTES .. ' bytes')
    end
  end
  if #ARGV > most then return redis.error_reply('{REFUSED} more than ' .. most .. ' arguments') end
  for i = 1, #ARGV do
    if #ARGV[i] > bytes then
      return redis.error_reply('{REFUSED} argument ' .. i .. ' has more than ' .. bytes .. ' bytes')
    end
  end
end
"""
)

PRELUDE = (
    BOUNDS
    + f"local VERSION = {VERSION}"
    + """
local meta, hinted, due, owner, spare = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local busy, att, poison, pub, res, done = KEYS[6], KEYS[7], KEYS[8], KEYS[9], KEYS[10], KEYS[11]
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local RECHECK, MOST_POISON = 60000, 8
-- A value of a hash; '' for one that is longer than all that embq stores there, which is read once in a call.
local MAX_STORED, oversized = 1024, nil
local function stored(key, field)
  if oversized and oversized[key .. ' ' .. field] then return '' end
  local value = redis.call('HGET', key, field)
  if value and #value > MAX_STORED then
    oversized = oversized or {}
    oversized[key .. ' ' .. field] = true
    return ''
  end
  return value
end
local function get(name) return stored(meta, name) end
-- The first three words of a text. One pattern for all of them would try every way to divide it.
local function words(text)
  local next_word = string.gmatch(text, '%S+')
  return next_word(), next_word(), next_word()
end
-- Name of the worker in a token.
local function worker_of(token) return string.match(token, '^[^:]*:(.*):') end
-- Any user with the right to write a key may have written anything: what is no plain number counts as `otherwise`.
local function plain(text, otherwise)
  return text and #text < 16 and string.find(text, '^%d+$') and tonumber(text) or otherwise
end
local function num(name, otherwise) return plain(get(name), otherwise) end
local function add(name, by)
  redis.call('HSET', meta, name, math.max(0, num(name, 0) + by))
end
local function total() return math.min(num('total', 0), 100000000) end
local function is_unit(u) return plain(u) ~= nil and tonumber(u) < total() and tostring(tonumber(u)) == u end
local function attempts(u) return plain(stored(att, u), 0) end
local function charge(u, by)
  local text = stored(att, u) or '0'
  if #text < 10 and string.find(text, '^%-?%d+$') then redis.call('HINCRBY', att, u, by) end
end
local function hint_at_once(u) redis.call('ZREM', due, u) redis.call('ZADD', hinted, 0, u) end
local function begun(token) return redis.call('HEXISTS', busy, token) == 1 end
local function holds(u, token)
  return stored(owner, u) == token or stored(spare, u) == token
end
-- End every lease on u.
local function end_leases(u)
  for _, lane in ipairs({owner, spare}) do
    local token = stored(lane, u)
    if token then redis.call('HDEL', busy, token) redis.call('HDEL', lane, u) end
  end
end
-- End one lease on u; true where another one on it goes on.
local function end_lease(u, token)
  redis.call('HDEL', busy, token)
  local second = stored(spare, u)
  if second and second ~= token then redis.call('HSET', owner, u, second) end
  redis.call('HDEL', spare, u)
  if second and (second ~= token or redis.call('HEXISTS', owner, u) == 1) then return true end
  redis.call('HDEL', owner, u)
  return false
end
-- Whether the stream takes a result of so many bytes, or of the mean size of those in it. One alone may be of any size;
-- a stream that was lost holds no bytes, whatever is counted.
local function has_room(bytes)
  local results, waiting = redis.call('XLEN', res), num('bytes', 0)
  if results > 0 and waiting > 0 and waiting + (bytes or waiting / results) > num('limit_bytes', math.huge) then
    return false
  end
  return results < num('limit_entries', math.huge)
end
local function publish_entry(u, token, fields, bytes)
  local entry = {'u', u, 'token', token, 'bytes', bytes}
  for i, value in ipairs(fields) do
    entry[#entry + 1] = value
  end
  local id = redis.pcall('XADD', res, '*', unpack(entry))
  if type(id) == 'table' then
    -- A stream whose last id is the greatest possible takes no entry: the queue is lost and gets rebuilt.
    if not string.find(id.err, 'last possible ID', 1, true) then error(id) end
    redis.call('HDEL', meta, 'gen')
    return false
  end
  for i = 1, #fields, 2 do
    if fields[i] == 'tokens' then add('tokens_waiting', plain(fields[i + 1], 0)) end
  end
  add('bytes', bytes)
  redis.call('HSETNX', pub, u, token .. ' ' .. id)
  end_leases(u)
  redis.call('ZREM', hinted, u)
  redis.call('ZADD', due, now + RECHECK, u)
  return true
end
-- Subtracts the bytes of an entry once: nothing is subtracted for one that is gone. The receipt says how many: here an
-- entry could only be read with all its rows.
local function take_off_stream(receipt)
  local id, bytes, tokens = words(receipt)
  redis.call('XACK', res, 'w', id)
  if redis.call('XDEL', res, id) == 1 and get('gen') then
    add('bytes', -plain(bytes, 0))
    add('tokens_waiting', -plain(tokens, 0))
  end
end
-- The last lease on u has ended without a result. The last allowed attempt that was charged either names the sample it
-- ended in, which the next attempt leaves out, or quarantines the unit: its failure is published like a result.
local function lapse(u, charged, max_attempts, code, message, ordinal)
  end_leases(u)
  local attempts = attempts(u)
  if charged and attempts >= max_attempts then
    local named = stored(poison, u) or ''
    local _, count = string.gsub(named, '%S+', '')
    if ordinal and ordinal ~= '' and count < MOST_POISON then
      redis.call('HSET', poison, u, named .. ordinal .. ' ')
      redis.call('HSET', att, u, max_attempts - 1)
      hint_at_once(u)
    else
      local failure = {'v', VERSION, 'code', code, 'message', message, 'attempts', attempts}
      publish_entry(u, 'quarantine', failure, 0)
    end
  elseif charged and attempts > 1 then
    redis.call('ZREM', hinted, u)
    redis.call('ZADD', due, now + 10000, u)
  else
    hint_at_once(u)
  end
end
-- The run is paused: release a unit that was claimed ahead, uncharged. False where it is begun; it may be finished.
local function give_back(u, token)
  if begun(token) then return false end
  if not end_lease(u, token) then lapse(u, false) end
  return true
end
-- Of a begun lease: since when it is busy, when its holder expects to end it, and its size in units of the usual size.
-- Where the holder has not said so, the end is the begin: nothing is known but that it was not done at once.
local function outlook(token)
  local since, ends, size = words(stored(busy, token) or '')
  since = plain(since, now)
  return since, plain(ends, since), plain(size, 100) / 100
end
-- Nothing is left to hint, so an idle worker may help with u: take it over where its holder has not begun it, or run it
-- a second time where it ends it sooner than its holder. A holder that is late is expected to need as long again as it
-- is late. own_ms: time that the idle worker needs for u, or for a unit of usual size; where it is 0, unknown, three
-- times the usual time of all workers is taken. A unit that was charged before runs once at a time. Gives the lane, and
-- the time that the holder still needs.
local function may_help(u, held, own_ms, is_usual)
  if num('cursor', 0) < total() or redis.call('ZCARD', hinted) > 0 then return nil end
  if attempts(u) > (begun(held) and 1 or 0) then return nil end
  if not begun(held) then return owner, math.huge end
  local _, ends, size = outlook(held)
  local left_ms = math.abs(ends - now)
  if own_ms == 0 then own_ms, is_usual = 3 * num('unit_ms', math.huge), true end
  if is_usual then own_ms = own_ms * size end
  if redis.call('HEXISTS', spare, u) == 0 and left_ms > own_ms + 1000 then return spare, left_ms end
  return nil
end
"""
)
