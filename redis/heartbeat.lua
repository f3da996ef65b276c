-- Renew a replica's lease, reap the charges of replicas whose lease ran out, forget pins that ended, and once a lease count
-- anew.
--
-- KEYS: 1 leases zset, 2 load hash, 3 flight hash of the replica, 4 mark of the last count, 5 pins zset, 6 mark of the
--       first heartbeat
-- ARGV: 1 replica, 2 lease ms, 3 what comes before the replica in the key of a flight hash, 4 what comes before the
--       session in the key of a pin (both with the same hash tag)
-- Returns a cmsgpack array {charges reaped, open charges of the replica, mark of the first heartbeat}: who finds another
-- mark than before knows that everything was lost meanwhile.

-- Pins looked at together, and rounds of it at most: 2,048 that have ended take a millisecond and a half.
local AT_ONCE, ROUNDS = 128, 16
-- How far a member's last use may lie in the future: no further than a clock is set back.
local AHEAD_MS = 60000

-- Drop from the front of `uses` what has no pin any more. EXISTS does not count as a use of the pin; GET would, and make
-- the pins used longest ago the last ones that `volatile-lru` drops.
local function forget_ended(uses, prefix)
  local rounds, ended = 0, AT_ONCE
  while ended == AT_ONCE and rounds < ROUNDS do
    local sessions, pins = healed(uses, redis.pcall('ZRANGE', uses, 0, AT_ONCE - 1)) or {}, {}
    for index, session in ipairs(sessions) do
      pins[index] = prefix .. session
    end
    rounds, ended = rounds + 1, 0
    local living = #pins > 0 and redis.call('EXISTS', unpack(pins)) or 0
    for index, session in ipairs(living < #pins and sessions or {}) do
      if living == 0 or redis.call('EXISTS', pins[index]) == 0 then
        redis.call('ZREM', uses, session)
        ended = ended + 1
      end
    end
  end
end

-- Let the index outlive the pin used last, and no pool that nobody serves any more.
local function keep_index(uses, prefix, lease_ms)
  local last = redis.call('ZRANGE', uses, -1, -1)[1]
  if last then
    redis.call('PEXPIRE', uses, math.max(0, redis.call('PTTL', prefix .. last)) + 4 * lease_ms)
  end
end

local replica, lease_ms, flight_prefix, pin_prefix = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4]
local now_ms = math.floor(clock() * 1000)
-- A flight hash whose lease was lost with the leases key would stay for ever otherwise.
redis.call('PEXPIRE', KEYS[3], 4 * lease_ms)
renew(KEYS[1], replica, now_ms + lease_ms)

local born = healed(KEYS[6], redis.pcall('GET', KEYS[6]))
if not born or not is_text(born) then
  born = string.format('%.0f', clock() * 1000000)
  redis.call('SET', KEYS[6], born)
end
redis.call('PEXPIRE', KEYS[6], 4 * lease_ms)

local reaped = 0
local lapsed = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now_ms)
for _, dead in ipairs(lapsed) do
  local flight = flight_prefix .. dead
  reaped = reaped + (healed(flight, redis.pcall('HLEN', flight)) or 0)
  redis.call('DEL', flight)
  redis.call('ZREM', KEYS[1], dead)
end

forget_ended(KEYS[5], pin_prefix)
local due = redis.call('SET', KEYS[4], '', 'NX', 'PX', lease_ms)
if due or #lapsed > 0 then
  recount(KEYS[1], KEYS[2], flight_prefix)
  redis.call('ZREMRANGEBYSCORE', KEYS[5], now_ms + AHEAD_MS, '+inf')
  keep_index(KEYS[5], pin_prefix, lease_ms)
end
return cmsgpack.pack({reaped, healed(KEYS[3], redis.pcall('HLEN', KEYS[3])) or 0, born})
