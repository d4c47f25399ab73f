"""The script behind pause, resume, cancel and priority. After the keys of the run it is given the key `asked`."""

from __future__ import annotations

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
          if begun(held[k + 1]) then charge(held[k], -1) end
        end
      end
      redis.call('DEL', due, owner, spare, busy)
    end
  end
end
return {get('state') or '', get('priority') or ''}
"""
