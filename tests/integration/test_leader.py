"""A whole group on a small real model: loaded, served, found in Redis, spoken to over gRPC."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from cluster.blocks import WIRE_HASH_BYTES
from cluster.config import ClusterConfig, parse
from cluster.errors import ConfigError, ModelLoadError, OutOfMemory
from cluster.membership import Watcher
from tests.support.models import tiny_llama
from tests.support.redis import RedisServer, running_redis
from tests.support.stub_router import StubRouter
from workers.leader import Leader, start_leader

TOKEN = "worker-token"
FOREVER = 100_000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_llama(tmp_path_factory.mktemp("tiny")).path)


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


def configured(path: str, engine: dict[str, Any] | None = None, **settings: Any) -> ClusterConfig:
    limits = {"max_context_tokens": 2048, "kv_memory_bytes": 16 << 20, "threads": 1, "device": "cpu"}
    raw = {"model": path, "model_name": "tiny", "worker_token": TOKEN, "engine": {**limits, **(engine or {})}}
    return parse({**raw, "worker": {"heartbeat_ms": 50, "lease_s": 2.0}, **settings})


@asynccontextmanager
async def leading(config: ClusterConfig, group_id: str = "g0") -> AsyncIterator[Leader]:
    leader = await start_leader(config, group_id)
    try:
        yield leader
    finally:
        await leader.stop()


def cached(leader: Leader) -> set[bytes]:
    """The engine's own view; only while it is idle."""
    return {block_hash[:WIRE_HASH_BYTES] for block_hash in leader._built.engine.cached_hashes()}


async def test_a_request_runs_and_its_pages_become_a_reusable_prefix(model: str) -> None:
    prompt = list(range(100, 150))
    async with leading(configured(model)) as leader, StubRouter(leader.address, TOKEN) as router:
        hello = router.hello
        assert (hello.group_id, hello.incarnation, hello.model) == ("g0", leader.incarnation, "tiny")
        assert (hello.block_tokens, hello.tp, hello.device, hello.dtype) == (16, 1, "cpu", "float32")
        assert len(hello.namespace) == 64
        assert hello.max_context_tokens == 2048
        assert list(hello.rank_pids) == [os.getpid()]
        await router.submit("cold", prompt=prompt, max_tokens=20, ignore_eos=True)
        cold = await router.finish("cold")
        assert len(router.tokens("cold")) == 20
        assert cold.finished.usage.cached_tokens.group == 0
        await router.submit("warm", prompt=prompt, max_tokens=20, ignore_eos=True)
        warm = await router.finish("warm")
        assert router.tokens("warm") == router.tokens("cold")
        assert warm.finished.usage.cached_tokens.group == 48
        assert router.deltas["warm", 1][0].admitted.cached_tokens.group == 48
        await router.wait(lambda: router.load.used_blocks == 0, "pages are free")
        await router.wait(lambda: router.blocks == cached(leader) and router.blocks, "the router knows what is cached")
        load = router.load
        assert load.free_blocks + load.cached_blocks == load.total_blocks
        assert load.pool_consistent
        assert load.requests_finished == 2
        async with StubRouter(leader.address, TOKEN, "late") as late:
            await late.wait(lambda: late.blocks == router.blocks, "a snapshot gives the same")


async def test_two_routers_at_once_get_what_they_would_get_alone(model: str) -> None:
    async with leading(configured(model)) as leader:
        async with StubRouter(leader.address, TOKEN, "alone") as alone:
            for number in range(6):
                await alone.submit(f"r{number}", prompt=[number, 5, 6], max_tokens=12, temperature=1.0, seed=number)
                await alone.finish(f"r{number}")
        async with StubRouter(leader.address, TOKEN, "a") as one, StubRouter(leader.address, TOKEN, "b") as two:
            for number in range(6):
                for router in (one, two):
                    await router.submit(
                        f"r{number}", prompt=[number, 5, 6], max_tokens=12, temperature=1.0, seed=number
                    )
            for number in range(6):
                for router in (one, two):
                    await router.finish(f"r{number}")
                    assert router.tokens(f"r{number}") == alone.tokens(f"r{number}")


async def test_cancel_disconnect_and_deadline_free_their_pages(model: str) -> None:
    limits = {"max_tokens": 1500, "ignore_eos": True}
    async with leading(configured(model)) as leader, StubRouter(leader.address, TOKEN, "stays") as stays:
        async with StubRouter(leader.address, TOKEN, "leaves") as leaves:
            await leaves.submit("lost", **limits)
            await leaves.wait(lambda: leaves.tokens("lost"), "tokens come")
            await stays.submit("cancelled", **limits)
            await stays.submit("late", remaining_ms=200, **limits)
            await stays.wait(lambda: stays.tokens("cancelled"), "tokens come")
            await stays.wait(lambda: stays.load.used_blocks, "pages are in use")
            await stays.cancel("cancelled")
        assert (await stays.finish("late")).failed.reason == "DEADLINE_EXCEEDED"
        await stays.wait(lambda: stays.load.used_blocks == 0 and stays.load.running_requests == 0, "all pages are free")
        await stays.wait(lambda: stays.load.pool_consistent, "the pool is whole")
        assert leader.open_requests == 0


