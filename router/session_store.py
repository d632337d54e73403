"""Stored sessions, in the control Redis: a conversation's messages, and the lease of the turn that runs on it.

A turn reads the messages and takes the lease in one script, renews it while the answer streams, and commits by
compare-and-set: new messages, the answer and the next version appear together or not at all. Token ids are not kept: a
turn must be rendered whole anyway to mean what a stateless Chat means, and only pages, not ids, are dear.

Redis being away, whatever the call, is SessionStoreUnavailable within the configured time; nothing else waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from cluster.config import SessionsConfig, TenantConfig
from cluster.errors import (
    ConfigError,
    PinBudget,
    QuireError,
    SessionConflict,
    SessionExists,
    SessionLimit,
    SessionNotFound,
    SessionNotStored,
    SessionStoreUnavailable,
    SessionTooLarge,
)
from cluster.membership import mask_url
from cluster.telemetry import get_logger
from router import session_scripts as scripts
from router.tenants import Tenants
from router.validation import Message

MAX_CONNECTIONS = 32
BUSY_RETRY_MS = 1000
AWAY_RETRY_MS = 2000
COMMIT_PAUSE_S = 0.05
RENEWALS_PER_LEASE = 3
"""So that two of them may be lost."""

Result = TypeVar("Result")

_log = get_logger("sessions")
_AWAY = (RedisError, OSError, TimeoutError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """What a turn left behind. ``expires_in_s`` is None for a pinned session."""

    version: int
    bytes: int
    expires_in_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSession:
    """A session as it lies in Redis. Times are Unix seconds, of Redis' clock; ``expires_in_s``: None when pinned."""

    messages: tuple[Message, ...]
    version: int
    bytes: int
    model: str
    created_at_s: float
    used_at_s: float
    expires_in_s: float | None
    busy: bool


@dataclass(frozen=True, slots=True)
class _Address:
    """Where one session of one tenant lies. Names may hold any bytes: keys hold their hashes."""

    prefix: str
    id: str

    @classmethod
    def of(cls, cluster: str, tenant: str, session_id: str) -> _Address:
        return cls(f"{{{cluster}:{_hashed(tenant)}}}", _hashed(session_id))

    @property
    def own(self) -> list[str]:
        return [f"{self.prefix}:{kind}:{self.id}" for kind in ("session", "messages", "lease")]

    @property
    def keys(self) -> list[str]:
        return [*self.own, f"{self.prefix}:sessions", f"{self.prefix}:pins"]


