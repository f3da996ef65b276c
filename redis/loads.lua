-- Load of every endpoint now.
--
-- KEYS: 1 load hash
-- Returns a cmsgpack array of {endpoint, backlog tokens, sequences, output tokens}; endpoints without any are left out.

local now, loads = clock(), {}
local entries = healed(KEYS[1], redis.pcall('HGETALL', KEYS[1])) or {}
for index = 1, #entries, 2 do
  local backlog, sequences, outputs = load_of(entries[index + 1], now)
  if backlog > 0 or sequences > 0 then
    table.insert(loads, {entries[index], backlog, sequences, outputs})
  end
end
return cmsgpack.pack(loads)
