"""Groups of several ranks under load, behind the router: any rank killed or frozen, the leader too."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import psutil
import pytest

from cluster.errors import QuireError
from cluster.pb.inference_pb2 import Group
from router.client import Client, RetryPolicy
from tests.support.served import Served, all_serve, idle, is_alive, run_quire, serving, until

CALL_S = 120.0
STEP_TIMEOUT_S = 10.0
"""The default."""

GROUP_WAIT_S = 1.0
NOTICED_S = STEP_TIMEOUT_S + GROUP_WAIT_S + 3.0
BACK_S = 60.0
CLEAR = {"GROUP_LOST", "NO_GROUP"}


@pytest.fixture(scope="module")
def before() -> set[str]:
    return set(os.listdir("/dev/shm"))


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def served(
    request: pytest.FixtureRequest, before: set[str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    # How long a router waits for another group is its own matter: what is measured is when the lost one is noticed.
    settings = ["--tp", str(request.param), "--set", f"router.group_wait_s={GROUP_WAIT_S}"]
    with serving(tmp_path_factory.mktemp("served"), *settings) as running:
        yield running


@pytest.fixture
def client(served: Served) -> Iterator[Client]:
    with served.client() as made:
        until(made, lambda found: all_serve(1)(found) and idle(found), "one idle group")
        yield made


def the_group(client: Client) -> Group:
    (group,) = client.cluster().groups
    return group


def test_ranks_answer_through_the_router_and_are_shown(served: Served, client: Client) -> None:
    text = client.chat_text("What is the capital of France?", max_tokens=16, temperature=0.0, timeout_s=CALL_S)
    assert "Paris" in text
    group = the_group(client)
    assert [rank.rank for rank in group.load.ranks] == list(range(group.tp))
    assert [rank.pid for rank in group.load.ranks] == list(group.rank_pids)
    assert all(rank.weight_bytes and rank.kv_bytes for rank in group.load.ranks)
    table = run_quire("status", "--address", served.address, "--once")
    assert table.returncode == 0
    assert all(str(pid) in table.stdout for pid in group.rank_pids), table.stdout


@dataclass
class Stream:
    """One client's answer, on a thread."""

    tokens: int = 0
    error: QuireError | None = None
    ended_at: float = 0.0
    begun: threading.Event = field(default_factory=threading.Event)

    def run(self, address: str) -> None:
        with Client(address, retry=RetryPolicy(attempts=1)) as client:
            try:
                for event in client.generate("Once", max_tokens=4000, ignore_eos=True, timeout_s=CALL_S):
                    self.tokens += len(event.delta.token_ids)
                    self.begun.set()
            except QuireError as error:
                self.error = error
        self.ended_at = time.monotonic()
        self.begun.set()


def slow(*case: object) -> Any:
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("rank", "number"),
    [
        (0, signal.SIGSTOP),
        (1, signal.SIGKILL),
        slow(0, signal.SIGKILL),
        slow(1, signal.SIGSTOP),
        slow(2, signal.SIGKILL),
        slow(2, signal.SIGSTOP),
    ],
)
def test_a_rank_is_killed_or_frozen_under_load(
    served: Served, client: Client, before: set[str], rank: int, number: signal.Signals
) -> None:
    group = the_group(client)
    if rank >= group.tp:
        pytest.skip(f"a group of {group.tp} has no rank {rank}")
    streams = [Stream() for _ in range(4)]
    threads = [threading.Thread(target=stream.run, args=(served.address,)) for stream in streams]
    for thread in threads:
        thread.start()
    for stream in streams:
        assert stream.begun.wait(CALL_S)
    processes = [psutil.Process(pid) for pid in group.rank_pids]
    processes[rank].send_signal(number)
    hit_at = time.monotonic()
    for thread in threads:
        thread.join(CALL_S)
    assert {stream.error.reason for stream in streams if stream.error} <= CLEAR
    assert all(stream.error for stream in streams), "no other group was there"
    ended_s = max(stream.ended_at for stream in streams) - hit_at
    found = until(client, lambda found: all_serve(1)(found) and idle(found), "a new group", NOTICED_S + BACK_S)
    back_s = time.monotonic() - hit_at
    print(f"rank {rank}, {number.name}: streams ended after {ended_s:.1f} s, the group was back after {back_s:.1f} s")
    assert ended_s < NOTICED_S
    assert back_s < NOTICED_S + BACK_S
    assert found.groups[0].incarnation != group.incarnation
    _, left = psutil.wait_procs(processes, timeout=10)
    assert not [one for one in left if is_alive(one)]
    assert client.generate_text("a", max_tokens=4, ignore_eos=True, timeout_s=CALL_S)
    ours = {name for name in os.listdir("/dev/shm") if "quire" in name}
    assert ours <= before
