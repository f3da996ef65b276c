-- Share work among its holders: renew one holder's lease, and say which names it has until then.
--
-- KEYS: 1 leases zset (holder -> end, milliseconds since the epoch), 2 the table of the work
-- ARGV[1]: cmsgpack array {holder, lease ms, names that it sees, names that it was told to stop and stopped}
-- Returns packed {names it has, names it has to stop}.
--
-- The table is packed {holders, names, heirs, ends}: {id, lease ms} of each holder; name -> place of its owner there;
-- name -> place of the heir, where another holder asked for it; name -> when it goes to the heir at the latest, where
-- the owner was told to stop. An owner that was told may not have heard it: until it says that it stopped, the name
-- waits for the end of the lease that the owner had before it was told.

local holder, lease_ms, asked, stopped_names = unpack(cmsgpack.unpack(ARGV[1]))
local now_ms = math.floor(clock() * 1000)

-- Longest lease believed; anything above is damage, and would keep a dead holder alive.
local LEASE_LIMIT_MS = 60000

local function field(value, key)
  return type(value) == 'table' and type(value[key]) == 'table' and value[key] or {}
end

-- Owner by name, heir by name, end by name, lease by holder. What cannot be read is nobody's.
local function read_table(packed)
  local read, value = pcall(cmsgpack.unpack, packed or '\192')
  value = read and value or nil
  local holders, lease_of, owners, heirs, ends = field(value, 1), {}, {}, {}, {}
  local function id_at(place)
    return type(holders[place]) == 'table' and holders[place][1] or nil
  end
  for _, each in pairs(holders) do
    local ms = type(each) == 'table' and type(each[1]) == 'string' and tonumber(each[2])
    if ms and ms > 0 and ms <= LEASE_LIMIT_MS then
      lease_of[each[1]] = ms
    end
  end
  for name, place in pairs(field(value, 2)) do
    owners[name] = id_at(place)
  end
  for name, place in pairs(field(value, 3)) do
    heirs[name] = owners[name] and id_at(place)
  end
  for name, ms in pairs(field(value, 4)) do
    ends[name] = owners[name] and tonumber(ms)
  end
  return owners, heirs, ends, lease_of
end

local owners, heirs, ends, lease_of = read_table(healed(KEYS[2], redis.pcall('GET', KEYS[2])))
local changed = lease_of[holder] ~= lease_ms

-- End of the lease of each holder that lives. An end beyond a whole lease from now was written before Redis' clock was
-- set back, and would keep a dead holder alive.
local living, number, longest_ms = {}, 0, lease_ms
local rows = healed(KEYS[1], redis.pcall('ZRANGE', KEYS[1], 0, -1, 'WITHSCORES')) or {}
for index = 1, #rows, 2 do
  local id, till_ms = rows[index], tonumber(rows[index + 1])
  local most_ms = now_ms + (lease_of[id] or lease_ms)
  if till_ms > most_ms then
    till_ms = most_ms
    redis.call('ZADD', KEYS[1], most_ms, id)
  end
  if till_ms > now_ms then
    living[id], number = till_ms, number + 1
    longest_ms = math.max(longest_ms, lease_of[id] or 0)
  else
    redis.call('ZREM', KEYS[1], id)
  end
end
local believed_ms = living[holder]

local sees, stopped = {}, {}
for _, name in ipairs(asked) do
  sees[name] = true
end
for _, name in ipairs(stopped_names) do
  stopped[name] = true
end

-- Settle who has each name: the dead lose theirs, and the holder what it does not ask for; what it stopped, or cannot
-- believe in any more, goes to the heir.
for name, owner in pairs(owners) do
  local heir, ends_ms = heirs[name], ends[name]
  if heir and (not living[heir] or (heir == holder and not sees[name])) then
    heir = nil
  end
  if not living[owner] or (owner == holder and not sees[name]) then
    owner, heir, ends_ms = heir, nil, nil
  elseif heir and ends_ms and (ends_ms <= now_ms or (owner == holder and stopped[name])) then
    owner, heir, ends_ms = heir, nil, nil
  elseif owner == holder then
    ends_ms = heir and (ends_ms or believed_ms)
  end
  if owner ~= owners[name] or heir ~= heirs[name] or ends_ms ~= ends[name] then
    owners[name], heirs[name], ends[name], changed = owner, heir, ends_ms, true
  end
end

if #asked == 0 then
  redis.call('ZREM', KEYS[1], holder)
  living[holder], changed = nil, true
else
  renew(KEYS[1], holder, now_ms + lease_ms)
  if not believed_ms then
    number = number + 1
  end
  living[holder], lease_of[holder] = now_ms + lease_ms, lease_ms
end

-- Nothing waits for a better holder: who comes first takes all that nobody has, and the others take their share of it
-- from there.
local total, counts = 0, {[holder] = 0}
for _, name in ipairs(asked) do
  if not owners[name] then
    owners[name], changed = holder, true
  end
end
for name, owner in pairs(owners) do
  local whose = heirs[name] or owner
  total, counts[whose] = total + 1, (counts[whose] or 0) + 1
end

-- Ask for names of those that have most, up to the share, as long as that makes the two more equal.
local function richest(takeable)
  local best = nil
  for owner, names in pairs(takeable) do
    if #names > 0 and (not best or counts[owner] > counts[best] or (counts[owner] == counts[best] and owner < best)) then
      best = owner
    end
  end
  return best
end

local share = math.ceil(total / math.max(number, 1))
if counts[holder] < share then
  local takeable = {}
  for _, name in ipairs(asked) do
    local owner = owners[name]
    if owner ~= holder and not heirs[name] then
      takeable[owner] = takeable[owner] or {}
      table.insert(takeable[owner], name)
    end
  end
  local from = richest(takeable)
  while from and counts[holder] < share and counts[from] >= counts[holder] + 2 do
    heirs[table.remove(takeable[from])], changed = holder, true
    counts[from], counts[holder] = counts[from] - 1, counts[holder] + 1
    from = richest(takeable)
  end
end

local has, stops = {}, {}
for _, name in ipairs(asked) do
  if owners[name] == holder then
    table.insert(heirs[name] and stops or has, name)
  end
end

if changed then
  local holders, place_of, names, heir_places = {}, {}, {}, {}
  for id in pairs(living) do
    table.insert(holders, {id, lease_of[id] or lease_ms})
    place_of[id] = #holders
  end
  for name, owner in pairs(owners) do
    names[name], heir_places[name] = place_of[owner], heirs[name] and place_of[heirs[name]]
  end
  redis.call('SET', KEYS[2], cmsgpack.pack({holders, names, heir_places, ends}))
end
-- The table must outlive every lease, and does not stay for ever when all are gone.
redis.call('PEXPIRE', KEYS[2], 4 * longest_ms)
redis.call('PEXPIRE', KEYS[1], 4 * longest_ms)
return cmsgpack.pack({has, stops})