class SessionStore:
    """Of one router. Lives on one event loop; connects with the first call."""

    def __init__(self, redis_url: str, cluster: str, config: SessionsConfig, tenants: Tenants) -> None:
        """Raises ConfigError for a malformed URL."""
        self.lease_ms = max(1, round(config.lease_s * 1000))
        self.ttl_ms = config.ttl_s * 1000
        self.timeout_s = config.timeout_ms / 1000
        self._cluster = cluster
        self._tenants = tenants
        self._client = _client(redis_url, self.timeout_s)
        self._live = True
        self._endings: set[asyncio.Task[Any]] = set()

    async def close(self) -> None:
        """Let commits and releases that are under way finish, each within its time, and disconnect."""
        await asyncio.gather(*self._endings, return_exceptions=True)
        await self._client.aclose()

    # -- a turn ------------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def turn(
        self, tenant: str, session_id: str, version: int | None, new: Sequence[Message]
    ) -> AsyncIterator[Turn]:
        """Hold the lease of a session for the block. ``version``: what it must be at, None for whatever it is at.

        Raises SessionConflict, SessionNotFound, SessionLimit, SessionTooLarge, SessionStoreUnavailable, all before
        anything was computed. Without ``Turn.commit`` the block leaves the session as it was.
        """
        turn = Turn(self, _Address.of(self._cluster, tenant, session_id), session_id, self._tenants[tenant], new)
        try:
            await turn.begin(version)
        except BaseException:
            self.ending(turn.end())  # not awaited: where Redis is away the client should hear so at once
            raise
        try:
            yield turn
        finally:
            await asyncio.shield(self.ending(turn.end()))

    def ending(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """Run ``work`` to its end, whatever becomes of the caller."""
        task = asyncio.create_task(work)
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)
        return task

    # -- single calls ------------------------------------------------------------------------------------------------

    async def get(self, tenant: str, session_id: str) -> StoredSession:
        """Raises SessionNotFound, SessionStoreUnavailable; so do the others."""
        address = _Address.of(self._cluster, tenant, session_id)
        found = cast(list[Any], await self.eval(scripts.READ, address.keys, address.id))
        if not found:
            raise _missing(session_id)
        version, size, model, created, used, expires_ms, busy, *messages = found
        return StoredSession(
            messages=tuple(map(_unpacked, messages)),
            version=int(version),
            bytes=int(size),
            model=model.decode(),
            created_at_s=int(created) / 1000,
            used_at_s=int(used) / 1000,
            expires_in_s=_seconds(expires_ms),
            busy=bool(busy),
        )

    async def delete(self, tenant: str, session_id: str) -> None:
        """A turn that runs on it ends as SessionConflict."""
        address = _Address.of(self._cluster, tenant, session_id)
        if not await self.eval(scripts.DELETE, address.keys, address.id):
            raise _missing(session_id)

    async def fork(self, tenant: str, session_id: str, new_session_id: str) -> StoredSession:
        """Copy what the last turn left. Raises SessionExists, SessionLimit too."""
        source = _Address.of(self._cluster, tenant, session_id)
        copy = _Address.of(self._cluster, tenant, new_session_id)
        most = self._tenants[tenant].max_sessions
        done = await self.eval(
            scripts.FORK, [*source.keys, *copy.own], source.id, copy.id, secrets.token_hex(16), self.ttl_ms, most
        )
        if done == b"missing":
            raise _missing(session_id)
        if done == b"exists":
            raise SessionExists(
                f"new_session_id: {_shown(new_session_id)} exists already; choose another name, or delete it",
                field="new_session_id",
                value=_shown(new_session_id),
            )
        if done == b"full":
            raise _full(most)
        return await self.get(tenant, new_session_id)

    async def pin(self, tenant: str, session_id: str, *, pinned: bool) -> StoredSession:
        """Take its time to live away, or give it back. Raises PinBudget too."""
        address, budget = _Address.of(self._cluster, tenant, session_id), self._tenants[tenant].pinned_bytes
        done, *wanted = cast(
            list[Any], await self.eval(scripts.PIN, address.keys, address.id, int(pinned), self.ttl_ms, budget)
        )
        if done == b"missing":
            raise _missing(session_id)
        if done == b"budget":
            raise _over_budget(int(wanted[0]), budget)
        return await self.get(tenant, session_id)

    async def eval(self, script: str, keys: list[str], *arguments: str | bytes | int) -> object:
        """One script, within the time that a session call may take. Raises SessionStoreUnavailable."""
        try:
            async with asyncio.timeout(self.timeout_s):
                answer = await cast(Awaitable[object], self._client.eval(script, len(keys), *keys, *arguments))
        except _AWAY as error:
            self._note(error)
            raise SessionStoreUnavailable(
                "stored sessions are not to be had now: the control Redis is away, or full; "
                "send the whole conversation without a session, or try again",
                retry_after_ms=AWAY_RETRY_MS,
            ) from error
        self._note(None)
        return answer

    def _note(self, error: Exception | None) -> None:
        """Log the change, not every call."""
        if self._live != (error is None):
            self._live = error is None
            if error is None:
                _log.info("stored sessions are back")
            else:
                _log.warning("stored sessions are away: %s: %s", type(error).__name__, error)


