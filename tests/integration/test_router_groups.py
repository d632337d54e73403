"""Real groups in processes of their own, a small model with random weights, a real Redis: what dies, what goes on."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cluster.config import parse
from cluster.errors import DeadlineExceeded, GroupLost, NoGroup, QuireError
from cluster.pb.inference_pb2 import Cluster, Group
from router.client import AsyncClient, AsyncStream, RetryPolicy
from router.server import RouterServer, start_router
from tests.support import processes
from tests.support.models import tiny_llama
from tests.support.processes import Process
from tests.support.redis import RedisServer, running_redis
from tests.support.scripted_group import eventually

ONCE = RetryPolicy(attempts=1)
LONG = 1500
WAIT_S = 60.0
PROMPTS = ["Once upon a time", "The capital of France", "def main():", "1, 2, 3, 4,", "Dear Sir or Madam, " * 8]
_NAMES = itertools.count()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_llama(tmp_path_factory.mktemp("tiny")).path)


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


def raw_config(model: str, redis_url: str, cluster: str, **router: Any) -> dict[str, Any]:
    return {
        "cluster": cluster,
        "model": model,
        "model_name": "tiny",
        "redis": redis_url,
        "worker_token": "worker-token",
        "cluster_secret": "cluster-secret",
        "engine": {"device": "cpu", "threads": 1, "max_context_tokens": 2048, "kv_memory_bytes": 32 << 20},
        "worker": {"heartbeat_ms": 50, "lease_s": 2.0},
        "router": {"port": 0, "group_silence_s": 2.0, **router},
    }


@dataclass
class Here:
    router: RouterServer
    groups: list[Process]
    client: AsyncClient
    config: dict[str, Any]

    async def until(self, condition: Callable[[Cluster], object], what: str) -> Cluster:
        """Ask the router until ``condition`` holds of what it answers."""
        end = asyncio.get_running_loop().time() + WAIT_S
        while not condition(found := await self.client.cluster()):
            assert asyncio.get_running_loop().time() < end, f"never: {what}; {found}"
            await asyncio.sleep(0.02)
        return found


def serving(count: int) -> Callable[[Cluster], bool]:
    return lambda found: sum(group.state == Group.SERVING for group in found.groups) == count


def idle(found: Cluster) -> bool:
    loads = [group.load for group in found.groups if group.state == Group.SERVING]
    return bool(loads) and all(load.used_blocks == load.running_requests == 0 for load in loads)


def known(found: Cluster) -> bool:
    return all(group.indexed_blocks == group.load.cached_blocks > 0 for group in found.groups)


@asynccontextmanager
async def cluster(
    model: str, redis_server: RedisServer, folder: Path, count: int, **router: Any
) -> AsyncIterator[Here]:
    config = raw_config(model, redis_server.url, f"r{next(_NAMES)}", **router)
    server = await start_router(parse(config))
    try:
        with processes.groups(config, folder, *(f"g{i}" for i in range(count))) as running:
            async with AsyncClient(f"127.0.0.1:{server.port}", retry=ONCE) as client:
                here = Here(server, running, client, config)
                await here.until(serving(count), "all groups serve")
                yield here
    finally:
        await server.stop()


@dataclass
class Heard:
    tokens: list[int]
    text: str
    group: str
    cached: int


async def hear(stream: AsyncStream, heard: Heard | None = None) -> Heard:
    heard = heard or Heard([], "", "", 0)
    async for event in stream:
        if event.HasField("started"):
            heard.group = event.started.group_id
            heard.cached = event.started.cached_tokens.group
        heard.tokens += event.delta.token_ids
        heard.text += event.delta.text
    return heard


def kinds(number: int) -> dict[str, Any]:
    """Greedy and seeded, short and long, in turn."""
    drawn = {"temperature": 0.8, "seed": number} if number % 2 else {"temperature": 0.0}
    return {**drawn, "max_tokens": 10 + 7 * (number % 5), "ignore_eos": True, "timeout_s": 120.0}


async def test_many_at_once_equal_their_solo_runs_and_leave_no_page(
    model: str, redis_server: RedisServer, tmp_path: Path
) -> None:
    async with cluster(model, redis_server, tmp_path, 2) as here:

        def one(number: int) -> AsyncStream:
            return here.client.chat(f"{number}. {PROMPTS[number % len(PROMPTS)]}", **kinds(number))

        solo = [await hear(one(number)) for number in range(32)]
        together = await asyncio.gather(*(hear(one(number)) for number in range(32)))
        assert [heard.tokens for heard in together] == [heard.tokens for heard in solo]
        assert [heard.text for heard in together] == [heard.text for heard in solo]
        assert all(heard.text for heard in solo)
        assert {heard.group for heard in together} == {"g0", "g1"}
        found = await here.until(lambda found: idle(found) and known(found), "pages are free, and the index is theirs")
        assert all(group.load.pool_consistent for group in found.groups)


async def test_a_follow_up_in_a_session_finds_its_pages(model: str, redis_server: RedisServer, tmp_path: Path) -> None:
    async with cluster(model, redis_server, tmp_path, 2) as here:
        messages = [("user", "Tell me about the history of the city of Paris, please. " * 4)]
        first = await hear(here.client.chat(messages, session_id="s", **kinds(0)))
        assert first.cached == 0
        await here.until(lambda found: any(group.indexed_blocks for group in found.groups), "the router knows of pages")
        messages += [("assistant", first.text), ("user", "And its museums?")]
        second = await hear(here.client.chat(messages, session_id="s", **kinds(0)))
        assert second.group == first.group
        assert second.cached > 0


async def test_cancelled_gone_and_late_clients_free_their_pages(
    model: str, redis_server: RedisServer, tmp_path: Path
) -> None:
    async with cluster(model, redis_server, tmp_path, 1) as here:
        endless = {"max_tokens": LONG, "ignore_eos": True}
        gone = AsyncClient(f"127.0.0.1:{here.router.port}")
        streams = [here.client.generate("a", **endless), gone.generate("b", **endless)]
        for stream in streams:
            await anext(stream)
        await here.until(lambda found: found.groups[0].load.used_blocks, "pages are in use")
        streams[0].cancel()
        await gone.close()
        with pytest.raises(DeadlineExceeded):
            await here.client.generate("c", timeout_s=0.2, **endless).text()
        found = await here.until(idle, "all pages are free")
        assert found.active_requests == 0
        assert found.groups[0].load.pool_consistent


async def test_a_group_is_killed_and_the_streams_go_on_with_the_same_tokens(
    model: str, redis_server: RedisServer, tmp_path: Path
) -> None:
    async with cluster(model, redis_server, tmp_path, 2) as here:

        def one(number: int) -> AsyncStream:
            return here.client.generate(PROMPTS[number % len(PROMPTS)], **{**kinds(number), "max_tokens": 300})

        solo = [await hear(one(number)) for number in range(6)]
        running = [Heard([], "", "", 0) for _ in range(6)]
        tasks = [asyncio.create_task(hear(one(number), running[number])) for number in range(6)]
        await eventually(lambda: all(len(heard.tokens) >= 20 for heard in running), "all have begun")
        victim = running[0].group
        here.groups[int(victim[1:])].kill()
        assert any(len(heard.tokens) < 300 for heard in running if heard.group == victim), "killed too late to matter"
        moved = await asyncio.gather(*tasks)
        assert [heard.tokens for heard in moved] == [heard.tokens for heard in solo]
        assert [heard.text for heard in moved] == [heard.text for heard in solo]
        # Another one takes its place, under its name.
        with processes.groups(here.config, tmp_path, victim):
            await here.until(serving(2), "the replacement serves")
            assert (await hear(one(0))).tokens == solo[0].tokens


async def test_a_frozen_group_is_given_up(model: str, redis_server: RedisServer, tmp_path: Path) -> None:
    async with cluster(model, redis_server, tmp_path, 2) as here:
        asked = {"temperature": 0.0, "max_tokens": 300, "ignore_eos": True}
        solo = await hear(here.client.generate("a b c", **asked))
        heard = Heard([], "", "", 0)
        task = asyncio.create_task(hear(here.client.generate("a b c", **asked), heard))
        await eventually(lambda: len(heard.tokens) >= 20, "it has begun")
        here.groups[int(heard.group[1:])].signal(signal.SIGSTOP)
        assert (await task).tokens == solo.tokens


async def test_the_last_group_dies_and_nothing_hangs(model: str, redis_server: RedisServer, tmp_path: Path) -> None:
    async with cluster(model, redis_server, tmp_path, 1, group_wait_s=0.5) as here:
        stream = here.client.generate("a", max_tokens=LONG, ignore_eos=True)
        await anext(stream)
        here.groups[0].kill()
        with pytest.raises(GroupLost) as caught:
            await stream.text()
        assert caught.value.code == "UNAVAILABLE"
        with pytest.raises(NoGroup):
            await here.client.generate_text("b")


async def test_redis_dies_and_comes_back_empty(model: str, tmp_path: Path) -> None:
    with running_redis() as server:
        async with cluster(model, server, tmp_path, 2) as here:
            asked = kinds(1)
            before = await hear(here.client.generate("a", **asked))
            server.kill()
            await here.until(lambda found: not found.membership_live, "the loss is noticed")
            assert (await hear(here.client.generate("a", **asked))).tokens == before.tokens
            server.start()
            await here.until(lambda found: found.membership_live and serving(2)(found), "it heals")
            assert (await hear(here.client.generate("a", **asked))).tokens == before.tokens


# -- the router as a process -----------------------------------------------------------------------------------------


async def test_a_router_by_hand_drains_on_sigterm(model: str, redis_server: RedisServer, tmp_path: Path) -> None:
    config = raw_config(model, redis_server.url, f"r{next(_NAMES)}", drain_s=30.0, group_wait_s=30.0)
    with processes.groups(config, tmp_path, "g0"), processes.router(config, tmp_path) as router:
        async with AsyncClient(router.address, retry=ONCE) as client:
            stream = client.generate("a", max_tokens=200, ignore_eos=True)
            await anext(stream)
            router.signal(signal.SIGTERM)
            assert len((await hear(stream)).tokens) == 200
            assert await asyncio.to_thread(router.wait) == 0


async def test_a_killed_router_breaks_its_streams_and_frees_its_pages(
    model: str, redis_server: RedisServer, tmp_path: Path
) -> None:
    async with cluster(model, redis_server, tmp_path, 1) as here:
        with processes.router(here.config, tmp_path) as other:
            async with AsyncClient(other.address, retry=ONCE) as client:
                stream = client.generate("a", max_tokens=LONG, ignore_eos=True, timeout_s=120.0)
                await anext(stream)
                other.kill()
                with pytest.raises(QuireError) as caught:
                    await stream.text()
                assert caught.value.code == "UNAVAILABLE"
        await here.until(idle, "the group dropped what nobody reads")
        assert len((await hear(here.client.generate("a", **kinds(0)))).tokens) == 10


def test_a_wrong_configuration_is_one_line(tmp_path: Path, redis_server: RedisServer) -> None:
    for wrong in ({"redis": None}, {"worker_token": None}, {"cluster_secret": None}, {"model": "/nowhere"}):
        file = tmp_path / "quire.yaml"
        file.write_text(json.dumps({**raw_config("smollm2-135m", redis_server.url, "x"), **wrong}))
        done = subprocess.run(
            [sys.executable, "-m", "router.server", "--config", str(file)],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 1
        assert next(iter(wrong)) in done.stderr or "/nowhere" in done.stderr
        assert done.stderr.startswith("error: ")
        assert done.stderr.count("\n") == 1
