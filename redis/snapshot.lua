-- Let readers see another snapshot than before, or none; the parts of the one before are deleted.
--
-- KEYS: 1 heads hash
-- ARGV: 1 name, 2 what comes before a generation in the key of a part (same hash tag), 3 new generation ('' to take the
--       snapshot back), 4 number of its parts, 5 id of the last feed entry that it includes
-- Returns 1, or 0 and changes nothing when parts of the new generation are missing.
--
-- A head is "generation parts at"; a part's key is prefix .. generation .. ':' .. number, from 0.

local name, prefix, generation, count = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])

local function part(of, number)
  return prefix .. of .. ':' .. number
end

for number = 0, count - 1 do
  if redis.call('EXISTS', part(generation, number)) == 0 then
    return 0
  end
end
local before = healed(KEYS[1], redis.pcall('HGET', KEYS[1], name)) or ''
if generation == '' then
  redis.call('HDEL', KEYS[1], name)
else
  -- Until here the parts had a life of their own, so that a writer that died leaves nothing behind.
  for number = 0, count - 1 do
    redis.call('PERSIST', part(generation, number))
  end
  redis.call('HSET', KEYS[1], name, generation .. ' ' .. ARGV[4] .. ' ' .. ARGV[5])
end
local old, parts = string.match(before, '^(%x+) (%d+) ')
if old and old ~= generation then
  for number = 0, math.min(tonumber(parts), 4096) - 1 do
    redis.call('UNLINK', part(old, number))
  end
end
return 1
