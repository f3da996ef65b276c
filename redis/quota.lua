-- Take of several limits at once, all or nothing; or correct what was taken. See extproc/govern/quotas.py for the rules
-- and where they come from.
--
-- KEYS: a bucket for each draw, three doubles {level, since, busy}: in use, and seconds on Redis' own clock
-- ARGV[1]: cmsgpack array {taken at, draws}; taken at 0 to take, else when what is corrected was taken. A draw is
--       {amount, most, rate, window}: window 0 drains at the rate, 1 begins anew each day, 2 each month (UTC).
-- Returns packed {allowed, now, levels}: what is in use, with the draws when they were taken.

local LEVEL_LIMIT = 1e15
-- Longest life of a key: one beyond a month was given a wrong rate.
local LIFE_LIMIT_MS = 3456000000
local DAY_S = 86400

local at, draws = unpack(cmsgpack.unpack(ARGV[1]))
local now = clock()

-- Days from the epoch to the first day of a month, and the month of a day: the proleptic Gregorian calendar counted from
-- 1 March of year 0, in eras of 400 years and 146,097 days (H. Hinnant, "chrono-Compatible Low-Level Date Algorithms").
local function days_to(year, month)
  if month <= 2 then
    year, month = year - 1, month + 12
  end
  local era = math.floor(year / 400)
  local of_era = year - era * 400
  local of_year = math.floor((153 * (month - 3) + 2) / 5)
  return era * 146097 + of_era * 365 + math.floor(of_era / 4) - math.floor(of_era / 100) + of_year - 719468
end

local function month_of(seconds)
  local days = math.floor(seconds / DAY_S) + 719468
  local era = math.floor(days / 146097)
  local of_era = days - era * 146097
  local year = math.floor(
    (of_era - math.floor(of_era / 1460) + math.floor(of_era / 36524) - math.floor(of_era / 146096)) / 365)
  local of_year = of_era - (365 * year + math.floor(year / 4) - math.floor(year / 100))
  local month = math.floor((5 * of_year + 2) / 153) + 3
  year = year + era * 400
  if month > 12 then
    year, month = year + 1, month - 12
  end
  return year, month
end

local function window_end(window, seconds)
  if window == 1 then
    return (math.floor(seconds / DAY_S) + 1) * DAY_S
  end
  local year, month = month_of(seconds)
  if month == 12 then
    year, month = year + 1, 0
  end
  return days_to(year, month + 1) * DAY_S
end

-- What is in use now, and when the bucket was found empty last. No comparison holds for a NaN.
local function standing(entry, rate, window)
  if not entry or #entry ~= 24 then
    return 0, now
  end
  local level, since, busy = struct.unpack('<ddd', entry)
  if not (level >= 0 and level <= LEVEL_LIMIT and since >= 0 and since < 1e11) then
    return 0, now
  end
  if window ~= 0 then
    if window_end(window, since) ~= window_end(window, now) then
      return 0, now
    end
    return level, busy
  end
  if now > since then
    level = level - rate * (now - since)
  end
  if level > 0 then
    return level, busy
  end
  return 0, now
end

local function put(key, level, busy, rate, window)
  local life_ms
  if window == 0 then
    life_ms = level / rate * 1000
  else
    life_ms = (window_end(window, now) - now) * 1000
  end
  -- What has drained is gone: a key that is not there is an empty bucket.
  redis.call('SET', key, struct.pack('<ddd', level, now, busy), 'PX', math.ceil(math.min(life_ms + 1, LIFE_LIMIT_MS)))
end

-- MGET answers nil for a key of another type, and SET writes over it.
local entries = redis.call('MGET', unpack(KEYS))
local levels, busies, allowed = {}, {}, true
for index, draw in ipairs(draws) do
  local amount, most, rate, window = unpack(draw)
  levels[index], busies[index] = standing(entries[index], rate, window)
  if at == 0 and levels[index] + amount > most then
    allowed = false
  end
end

for index, draw in ipairs(draws) do
  local amount, _, rate, window = unpack(draw)
  local changes = allowed
  if at ~= 0 then
    if window ~= 0 then
      changes = window_end(window, at) == window_end(window, now)
    else
      changes = amount > 0 or busies[index] <= at
    end
  end
  if changes then
    levels[index] = math.max(0, levels[index] + amount)
    put(KEYS[index], levels[index], busies[index], rate, window)
  end
end
return cmsgpack.pack({allowed, now, levels})