class Turn:
    """One turn on one session, from lease to commit. Made by ``SessionStore.turn``."""

    def __init__(
        self, store: SessionStore, address: _Address, session_id: str, quota: TenantConfig, new: Sequence[Message]
    ) -> None:
        self.messages: tuple[Message, ...] = ()  # stored ones, then the new ones
        self.version = 0  # 0: there is no such session yet
        self.on_lost: Callable[[QuireError], None] = lambda error: None  # the session was deleted, or is another turn's
        self._store = store
        self._address = address
        self._session_id = session_id
        self._quota = quota
        self._new = list(new)
        self._token = secrets.token_hex(16)
        self._stamp = ""
        self._done = False  # it certainly holds no lease
        self._clock_ms = 0.0  # Redis' clock less ours
        self._stopping = asyncio.Event()
        self._renewing: asyncio.Task[None] | None = None

    async def begin(self, expected: int | None) -> None:
        """Take the lease and read what is stored."""
        store, quota = self._store, self._quota
        arguments = (
            self._token,
            store.lease_ms,
            store.ttl_ms,
            quota.max_sessions,
            "" if expected is None else expected,
        )
        verdict, *found = cast(
            list[Any], await store.eval(scripts.BEGIN, self._address.keys, self._address.id, *arguments)
        )
        if verdict != b"ok":
            self._done = True
            raise self._refusal(verdict, found, expected)
        now_ms, version, size, stamp, *messages = found
        self._set_clock(int(now_ms))
        self.version, self._stamp = int(version), stamp.decode()
        self.messages = (*map(_unpacked, messages), *self._new)
        # Before the check below: what raises there must give the lease back.
        self._renewing = asyncio.create_task(self._renew(), name="lease of a session")
        added = sum(len(_packed(message)) for message in self._new)
        if int(size) + added > quota.session_bytes:
            raise self._too_large(int(size) + added)

    async def commit(self, answer: str, model: str) -> Committed:
        """Store the new messages and ``answer``. Goes on when the caller is cancelled.

        Raises SessionNotStored, SessionConflict, SessionTooLarge, PinBudget.
        """
        return await asyncio.shield(self._store.ending(self._commit(answer, model)))

    async def end(self) -> None:
        """Give the lease back, if it is still this turn's. Never raises: a lease ends by itself."""
        await self._stop_renewing()
        if self._done:
            return
        with contextlib.suppress(SessionStoreUnavailable):
            await self._store.eval(scripts.RELEASE, self._address.keys, self._address.id, self._token)

    # -- keeping the lease -------------------------------------------------------------------------------------------

    async def _renew(self) -> None:
        store = self._store
        arguments = (self._address.id, self._token, self._stamp, store.lease_ms, store.ttl_ms)
        while not await self._stopped_within(store.lease_ms / 1000 / RENEWALS_PER_LEASE):
            try:
                now_ms = cast(int, await store.eval(scripts.RENEW, self._address.keys, *arguments))
            except SessionStoreUnavailable:
                continue  # the answer streams on; whether it can be stored is seen at its end
            if not now_ms:
                self.on_lost(self._lost())
                return
            self._set_clock(now_ms)

    async def _stopped_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        return self._stopping.is_set()

    async def _stop_renewing(self) -> None:
        # Not cancelled: a renewal that is under way would land behind the release, and hold the session for a lease.
        self._stopping.set()
        if self._renewing is not None:
            await self._renewing

    def _set_clock(self, now_ms: int) -> None:
        self._clock_ms = now_ms - 1000 * time.monotonic()

    # -- the end -----------------------------------------------------------------------------------------------------

    async def _commit(self, answer: str, model: str) -> Committed:
        await self._stop_renewing()
        packed = [_packed(message) for message in (*self._new, {"role": "assistant", "content": answer})]
        quota, store = self._quota, self._store
        not_after_ms = int(self._clock_ms + 1000 * (time.monotonic() + store.timeout_s))
        limits = (not_after_ms, store.ttl_ms, quota.session_bytes, quota.pinned_bytes)
        added = sum(map(len, packed))
        verdict, *found = await self._until_answered(self._token, self._stamp, *limits, model, added, *packed)
        if verdict == b"ok":
            self._done = True
            version, size, expires_ms = found
            return Committed(version=int(version), bytes=int(size), expires_in_s=_seconds(expires_ms))
        error = self._not_stored(verdict, found)
        _log.warning("a turn that is complete is not stored: %s", error.reason)
        raise error

    async def _until_answered(self, *arguments: str | bytes | int) -> list[Any]:
        """A commit may be sent again, so a connection that breaks costs nothing while there is time."""
        keys = self._address.keys
        try:
            async with asyncio.timeout(self._store.timeout_s):
                while True:
                    try:
                        return cast(
                            list[Any], await self._store.eval(scripts.COMMIT, keys, self._address.id, *arguments)
                        )
                    except SessionStoreUnavailable as error:
                        if isinstance(error.__cause__, ResponseError):
                            raise  # full, or read-only: it did answer
                    await asyncio.sleep(COMMIT_PAUSE_S)
        except (SessionStoreUnavailable, TimeoutError) as error:
            raise SessionNotStored(
                "the answer is complete, and the control Redis did not confirm that the turn is stored; when it is "
                f"back, GetSession tells: version {self.version + 1} means it is, else send the turn again",
                version=self.version + 1,
            ) from error

    # -- what is said ------------------------------------------------------------------------------------------------

    def _refusal(self, verdict: bytes, found: Sequence[Any], expected: int | None) -> QuireError:
        if verdict == b"full":
            return _full(self._quota.max_sessions)
        if verdict == b"busy":
            return SessionConflict(
                f"session {_shown(self._session_id)}: another turn runs on it; wait for its end, or fork the session",
                retry_after_ms=BUSY_RETRY_MS,
                field="session.session_id",
                value=_shown(self._session_id),
                version=int(found[0]),
            )
        if not int(found[0]):
            return _missing(self._session_id)
        return SessionConflict(
            f"session.version: the session is at {int(found[0])}, the turn goes on from {expected}; look at GetSession",
            field="session.version",
            value=expected,
            version=int(found[0]),
        )

    def _not_stored(self, verdict: bytes, found: Sequence[Any]) -> QuireError:
        if verdict == b"large":
            return self._too_large(int(found[0]))
        if verdict == b"pinned":
            return _over_budget(int(found[0]), self._quota.pinned_bytes)
        if verdict == b"late":
            return SessionNotStored(
                "the answer is complete, and the turn is not stored: the control Redis was too slow; send it again",
                version=self.version + 1,
            )
        return self._lost()

    def _lost(self) -> SessionConflict:
        return SessionConflict(
            f"session {_shown(self._session_id)}: it was deleted or changed while the turn ran; the turn is not stored",
            field="session.session_id",
            value=_shown(self._session_id),
        )

    def _too_large(self, size: int) -> SessionTooLarge:
        limit = self._quota.session_bytes
        return SessionTooLarge(
            f"session {_shown(self._session_id)}: with this turn it has {size:,} bytes, more than the {limit:,} of a "
            "session; begin a new one, send the conversation without a session, or raise session_bytes of the tenant",
            field="session.session_id",
            value=size,
            limit=limit,
        )


