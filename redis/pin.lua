-- Pin a session, whatever it was pinned to.
--
-- KEYS: 1 pins zset, 2 pin
-- ARGV[1]: cmsgpack array {endpoint, ttl ms, most pins, most trimmed for one, what comes before the session in the key of
--       a pin}

local endpoint, ttl_ms, max_pins, trimmed, prefix = unpack(cmsgpack.unpack(ARGV[1]))
keep_pin(clock(), KEYS[1], KEYS[2], endpoint, ttl_ms, max_pins, trimmed, prefix)
return 1
