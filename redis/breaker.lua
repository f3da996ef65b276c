-- Breakers of a pool's endpoints: the rule of extproc/state/breakers.py, on Redis' own clock.
--
-- KEYS: 1 breakers hash (endpoint -> packed {strikes, openings, until, closed at, probed until}, times in milliseconds)
-- ARGV[1]: cmsgpack array, one of
--   {'judge', endpoint, verdict, strikes that open it, open ms, longest open ms}; returns packed {state, strikes,
--     openings, ms left}
--   {'probe', endpoint, lease ms}; returns 1 when the caller may send a probe, else 0
--   {'all'}; returns packed map endpoint -> {state, strikes, openings, ms left} of those that are not as good as new

local ask = cmsgpack.unpack(ARGV[1])
local now = clock() * 1000

-- Longest time from now that is believed; anything above is damage, or was written before Redis' clock was set back.
local MOST_MS = 3600000
local DOUBLINGS = 16

local function number_or_0(value)
  -- No comparison holds for a NaN.
  return type(value) == 'number' and value >= 0 and value < math.huge and value or 0
end

local function breaker_of(packed)
  local read, record = pcall(cmsgpack.unpack, packed or '\192')
  if not read or type(record) ~= 'table' or #record ~= 5 then
    return {0, 0, 0, 0, 0}
  end
  for at = 1, 5 do
    record[at] = number_or_0(record[at])
  end
  if record[3] > now + MOST_MS then
    record[3] = 0
  end
  if record[5] > now + MOST_MS then
    record[5] = 0
  end
  record[4] = math.min(record[4], now)
  return record
end

local function state_of(breaker)
  if breaker[3] == 0 then
    return 'closed'
  end
  return now < breaker[3] and 'open' or 'half_open'
end

local function view(breaker)
  return {state_of(breaker), math.floor(breaker[1]), math.floor(breaker[2]), math.max(0, breaker[3] - now)}
end

local function put(endpoint, breaker)
  redis.call('HSET', KEYS[1], endpoint, cmsgpack.pack(breaker))
end

local function read(endpoint)
  return breaker_of(healed(KEYS[1], redis.pcall('HGET', KEYS[1], endpoint)) or nil)
end

local function judged(breaker, verdict, strikes, open_ms, max_open_ms)
  local state = state_of(breaker)
  if state == 'open' then
    return breaker
  elseif verdict == 'neutral' then
    return {breaker[1], breaker[2], breaker[3], breaker[4], 0}
  elseif verdict == 'good' then
    if state == 'closed' then
      return {0, breaker[2], 0, breaker[4], breaker[5]}
    end
    return {0, breaker[2], 0, now, 0}
  elseif state == 'closed' and breaker[1] + 1 < strikes then
    return {breaker[1] + 1, breaker[2], 0, breaker[4], breaker[5]}
  end
  local relapsed = state == 'half_open' or now - breaker[4] < max_open_ms
  local openings = relapsed and breaker[2] + 1 or 1
  local length_ms = math.min(max_open_ms, open_ms * 2 ^ math.min(openings - 1, DOUBLINGS))
  return {0, openings, now + length_ms, breaker[4], 0}
end

if ask[1] == 'judge' then
  local before = read(ask[2])
  local changed = judged(before, ask[3], ask[4], ask[5], ask[6])
  if changed ~= before then
    put(ask[2], changed)
  end
  return cmsgpack.pack(view(changed))
elseif ask[1] == 'probe' then
  local breaker = read(ask[2])
  if state_of(breaker) ~= 'half_open' or now < breaker[5] then
    return 0
  end
  put(ask[2], {breaker[1], breaker[2], breaker[3], breaker[4], now + ask[3]})
  return 1
end

local views, any = {}, false
local entries = healed(KEYS[1], redis.pcall('HGETALL', KEYS[1])) or {}
for index = 1, #entries, 2 do
  local breaker = breaker_of(entries[index + 1])
  if breaker[1] > 0 or breaker[3] > 0 then
    views[entries[index]], any = view(breaker), true
  end
end
-- An empty Lua table packs as an array.
return any and cmsgpack.pack(views) or '\128'
