-- Claim a key for one request, or give it up.
--
-- KEYS: 1 the key, a string with the token of whoever has it
-- ARGV: 1 token, 2 lease in milliseconds, 0 to give up
-- Returns 1 when the key is the caller's (or was, and is given up), else 0.

local token, lease_ms = ARGV[1], tonumber(ARGV[2])
local holder = healed(KEYS[1], redis.pcall('GET', KEYS[1]))
if lease_ms == 0 then
  return holder == token and redis.call('DEL', KEYS[1]) or 0
end
-- A key without an end was not written here, and would be taken for ever.
if holder and holder ~= token and redis.call('PTTL', KEYS[1]) >= 0 then
  return 0
end
redis.call('SET', KEYS[1], token, 'PX', lease_ms)
return 1
