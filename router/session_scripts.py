"""What is done to a stored session, each as one script: Redis runs it whole, so no other router sees it half done.

Of a tenant, all under one hash tag, so that one script may touch them on a Redis Cluster too:

    {cluster:tenant}:session:ID   hash: version, stamp, bytes, model, created, used (ms of Unix time)
    {cluster:tenant}:messages:ID  list: one JSON object per message, oldest first; expires in the same millisecond
    {cluster:tenant}:lease:ID     the token of the turn that runs; expires by itself
    {cluster:tenant}:sessions     sorted set: ID by when it expires; what counts as a session, first turns included
    {cluster:tenant}:pins         hash: ID to bytes, of pinned sessions

Tenant and ID are hashes of their names, which may hold any bytes. The *stamp* is the token of the turn that wrote last:
a session that was deleted and made again has another one, even where its version is the same.

A Redis that is full refuses a script at its first write, and only there: BEGIN and COMMIT begin with one that needs
memory.

All begin with KEYS session, messages, lease, sessions, pins and ARGV id.
"""

_COMMON = """
local session, messages, lease, index, pins = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local id = ARGV[1]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local function count()
  redis.call('ZREMRANGEBYSCORE', index, '-inf', now)
  return redis.call('ZCARD', index)
end

local function keep(session, messages, id, ttl)
  if redis.call('HEXISTS', pins, id) == 1 then
    redis.call('PERSIST', session)
    redis.call('PERSIST', messages)
    redis.call('ZADD', index, '+inf', id)
  else
    redis.call('PEXPIREAT', session, now + ttl)
    redis.call('PEXPIREAT', messages, now + ttl)
    redis.call('ZADD', index, now + ttl, id)
  end
end

local function pinned_besides(id)
  local sum, all = 0, redis.call('HGETALL', pins)
  for i = 1, #all, 2 do
    if all[i] ~= id then sum = sum + tonumber(all[i + 1]) end
  end
  return sum
end
"""

# ARGV: token, lease ms, ttl ms, most sessions, expected version or ''.
# Returns busy | version, N | full | ok, now, version, bytes, stamp, messages...
BEGIN = (
    _COMMON
    + """
local token, lease_ms, ttl, most, expected = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[6]
local version = redis.call('HGET', session, 'version') or '0'
if redis.call('EXISTS', lease) == 1 then return {'busy', version} end
if expected ~= '' and expected ~= version then return {'version', version} end
redis.call('SET', lease, token, 'PX', lease_ms)
if version ~= '0' then
  keep(session, messages, id, ttl)
elseif count() < most then
  redis.call('HDEL', pins, id)
  redis.call('ZADD', index, now + lease_ms, id)
else
  redis.call('DEL', lease)
  return {'full'}
end
local bytes, stamp = redis.call('HGET', session, 'bytes') or '0', redis.call('HGET', session, 'stamp') or ''
local found = {'ok', now, version, bytes, stamp}
for _, message in ipairs(redis.call('LRANGE', messages, 0, -1)) do found[#found + 1] = message end
return found
"""
)

# ARGV: token, stamp, lease ms, ttl ms. A lease that ran out while Redis was frozen is taken again, if nobody else came.
# Returns now, or 0: the session is another turn's, or gone.
RENEW = (
    _COMMON
    + """
local token, stamp, lease_ms, ttl = ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local holder = redis.call('GET', lease)
if holder and holder ~= token then return 0 end
if (redis.call('HGET', session, 'stamp') or '') ~= stamp then return 0 end
redis.call('SET', lease, token, 'PX', lease_ms)
if stamp == '' then redis.call('ZADD', index, now + lease_ms, id) else keep(session, messages, id, ttl) end
return now
"""
)

# ARGV: token.
RELEASE = (
    _COMMON
    + """
if redis.call('GET', lease) ~= ARGV[2] then return 0 end
redis.call('DEL', lease)
if redis.call('EXISTS', session) == 0 then redis.call('ZREM', index, id) end
return 1
"""
)

