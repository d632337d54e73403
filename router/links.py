"""A router's side of the worker protocol: one stream to one incarnation of one group.

    submit ──▶ [hello][submit][cancel]… ──▶ leader
    Attempt ◀── step ┐
    index   ◀── cache ├── frames in order, or the stream is given up
    load    ◀── load ┘

A link outlives its stream: it connects again, with backoff, for as long as the group's record exists. Losing the stream
ends every attempt on it with GroupLost; moving them is the relay's business.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from enum import Enum
from typing import Any

import grpc.aio

from cluster.config import RouterConfig
from cluster.errors import GroupLost, ProtocolError, QuireError, SlowConsumer, from_reason, from_rpc_error
from cluster.membership import GroupRecord
from cluster.pb import common_pb2, worker_pb2, worker_pb2_grpc
from cluster.rpc import WORKER_CHANNEL_OPTIONS, WORKER_PROTOCOL_VERSION, bearer
from cluster.telemetry import get_logger
from router.index import BlockIndex
from router.policy import GroupView

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 2.0
CLOSE_TIMEOUT_S = 5.0
MISSED_BEATS = 3
LOOKS_PER_SILENCE = 4

_log = get_logger("links")


class State(Enum):
    """As in proto/inference.proto's Group.State."""

    CONNECTING = "connecting"
    SERVING = "serving"
    DRAINING = "draining"
    LOST = "lost"


class Attempt:
    """One try of one request on one link: its deltas, in order, bounded. Close it; closing twice is harmless."""

    def __init__(
        self, link: GroupLink, submit: worker_pb2.Submit, max_deltas: int, interrupt: Callable[[QuireError], None]
    ) -> None:
        self.link = link
        self.key = (submit.request_id, submit.attempt)
        self.sequence = submit.sequence
        self.refused = False  # ended by the group's own word, rather than by losing the stream
        self._open_samples = submit.sampling.n
        self._max_deltas = max_deltas
        self._interrupt = interrupt
        self._deltas: deque[worker_pb2.SequenceDelta] = deque()
        self._error: QuireError | None = None
        self._ready = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[worker_pb2.SequenceDelta]:
        """Until the last sample has ended. Raises what the group answered, or GroupLost."""
        while True:
            while self._deltas:
                yield self._deltas.popleft()
            if self._error is not None:
                raise self._error
            if not self._open_samples:
                return
            self._ready.clear()
            await self._ready.wait()

    @property
    def running(self) -> bool:
        """Whether the group still has work for it."""
        return self._open_samples > 0 and self._error is None

    def push(self, delta: worker_pb2.SequenceDelta) -> None:
        """Take a delta of the group."""
        end = delta.WhichOneof("end")
        if end == "failed":
            failed = delta.failed
            self.refused = True
            self.fail(from_reason(failed.reason, failed.message, dict(failed.metadata), failed.retry_after_ms))
            return
        if len(self._deltas) >= self._max_deltas:
            # Its reader hangs in a write to the client, and would not look here before that ends.
            error = SlowConsumer(f"the client left {self._max_deltas} events unread", limit=self._max_deltas)
            self.close()
            self._interrupt(error)
            return
        self._deltas.append(delta)
        self._open_samples -= end == "finished"
        self._ready.set()

    def fail(self, error: QuireError) -> None:
        """End it, after the deltas that are there."""
        self._error = self._error or error
        self._ready.set()

    def close(self) -> None:
        """Forget it, and have the group forget it if it still runs there."""
        self.link.forget(self)


