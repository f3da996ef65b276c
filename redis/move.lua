-- Move an open charge to the endpoint that serves it, where that is not the one picked.
--
-- KEYS: 1 load hash, 2 flight hash of the replica
-- ARGV[1]: cmsgpack array {charge id, endpoint, tokens that it has to prefill, rate at which its backlog drains}
-- Returns 1 when the charge is open, moved or there already, else 0.

local charge_id, endpoint, tokens, rate = unpack(cmsgpack.unpack(ARGV[1]))
local packed = healed(KEYS[2], redis.pcall('HGET', KEYS[2], charge_id))
local from, from_tokens, moved_sequences, moved_outputs = charge_of(packed)
if not from or from == endpoint then
  return from and 1 or 0
end

local now = clock()
local entries = healed(KEYS[1], redis.pcall('HMGET', KEYS[1], from, endpoint)) or {}
redis.call('HDEL', KEYS[1], from)
local backlog, sequences, outputs, from_rate = load_of(entries[1], now)
backlog, sequences, outputs = backlog - from_tokens, sequences - moved_sequences, outputs - moved_outputs
if sequences <= 0 then
  sequences, outputs = 0, 0
end
if backlog > 0 or sequences > 0 then
  put_load(KEYS[1], from, math.max(0, backlog), now, from_rate, sequences, math.max(0, outputs))
end

backlog, sequences, outputs = load_of(entries[2], now)
put_load(KEYS[1], endpoint, backlog + tokens, now, rate, sequences + moved_sequences, outputs + moved_outputs)
local record = cmsgpack.unpack(packed)
record[1], record[9] = endpoint, tokens
redis.call('HSET', KEYS[2], charge_id, cmsgpack.pack(record))
return 1