async def test_what_cannot_fit_is_refused_at_once(model: str) -> None:
    async with leading(configured(model)) as leader, StubRouter(leader.address, TOKEN) as router:
        await router.submit("fits", prompt=[7] * 2040, max_tokens=8, ignore_eos=True)
        await router.submit("too long", prompt=[7] * 2040, max_tokens=9)
        assert (await router.finish("too long")).failed.reason == "CONTEXT_EXCEEDED"
        assert (await router.finish("fits")).finished.usage.completion_tokens == 8


async def test_it_is_announced_drains_and_leaves(model: str, redis_server: RedisServer) -> None:
    config = configured(model, redis=redis_server.url, cluster="leader")
    async with Watcher(redis_server.url, "leader", poll_s=0.05) as watcher:
        async with leading(config) as leader:
            assert leader.announced
            assert await watcher.wait_for(lambda w: "g0" in w.groups(), 30)
            record = watcher.groups()["g0"]
            assert (record.address, record.incarnation) == (leader.address, leader.incarnation)
            assert (record.model, record.device, record.dtype, record.tp) == ("tiny", "cpu", "float32", 1)
            async with StubRouter(record.address, TOKEN) as router:
                assert router.hello.namespace == record.namespace
                await router.submit("a", max_tokens=1500, ignore_eos=True)
                await router.wait(lambda: router.tokens("a"), "it runs")
                await leader.drain(0.01)
                assert (await router.finish("a")).failed.reason == "GROUP_LOST"
            beat = leader.heartbeat()
            assert beat.failure is None
        assert await watcher.wait_for(lambda w: not w.groups(), 30)


async def test_equal_groups_share_a_namespace_and_unequal_ones_do_not(model: str) -> None:
    async with leading(configured(model)) as one, leading(configured(model), "g1") as two:
        assert one.address != two.address
        assert one.incarnation != two.incarnation
        assert one._built.namespace == two._built.namespace
    async with leading(configured(model, {"block_tokens": 32})) as other:
        assert other._built.namespace != one._built.namespace


async def test_redis_away_is_no_reason_not_to_serve(model: str) -> None:
    with running_redis() as server:
        server.kill()
        async with leading(configured(model, redis=server.url, cluster="away")) as leader:
            assert not leader.announced
            async with StubRouter(leader.address, TOKEN) as router:
                await router.submit("a")
                await router.finish("a")
            server.start()
            async with Watcher(server.url, "away", poll_s=0.05) as watcher:
                assert await watcher.wait_for(lambda w: "g0" in w.groups(), 30)


@pytest.mark.parametrize(
    ("engine", "settings", "error"),
    [
        ({}, {"model": "/nowhere/at/all"}, ModelLoadError),
        ({}, {"worker_token": None}, ConfigError),
        ({}, {"redis": "http://host"}, ConfigError),
        ({"max_context_tokens": 10_000_000}, {}, ConfigError),
        ({"kv_memory_bytes": 1 << 60}, {}, OutOfMemory),
        ({"kv_memory_bytes": 1}, {}, OutOfMemory),
    ],
)
async def test_what_an_operator_must_mend_is_one_line_and_leaves_nothing(
    model: str, engine: dict[str, Any], settings: dict[str, Any], error: type[Exception]
) -> None:
    before = len(asyncio.all_tasks())
    with pytest.raises(error) as caught:
        await start_leader(configured(model, engine, **settings), "g0")
    assert "\n" not in str(caught.value)
    assert len(asyncio.all_tasks()) == before


@contextmanager
def by_hand(config: ClusterConfig, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """``python -m workers.leader``, once it has printed its address."""
    file = folder / "quire.yaml"
    text = config.model_copy(update={"worker_token": None}).model_dump_json()
    file.write_text(text.replace('"worker_token":null', f'"worker_token":"{TOKEN}"'))
    argv = [sys.executable, "-m", "workers.leader", "--config", str(file), "--group-id", "by-hand"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert process.stdout is not None
        with process.stdout:
            name, address = process.stdout.readline().decode().split()
            assert name == "by-hand"
            assert address.startswith("127.0.0.1:")
            yield process
    finally:
        process.kill()
        process.wait(10)


def test_a_group_by_hand_prints_its_address_and_ends_on_sigterm(model: str, tmp_path: Path) -> None:
    with by_hand(configured(model), tmp_path) as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ranks_by_hand_end_with_their_leader(model: str, tmp_path: Path, number: signal.Signals) -> None:
    with by_hand(configured(model, tp=2), tmp_path) as process:
        ranks = psutil.Process(process.pid).children(recursive=True)
        assert ranks
        process.send_signal(number)
        assert process.wait(60) == (0 if number == signal.SIGTERM else -number)
        assert not psutil.wait_procs(ranks, timeout=10)[1]


def test_a_leader_by_hand_that_loses_a_rank_while_it_rests_ends(model: str, tmp_path: Path) -> None:
    with by_hand(configured(model, tp=2), tmp_path) as process:
        ranks = psutil.Process(process.pid).children(recursive=True)
        next(one for one in ranks if "workers.rank" in one.cmdline()).kill()
        assert process.wait(60) == 1
        assert not psutil.wait_procs(ranks, timeout=10)[1]


def test_a_wrong_configuration_by_hand_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "quire.yaml"
    file.write_text("groups: -1\n")
    argv = [sys.executable, "-m", "workers.leader", "--config", str(file)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "groups" in done.stderr