class GroupLink:
    """To one incarnation of one group. Lives on one event loop."""

    def __init__(
        self,
        record: GroupRecord,
        token: str,
        router_id: str,
        config: RouterConfig,
        on_change: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.record = record
        self.key = key_of(record)
        self.superseded = False  # a newer incarnation of the group is known: nothing new goes here
        self.hello: worker_pb2.GroupHello | None = None
        self.load = common_pb2.GroupLoad()
        self.index = BlockIndex(config.index_blocks)
        self.last_frame = float("-inf")
        self._last_step = 0.0  # when the group was last seen to step
        self._token = token
        self._router_id = router_id
        self._config = config
        self._on_change = on_change
        self._clock = clock
        self._connected = False
        self._answered = False  # since it connected, the group's engine has sent its snapshot
        self._was_connected = False
        self._retired = asyncio.Event()
        self._attempts: dict[tuple[str, int], Attempt] = {}
        self._sequence = 0
        self._unseen: dict[int, int] = {}  # submit sequence -> prefill tokens that no load frame shows yet
        self._outbox: deque[worker_pb2.RouterFrame] = deque()
        self._outbox_ready = asyncio.Event()
        self._trouble = ""  # what was logged last, so that a group that stays away is one line
        self._task: asyncio.Task[None] | None = None

    # -- life --------------------------------------------------------------------------------------------------------

    def start(self, on_end: Callable[[GroupLink], None]) -> None:
        """Connect, and stay connected, until ``retire``; then ``on_end`` is called."""
        self._task = asyncio.create_task(self._run(), name=f"link to {self.key}")
        self._task.add_done_callback(lambda _: on_end(self))

    def retire(self, *, retired: bool = True) -> None:
        """The group's record is gone: the stream is used while it lives, and not made anew. False takes it back."""
        if retired:
            self._retired.set()
        else:
            self._retired.clear()

    async def close(self) -> None:
        """Give the stream up; what runs on it ends as GroupLost."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=CLOSE_TIMEOUT_S)

    @property
    def state(self) -> State:
        """As this router sees it now.

        A hello proves no more than that the leader's event loop runs. The snapshot comes from its step loop: until then
        a group whose step loop is stuck would look fine each time it is connected to.
        """
        if self._connected and self._answered:
            return State.DRAINING if self.load.draining else State.SERVING
        return State.LOST if self._was_connected and not self._connected else State.CONNECTING

    @property
    def usable(self) -> bool:
        """Whether it takes new requests."""
        return self.state is State.SERVING and not self.superseded

    async def _run(self) -> None:
        failures = 0
        while not self._retired.is_set():
            began = self._clock()
            try:
                await self._session()
            except Exception as error:  # noqa: BLE001 - whatever it is, this group is lost for now and no other is
                self._note_trouble(error)
            failures = 0 if self._clock() - began > MAX_BACKOFF_S else failures + 1
            await self._pause(failures)

    async def _pause(self, failures: int) -> None:
        # Spread: all routers lose a group at the same time, and should not all come back at the same time.
        delay_s = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(failures, 8)) * random.uniform(0.5, 1.0)
        try:
            async with asyncio.timeout(delay_s):
                await self._retired.wait()
        except TimeoutError:
            return

    def _note_trouble(self, error: BaseException) -> None:
        if isinstance(error, grpc.RpcError):
            error = from_rpc_error(error)
        known = isinstance(error, QuireError | asyncio.InvalidStateError | TimeoutError)
        trouble = f"{type(error).__name__}: {error}"
        if trouble != self._trouble:
            self._trouble = trouble
            _log.warning("%s: %s", self.key, trouble, exc_info=None if known else error)

    # -- one stream --------------------------------------------------------------------------------------------------

    async def _session(self) -> None:
        """From connect to loss. Raises what ended it."""
        async with grpc.aio.insecure_channel(self.record.address, options=WORKER_CHANNEL_OPTIONS) as channel:
            stub = worker_pb2_grpc.WorkerGroupStub(channel)  # type: ignore[no-untyped-call]
            call: Any = stub.Connect(metadata=bearer(self._token))
            async with asyncio.timeout(self._config.group_silence_s):
                await call.write(
                    worker_pb2.RouterFrame(
                        hello=worker_pb2.RouterHello(
                            router_id=self._router_id, protocol_version=WORKER_PROTOCOL_VERSION
                        )
                    )
                )
                hello = self._checked_hello(await call.read())
            self._open(hello)
            try:
                await self._carry(call)
            finally:
                self._lose()

    def _checked_hello(self, frame: object) -> worker_pb2.GroupHello:
        if not isinstance(frame, worker_pb2.GroupFrame) or frame.WhichOneof("frame") != "hello":
            raise ProtocolError("the group's first frame must be its hello")
        hello = frame.hello
        if hello.protocol_version != WORKER_PROTOCOL_VERSION:
            raise ProtocolError(f"the group speaks version {hello.protocol_version} of the protocol")
        if (hello.group_id, hello.incarnation) != (self.record.group_id, self.record.incarnation):
            # Its port was taken over by another group, which has a record and a link of its own.
            raise ProtocolError(f"{hello.group_id} {hello.incarnation[:8]} answers at its address")
        if hello.block_tokens < 1 or hello.max_context_tokens < 1:
            raise ProtocolError("the group's hello lacks its limits")
        return hello

    def _open(self, hello: worker_pb2.GroupHello) -> None:
        self.hello = hello
        self.load = common_pb2.GroupLoad()
        self.index = BlockIndex(self._config.index_blocks)
        self.last_frame = self._clock()
        self._sequence = 0
        self._unseen.clear()
        self._outbox.clear()
        self._connected = self._was_connected = True
        self._answered = False
        self._trouble = ""
        _log.info("%s at %s: connected", self.key, self.record.address)
        self._on_change()

    def _lose(self) -> None:
        self._connected = False
        self.index.clear()
        attempts, self._attempts = self._attempts, {}
        self._unseen.clear()
        for attempt in attempts.values():
            attempt.fail(GroupLost(f"group {self.record.group_id} is lost", group=self.record.group_id))
        self._on_change()

    async def _carry(self, call: Any) -> None:
        works = (("read", self._read(call)), ("write", self._write(call)), ("watch", self._watch()))
        tasks = {asyncio.create_task(work, name=f"{name} {self.key}") for name, work in works}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            call.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        errors = [task.exception() for task in done if not task.cancelled()]
        raise next((error for error in errors if error is not None), GroupLost("the group closed the stream"))

    async def _read(self, call: Any) -> None:
        while isinstance(frame := await call.read(), worker_pb2.GroupFrame):  # else it is grpc.aio.EOF
            self.last_frame = self._clock()
            self._take(frame)

    async def _write(self, call: Any) -> None:
        while True:
            while self._outbox:
                await call.write(self._outbox.popleft())
            self._outbox_ready.clear()
            await self._outbox_ready.wait()

    async def _watch(self) -> None:
        """Raise GroupLost when no frame came for ``_silence_s``: a frozen or unplugged peer closes nothing.

        Counted in looks: when this process itself stood still, that is one look, and not the silence of every group.
        """
        missed = 0
        seen = self.last_frame
        while missed < LOOKS_PER_SILENCE:
            await asyncio.sleep(self._silence_s / LOOKS_PER_SILENCE)
            missed = missed + 1 if self.last_frame == seen else 0
            seen = self.last_frame
        raise GroupLost(f"no frame for {self._silence_s:g} s", group=self.record.group_id)

    @property
    def _silence_s(self) -> float:
        """Our own limit, and never less than a few of the beats that the group has promised."""
        beat_s = 0.0 if self.hello is None else self.hello.heartbeat_ms / 1000
        return max(self._config.group_silence_s, MISSED_BEATS * beat_s)

    # -- frames ------------------------------------------------------------------------------------------------------

    def _take(self, frame: worker_pb2.GroupFrame) -> None:
        kind = frame.WhichOneof("frame")
        if kind == "step":
            for delta in frame.step.deltas:
                attempt = self._attempts.get((delta.request_id, delta.attempt))
                if attempt is not None:  # else it was closed, and the group has not heard of it yet
                    attempt.push(delta)
        elif kind == "load":
            self._take_load(frame.load)
        elif kind == "cache":
            self._take_cache(frame.cache)
        else:
            raise ProtocolError(f"unexpected frame: {kind or 'unknown'}")

    def _take_load(self, load: common_pb2.GroupLoad) -> None:
        if load.steps != self.load.steps or load.running_requests:
            self._last_step = self._clock()
        was_draining, self.load = self.load.draining, load
        for sequence in [sequence for sequence in self._unseen if sequence <= load.last_submit_sequence]:
            del self._unseen[sequence]
        if load.draining != was_draining:
            self._on_change()

    def _take_cache(self, events: worker_pb2.CacheEvents) -> None:
        if not self.index.apply(events):
            _log.warning("%s: cache events were missed, asking for a snapshot", self.key)
            self._send(worker_pb2.RouterFrame(snapshot=worker_pb2.SnapshotRequest()))
        if events.snapshot and not self._answered:
            self._answered = True
            self._on_change()

    def _send(self, frame: worker_pb2.RouterFrame) -> None:
        # Bounded by what admission lets in: a submit, and at most one cancel, per request.
        self._outbox.append(frame)
        self._outbox_ready.set()

    # -- requests ----------------------------------------------------------------------------------------------------

    def submit(
        self, submit: worker_pb2.Submit, prefill_tokens: int, interrupt: Callable[[QuireError], None]
    ) -> Attempt:
        """Send a request; ``submit.sequence`` is set here. ``prefill_tokens``: what it is believed to add.

        Raises GroupLost when the stream is gone.
        """
        if not self._connected:
            raise GroupLost(f"group {self.record.group_id} is lost", group=self.record.group_id)
        self._sequence += 1
        submit.sequence = self._sequence
        attempt = Attempt(self, submit, self._config.max_buffered_events, interrupt)
        self._attempts[attempt.key] = attempt
        self._unseen[self._sequence] = prefill_tokens
        self._send(worker_pb2.RouterFrame(submit=submit))
        return attempt

    def forget(self, attempt: Attempt) -> None:
        """Drop an attempt, and cancel it in the group where it still runs. Idempotent."""
        if self._attempts.get(attempt.key) is not attempt:
            return
        del self._attempts[attempt.key]
        self._unseen.pop(attempt.sequence, None)
        if attempt.running:
            request_id, number = attempt.key
            self._send(worker_pb2.RouterFrame(cancel=worker_pb2.Cancel(request_id=request_id, attempt=number)))

    def view(self, cached_tokens: int) -> GroupView:
        """The group as the policy sees it, for a prompt of which it is believed to hold ``cached_tokens``."""
        load, hello = self.load, self.hello
        if hello is None:
            raise GroupLost(f"group {self.record.group_id} has not said hello", group=self.record.group_id)
        return GroupView(
            key=self.key,
            cached_tokens=cached_tokens,
            waiting_sequences=load.waiting_sequences,
            waiting_prefill_tokens=load.waiting_prefill_tokens,
            running_sequences=load.running_sequences,
            max_running=hello.max_running,
            # Before the first load frame: an idle group.
            usable_blocks=load.free_blocks + load.cached_blocks if load.total_blocks else hello.total_blocks,
            used_blocks=load.used_blocks,
            block_tokens=hello.block_tokens,
            prefill_tokens_per_s=load.prefill_tokens_per_s,
            decode_tokens_per_s=load.decode_tokens_per_s,
            step_ms=load.step_ms,
            mean_output_tokens=load.output_tokens / load.requests_finished if load.requests_finished else 0.0,
            sent_requests=len(self._unseen),
            sent_prefill_tokens=sum(self._unseen.values()),
            idle_s=self._clock() - self._last_step if load.steps else 0.0,
        )


def key_of(record: GroupRecord) -> str:
    """Names one incarnation of one group."""
    return f"{record.group_id}/{record.incarnation[:16]}"
