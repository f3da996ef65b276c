-- Documents that replace one another revision by revision, parts that many write, and records: see
-- extproc/state/document_store.py.
--
-- KEYS: 1 the key
-- ARGV: 1 what to do, then its arguments:
--   'put', name, value, revision, most: KEYS[1] is a hash name -> "revision payload". Returns 1 when the value is kept
--     now: its predecessor was there, nothing (or nothing that can be read), or the value itself. 0 when another one is
--     there; -1 when it would be one more than `most`.
--   'drop', name, revision: the document goes if it is of this revision. Returns 1 when it went, else 0.
--   'all': returns {{seconds, microseconds}, {name, value, ...}}: Redis' own time, and the whole hash.
--   'part', name, payload, life in milliseconds, most: KEYS[1] is a hash name -> payload. Returns 1, or -1 as above.
--   'record', payload, most, age in milliseconds: KEYS[1] is a stream. Keeps about the newest `most`, none older than
--     that age (0 for any); returns the new entry's id.

local key, what = KEYS[1], ARGV[1]

-- Put a field of a hash; false when it would be one more than `most`.
local function put(field, value, most)
  if redis.call('HEXISTS', key, field) == 0 and redis.call('HLEN', key) >= tonumber(most) then
    return false
  end
  redis.call('HSET', key, field, value)
  return true
end

if what == 'all' then
  return {redis.call('TIME'), healed(key, redis.pcall('HGETALL', key)) or {}}
end

if what == 'put' then
  local name, value, revision, most = ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5]
  local kept = healed(key, redis.pcall('HGET', key, name)) or ''
  local digits = string.match(kept, '^([1-9]%d*) ')
  if digits and #digits <= 15 and tonumber(digits) ~= revision - 1 then
    return kept == value and 1 or 0
  end
  return put(name, value, most) and 1 or -1
end

if what == 'drop' then
  local name, revision = ARGV[2], tonumber(ARGV[3])
  local digits = string.match(healed(key, redis.pcall('HGET', key, name)) or '', '^([1-9]%d*) ')
  if digits and #digits <= 15 and tonumber(digits) == revision then
    return redis.call('HDEL', key, name)
  end
  return 0
end

if what == 'part' then
  local name, payload, life_ms, most = ARGV[2], ARGV[3], ARGV[4], ARGV[5]
  healed(key, redis.pcall('HLEN', key))
  if not put(name, payload, most) then
    return -1
  end
  redis.call('PEXPIRE', key, life_ms)
  return 1
end

local payload, most, age_ms = ARGV[2], ARGV[3], ARGV[4]
local id = healed(key, redis.pcall('XADD', key, 'MAXLEN', '~', most, '*', 'p', payload))
  or redis.call('XADD', key, 'MAXLEN', '~', most, '*', 'p', payload)
if tonumber(age_ms) == 0 then
  redis.call('PERSIST', key)
  return id
end
redis.call('XTRIM', key, 'MINID', string.format('%.0f', math.max(0, math.floor(clock() * 1000 - age_ms))))
-- What nobody adds to any more ends, too.
redis.call('PEXPIRE', key, age_ms)
return id
