-- Helpers put in front of every script (see extproc/state/scripts.py). Nothing stored is trusted: a key of another
-- type is deleted, a value that cannot be read counts as absent, so that a damaged key never fails a request.
--
-- Redis whose `maxmemory` is reached refuses the first write of a script when it could take memory, and lets all that
-- follow a write that could not (HDEL, DEL, ZREM, PEXPIRE) pass. Scripts that have to work then write in that order:
-- settle, move, heartbeat and release, because what they end or count frees memory, and no other Redis hears of it.

-- Most tokens believed, of a backlog or of outputs in flight, and most sequences; anything above is damage.
local TOKENS_LIMIT = 1e13
local SEQUENCES_LIMIT = 1e9

-- Seconds since the epoch on Redis' own clock, the only clock all replicas share.
local function clock()
  local time = redis.call('TIME')
  return tonumber(time[1]) + tonumber(time[2]) / 1000000
end

-- The reply, or nil after deleting a key that holds another type. Other errors end the script.
local function healed(key, reply)
  if type(reply) == 'table' and reply.err then
    if not string.find(reply.err, 'WRONGTYPE', 1, true) then
      -- The text and not the table, which Redis 6.2 cannot print: its code is in it.
      error(reply.err)
    end
    redis.call('DEL', key)
    return nil
  end
  return reply
end

local read_entry = struct.unpack

-- Load of an endpoint now: backlog, sequences and output tokens in flight, rate at which the backlog drains.
-- An entry is five doubles: a leaky bucket {tokens, since, rate}, of which b(now) = max(0, b(since) - rate * (now -
-- since)) is left, then sequences and output tokens. No comparison holds for a NaN. It is called for every candidate of
-- a reservation: a comparison takes a tenth of what a call of math.max does.
local function load_of(entry, now)
  if not entry or #entry ~= 40 then
    return 0, 0, 0, 0
  end
  local backlog, since, rate, sequences, outputs = read_entry('<ddddd', entry)
  if now > since then
    backlog = backlog - rate * (now - since)
  end
  if not (backlog > 0 and backlog <= TOKENS_LIMIT) then
    backlog = 0
  end
  if not (sequences >= 1 and sequences <= SEQUENCES_LIMIT) then
    return backlog, 0, 0, rate
  end
  if not (outputs > 0 and outputs <= TOKENS_LIMIT) then
    outputs = 0
  end
  return backlog, math.floor(sequences), outputs, rate
end

local function put_load(key, endpoint, backlog, now, rate, sequences, outputs)
  redis.call('HSET', key, endpoint, struct.pack('<ddddd', backlog, now, rate, sequences, outputs))
end

-- Whether a value reads as UTF-8 (over-long forms pass: they are not worth the time).
local function is_text(value)
  return string.gsub(value, '[%z\1-\127\194-\244][\128-\191]*', '') == ''
end

-- The charge behind a packed record {endpoint, cost, backlog, running, outputs, pinned, moved, absent pin, tokens
-- charged, sequences charged, output tokens charged}: endpoint and the last three.
local function charge_of(packed)
  if type(packed) ~= 'string' then
    return nil
  end
  local read, record = pcall(cmsgpack.unpack, packed)
  if not read or type(record) ~= 'table' or type(record[1]) ~= 'string' then
    return nil
  end
  for at = 9, 11 do
    -- No comparison holds for a NaN.
    if type(record[at]) ~= 'number' or not (record[at] >= 0 and record[at] < math.huge) then
      return nil
    end
  end
  if record[10] > SEQUENCES_LIMIT or record[11] > TOKENS_LIMIT then
    return nil
  end
  return record[1], record[9], record[10], record[11]
end

-- Pin a session. A pin is a string with a life of its own; beside the pins stands a sorted set with the last use of each
-- (ms), by which a pool's pins are bounded: those used longest ago go, `trimmed` at most for one that is added. The set
-- is an index: one that was lost fills again with use, and pins that it lacks end with their own lives.
local function keep_pin(now, uses, pin, endpoint, ttl_ms, max_pins, trimmed, prefix)
  redis.call('SET', pin, endpoint, 'PX', ttl_ms)
  local used_ms, session = now * 1000, string.sub(pin, #prefix + 1)
  local added = healed(uses, redis.pcall('ZADD', uses, used_ms, session))
    or redis.call('ZADD', uses, used_ms, session)
  local over = added == 1 and redis.call('ZCARD', uses) - max_pins or 0
  if over > 0 then
    local gone, popped = {}, redis.call('ZPOPMIN', uses, math.min(over, trimmed))
    for index = 1, #popped, 2 do
      table.insert(gone, prefix .. popped[index])
    end
    redis.call('DEL', unpack(gone))
  end
end

local function renew(leases, replica, until_ms)
  if healed(leases, redis.pcall('ZADD', leases, until_ms, replica)) == nil then
    redis.call('ZADD', leases, until_ms, replica)
  end
end

local function drop_damaged(flight)
  local charges = redis.call('HGETALL', flight)
  for index = 1, #charges, 2 do
    if not charge_of(charges[index + 1]) then
      redis.call('HDEL', flight, charges[index])
    end
  end
end

-- Count what is in flight anew from the charges of all leased replicas, and drop the endpoints without any load and the
-- charges that cannot be read: no drift survives it, and nothing that left stays behind.
local function recount(leases, key, flight_prefix)
  local now, sequences, outputs = clock(), {}, {}
  for _, replica in ipairs(redis.call('ZRANGE', leases, 0, -1)) do
    local flight, damaged = flight_prefix .. replica, false
    for _, packed in ipairs(healed(flight, redis.pcall('HVALS', flight)) or {}) do
      local endpoint, _, more_sequences, more_outputs = charge_of(packed)
      if endpoint then
        sequences[endpoint] = (sequences[endpoint] or 0) + more_sequences
        outputs[endpoint] = (outputs[endpoint] or 0) + more_outputs
      else
        damaged = true
      end
    end
    if damaged then
      drop_damaged(flight)
    end
  end
  local entries = healed(key, redis.pcall('HGETALL', key)) or {}
  for index = 1, #entries, 2 do
    local endpoint = entries[index]
    local backlog, _, _, rate = load_of(entries[index + 1], now)
    if sequences[endpoint] or backlog > 0 then
      put_load(key, endpoint, backlog, now, rate, sequences[endpoint] or 0, outputs[endpoint] or 0)
      sequences[endpoint] = nil
    else
      redis.call('HDEL', key, endpoint)
    end
  end
  for endpoint, number in pairs(sequences) do
    put_load(key, endpoint, 0, now, 0, number, outputs[endpoint])
  end
end
