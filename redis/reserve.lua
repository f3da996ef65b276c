-- Pick an endpoint, charge it and pin the session to it, in one step.
--
-- KEYS: 1 load hash, 2 leases zset, 3 flight hash of the replica, 4 void mark of the charge, 5 pins zset,
--       6 pin to write, 7 pin to honour (6 and 7 left out without a session, 7 when none is honoured; they may be the
--       same)
-- ARGV[1]: cmsgpack array {charge id, replica, candidates, pin ttl ms, break-out ms, strict, ignore pin, sequences,
--       output tokens, running ms, output ms, backlog weight, tie ms, lease ms, most pins, most trimmed for one, what
--       comes before the session in the key of a pin}; a candidate is {endpoint, static ms, tokens, rate, floor tokens,
--       floor running, stalled tokens}.
-- Returns the packed record of the charge (see charge_of), or with an absent pin a record that charges nothing,
-- or an error when the charge was settled before this reservation arrived.

local charge_id, replica, candidates, pin_ttl_ms, break_out_ms, strict, ignore_pin, sequences, output_tokens,
  running_ms, output_ms, backlog_weight, tie_ms, lease_ms, max_pins, trimmed, pin_prefix = unpack(
    cmsgpack.unpack(ARGV[1]))

local known = healed(KEYS[3], redis.pcall('HGET', KEYS[3], charge_id))
if charge_of(known) then
  return known
end

-- MGET answers nil for a key of another type.
local marks = redis.call('MGET', KEYS[4], KEYS[7] or KEYS[4])
if marks[1] then
  return redis.error_reply('VOID the charge was settled before it was reserved')
end
local pin = KEYS[7] and marks[2]

-- What counts of a load: what the ledger has, and no less than what the candidate's engine proves.
local function floored(candidate, backlog, running)
  local floor, proven, stalled = candidate[5], candidate[6], candidate[7]
  if proven > running then
    running = proven
  end
  stalled = stalled * running
  if floor > backlog then
    backlog = floor
  end
  if stalled > backlog then
    backlog = stalled
  end
  return backlog, running
end

local ids = {}
for index, candidate in ipairs(candidates) do
  ids[index] = candidate[1]
end
local entries = healed(KEYS[1], redis.pcall('HMGET', KEYS[1], unpack(ids))) or {}
local now = clock()

local costs, least, pinned_at = {}, math.huge, nil
for index, candidate in ipairs(candidates) do
  local in_ledger, in_flight, outputs = load_of(entries[index], now)
  local backlog, running = floored(candidate, in_ledger, in_flight)
  local cost = candidate[2] + backlog / candidate[4] * 1000 * backlog_weight + running * running_ms
    + outputs * output_ms
  costs[index] = cost
  if cost < least then
    least = cost
  end
  if not pinned_at and candidate[1] == pin then
    pinned_at = index
  end
end
if pin and not pinned_at and (pin == '' or not is_text(pin)) then
  pin = nil
end
if pin and not pinned_at and not ignore_pin then
  return cmsgpack.pack({'', 0, 0, 0, 0, false, false, pin})
end

local picked = nil
local honoured = pinned_at and not ignore_pin and (strict or costs[pinned_at] <= least + break_out_ms)
if honoured then
  picked = pinned_at
else
  for index, cost in ipairs(costs) do
    if cost <= least + tie_ms then
      picked = index
      break
    end
  end
end

local endpoint, _, tokens, rate = unpack(candidates[picked])
local in_ledger, in_flight, outputs = load_of(entries[picked], now)
local backlog, running = floored(candidates[picked], in_ledger, in_flight)
local moved = pin and pin ~= endpoint or false
local record = cmsgpack.pack({
  endpoint, costs[picked], backlog, running, outputs, honoured or false, moved, '', tokens, sequences, output_tokens,
})
put_load(KEYS[1], endpoint, backlog + tokens, now, rate, in_flight + sequences, outputs + output_tokens)
redis.call('HSET', KEYS[3], charge_id, record)
renew(KEYS[2], replica, math.floor(now * 1000) + lease_ms)
if KEYS[6] then
  keep_pin(now, KEYS[5], KEYS[6], endpoint, pin_ttl_ms, max_pins, trimmed, pin_prefix)
end
return record
