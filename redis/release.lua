-- Give up a replica's lease and all its open charges (clean shutdown).
--
-- KEYS: 1 leases zset, 2 load hash, 3 flight hash of the replica
-- ARGV: 1 replica, 2 what comes before the replica in the key of a flight hash (same hash tag)

healed(KEYS[1], redis.pcall('ZREM', KEYS[1], ARGV[1]))
redis.call('DEL', KEYS[3])
recount(KEYS[1], KEYS[2], ARGV[2])
return 0
