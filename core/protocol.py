"""Every Redis key and every Lua script of embq, with type, content and lifetime. Nothing else names a key.

All of it can be rebuilt from the output folder. `{R}` is the run id; "run" means: as long as the server
keeps its data; a finished run leaves a few hundred bytes and its bitmap.

========================  ======  ====================================================  ==========================
key                       type    content                                               lifetime, bound
========================  ======  ====================================================  ==========================
embq:runs                 hash    run id -> run record (JSON)                           run
embq:workers              zset    worker name -> ms of its last report, for people      until it is found gone
embq:worker:<name>        string  what one worker last said of itself (JSON)            three leases
embq:services             zset    name of a producer, writer or supervisor -> ms of its  until a producer or a
                                  last report                                           writer finds it gone
embq:service:<name>       string  what one of them last said of itself (JSON)           20 s
embq:rates                hash    model config and device -> measured speed (JSON)      256 fields
embq:turns                string  virtual times of the models that share workers (JSON) models with work of late
embq:indexing             hash    queue of a build of an index -> what of it is at work   30 s, renewed; then removed
                                  now (JSON): index folder, stage, the stage's run id     with what it names
embq:uploads              hash    upload name -> what is being sent (JSON)              until it is in the folder
embq:up:{U}:pieces        hash    number -> compressed piece of an upload               64 pieces
embq:up:{U}:state         hash    taken, sent, why, end; the end also under the run's   a day after its end
                                  id in the place of U
embq:{R}:meta             hash    gen, state, priority, total, cursor, done, bytes ...  run
embq:{R}:hinted           zset    u -> server ms of its last hint; 0 = hint at once     units waiting in RQ
embq:{R}:due              zset    u -> server ms when its lease, its delay or its       units leased, delayed or
                                  published result must be looked at again              published
embq:{R}:owner            hash    u -> token of the lease                               leased units
embq:{R}:spare            hash    u -> token of a second lease, at the tail of a run    leased units
embq:{R}:busy             hash    token -> server ms, once its samples are being read   leases begun
embq:{R}:att              hash    u -> attempts charged so far                          units charged, not committed
embq:{R}:poison           hash    u -> ordinals of samples that ended their worker      units charged, not committed
embq:{R}:pub              hash    u -> "<token> <stream id>" of the published result    published units
embq:{R}:res              stream  results; group "w"                                    limit_bytes, limit_entries
embq:{R}:done             bitmap  committed units                                       run; N/8 bytes
embq:{R}:writer           string  id of the writer at work: an early warning only        5 s, renewed
embq:{R}:asked            hash    state and priority that a user asked for               until the writer has them
                                                                                         in the output folder
rq:queue:embq.<v>.<key>   list    RQ's own: hints                                       high-water mark
========================  ======  ====================================================  ==========================

A stage of a build of an index is a run of its own, with the keys of every run. It stands in `embq:indexing` and not in
`embq:runs`, so producers and writers never see it; its conductor is both to it, and removes it when it is over.

Every unit below the cursor is done, or in `hinted`, or in `due`. One rule mends lost hints, lost leases and lost
results alike: what is overdue is hinted again (`LAPSE`). Losing or doubling a hint is harmless, because only the holder
of a token may publish and the writer accepts a unit once.

At the tail of a run, when nothing is left to hint, an idle worker may take a unit over that its holder has not begun,
or get a second lease on one that takes longer than it would itself need, or than is usual. The first of the two to
publish wins.

A token is "<gen>:<worker name>:<random>"; it is compared for equality only. `gen` changes whenever the queue is
rebuilt, so nothing from before a loss of the broker can publish after it. Times are the server's; clients' clocks
decide nothing.

Where `meta` is lost, the queue is lost: every lease is void, and no script writes to `meta` until the writer has made
the queue anew.

Every script may be sent twice (a reply was lost): the second time changes nothing more, and `claim`, `start` and
`publish` repeat their answer.
"""

from __future__ import annotations

