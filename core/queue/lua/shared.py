"""Scripts about what belongs to no run: reports of services, measured speeds, turns, builds of indices."""

from __future__ import annotations

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
