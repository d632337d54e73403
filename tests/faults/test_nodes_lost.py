"""A cluster of several Ray nodes, all on this machine: one of them is lost under load."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from cluster.errors import QuireError
from cluster.pb.inference_pb2 import Group
from cluster.serve import environment
from router.client import Client, RetryPolicy
from tests.support.served import Served, all_serve, idle, is_alive, serving, until

pytestmark = pytest.mark.slow

CALL_S = 180.0
BACK_S = 120.0
LOST_NODE = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 500}
LOST_NODE |= {"health_check_timeout_ms": 1000, "health_check_failure_threshold": 3}
"""How soon Ray takes a silent node for dead; by default it needs some fifteen seconds."""

RESOURCES = ["--set", "group_resources={group: 1}", "--set", "router_resources={router: 1}"]
SMALL = ["--kv-memory", "64MiB", "--set", "engine.max_context_tokens=2048", "--set", "engine.threads=1"]


class Nodes:
    """Raylets of a cluster: a head for routers and Redis, and places for one group each."""

    def __init__(self, places: int) -> None:
        environment.prepare()
        from ray.cluster_utils import Cluster

        self._cluster: Any = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 2, "resources": {"router": 2}, "_system_config": LOST_NODE},
        )
        self.places = [self._cluster.add_node(num_cpus=2, resources={"group": 1}) for _ in range(places)]

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def of(self, pid: int) -> Any:
        """The node that runs a process."""
        above = {parent.pid for parent in psutil.Process(pid).parents()}
        for node in self.places:
            if raylet(node).pid in above:
                return node
        raise AssertionError(f"process {pid} runs on none of the nodes")

    def close(self) -> None:
        self._cluster.shutdown()


def raylet(node: Any) -> psutil.Process:
    (found,) = node.all_processes["raylet"]
    return psutil.Process(found.process.pid)


def lose(node: Any) -> list[psutil.Process]:
    """As when its machine loses power: the raylet and all below it at once. Returns what ran there."""
    doomed = [raylet(node), *raylet(node).children(recursive=True)]
    for process in doomed:
        process.suspend()  # nobody may say goodbye
    for process in doomed:
        process.kill()
    return doomed


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    made = Nodes(3)
    yield made
    made.close()


@pytest.fixture(scope="module")
def served(nodes: Nodes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    before = os.environ.get("RAY_ADDRESS")
    os.environ["RAY_ADDRESS"] = nodes.address
    folder: Path = tmp_path_factory.mktemp("served")
    try:
        with serving(folder, "--groups", "2", "--tp", "2", *SMALL, *RESOURCES) as running:
            yield running
    finally:
        os.environ.pop("RAY_ADDRESS", None)
        if before is not None:
            os.environ["RAY_ADDRESS"] = before


class Stream:
    """One client's answer, and the group that it came from."""

    def __init__(self, address: str, number: int) -> None:
        self.group = ""
        self.tokens: list[int] = []
        self.error: QuireError | None = None
        self._address, self._number = address, number

    def run(self) -> None:
        with Client(self._address, retry=RetryPolicy(attempts=1)) as client:
            prompt = f"Number {self._number} of many stories begins"
            try:
                for event in client.generate(prompt, max_tokens=400, ignore_eos=True, seed=7, timeout_s=CALL_S):
                    if event.HasField("started"):
                        self.group = event.started.group_id
                    self.tokens += event.delta.token_ids
            except QuireError as error:
                self.error = error


def test_a_node_is_lost_under_load(nodes: Nodes, served: Served) -> None:
    """Its group comes back on another node by itself, and the other group's streams never notice."""
    with served.client() as client:
        found = until(client, lambda now: all_serve(2)(now) and idle(now), "two idle groups")
        places = {group.group_id: nodes.of(group.rank_pids[0]) for group in found.groups}
        assert len({raylet(node).pid for node in places.values()}) == 2, "each node has room for one group"
        for group in found.groups:
            assert {raylet(nodes.of(pid)).pid for pid in group.rank_pids} == {raylet(places[group.group_id]).pid}
        streams = [Stream(served.address, number) for number in range(6)]
        with ThreadPoolExecutor(len(streams)) as threads:
            running = [threads.submit(stream.run) for stream in streams]
            end = time.monotonic() + CALL_S
            while not all(len(stream.tokens) > 5 or stream.error for stream in streams):
                assert time.monotonic() < end
                time.sleep(0.05)
            lost, kept = sorted(places, key=lambda name: sum(stream.group == name for stream in streams))
            assert {stream.group for stream in streams} == {lost, kept}
            doomed = lose(places[lost])
            lost_at = time.monotonic()
            for one in running:
                one.result(CALL_S)
        streams_s = time.monotonic() - lost_at
        untouched = [stream for stream in streams if stream.group == kept]
        assert all(stream.error is None and len(stream.tokens) == 400 for stream in untouched)
        for stream in streams:
            assert stream.error is not None or len(stream.tokens) == 400
            assert stream.error is None or stream.error.reason in {"GROUP_LOST", "NO_GROUP"}

        def is_back(now: Any) -> bool:
            return all_serve(2)(now) and idle(now) and lost not in {group.group_id for group in now.groups}

        now = until(client, is_back, "another group", BACK_S)
        back_s = time.monotonic() - lost_at
        survivor = _group(now.groups, kept)
        assert survivor.incarnation == _group(found.groups, kept).incarnation, "the other group was not touched"
        (fresh,) = [group for group in now.groups if group.group_id != kept]
        assert raylet(nodes.of(fresh.rank_pids[0])).pid not in {raylet(places[kept]).pid}
        alone = Stream(served.address, untouched[0]._number)
        alone.run()
        assert alone.tokens == untouched[0].tokens, "the tokens are those that come without a loss"
        assert not [process for process in doomed if is_alive(process)]
        print(f"node lost: {streams_s:.1f} s to the last stream's end, its group was back after {back_s:.1f} s")


def _group(groups: Any, group_id: str) -> Group:
    (found,) = [group for group in groups if group.group_id == group_id]
    return found