VERSION = 3
"""Version of keys, hints and results. It is in the name of the RQ queue, so that workers of two versions never see each
other's hints; records, queues and results of another version are not read."""

RUNS = "embq:runs"
WORKERS = "embq:workers"
SERVICES = "embq:services"
RATES = "embq:rates"
TURNS = "embq:turns"
INDEXING = "embq:indexing"
INDEXING_MS = 30_000
"""A build that its conductor has not renewed for so long has none."""

UPLOADS = "embq:uploads"
GROUP = "w"
CONSUMER = "w0"
HINT_FUNCTION = "embq.unit"
INDEX_HINT_FUNCTION = "embq.index"
"""The only job names that a worker accepts. They are never imported or called by name."""

HINT_MAX_BYTES = 64_000
MAX_ATTEMPTS = 3
"""The last attempt at a unit goes sample by sample. Where it ends badly as well, the sample that was in hand becomes a
failure and the rest is tried again; where no sample can be named, the unit is quarantined."""


def worker_key(name: str) -> str:
    """Key of one worker's stats."""
    return f"embq:worker:{name}"


def service_key(name: str) -> str:
    """Key of what one service says of itself."""
    return f"embq:service:{name}"


def upload_key(name: str, part: str) -> str:
    """Key of one part of an upload."""
    return f"embq:up:{{{name}}}:{part}"


def run_key(run: str, part: str) -> str:
    """Key of one part of a run's ledger."""
    return f"embq:{{{run}}}:{part}"


def queue_name(queue_key: str) -> str:
    """RQ queue of all runs that can share a loaded model."""
    return f"embq.{VERSION}.{queue_key}"


RUN_PARTS = ("meta", "hinted", "due", "owner", "spare", "busy", "att", "poison", "pub", "res", "done")
"""The keys that every script gets, in this order. A rebuild makes all of them anew."""