# ARGV: token, stamp, not after (ms of Redis' clock), ttl ms, most bytes, pin budget, model, bytes added, messages...
# May be sent twice: the second finds its own stamp. One that Redis comes to too late, when the client has been told
# already, does nothing. Returns ok, version, bytes, expires in ms | late | conflict | large, N | pinned, N.
COMMIT = (
    _COMMON
    + """
local token, stamp, not_after, ttl, most = ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local budget, model, added = tonumber(ARGV[7]), ARGV[8], tonumber(ARGV[9])
local found = redis.call('HGET', session, 'stamp') or ''
if found ~= token then
  if now > not_after then return {'late'} end
  local holder = redis.call('GET', lease)
  if found ~= stamp or (holder and holder ~= token) then return {'conflict'} end
  local bytes = (tonumber(redis.call('HGET', session, 'bytes') or '0')) + added
  if bytes > most then return {'large', bytes} end
  if redis.call('HEXISTS', pins, id) == 1 then
    local all = pinned_besides(id) + bytes
    if all > budget then return {'pinned', all} end
    redis.call('HSET', pins, id, bytes)
  end
  for i = 10, #ARGV do redis.call('RPUSH', messages, ARGV[i]) end
  redis.call('HSETNX', session, 'created', now)
  redis.call('HSET', session, 'stamp', token, 'bytes', bytes, 'model', model, 'used', now)
  redis.call('HINCRBY', session, 'version', 1)
  keep(session, messages, id, ttl)
  redis.call('DEL', lease)
end
return {'ok', redis.call('HGET', session, 'version'), redis.call('HGET', session, 'bytes'), redis.call('PTTL', session)}
"""
)

# Returns nothing, or version, bytes, model, created, used, expires in ms (-1: pinned), busy, messages...
READ = (
    _COMMON
    + """
if redis.call('EXISTS', session) == 0 then return {} end
local found = redis.call('HMGET', session, 'version', 'bytes', 'model', 'created', 'used')
found[6] = redis.call('PTTL', session)
found[7] = redis.call('EXISTS', lease)
for _, message in ipairs(redis.call('LRANGE', messages, 0, -1)) do found[#found + 1] = message end
return found
"""
)

# Returns 1, or 0: there is none. A turn that runs finds its lease gone.
DELETE = (
    _COMMON
    + """
if redis.call('EXISTS', session) == 0 then return 0 end
redis.call('DEL', session, messages, lease)
redis.call('ZREM', index, id)
redis.call('HDEL', pins, id)
return 1
"""
)

# KEYS also: the copy's session, messages, lease. ARGV: the copy's id, its stamp, ttl ms, most sessions.
# Returns missing | exists | full | ok.
FORK = (
    _COMMON
    + """
local copy, copied, its_lease, new_id = KEYS[6], KEYS[7], KEYS[8], ARGV[2]
if redis.call('EXISTS', session) == 0 then return 'missing' end
if redis.call('EXISTS', copy, its_lease) > 0 then return 'exists' end
if count() >= tonumber(ARGV[5]) then return 'full' end
redis.call('HDEL', pins, new_id)
redis.call('COPY', session, copy)
redis.call('COPY', messages, copied)
redis.call('HSET', copy, 'version', 1, 'stamp', ARGV[3], 'created', now, 'used', now)
keep(copy, copied, new_id, tonumber(ARGV[4]))
return 'ok'
"""
)

# ARGV: 1 to pin or 0, ttl ms, pin budget. Returns missing | budget, N | ok.
PIN = (
    _COMMON
    + """
if redis.call('EXISTS', session) == 0 then return {'missing'} end
if ARGV[2] == '1' then
  local bytes = redis.call('HGET', session, 'bytes')
  local all = pinned_besides(id) + tonumber(bytes)
  if all > tonumber(ARGV[4]) then return {'budget', all} end
  redis.call('HSET', pins, id, bytes)
else
  redis.call('HDEL', pins, id)
end
keep(session, messages, id, tonumber(ARGV[3]))
return {'ok'}
"""
)
