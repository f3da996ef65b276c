-- End a charge. Ending it twice, or ending one that was reaped or lost, changes no count.
--
-- KEYS: 1 load hash, 2 flight hash of the replica, 3 void mark of the charge
-- ARGV: 1 charge id, 2 '1' to give the tokens back, 3 life of the void mark in ms
-- Returns 1 when the charge was open, else 0.

local packed = healed(KEYS[2], redis.pcall('HGET', KEYS[2], ARGV[1]))
local endpoint, tokens, ended_sequences, ended_outputs = charge_of(packed)
if not endpoint then
  -- After a lost connection the reservation may still lie unread in a socket: it must not charge when it arrives. A full
  -- Redis takes no mark, and no reservation either.
  local marked = redis.pcall('SET', KEYS[3], '', 'PX', ARGV[3])
  if marked.err and not string.find(marked.err, 'OOM ', 1, true) then
    error(marked.err)
  end
  if packed then
    redis.call('HDEL', KEYS[2], ARGV[1])
  end
  return 0
end

redis.call('HDEL', KEYS[2], ARGV[1])
local now = clock()
local entry = healed(KEYS[1], redis.pcall('HGET', KEYS[1], endpoint))
local backlog, sequences, outputs, rate = load_of(entry, now)
if ARGV[2] == '1' then
  backlog = math.max(0, backlog - tokens)
end
sequences, outputs = sequences - ended_sequences, outputs - ended_outputs
if sequences > 0 then
  put_load(KEYS[1], endpoint, backlog, now, rate, sequences, math.max(0, outputs))
elseif backlog > 0 then
  put_load(KEYS[1], endpoint, backlog, now, rate, 0, 0)
else
  redis.call('HDEL', KEYS[1], endpoint)
end
return 1