_PRELUDE = (
    f"local VERSION = {VERSION}"
    + """
local meta, hinted, due, owner, spare = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local busy, att, poison, pub, res, done = KEYS[6], KEYS[7], KEYS[8], KEYS[9], KEYS[10], KEYS[11]
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local RECHECK, MOST_POISON = 60000, 8
local function get(name) return redis.call('HGET', meta, name) end
local function hint_at_once(u) redis.call('ZREM', due, u) redis.call('ZADD', hinted, 0, u) end
local function begun(token) return redis.call('HEXISTS', busy, token) == 1 end
local function holds(u, token)
  return redis.call('HGET', owner, u) == token or redis.call('HGET', spare, u) == token
end
-- Every lease on u ends.
local function end_leases(u)
  for _, lane in ipairs({owner, spare}) do
    local token = redis.call('HGET', lane, u)
    if token then redis.call('HDEL', busy, token) redis.call('HDEL', lane, u) end
  end
end
-- One lease on u ends; true where another one on it goes on.
local function end_lease(u, token)
  redis.call('HDEL', busy, token)
  local second = redis.call('HGET', spare, u)
  if second and second ~= token then redis.call('HSET', owner, u, second) end
  redis.call('HDEL', spare, u)
  if second and (second ~= token or redis.call('HEXISTS', owner, u) == 1) then return true end
  redis.call('HDEL', owner, u)
  return false
end
local function publish_entry(u, token, fields, bytes)
  local entry = {'u', u, 'token', token, 'bytes', bytes}
  for i, value in ipairs(fields) do
    entry[#entry + 1] = value
    if i % 2 == 1 and value == 'tokens' and string.find(fields[i + 1], '^%d+$') then
      redis.call('HINCRBY', meta, 'tokens_waiting', fields[i + 1])
    end
  end
  local id = redis.call('XADD', res, '*', unpack(entry))
  redis.call('HINCRBY', meta, 'bytes', bytes)
  redis.call('HSET', pub, u, token .. ' ' .. id)
  end_leases(u)
  redis.call('ZREM', hinted, u)
  redis.call('ZADD', due, now + RECHECK, u)
end
-- An entry that is there gives its bytes back once; one that is gone already gives nothing back.
local function take_off_stream(id)
  local entry = redis.call('XRANGE', res, id, id)
  if #entry == 1 and get('gen') then
    local fields = entry[1][2]
    for k = 1, #fields, 2 do
      -- Not -0: Redis 7.0 hands it on as "-0", which is no integer to it.
      local counted = ({bytes = 'bytes', tokens = 'tokens_waiting'})[fields[k]]
      if counted and string.find(fields[k + 1], '^[1-9]%d*$') then
        redis.call('HINCRBY', meta, counted, '-' .. fields[k + 1])
      end
    end
  end
  redis.call('XACK', res, 'w', id)
  redis.call('XDEL', res, id)
end
-- The last lease on u has ended without a result. An attempt that was charged and was the last one allowed either names
-- the sample it ended in, which the next attempt leaves out, or quarantines the unit: its failure travels to the writer
-- like any other result.
local function lapse(u, charged, max_attempts, code, message, ordinal)
  end_leases(u)
  local attempts = tonumber(redis.call('HGET', att, u) or '0')
  if charged and attempts >= max_attempts then
    local named = redis.call('HGET', poison, u) or ''
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
-- The run is paused: a unit that was claimed ahead goes back, uncharged. False where it is begun; it may be finished.
local function give_back(u, token)
  if begun(token) then return false end
  if not end_lease(u, token) then lapse(u, false) end
  return true
end
-- Nothing is left to hint, so a worker without work may as well help with u: take it over where its holder has not
-- begun it, or run it a second time where it takes longer than the idle one needs (own_ms; 0 where it does not know),
-- or three times as long as usual. A unit that was charged before runs once at a time.
local function may_help(u, held, own_ms)
  if tonumber(get('cursor')) < tonumber(get('total')) or redis.call('ZCARD', hinted) > 0 then return nil end
  if tonumber(redis.call('HGET', att, u) or '0') > (begun(held) and 1 or 0) then return nil end
  local since = redis.call('HGET', busy, held)
  if not since then return owner, 0 end
  local usual = tonumber(get('unit_ms') or '')
  local patience = usual and 3 * usual
  if own_ms > 0 then patience = math.min(own_ms, patience or own_ms) end
  if patience and redis.call('HEXISTS', spare, u) == 0 and now - since > patience + 1000 then return spare, since end
  return nil
end
"""
)

# claim(u, token, gen, lease_ms, fingerprint, idle, own_ms) -> {word, detail, ordinals to leave out}. own_ms: what a
# unit takes the worker; 0 where it does not know.
CLAIM = """
local u, token, lane = ARGV[1], ARGV[2], owner
if get('gen') ~= ARGV[3] then return {'gen', '', ''} end
local state = get('state')
if state ~= 'running' then return {'state', state or '', ''} end
if not (tonumber(u) >= 0 and tonumber(u) < tonumber(get('total'))) then return {'gen', '', ''} end
local attempts = redis.call('HGET', att, u) or '0'
if holds(u, token) then return {'ok', attempts, redis.call('HGET', poison, u) or ''} end
if redis.call('GETBIT', done, u) == 1 or redis.call('HEXISTS', pub, u) == 1 then
  redis.call('ZREM', hinted, u)
  return {'dup', '', ''}
end
local held = redis.call('HGET', owner, u)
if held then
  redis.call('ZREM', hinted, u)
  local theirs, ours = string.match(held, ':(.*):'), string.match(token, ':(.*):')
  lane = ARGV[6] == '1' and theirs ~= ours and may_help(u, held, tonumber(ARGV[7]))
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
return {'ok', lane == spare and '0' or attempts, redis.call('HGET', poison, u) or ''}
"""

# start(u, token, ...) -> the tokens whose lease is lost; their units must not be worked on
START = """
local lost, known, state = {}, get('gen'), get('state')
for i = 1, #ARGV, 2 do
  local u, token = ARGV[i], ARGV[i + 1]
  if not known or not holds(u, token) or (state ~= 'running' and give_back(u, token)) then
    lost[#lost + 1] = token
  elseif redis.call('HSETNX', busy, token, now) == 1 then
    redis.call('HINCRBY', att, u, 1)
    redis.call('HSETNX', meta, 'began_ms', now)
  end
end
return lost
"""

