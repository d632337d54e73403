"""The group's gRPC port: any number of routers, each with one stream, around one engine.

A router's stream is its life line: when it is lost, its requests are cancelled at once. Nothing that one router does,
not reading, sending nonsense, vanishing, is noticed by another.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from cluster.config import WorkerConfig
from cluster.errors import Draining, GroupLost, ProtocolError, QuireError, Unauthenticated, abort
from cluster.pb import common_pb2, worker_pb2, worker_pb2_grpc
from cluster.rpc import WORKER_PROTOCOL_VERSION, WORKER_SERVER_OPTIONS, bind
from cluster.telemetry import get_logger
from workers.engine_thread import EngineThread, Heartbeat, StepReport
from workers.rank_group import RankFacts
from workers.request import Output, RequestKey
from workers.stream import RouterStream
from workers.wire import Limits, to_load, to_request

if TYPE_CHECKING:
    from workers.engine import Engine, Load

Context: TypeAlias = "grpc.aio.ServicerContext[worker_pb2.RouterFrame, worker_pb2.GroupFrame]"

SERVICE = "quire.worker.v1.WorkerGroup"
HELLO_TIMEOUT_S = 10.0
FLUSH_TIMEOUT_S = 2.0
CLOSE_TIMEOUT_S = 2.0
THREAD_STOP_S = 10.0
DRAIN_POLL_S = 0.02

_log = get_logger("server")


class GroupServer:
    """Serves one engine, which it runs on a thread of its own. ``on_broken`` is called once if that engine breaks.

    ``ranks`` says who computes, for people who look. ``set_up_thread`` is called on the engine's thread before its
    first step: some settings of libraries are per thread.
    """

    def __init__(
        self,
        engine: Engine,
        hello: worker_pb2.GroupHello,
        token: str,
        config: WorkerConfig,
        *,
        on_broken: Callable[[BaseException], None] = lambda error: None,
        set_up_thread: Callable[[], None] = lambda: None,
        ranks: Callable[[], Sequence[RankFacts]] = lambda: (),
    ) -> None:
        self._hello = hello
        self._credential = f"Bearer {token}".encode()
        self._config = config
        self._on_broken = on_broken
        self._ranks = ranks
        self._limits = Limits(hello.model, hello.vocab_size)
        self._streams: dict[str, RouterStream] = {}
        self._owners = itertools.count(1)
        self._draining = False
        self._load: Load = engine.load()
        self._thread = EngineThread(
            engine,
            listener=self,
            loop=asyncio.get_running_loop(),
            max_waiting=hello.max_waiting,
            set_up=set_up_thread,
        )
        self._health = health.aio.HealthServicer()
        self._server: grpc.aio.Server = grpc.aio.server(options=WORKER_SERVER_OPTIONS)
        self._beating: asyncio.Task[None] | None = None

    # -- life --------------------------------------------------------------------------------------------------------

    async def start(self, host: str, port: int = 0) -> int:
        """Listen and run the engine. Returns the port. Raises PortInUse, or ConfigError for a foreign address."""
        worker_pb2_grpc.add_WorkerGroupServicer_to_server(_Servicer(self), self._server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        bound = bind(self._server, host, port)
        await self._set_health(serving=True)
        await self._server.start()
        self._thread.start()
        self._beating = asyncio.create_task(self._beat(), name="group heartbeat")
        return bound

    async def drain(self, timeout_s: float) -> None:
        """Take nothing new, wait for what is open, then end the rest as GROUP_LOST, so that routers move it."""
        self._draining = True
        await self._set_health(serving=False)
        self._send_loads()
        if not await self._empty_within(timeout_s):
            _log.info(
                "%d requests are still open after %.1f s and are given back", self._thread.open_requests, timeout_s
            )
            self._thread.fail_all(GroupLost("the group is going down"))
            await self._empty_within(FLUSH_TIMEOUT_S)

    async def stop(self) -> None:
        """End what is open as GROUP_LOST, send what is queued, close the port, end the thread. Idempotent."""
        if self._beating is None:
            return
        self._beating.cancel()
        await asyncio.gather(self._beating, return_exceptions=True)
        self._beating = None
        self._draining = True
        self._thread.fail_all(GroupLost("the group is going down"))
        if not await asyncio.to_thread(self._thread.stop, THREAD_STOP_S):
            _log.warning("a step still runs after %.0f s; its thread is left behind", THREAD_STOP_S)
        await asyncio.sleep(0)  # the thread's last report was queued before it ended: it is handled by now
        for stream in self._streams.values():
            stream.finish(Draining("the group is going down"))
        await self._closed_within(FLUSH_TIMEOUT_S)
        await self._server.stop(CLOSE_TIMEOUT_S / 2)

    def heartbeat(self) -> Heartbeat:
        """The state of the step loop now."""
        return self._thread.heartbeat()

    @property
    def open_requests(self) -> int:
        """Requests that have not ended."""
        return self._thread.open_requests

    @property
    def routers(self) -> list[str]:
        """The streams that are connected, by owner."""
        return list(self._streams)

    async def _empty_within(self, timeout_s: float) -> bool:
        return await _within(timeout_s, lambda: not self._thread.open_requests)

    async def _closed_within(self, timeout_s: float) -> bool:
        return await _within(timeout_s, lambda: not self._streams)

    async def _set_health(self, *, serving: bool) -> None:
        kind = health_pb2.HealthCheckResponse
        for service in ("", SERVICE):
            await self._health.set(service, kind.SERVING if serving else kind.NOT_SERVING)

    # -- what the engine's thread tells ------------------------------------------------------------------------------

    def on_report(self, report: StepReport) -> None:
        """Hand each router its share of a step."""
        self._load = report.load
        for stream in list(self._streams.values()):
            with _ending_it_alone(stream):
                self._tell(stream, report)

    def _tell(self, stream: RouterStream, report: StepReport) -> None:
        owner = stream.owner
        stream.last_submit_sequence = max(stream.last_submit_sequence, report.taken_in.get(owner, 0))
        stream.send_step(report.step, report.outputs.get(owner, ()))
        if owner in report.snapshots:
            stream.send_snapshot(report.snapshots[owner])  # these events are in it
        elif stream.has_snapshot:
            stream.send_events(report.events.stored, report.events.dropped)
        if self._news(stream) != stream.sent_load:
            stream.send_load()

    def on_failure(self, error: BaseException, outputs: Mapping[str, Sequence[Output]]) -> None:
        """The engine is broken: tell every router, close, and tell the owner of the process."""
        for stream in list(self._streams.values()):
            with _ending_it_alone(stream):
                stream.send_step(0, outputs.get(stream.owner, ()))
                stream.finish(GroupLost("the group's engine broke"))
        self._on_broken(error)

    def _news(self, stream: RouterStream) -> tuple[int | bool, ...]:
        """What of a load is worth a frame after a step. Rates and sums change in each one and wait for a heartbeat."""
        load = self._load
        return (
            stream.last_submit_sequence,
            load.waiting_requests,
            load.waiting_prefill_tokens,
            load.running_requests,
            load.waiting_sequences,
            load.running_sequences,
            load.free_blocks,
            load.cached_blocks,
            load.used_blocks,
            self._draining,
        )

    def _load_for(self, stream: RouterStream) -> common_pb2.GroupLoad:
        stream.sent_load = self._news(stream)
        stream.load_time = self._thread.now()
        return to_load(
            replace(self._load, tier=self._thread.tier_load()),
            last_submit_sequence=stream.last_submit_sequence,
            draining=self._draining,
            pool_consistent=self._thread.heartbeat().pool_consistent,
            ranks=self._ranks(),
        )

    def _send_loads(self, older_than_s: float = 0.0) -> None:
        now = self._thread.now()
        for stream in self._streams.values():
            if now - stream.load_time >= older_than_s:
                stream.send_load()

    async def _beat(self) -> None:
        """Loads for routers that a step has not sent one to lately: when idle, and in a long prefill.

        They stop when the step loop is dead: a heartbeat that only proves that this event loop runs would be a lie.
        """
        half_s = self._config.heartbeat_ms / 2000
        healthy = True
        while True:
            await asyncio.sleep(half_s)
            beat = self._thread.heartbeat()
            alive = beat.failure is None and beat.step_age_s <= self._config.step_timeout_s
            if alive:
                self._send_loads(older_than_s=half_s)
            if alive != healthy:
                _log.warning("the step loop is %s", "alive again" if alive else "dead: no step has ended in time")
                healthy = alive
                await self._set_health(serving=alive and not self._draining)

    # -- what routers tell -------------------------------------------------------------------------------------------

    async def connect(self, context: Context) -> None:
        """One router's stream, from hello to its loss."""
        try:
            router_id = await self._welcome(context)
        except QuireError as error:
            await abort(context, error)
        stream = RouterStream(f"{router_id}#{next(self._owners)}", self._config.max_outbound_bytes, self._load_for)
        self._streams[stream.owner] = stream
        self._thread.snapshot(stream.owner)
        stream.send_load()
        _log.info("router %s is connected", stream.owner)
        try:
            farewell = await self._carry(stream, context)
        finally:
            del self._streams[stream.owner]
            self._thread.cancel_owner(stream.owner)
            _log.info("router %s is gone", stream.owner)
        if farewell is not None:
            await abort(context, farewell)

    async def _welcome(self, context: Context) -> str:
        metadata = dict(context.invocation_metadata() or ())
        shown = metadata.get("authorization", "")
        shown_bytes = shown if isinstance(shown, bytes) else shown.encode()
        if not hmac.compare_digest(shown_bytes, self._credential):
            raise Unauthenticated("this port is for the cluster's routers: wrong or missing worker token")
        if self._thread.failed is not None:
            raise GroupLost("the group's engine broke")
        try:
            frame = await asyncio.wait_for(context.read(), HELLO_TIMEOUT_S)
        except TimeoutError as error:
            raise ProtocolError(f"no hello within {HELLO_TIMEOUT_S:.0f} s") from error
        if not isinstance(frame, worker_pb2.RouterFrame) or frame.WhichOneof("frame") != "hello":
            raise ProtocolError("the first frame must be a RouterHello")
        if frame.hello.protocol_version != WORKER_PROTOCOL_VERSION:
            raise ProtocolError(
                f"this group speaks version {WORKER_PROTOCOL_VERSION} of the protocol",
                field="protocol_version",
                value=frame.hello.protocol_version,
            )
        await context.write(worker_pb2.GroupFrame(hello=self._hello))
        return frame.hello.router_id

    async def _carry(self, stream: RouterStream, context: Context) -> QuireError | None:
        """Both directions, until one ends. Returns the error to close with; None when the router has left."""
        reader = asyncio.create_task(self._read(stream, context), name=f"read {stream.owner}")
        writer = asyncio.create_task(_write(stream, context), name=f"write {stream.owner}")
        try:
            waited: set[asyncio.Future[Any]] = {reader, writer, stream.ended}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (reader, writer):
                task.cancel()
            outcomes = await asyncio.gather(reader, writer, return_exceptions=True)
        if stream.ended.done():
            return stream.ended.result()
        for outcome in outcomes:
            if isinstance(outcome, QuireError):
                return outcome
            if isinstance(outcome, Exception) and not isinstance(outcome, grpc.RpcError):
                _log.error("router %s: its stream failed", stream.owner, exc_info=outcome)
                return QuireError("internal error")
        return stream.farewell

    async def _read(self, stream: RouterStream, context: Context) -> None:
        """Take frames until the router closes its side. Raises ProtocolError."""
        while isinstance(frame := await context.read(), worker_pb2.RouterFrame):  # else it is grpc.aio.EOF
            self._handle(stream, frame)

    def _handle(self, stream: RouterStream, frame: worker_pb2.RouterFrame) -> None:
        kind = frame.WhichOneof("frame")
        if kind == "submit":
            self._submit(stream, frame.submit)
        elif kind == "cancel":
            if stream.close_request(frame.cancel.request_id, frame.cancel.attempt):
                self._thread.cancel(RequestKey(stream.owner, frame.cancel.request_id, frame.cancel.attempt))
        elif kind == "snapshot":
            self._thread.snapshot(stream.owner)
        else:
            raise ProtocolError(f"unexpected frame: {kind or 'unknown'}")

    def _submit(self, stream: RouterStream, submit: worker_pb2.Submit) -> None:
        """Hand a request to the engine. Whatever is wrong with it ends this request alone."""
        request_id, attempt = submit.request_id, submit.attempt
        try:
            if self._draining:
                raise Draining("this group is going down")
            request = to_request(submit, stream.owner, self._limits, self._thread.now())
            replaced = stream.open_request(request_id, attempt, request.sampling.n)
            if replaced is not None:
                self._thread.cancel(RequestKey(stream.owner, request_id, replaced))
            self._thread.submit(request)
        except QuireError as error:
            if stream.close_request(request_id, attempt):
                # Refused after all, or sent twice: then the one that runs ends too, or it would run for nobody.
                self._thread.cancel(RequestKey(stream.owner, request_id, attempt))
            stream.send_failure(request_id, attempt, error)


@contextmanager
def _ending_it_alone(stream: RouterStream) -> Iterator[None]:
    """Whatever cannot be told to a router closes its stream: it moves its requests, which would wait for ever else."""
    try:
        yield
    except Exception:  # noqa: BLE001 - the other routers must hear their part of the same report
        _log.exception("router %s could not be told of a step", stream.owner)
        stream.end(QuireError("internal error"))


async def _write(stream: RouterStream, context: Context) -> None:
    async for frame in stream.frames():
        await context.write(frame)


async def _within(timeout_s: float, condition: Callable[[], bool]) -> bool:
    """Poll until ``condition()`` holds; False when it does not in time."""
    end = asyncio.get_running_loop().time() + timeout_s
    while not condition():
        if asyncio.get_running_loop().time() >= end:
            return False
        await asyncio.sleep(DRAIN_POLL_S)
    return True


class _Servicer(worker_pb2_grpc.WorkerGroupServicer):
    def __init__(self, server: GroupServer) -> None:
        self._group = server

    async def Connect(self, request_iterator: Any, context: Any) -> None:
        await self._group.connect(context)
