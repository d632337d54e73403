"""Who is in the cluster: groups put their address into Redis under a lease, routers watch.

Redis is a bulletin board, not the truth: while it is away membership is frozen (``Watcher.live`` is False), and when it
comes back empty the known groups stay for one more lease, in which their leaders announce themselves again. Whether a
group whose lease ran out is still used is the router's decision: its stream may be alive.

Routers poll, one script in one round trip every half a second, instead of subscribing: a lost notification cannot
exist, a reconnect needs no special case, and a group that appears half a second later hurts nobody.

Keys: ``{cluster}:groups`` is the set of group ids, so that nothing scans; ``{cluster}:groups:<id>`` is a record with
its lease. The braces are a hash tag: all keys of a cluster lie in one slot, and one script may touch them all.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, fields
from types import TracebackType
from typing import cast, get_type_hints
from urllib.parse import urlsplit, urlunsplit

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from cluster.errors import ConfigError, DependencyUnreachable
from cluster.telemetry import get_logger

POLL_S = 0.5
CALL_TIMEOUT_S = 1.0
MAX_BACKOFF_S = 2.0

_log = get_logger("membership")

# What "Redis is away" looks like. RedisError covers its own refusals too (OOM, LOADING, READONLY): all of them pass.
_AWAY = (RedisError, OSError, TimeoutError)

# The first announcement takes the id over; a renewal does not, so that a leader that was frozen and replaced cannot
# push its successor out when it thaws. KEYS: index, record. ARGV: group id, incarnation, value, lease ms, first|renew.
_ANNOUNCE = """
local old = redis.call('GET', KEYS[2])
if ARGV[5] == 'renew' and old and cjson.decode(old).incarnation ~= ARGV[2] then return 0 end
redis.call('SET', KEYS[2], ARGV[3], 'PX', ARGV[4])
redis.call('SADD', KEYS[1], ARGV[1])
return 1
"""

# KEYS: index, record. ARGV: group id, incarnation.
_WITHDRAW = """
local old = redis.call('GET', KEYS[2])
if old and cjson.decode(old).incarnation ~= ARGV[2] then return 0 end
redis.call('DEL', KEYS[2])
redis.call('SREM', KEYS[1], ARGV[1])
return 1
"""

# KEYS: index. ARGV: prefix of the records' keys. Ids whose lease ran out leave the index here: it cannot grow for ever.
_LIST = """
local found = {}
for _, id in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local value = redis.call('GET', ARGV[1] .. id)
  if value then found[#found + 1] = value else redis.call('SREM', KEYS[1], id) end
end
return found
"""


# KEYS: phases. ARGV: group id, phase (empty: none any more), lease ms.
_NOTE_PHASE = """
if ARGV[2] == '' then return redis.call('HDEL', KEYS[1], ARGV[1]) end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
return redis.call('PEXPIRE', KEYS[1], ARGV[3])
"""

_PHASES = "return redis.call('HGETALL', KEYS[1])"

_PHASE_S = 300.0
"""What a group that died at its start has said last is forgotten after this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecord:
    """What a group says about itself. ``address`` is "host:port" of its worker protocol."""

    group_id: str
    incarnation: str  # random, made when the leader's process starts
    model: str
    namespace: str  # SHA-256 hex
    address: str
    tp: int
    device: str
    dtype: str


_RECORD_TYPES = get_type_hints(GroupRecord)


def mask_url(url: str) -> str:
    """``url`` without its password and query, for messages and logs."""
    try:
        parts = urlsplit(url)
        if "@" not in parts.netloc:
            return urlunsplit(parts._replace(query=""))
        user, host = parts.netloc.rsplit("@", 1)
        return urlunsplit(parts._replace(netloc=f"{user.partition(':')[0]}:***@{host}", query=""))
    except ValueError:
        return "<malformed URL>"


async def ping(url: str, timeout_s: float = 3.0) -> None:
    """Return when Redis answers. Raises DependencyUnreachable, or ConfigError for a malformed URL; both masked."""
    connection = _Connection(url, timeout_s)
    try:
        await connection.ping()
    except _AWAY as error:
        why = str(error) or type(error).__name__
        raise DependencyUnreachable(f"redis: {mask_url(url)} does not answer: {why}", field="redis") from error
    finally:
        await connection.close()


async def phases(url: str, cluster: str, timeout_s: float = CALL_TIMEOUT_S) -> dict[str, str]:
    """What the groups that are starting do now, by group id; {} where Redis does not answer."""
    connection = _Connection(url, timeout_s)
    try:
        flat = cast(list[bytes], await connection.eval(_PHASES, [_Keys(cluster).phases]))
        words = [word.decode() for word in flat]
        return dict(zip(words[::2], words[1::2], strict=True))
    except _AWAY:
        return {}
    finally:
        await connection.close()


class Registry:
    """A leader's side: keeps one record alive till it is withdrawn. Lives on one event loop."""

    def __init__(self, redis_url: str, cluster: str, *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        self._connection = _Connection(redis_url, timeout_s)
        self._keys = _Keys(cluster)
        self._stopping = asyncio.Event()
        self._record: GroupRecord | None = None
        self._task: asyncio.Task[None] | None = None
        self._announced = False

    @property
    def announced(self) -> bool:
        """Whether the last renewal went through; False while Redis is away or another incarnation holds the id."""
        return self._announced

    async def announce(self, record: GroupRecord, lease_s: float) -> None:
        """Put the record up and renew it until ``withdraw``; returns after the first try.

        Redis being away raises nothing: the group serves on, and the record appears as soon as Redis is back.
        """
        if self._task is not None:
            raise ValueError(f"{record.group_id} is announced already")
        self._record = record
        self._stopping.clear()
        await self._put(record, lease_s, "first")
        self._task = asyncio.create_task(self._renew(record, lease_s), name=f"lease of {record.group_id}")

    async def note_phase(self, group_id: str, phase: str) -> None:
        """Say what a group does until it can be announced; empty: nothing any more. Redis may be away."""
        try:
            await self._connection.eval(_NOTE_PHASE, [self._keys.phases], group_id, phase, round(1000 * _PHASE_S))
        except _AWAY as error:
            _log.debug("%s: its phase could not be noted: %s", group_id, error)

    async def withdraw(self) -> None:
        """Stop renewing, and delete the record if it is still this incarnation's. Idempotent; Redis may be away."""
        task, self._task = self._task, None
        record, self._record = self._record, None
        if task is None or record is None:
            return
        # Not cancelled: a renewal that is under way would land after the delete and leave a ghost for a whole lease.
        self._stopping.set()
        await task
        self._announced = False
        try:
            await self._connection.eval(
                _WITHDRAW, [self._keys.index, self._keys.record(record.group_id)], record.group_id, record.incarnation
            )
        except _AWAY as error:
            _log.warning("%s could not be withdrawn, its lease will run out: %s", record.group_id, error)

    async def close(self) -> None:
        """Withdraw and disconnect."""
        await self.withdraw()
        await self._connection.close()

    async def __aenter__(self) -> Registry:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        await self.close()

    async def _renew(self, record: GroupRecord, lease_s: float) -> None:
        failures = 0 if self._announced else 1
        while not await _set_within(self._stopping, _renewal_delay(lease_s, failures)):
            failures = 0 if await self._put(record, lease_s, "renew") else failures + 1

    async def _put(self, record: GroupRecord, lease_s: float, how: str) -> bool:
        value = json.dumps({**asdict(record), "lease_s": lease_s})
        keys = [self._keys.index, self._keys.record(record.group_id)]
        lease_ms = max(1, round(lease_s * 1000))
        try:
            mine = await self._connection.eval(
                _ANNOUNCE, keys, record.group_id, record.incarnation, value, lease_ms, how
            )
        except _AWAY as error:
            if self._announced or how == "first":
                _log.warning("%s cannot be announced, trying on: %s", record.group_id, error)
            self._announced = False
            return False
        if mine != 1 and self._announced:
            _log.warning("%s is held by a newer incarnation; this one stays off the board", record.group_id)
        self._announced = mine == 1
        return True


class Watcher:
    """A router's side: the groups as Redis last told them. Lives on one event loop.

    ``on_change`` is called on that loop, without arguments, after ``groups()`` or ``live`` changed.
    """

    def __init__(
        self,
        redis_url: str,
        cluster: str,
        *,
        on_change: Callable[[], None] | None = None,
        poll_s: float = POLL_S,
        timeout_s: float = CALL_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connection = _Connection(redis_url, timeout_s)
        self._keys = _Keys(cluster)
        self._on_change = on_change
        self._poll_s = poll_s
        self._clock = clock
        self._groups: dict[str, GroupRecord] = {}
        self._leases: dict[str, float] = {}
        self._grace_until = float("-inf")
        self._live = False
        self._change = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def live(self) -> bool:
        """Whether the last look reached Redis. While it is False ``groups()`` is frozen."""
        return self._live

    def groups(self) -> dict[str, GroupRecord]:
        """By group id; a copy."""
        return dict(self._groups)

    async def start(self) -> None:
        """Look once (Redis being away raises nothing), then keep looking until ``close``."""
        if self._task is None:
            await self._look()
            self._task = asyncio.create_task(self._run(), name="membership watcher")

    async def close(self) -> None:
        """Stop looking and disconnect; ``groups()`` keeps its last value."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await self._connection.close()

    async def wait_for(self, condition: Callable[[Watcher], bool], timeout_s: float) -> bool:
        """Wait until ``condition(self)`` holds, looked at after every change; False after ``timeout_s``."""
        try:
            async with asyncio.timeout(timeout_s):
                while not condition(self):
                    self._change.clear()
                    await self._change.wait()
        except TimeoutError:
            return condition(self)
        return True

    async def __aenter__(self) -> Watcher:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        await self.close()

    async def _run(self) -> None:
        failures = 0
        while True:
            await asyncio.sleep(min(self._poll_s * 2**failures, max(self._poll_s, MAX_BACKOFF_S)))
            try:
                failures = 0 if await self._look() else min(failures + 1, 8)
            except Exception:  # noqa: BLE001 - whatever a listener made of it: membership must go on being followed
                _log.exception("a change of the membership could not be told")
                failures = min(failures + 1, 8)

    async def _look(self) -> bool:
        try:
            values = await self._connection.eval(_LIST, [self._keys.index], self._keys.record(""))
        except _AWAY as error:
            if self._live:
                _log.warning("Redis is away, membership is frozen: %s", error)
                self._live = False
                self._tell()
            return False
        self._take(cast(list[bytes], values))
        return True

    def _take(self, values: list[bytes]) -> None:
        now = self._clock()
        came_back = not self._live
        if came_back and self._leases:
            # It may have lost everything, or have let leases run out while it was frozen. Its leaders renew within one.
            self._grace_until = now + max(self._leases.values())
        self._live = True
        found = dict(filter(None, map(_parsed, values)))
        groups = {group_id: record for group_id, (record, _) in found.items()}
        self._leases.update({group_id: lease_s for group_id, (_, lease_s) in found.items()})
        if now < self._grace_until:
            groups = {**self._groups, **groups}
        self._leases = {group_id: lease_s for group_id, lease_s in self._leases.items() if group_id in groups}
        changed = groups != self._groups
        self._groups = groups
        if changed or came_back:
            self._tell()

    def _tell(self) -> None:
        self._change.set()
        if self._on_change is not None:
            self._on_change()


class _Keys:
    def __init__(self, cluster: str) -> None:
        self.index = f"{{{cluster}}}:groups"
        self.phases = f"{{{cluster}}}:starting"

    def record(self, group_id: str) -> str:
        return f"{self.index}:{group_id}"


class _Connection:
    """One connection on which no call waits longer than its timeout, and which is never reused after an error.

    redis-py's own retries are off: the callers retry for ever, and must learn of each loss (Redis may be empty now).
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        try:
            self._client = Redis.from_url(
                url,
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                retry=Retry(NoBackoff(), 0),
                max_connections=2,
            )
        except ValueError as error:
            raise ConfigError(f"redis: {mask_url(url)} is no redis:// URL", field="redis") from error

    async def eval(self, script: str, keys: list[str], *arguments: str | int) -> object:
        return await self._call(cast(Awaitable[object], self._client.eval(script, len(keys), *keys, *arguments)))

    async def ping(self) -> None:
        await self._call(cast(Awaitable[object], self._client.ping()))

    async def close(self) -> None:
        await self._client.aclose()

    async def _call(self, answer: Awaitable[object]) -> object:
        try:
            # Over connecting, sending and receiving together; the socket timeouts are for each alone.
            async with asyncio.timeout(2 * self._timeout_s):
                return await answer
        except BaseException:
            # A late reply on a reused connection would go to the next caller.
            await self._client.connection_pool.disconnect(inuse_connections=True)
            raise


def _parsed(value: bytes) -> tuple[str, tuple[GroupRecord, float]] | None:
    """A record and its lease; None for one that this version cannot read. Fields of a newer version are ignored."""
    try:
        raw: Mapping[str, object] = json.loads(value)
        record = GroupRecord(**{field.name: raw[field.name] for field in fields(GroupRecord)})  # type: ignore[arg-type]
        wrong = [name for name, kind in _RECORD_TYPES.items() if not isinstance(getattr(record, name), kind)]
        lease_s = raw["lease_s"]
        if wrong or not isinstance(lease_s, int | float) or not 0 < lease_s < float("inf"):
            raise TypeError(f"{wrong or 'lease_s'} of the wrong type")
        return record.group_id, (record, float(lease_s))
    except (ValueError, KeyError, TypeError) as error:
        _log.warning("a group's record cannot be read and is ignored: %r", error)
        return None


def _renewal_delay(lease_s: float, failures: int) -> float:
    """A third of the lease, so that two renewals may be lost; sooner after failures, when every second counts."""
    return lease_s / 3 if not failures else min(lease_s / 3, MAX_BACKOFF_S, 0.1 * 2.0 ** min(failures, 8))


async def _set_within(event: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True