# beat(gen, lease_ms, u, token, ...) -> {state, token of each lost lease ...}
BEAT = """
if get('gen') ~= ARGV[1] then
  local lost = {'gen'}
  for i = 4, #ARGV, 2 do lost[#lost + 1] = ARGV[i] end
  return lost
end
local state = get('state') or ''
local answer = {state}
for i = 3, #ARGV, 2 do
  if holds(ARGV[i], ARGV[i + 1]) and not (state ~= 'running' and give_back(ARGV[i], ARGV[i + 1])) then
    redis.call('ZADD', due, now + tonumber(ARGV[2]), ARGV[i])
  else
    answer[#answer + 1] = ARGV[i + 1]
  end
end
return answer
"""

# publish(u, token, bytes, field, value, ...) -> 1 accepted, 2 another's result stands, 0 lease lost, -1 no room
PUBLISH = """
if not get('gen') then return 0 end
local u, token, bytes = ARGV[1], ARGV[2], tonumber(ARGV[3])
local there = redis.call('HGET', pub, u)
if there then
  if string.sub(there, 1, #token + 1) == token .. ' ' then return 1 end
  return 2
end
if redis.call('GETBIT', done, u) == 1 then return 2 end
if not holds(u, token) then return 0 end
-- An empty stream holds no bytes, also where it was lost with what it held.
if redis.call('XLEN', res) == 0 then redis.call('HSET', meta, 'bytes', 0, 'tokens_waiting', 0) end
local waiting = tonumber(get('bytes') or '0')
if waiting > 0 and waiting + bytes > tonumber(get('limit_bytes')) then return -1 end
if redis.call('XLEN', res) >= tonumber(get('limit_entries')) then return -1 end
local since = redis.call('HGET', busy, token)
if since then
  -- What a unit usually takes, later ones counting more.
  local usual = tonumber(get('unit_ms') or '') or (now - since)
  redis.call('HSET', meta, 'unit_ms', math.floor(usual + (now - since - usual) / 8 + 0.5))
end
local fields = {}
for i = 4, #ARGV do fields[#fields + 1] = ARGV[i] end
publish_entry(u, token, fields, bytes)
return 1
"""

# release(u, token, mode, code, message, max_attempts) -> 1 released, 0 lease was lost before. mode: undo | fail
RELEASE = """
if not get('gen') then return 0 end
local u, token, mode = ARGV[1], ARGV[2], ARGV[3]
if not holds(u, token) then return 0 end
if mode == 'undo' and begun(token) then redis.call('HINCRBY', att, u, -1) end
if mode == 'fail' and not begun(token) then redis.call('HINCRBY', att, u, 1) end
if not end_lease(u, token) then lapse(u, mode == 'fail', tonumber(ARGV[6]), ARGV[4], ARGV[5]) end
return 1
"""

# abandon(worker name, max_attempts, message, token, ordinal or '', ...) -> number of leases freed. For the supervisor
# that saw the worker die. Charged are the begun units among the tokens named, those that the worker had in hand.
ABANDON = """
if not get('gen') then return 0 end
local freed, blamed = 0, {}
for i = 4, #ARGV, 2 do blamed[ARGV[i]] = ARGV[i + 1] end
for _, lane in ipairs({spare, owner}) do
  local held = redis.call('HGETALL', lane)
  for i = 1, #held, 2 do
    local u, token = held[i], held[i + 1]
    if string.find(token, ':' .. ARGV[1] .. ':', 1, true) then
      local charged = begun(token) and blamed[token] ~= nil
      if begun(token) and not charged then redis.call('HINCRBY', att, u, -1) end
      if not end_lease(u, token) then lapse(u, charged, tonumber(ARGV[2]), 'crash', ARGV[3], blamed[token]) end
      freed = freed + 1
    end
  end
end
return freed
"""