def _client(url: str, timeout_s: float) -> Redis:
    """No retries of its own: what a session call may do twice is known here. A cancelled call closes its connection."""
    try:
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=MAX_CONNECTIONS,
            timeout=timeout_s,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
        )
    except ValueError as error:
        raise ConfigError(f"redis: {mask_url(url)} is no redis:// URL", field="redis") from error
    return Redis.from_pool(pool)


def _hashed(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:32]


def _packed(message: Message) -> bytes:
    return json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode()


def _unpacked(packed: bytes) -> Message:
    return cast(Message, json.loads(packed))


def _seconds(expires_ms: int) -> float | None:
    return None if expires_ms < 0 else expires_ms / 1000


def _shown(name: str) -> str:
    shown = repr(name)
    return shown if len(shown) <= 80 else shown[:77] + "..."


def _missing(session_id: str) -> SessionNotFound:
    return SessionNotFound(
        f"session {_shown(session_id)}: there is none; it ran out, was deleted, or never was. A turn without a version "
        "begins a new one",
        field="session_id",
        value=_shown(session_id),
    )


def _full(most: int) -> SessionLimit:
    return SessionLimit(
        f"the tenant has {most} stored sessions, its limit; delete some, or wait until they run out", limit=most
    )


def _over_budget(wanted: int, budget: int) -> PinBudget:
    return PinBudget(
        f"pinned sessions would have {wanted:,} bytes, more than the {budget:,} of the tenant; unpin or delete one",
        value=wanted,
        limit=budget,
    )
