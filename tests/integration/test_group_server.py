"""A group's port over loopback gRPC, around an engine without a model: what routers do, and what others notice."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast
from unittest.mock import Mock

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.blocks import WIRE_HASH_BYTES, BlockHash, chain
from cluster.config import WorkerConfig
from cluster.errors import GroupLost, PortInUse, ProtocolError, Unauthenticated, from_rpc_error
from cluster.pb import common_pb2, worker_pb2, worker_pb2_grpc
from cluster.rpc import MAX_WORKER_MESSAGE_BYTES, WORKER_CHANNEL_OPTIONS, WORKER_SERVER_OPTIONS, bearer
from tests.support.ports import occupied_port
from tests.support.scripted_engine import ScriptedEngine
from tests.support.stub_router import ROOT, StubRouter
from workers.server import SERVICE, GroupServer
from workers.stream import CHUNK_HASHES

TOKEN = "worker-token"
FOREVER = 1_000_000


class Running:
    def __init__(self, engine: ScriptedEngine, server: GroupServer, address: str, broken: list[BaseException]) -> None:
        self.engine = engine
        self.server = server
        self.address = address
        self.broken = broken

    def router(self, router_id: str = "router", **settings: Any) -> StubRouter:
        return StubRouter(self.address, TOKEN, router_id, **settings)


@asynccontextmanager
async def group(engine: ScriptedEngine | None = None, **settings: Any) -> AsyncIterator[Running]:
    engine = engine or ScriptedEngine()
    broken: list[BaseException] = []
    hello = worker_pb2.GroupHello(group_id="g", incarnation="i", model="m", vocab_size=50_000, max_waiting=1000)
    config = WorkerConfig(**{"heartbeat_ms": 50, **settings})
    server = GroupServer(cast(Any, engine), hello, TOKEN, config, on_broken=broken.append)
    port = await server.start("127.0.0.1")
    try:
        yield Running(engine, server, f"127.0.0.1:{port}", broken)
    finally:
        engine.gate.set()
        await server.stop()


async def eventually(condition: Callable[[], object], what: str) -> None:
    try:
        async with asyncio.timeout(30):
            while not condition():  # noqa: ASYNC110 - of another thread, which sets no event
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"never: {what}") from None


async def test_a_request_streams_and_ends_exactly_once() -> None:
    async with group() as running, running.router() as router:
        assert (router.hello.group_id, router.hello.incarnation, router.hello.model) == ("g", "i", "m")
        await router.submit("a", max_tokens=5, seed=100)
        ended = await router.finish("a")
        assert router.tokens("a") == [100, 101, 102, 103, 104]
        assert ended.finished.reason == common_pb2.FINISH_REASON_LENGTH
        assert ended.finished.usage.completion_tokens == 5
        deltas = router.deltas["a", 1]
        assert [delta.HasField("admitted") for delta in deltas] == [True] + [False] * 4
        assert sum(delta.WhichOneof("end") is not None for delta in deltas) == 1


async def test_one_frame_for_each_step_carries_all_requests_and_samples() -> None:
    engine = ScriptedEngine()
    async with group(engine) as running, running.router() as router:
        engine.gate.clear()
        await router.submit("first", max_tokens=1)
        await eventually(engine.stepping.is_set, "a step begins")
        for name in ("a", "b", "c"):
            await router.submit(name, max_tokens=3, n=2)
        await eventually(lambda: running.server.open_requests == 4, "all are queued while the step runs")
        engine.gate.set()
        for name in ("a", "b", "c"):
            await router.wait(lambda name=name: len(router.deltas.get((name, 1), [])) == 6, f"{name} ends")
        shared = [step for step in router.step_frames if any(delta.request_id == "a" for delta in step.deltas)]
        assert [len(step.deltas) for step in shared] == [6, 6, 6]
        assert len({step.step for step in router.step_frames}) == len(router.step_frames)


async def test_two_routers_see_only_their_own_requests_even_with_the_same_id() -> None:
    async with group() as running, running.router("one") as one, running.router("two") as two:
        await one.submit("same", seed=10)
        await two.submit("same", seed=20)
        await one.finish("same")
        await two.finish("same")
        assert one.tokens("same") == [10, 11, 12, 13]
        assert two.tokens("same") == [20, 21, 22, 23]


async def test_cancel_frees_the_pages_and_says_nothing_more() -> None:
    async with group() as running, running.router() as router:
        await router.submit("a", max_tokens=FOREVER)
        await router.wait(lambda: router.tokens("a") and router.load.used_blocks, "tokens come")
        await router.cancel("a", attempt=2)  # another attempt: not this one
        await router.cancel("unknown")
        await router.cancel("a")
        await router.cancel("a")
        await router.wait(lambda: router.load.used_blocks == 0 == router.load.running_requests, "pages are free")
        await router.submit("b", max_tokens=FOREVER)
        # A token that was made before the cancel may come behind that load, but not behind b's.
        await router.wait(lambda: router.tokens("b"), "b begins")
        seen = len(router.tokens("a"))
        await router.wait(lambda: len(router.tokens("b")) > 5, "b goes on")
        await router.cancel("b")
        await router.wait(lambda: router.load.used_blocks == 0 == router.load.running_requests, "pages are free")
        assert len(router.tokens("a")) == seen
        assert router.end("a") is None
        assert running.engine.requests == {}


async def test_a_lost_stream_frees_its_pages_and_nobody_elses() -> None:
    async with group() as running, running.router("stays") as stays:
        async with running.router("leaves") as leaves:
            await leaves.submit("a", max_tokens=FOREVER)
            await stays.submit("b", max_tokens=FOREVER)
            await leaves.wait(lambda: leaves.tokens("a"), "tokens come")
        await eventually(lambda: len(running.engine.requests) == 1, "the lost router's request is gone")
        before = len(stays.tokens("b"))
        await stays.wait(lambda: len(stays.tokens("b")) > before, "the other one goes on")


async def test_a_router_that_closes_its_side_ends_its_requests() -> None:
    async with group() as running, running.router() as router:
        await router.submit("a", max_tokens=FOREVER)
        await router.wait(lambda: router.tokens("a"), "tokens come")
        await router.call.done_writing()
        await router.wait(lambda: router.ended, "the stream ends")
        assert router.error is None
        await eventually(lambda: not running.engine.requests, "pages are free")


@pytest.mark.parametrize(
    "metadata", [(), bearer("wrong"), (("authorization", TOKEN),), bearer(""), bearer("wörker".encode().hex())]
)
async def test_a_wrong_token_is_refused(metadata: Any) -> None:
    async with group() as running, grpc.aio.insecure_channel(running.address) as channel:
        call: Any = worker_pb2_grpc.WorkerGroupStub(channel).Connect(metadata=metadata)
        with pytest.raises(grpc.RpcError) as caught:
            await call.read()
        assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
        assert isinstance(from_rpc_error(caught.value), Unauthenticated)


@pytest.mark.parametrize(
    "first",
    [
        worker_pb2.RouterFrame(),
        worker_pb2.RouterFrame(cancel=worker_pb2.Cancel(request_id="a")),
        worker_pb2.RouterFrame(hello=worker_pb2.RouterHello(router_id="r", protocol_version=99)),
    ],
    ids=["empty", "cancel", "version"],
)
async def test_a_bad_first_frame_is_refused(first: worker_pb2.RouterFrame) -> None:
    async with group() as running, grpc.aio.insecure_channel(running.address) as channel:
        call: Any = worker_pb2_grpc.WorkerGroupStub(channel).Connect(metadata=bearer(TOKEN))
        await call.write(first)
        with pytest.raises(grpc.RpcError) as caught:
            await call.read()
        assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        assert isinstance(from_rpc_error(caught.value), ProtocolError)


async def test_a_second_hello_ends_the_stream_and_its_requests() -> None:
    async with group() as running, running.router() as router:
        await router.submit("a", max_tokens=FOREVER)
        await router.send(hello=worker_pb2.RouterHello(router_id="again", protocol_version=1))
        await router.wait(lambda: router.ended, "the stream ends")
        assert isinstance(router.error, ProtocolError)
        await eventually(lambda: not running.engine.requests, "its request is gone")


BAD_SUBMITS: dict[str, tuple[dict[str, Any], str]] = {
    "empty prompt": ({"prompt": []}, "PROMPT_EMPTY"),
    "id outside the vocabulary": ({"prompt": [1, 50_000]}, "INVALID_FIELD"),
    "output id outside": ({"output_token_ids": [common_pb2.TokenSequence(token_ids=[50_000])]}, "INVALID_FIELD"),
    "outputs of two samples for one": ({"output_token_ids": [common_pb2.TokenSequence()] * 2}, "INVALID_FIELD"),
    "short root": ({"root": ROOT[:16]}, "INVALID_FIELD"),
    "another model": ({"model": "other"}, "MODEL_NOT_FOUND"),
    "attempt 0": ({"attempt": 0}, "INVALID_FIELD"),
    "no seed": ({"sampling": common_pb2.SamplingParams(max_tokens=3)}, "INVALID_FIELD"),
    "no max_tokens": ({"sampling": common_pb2.SamplingParams(seed=3)}, "INVALID_FIELD"),
    "NaN": ({"temperature": float("nan")}, "INVALID_FIELD"),
    "infinite": ({"temperature": float("inf")}, "INVALID_FIELD"),
    "top_p 0": ({"top_p": 0.0}, "INVALID_FIELD"),
    "min_tokens above max_tokens": ({"min_tokens": 9}, "INVALID_FIELD"),
    "stop id outside": ({"stop_token_ids": [50_000]}, "INVALID_FIELD"),
    "bias outside": ({"logit_bias": {50_000: 1.0}}, "INVALID_FIELD"),
    "bias NaN": ({"logit_bias": {5: float("nan")}}, "INVALID_FIELD"),
    "adapter": ({"adapter": "x"}, "FIELD_NOT_SUPPORTED"),
    "constraint": ({"constraint": common_pb2.Constraint(regex="a")}, "FIELD_NOT_SUPPORTED"),
    "draft": ({"draft": common_pb2.DraftSettings(method="m")}, "FIELD_NOT_SUPPORTED"),
    "a fault inside the engine": ({"top_k": 666}, "INTERNAL"),
}


@pytest.mark.parametrize("name", BAD_SUBMITS)
async def test_a_bad_submit_ends_alone(name: str) -> None:
    fields, reason = BAD_SUBMITS[name]
    async with group() as running, running.router() as router:
        await router.submit("good", max_tokens=FOREVER)
        await router.submit("bad", **fields)
        attempt = fields.get("attempt", 1)
        assert (await router.finish("bad", attempt)).failed.reason == reason
        before = len(router.tokens("good"))
        await router.wait(lambda: len(router.tokens("good")) > before, "the neighbour goes on")
        assert [key.request_id for key in running.engine.requests] == ["good"]


async def test_an_empty_request_id_is_refused() -> None:
    async with group() as running, running.router() as router:
        await router.submit("", max_tokens=FOREVER)
        assert (await router.finish("")).failed.metadata["field"] == "request_id"
        assert not running.engine.requests


async def test_a_newer_attempt_replaces_the_older_one_and_keeps_it_silent() -> None:
    async with group() as running, running.router() as router:
        await router.submit("a", max_tokens=FOREVER, seed=0, attempt=1)
        await router.wait(lambda: router.tokens("a"), "tokens of the first try")
        await router.submit("a", max_tokens=3, seed=500, attempt=2)
        await router.finish("a", 2)
        assert router.tokens("a", 2) == [500, 501, 502]
        last_of_old = max(step.step for step in router.step_frames if step.deltas[0].attempt == 1)
        first_of_new = min(step.step for step in router.step_frames if step.deltas[0].attempt == 2)
        assert last_of_old < first_of_new
        assert router.end("a", 1) is None
        await router.submit("b", max_tokens=FOREVER, attempt=5)
        await router.wait(lambda: router.tokens("b", 5), "tokens of the newer try")
        await router.submit("b", attempt=4)
        assert (await router.finish("b", 4)).failed.reason == "INVALID_FIELD"
        assert [key.attempt for key in running.engine.requests] == [5]


async def test_the_same_attempt_twice_ends_both() -> None:
    async with group() as running, running.router() as router:
        await router.submit("a", max_tokens=FOREVER)
        await router.submit("a", max_tokens=FOREVER)
        assert (await router.finish("a")).failed.reason == "INVALID_FIELD"
        await eventually(lambda: not running.engine.requests, "nothing runs for nobody")


async def test_the_remaining_time_becomes_a_deadline_on_the_engines_clock() -> None:
    async with group() as running, running.router() as router:
        await router.submit("late", max_tokens=FOREVER, remaining_ms=1)
        assert (await router.finish("late")).failed.reason == "DEADLINE_EXCEEDED"
        await router.submit("none", max_tokens=3)
        assert (await router.finish("none")).WhichOneof("end") == "finished"
        assert not running.engine.requests


async def test_a_router_that_does_not_read_is_cut_off_and_others_notice_nothing() -> None:
    engine = ScriptedEngine()
    engine.wide = 20_000
    async with group(engine, max_outbound_bytes=1 << 20) as running, running.router("reads") as reads:
        silent = running.router("silent", read=False)
        await silent.__aenter__()
        await silent.submit("a", max_tokens=FOREVER)
        await eventually(lambda: engine.requests, "it runs")
        await eventually(lambda: not engine.requests, "its pages are free though it reads nothing")
        engine.wide = 1
        await reads.submit("b", max_tokens=3)
        assert (await reads.finish("b")).WhichOneof("end") == "finished"
        silent.start_reading()
        await silent.wait(lambda: silent.ended, "the stream is closed")
        assert silent.error is not None
        assert silent.error.reason == "SLOW_CONSUMER"
        assert silent.error.code == "RESOURCE_EXHAUSTED"
        await silent.close()


async def test_messages_above_the_default_limit_of_4_mib_pass_both_ways() -> None:
    engine = ScriptedEngine()
    async with group(engine) as running, running.router() as router:
        await router.submit("long", prompt=[40_000] * 3_000_000, max_tokens=2)  # 3 bytes each
        assert (await router.finish("long")).finished.usage.prompt_tokens == 3_000_000
        engine.wide = 2_000_000
        await router.submit("wide", max_tokens=2, seed=40_000)
        await router.finish("wide")
        assert len(router.tokens("wide")) == 4_000_000


async def _read_all(call: Any) -> None:
    while await asyncio.wait_for(call.read(), 30) is not grpc.aio.EOF:
        pass


async def test_a_message_above_our_own_limit_ends_that_stream_only() -> None:
    unlimited = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    async with group() as running, running.router("other") as other:
        async with grpc.aio.insecure_channel(running.address, options=unlimited) as channel:
            call: Any = worker_pb2_grpc.WorkerGroupStub(channel).Connect(metadata=bearer(TOKEN))
            await call.write(worker_pb2.RouterFrame(hello=worker_pb2.RouterHello(router_id="r", protocol_version=1)))
            huge = worker_pb2.Submit(root=bytes(MAX_WORKER_MESSAGE_BYTES + 1))
            with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
                await call.write(worker_pb2.RouterFrame(submit=huge))
            with pytest.raises(grpc.RpcError) as caught:
                await _read_all(call)
            assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        await other.submit("a")
        await other.finish("a")


def _hashes(count: int, seed: int = 0) -> list[BlockHash]:
    return chain(BlockHash(ROOT), range(seed, seed + count), 1)


def _wire(hashes: set[BlockHash]) -> set[bytes]:
    return {block_hash[:WIRE_HASH_BYTES] for block_hash in hashes}


@pytest.mark.parametrize("count", [0, 1, CHUNK_HASHES, 2 * CHUNK_HASHES + 1])
async def test_the_snapshot_comes_in_chunks_and_is_whole(count: int) -> None:
    engine = ScriptedEngine()
    engine.cached = set(_hashes(count))
    async with group(engine, max_outbound_bytes=1 << 16) as running, running.router() as router:
        await router.wait(lambda: router.cache_frames and not router.cache_frames[-1].more, "the snapshot is complete")
        assert router.blocks == _wire(engine.cached)
        assert [frame.snapshot for frame in router.cache_frames] == [True] + [False] * ((count - 1) // CHUNK_HASHES)
        assert all(len(frame.stored) <= CHUNK_HASHES for frame in router.cache_frames)


async def test_snapshot_and_increments_equal_what_the_engine_has_for_early_and_late_routers() -> None:
    engine = ScriptedEngine()
    engine.cached = set(_hashes(3, seed=1000))
    async with group(engine) as running, running.router("early") as early:
        await early.wait(lambda: early.cache_frames, "the snapshot")
        engine.store(_hashes(CHUNK_HASHES + 5), dropped=_hashes(1, seed=1000))
        await early.submit("a")
        await early.finish("a")
        async with running.router("late") as late:
            await late.wait(lambda: late.cache_frames and not late.cache_frames[-1].more, "the late one's snapshot")
            engine.store(_hashes(2, seed=7000), dropped=_hashes(2))
            await late.submit("b")
            await late.finish("b")
            for router in (early, late):
                await router.wait(
                    lambda router=router: router.blocks == _wire(engine.cached), "both agree with the engine"
                )
            await late.send(snapshot=worker_pb2.SnapshotRequest())
            await late.wait(lambda: sum(frame.snapshot for frame in late.cache_frames) == 2, "a second snapshot")
            await late.wait(lambda: late.blocks == _wire(engine.cached), "it is whole too")


async def test_loads_say_which_submits_were_taken_in_refused_ones_too() -> None:
    async with group() as running, running.router() as router:
        assert router.load.last_submit_sequence == 0
        await router.submit("a", max_tokens=FOREVER)
        await router.wait(lambda: router.load.last_submit_sequence == 1, "the first is taken in")
        await router.submit("b", top_k=666)
        await router.wait(lambda: router.load.last_submit_sequence == 2, "the refused one too")
        async with running.router("other") as other:
            await other.wait(lambda: other.loads, "a load")
            assert other.load.last_submit_sequence == 0


async def test_loads_go_on_when_idle_and_during_a_long_step() -> None:
    async with group() as running, running.router() as router:
        before = router.loads
        await router.wait(lambda: router.loads > before + 3, "loads when idle")
        running.engine.gate.clear()
        await router.submit("a")
        await eventually(running.engine.stepping.is_set, "a step begins")
        before = router.loads
        await router.wait(lambda: router.loads > before + 3, "loads while the step runs")
        assert running.server.heartbeat().busy


async def _serving(address: str, service: str) -> int:
    async with grpc.aio.insecure_channel(address) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
        return int(answer.status)


async def test_health_is_green_in_a_long_step_and_red_with_a_dead_step_loop() -> None:
    kind = health_pb2.HealthCheckResponse
    async with group(step_timeout_s=0.5) as running, running.router() as router:
        assert await _serving(running.address, SERVICE) == kind.SERVING
        assert await _serving(running.address, "") == kind.SERVING
        running.engine.gate.clear()
        await router.submit("a")
        await eventually(running.engine.stepping.is_set, "a step begins")
        assert await _serving(running.address, SERVICE) == kind.SERVING
        await eventually(lambda: running.server.heartbeat().step_age_s > 1.0, "the step is too long")
        assert await _serving(running.address, SERVICE) == kind.NOT_SERVING
        loads = router.loads
        assert running.server.heartbeat().busy
        running.engine.gate.set()
        await router.finish("a")
        await router.wait(lambda: router.loads > loads + 2, "loads come again")


async def test_a_broken_engine_ends_every_request_and_tells_the_owner() -> None:
    async with group() as running, running.router("one") as one, running.router("two") as two:
        await one.submit("a", max_tokens=FOREVER)
        await two.submit("b", max_tokens=FOREVER)
        await one.wait(lambda: one.tokens("a"), "tokens")
        await two.wait(lambda: two.tokens("b"), "tokens")
        running.engine.breakage = RuntimeError("a kernel failed")
        for router, name in ((one, "a"), (two, "b")):
            assert (await router.finish(name)).failed.reason == "GROUP_LOST"
            await router.wait(lambda router=router: router.ended, "the stream closes")
            assert isinstance(router.error, GroupLost)
        assert running.broken == [running.engine.breakage]
        assert running.server.heartbeat().failure == "RuntimeError: a kernel failed"
        with pytest.raises(grpc.RpcError) as caught:
            async with running.router("late") as late:
                await late.wait(lambda: late.ended, "refused")
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_what_cannot_be_told_to_one_router_closes_its_stream_and_no_other() -> None:
    """Its requests are cancelled, so that it moves them; nobody waits for an end that was lost."""
    async with group() as running, running.router("one") as one, running.router("two") as two:
        await two.submit("b", max_tokens=FOREVER)
        await two.wait(lambda: two.tokens("b"), "tokens")
        await one.submit("a", max_tokens=3, seed=2**32)  # its tokens fit no uint32: a fault of the engine
        await one.wait(lambda: one.ended, "the stream closes")
        assert one.error is not None
        assert one.error.reason == "INTERNAL"
        await eventually(lambda: [key.request_id for key in running.engine.requests] == ["b"], "its request is gone")
        seen = len(two.tokens("b"))
        await two.wait(lambda: len(two.tokens("b")) > seen, "tokens go on")
        assert running.broken == []
        async with running.router("one") as again:
            await again.submit("a")
            assert (await again.finish("a")).HasField("finished")


async def test_a_break_that_one_router_cannot_be_told_of_reaches_the_others_and_the_owner() -> None:
    async with group() as running, running.router("one") as one, running.router("two") as two:
        for router in (one, two):
            await router.submit("a", max_tokens=FOREVER)
        await one.wait(lambda: one.tokens("a"), "tokens")
        await two.wait(lambda: two.tokens("a"), "tokens")
        finish = Mock(side_effect=RuntimeError("a fault of the stream's own"))
        next(iter(running.server._streams.values())).finish = finish  # type: ignore[method-assign]
        running.engine.breakage = RuntimeError("a kernel failed")
        await one.wait(lambda: one.ended, "the stream closes")
        await two.wait(lambda: two.ended, "the stream closes")
        assert finish.called
        assert running.broken == [running.engine.breakage]


async def test_draining_lets_running_ones_finish_and_refuses_new_ones() -> None:
    engine = ScriptedEngine()
    async with group(engine) as running, running.router() as router:
        engine.gate.clear()
        await router.submit("runs", max_tokens=50)
        await eventually(engine.stepping.is_set, "it runs")
        drained = asyncio.create_task(running.server.drain(30))
        await router.wait(lambda: router.load.draining, "the load says so")
        await router.submit("new")
        assert (await router.finish("new")).failed.reason == "DRAINING"
        engine.gate.set()
        await drained
        assert (await router.finish("runs")).WhichOneof("end") == "finished"
        assert len(router.tokens("runs")) == 50
        assert await _serving(running.address, SERVICE) == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_draining_gives_back_what_does_not_finish_in_time() -> None:
    async with group() as running, running.router() as router:
        await router.submit("a", max_tokens=FOREVER)
        await router.wait(lambda: router.tokens("a"), "it runs")
        await running.server.drain(0.05)
        assert (await router.finish("a")).failed.reason == "GROUP_LOST"
        assert not running.engine.requests


async def test_stopping_sends_the_last_message_before_the_stream_ends() -> None:
    async with group() as running, running.router() as router:
        for number in range(20):
            await router.submit(f"r{number}", max_tokens=FOREVER)
        await router.wait(lambda: router.tokens("r19"), "all run")
        await running.server.stop()
        await router.wait(lambda: router.ended, "the stream ends")
        assert router.error is not None
        assert router.error.reason == "DRAINING"
        ends = [router.end(f"r{number}") for number in range(20)]
        assert [end is not None and end.failed.reason for end in ends] == ["GROUP_LOST"] * 20


async def test_a_port_in_use_is_refused_and_two_groups_never_share_one() -> None:
    with occupied_port() as port:
        server = GroupServer(cast(Any, ScriptedEngine()), worker_pb2.GroupHello(), TOKEN, WorkerConfig())
        with pytest.raises(PortInUse) as caught:
            await server.start("127.0.0.1", port)
        assert str(port) in caught.value.message
    async with group() as running:
        taken = int(running.address.rpartition(":")[2])
        server = GroupServer(cast(Any, ScriptedEngine()), worker_pb2.GroupHello(), TOKEN, WorkerConfig())
        with pytest.raises(PortInUse):
            await server.start("127.0.0.1", taken)


async def test_keepalive_pings_in_a_long_step_end_in_no_goaway() -> None:
    """Both sides take their settings from one place; here the router pings as fast as gRPC lets it."""
    fast = {"grpc.keepalive_time_ms": 1_000, "grpc.keepalive_timeout_ms": 5_000}
    options = [(name, fast.get(name, value)) for name, value in WORKER_CHANNEL_OPTIONS]
    permitted = dict(WORKER_SERVER_OPTIONS)
    assert permitted["grpc.http2.max_ping_strikes"] == 0
    async with group(heartbeat_ms=60_000) as running:
        running.engine.gate.clear()
        async with grpc.aio.insecure_channel(running.address, options=options) as channel:
            call: Any = worker_pb2_grpc.WorkerGroupStub(channel).Connect(metadata=bearer(TOKEN))
            await call.write(worker_pb2.RouterFrame(hello=worker_pb2.RouterHello(router_id="r", protocol_version=1)))
            assert (await call.read()).WhichOneof("frame") == "hello"
            submit = worker_pb2.Submit(request_id="a", attempt=1, model="m", prompt_token_ids=[1], root=ROOT)
            submit.sampling.CopyFrom(common_pb2.SamplingParams(max_tokens=1, seed=1))
            await call.write(worker_pb2.RouterFrame(submit=submit))
            await eventually(running.engine.stepping.is_set, "the long step begins")
            await asyncio.sleep(5)  # five pings without data; gRPC's default forgives two
            assert not call.done()
            running.engine.gate.set()
            while True:
                frame = await asyncio.wait_for(call.read(), 30)
                assert frame is not grpc.aio.EOF
                if frame.WhichOneof("frame") == "step":
                    break


FROZEN_ROUTER = """
import asyncio, sys
from tests.support.stub_router import StubRouter
async def main():
    async with StubRouter(sys.argv[1], sys.argv[2], "frozen") as router:
        await router.submit("a", max_tokens=1_000_000)
        print("submitted", flush=True)
        await asyncio.sleep(600)
asyncio.run(main())
"""


async def test_a_frozen_router_is_noticed_by_keepalive_though_nothing_is_sent_to_it() -> None:
    async with group(heartbeat_ms=600_000) as running:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", FROZEN_ROUTER, running.address, TOKEN, stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        try:
            running.engine.gate.clear()
            assert await process.stdout.readline() == b"submitted\n"
            await eventually(lambda: running.server.open_requests == 1, "it is there")
            process.send_signal(signal.SIGSTOP)
            await eventually(lambda: not running.server.routers, "only a ping can tell, and it does")
            running.engine.gate.set()
            await eventually(lambda: not running.engine.requests, "its request is cancelled")
        finally:
            process.kill()
            await process.wait()