# next(gen, room, queue_empty, reap_at, max_attempts, idle, fresh, own_ms) -> {number of urgent units, u ...}: what to
# hint now, urgent ones first; of the others as many as still fit in `room`, and `fresh` of them for the first time.
# Leases that have run out are taken away only within two seconds of `reap_at`, when that was decided: where this was
# sent before an outage and is carried out after it, the holders must get to beat first.
NEXT = """
if get('gen') ~= ARGV[1] or get('state') ~= 'running' then return {0} end
local room, max_attempts, fresh = tonumber(ARGV[2]), tonumber(ARGV[5]), tonumber(ARGV[7])
local reap = math.abs(now - tonumber(ARGV[4])) < 2000
-- The server's clock was set back: what was to be looked at soon would otherwise wait as long as that.
local back = tonumber(get('fed_ms') or '0') - now
if back > 2000 then
  for _, key in ipairs({due, hinted}) do
    local later = redis.call('ZRANGEBYSCORE', key, now, '+inf', 'WITHSCORES')
    for i = 1, #later, 2 do redis.call('ZADD', key, later[i + 1] - back, later[i]) end
  end
  redis.call('HDEL', meta, 'helped_ms')
end
for _, u in ipairs(redis.call('ZRANGEBYSCORE', due, '-inf', now, 'LIMIT', 0, 500)) do
  local there = redis.call('HGET', pub, u)
  local held = redis.call('HGET', owner, u)
  if there then
    local id = string.match(there, '(%S+)$')
    if #redis.call('XRANGE', res, id, id) == 0 then
      redis.call('HDEL', pub, u)
      hint_at_once(u)
    else
      redis.call('ZADD', due, now + RECHECK, u)
    end
  elseif not held then
    hint_at_once(u)
  elseif reap then
    lapse(u, begun(held), max_attempts, 'crash', 'the worker was not heard of for one lease')
  end
end
-- These were in hand and go in front: a queue that is full is no reason to let them wait.
local units = redis.call('ZRANGEBYSCORE', hinted, 0, 0, 'LIMIT', 0, 500)
local urgent = #units
local patience = ARGV[3] == '1' and 5000 or 600000
for _, u in ipairs(redis.call('ZRANGEBYSCORE', hinted, 1, now - patience, 'LIMIT', 0, math.max(0, room - #units))) do
  units[#units + 1] = u
end
room = math.min(room, #units + fresh)
local cursor, total = tonumber(get('cursor')), tonumber(get('total'))
-- Fewer units than the cursor has passed are done, hinted or due: a key was lost. Pass all of them again.
if tonumber(get('done')) + redis.call('ZCARD', hinted) + redis.call('ZCARD', due) < cursor then cursor = 0 end
while #units < room and cursor < total do
  if redis.call('GETBIT', done, cursor) == 1 then
    -- Millions of done units are passed in one step; the first byte may have a zero before the cursor.
    cursor = math.max(cursor + 1, redis.call('BITPOS', done, 0, math.floor(cursor / 8)))
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
-- Workers without work at the tail are told, once a second, of units that they may help with: first of those that
-- nobody has begun, then of those that have taken longest. own_ms is what a unit takes the fastest of them.
local idle, own_ms = tonumber(ARGV[6]), tonumber(ARGV[8])
if idle > 0 and #units == 0 and ARGV[3] == '1' and now - tonumber(get('helped_ms') or '0') > 1000 then
  local held, wanting = redis.call('HGETALL', owner), {}
  for i = 1, #held, 2 do
    local lane, since = may_help(held[i], held[i + 1], own_ms)
    if lane then wanting[#wanting + 1] = {tonumber(since), tonumber(held[i])} end
  end
  table.sort(wanting, function(a, b) return a[1] < b[1] or (a[1] == b[1] and a[2] < b[2]) end)
  for i = 1, math.min(idle, #wanting) do answer[#answer + 1] = tostring(wanting[i][2]) end
  redis.call('HSET', meta, 'helped_ms', now)
end
return answer
"""

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
if count == tonumber(get('total')) and get('state') ~= 'done' then
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
if tonumber(ARGV[2]) <= tonumber(get('total')) then return 1 end
redis.call('HSET', meta, 'total', ARGV[2])
if get('state') == 'done' then redis.call('HSET', meta, 'state', 'running') end
return 1
"""

# control(durable, name, value, ...) -> {state, priority}: what a user asked for. It holds at once, and stands in
# `asked` until the writer has it on disk and sends it again as durable; what was asked for since stands above that.
CONTROL = """
local asked, durable = KEYS[12], ARGV[1] == '1'
for i = 2, #ARGV, 2 do
  local name, wish = ARGV[i], ARGV[i + 1]
  local open = redis.call('HGET', asked, name)
  if durable and open == wish then
    redis.call('HDEL', asked, name)
    open = false
  elseif not durable and (name == 'priority' or get('state') ~= 'done') then
    -- A run that is done has no state to change, but its weight counts when units are added to it.
    redis.call('HSET', asked, name, wish)
    open = false
  end
  if get('gen') and not open and get(name) ~= wish and get('state') ~= 'done' then
    redis.call('HSET', meta, name, wish)
    if name == 'state' and wish ~= 'running' then
      -- No hint is left. Going on, the feeder passes all units again, and finds those that are neither done nor held.
      redis.call('DEL', hinted)
      redis.call('HSET', meta, 'cursor', 0)
    end
    if name == 'state' and wish == 'cancelled' then
      for _, lane in ipairs({owner, spare}) do
        local held = redis.call('HGETALL', lane)
        for k = 1, #held, 2 do
          if begun(held[k + 1]) then redis.call('HINCRBY', att, held[k], -1) end
        end
      end
      redis.call('DEL', due, owner, spare, busy)
    end
  end
end
return {get('state') or '', get('priority') or ''}
"""

SCRIPTS = {
    name: _PRELUDE + body
    for name, body in {
        "claim": CLAIM,
        "start": START,
        "beat": BEAT,
        "publish": PUBLISH,
        "release": RELEASE,
        "abandon": ABANDON,
        "next": NEXT,
        "commit": COMMIT,
        "reject": REJECT,
        "grow": GROW,
        "control": CONTROL,
    }.items()
}

FREEING = frozenset(
    {"beat", "release", "abandon", "commit", "reject", "report", "rate", "swap", "forget", "grow", "control"}
)
"""Scripts that must run although the server is out of memory, or the backlog could never drain (Redis >= 7)."""

# report(name, what it says of itself, life_ms): KEYS are the list of workers or services, and the reporter's own key
REPORT = """
local t = redis.call('TIME')
redis.call('ZADD', KEYS[1], t[1] * 1000 + math.floor(t[2] / 1000), ARGV[1])
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
return 1
"""

# rate(field, what was measured): the hash has 256 fields at most
RATE = """
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 and redis.call('HLEN', KEYS[1]) >= 256 then
  redis.call('HDEL', KEYS[1], redis.call('HRANDFIELD', KEYS[1]))
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
return 1
"""

# forget(queue of a build, its record) -> 1: the record was still that one, and is gone with the keys of its stage
FORGET = """
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return 0 end
redis.call('HDEL', KEYS[1], ARGV[1])
for i = 2, #KEYS do redis.call('DEL', KEYS[i]) end
return 1
"""

# swap(old, new) -> 1 where the key held `old` ('': nothing), or holds `new` already; 0 where somebody was faster
SWAP = """
local there = redis.call('GET', KEYS[1]) or ''
if there ~= ARGV[1] and there ~= ARGV[2] then return 0 end
redis.call('SET', KEYS[1], ARGV[2])
return 1
"""

# Renew or take the writer lock: (writer id, ttl_ms, takeover) -> "" when held by us, else the holder's id.
WRITER_LOCK = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] and ARGV[3] ~= '1' then return holder end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return ''
"""
