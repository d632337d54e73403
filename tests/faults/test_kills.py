"""`quire serve` under load: each kind of process is killed or frozen in turn; what goes on, what comes back."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psutil
import pytest

from cluster.errors import QuireError
from cluster.pb.inference_pb2 import Cluster, Group
from router.client import Client, RetryPolicy
from tests.support.models import tiny_llama
from tests.support.served import Served, all_serve, command_line, idle, is_alive, serving, until

CLIENTS = 6
TOKENS = 120
CALL_S = 60.0
"""No call may take longer, whatever happens: a stream that hangs ends by this deadline and fails the test."""

CLEAR = {"GROUP_LOST", "NO_GROUP", "OVERLOADED", "DRAINING", "INTERNAL"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    # Small weights, so that starts and steps are short; all else is as in service.
    model = tiny_llama(tmp_path_factory.mktemp("tiny"), layers=4, hidden=128)
    settings = ["--set", "engine.max_context_tokens=2048", "--set", "worker.lease_s=3"]
    with serving(
        tmp_path_factory.mktemp("faults"),
        "--model",
        str(model.path),
        "--groups",
        "2",
        "--kv-memory",
        "64MiB",
        *settings,
    ) as running:
        yield running


@pytest.fixture
def client(served: Served) -> Iterator[Client]:
    with served.client() as made:
        until(made, lambda found: all_serve(2)(found) and idle(found), "two idle groups")
        yield made


@dataclass
class Load:
    """Clients that ask the same seeded questions again and again; what they got."""

    whole: int = 0
    failures: list[QuireError] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    begun: dict[int, int] = field(default_factory=dict)  # of each client's call under way, tokens received
    stop: threading.Event = field(default_factory=threading.Event)


def question(number: int) -> dict[str, Any]:
    return {"max_tokens": TOKENS, "ignore_eos": True, "seed": number, "temperature": 0.8, "timeout_s": CALL_S}


@contextmanager
def loaded(served: Served, expected: dict[int, list[int]]) -> Iterator[Load]:
    """Clients run for the time of the block; they are joined at its end."""
    load = Load()

    def ask(number: int) -> None:
        with Client(served.address, retry=RetryPolicy(attempts=1)) as client:
            while not load.stop.is_set():
                tokens: list[int] = []
                load.begun[number] = 0
                try:
                    for event in client.generate(f"Question {number}", **question(number)):
                        tokens += event.delta.token_ids
                        load.begun[number] = len(tokens)
                    load.whole += 1
                    if tokens != expected[number]:
                        load.wrong.append(f"{number}: {tokens} instead of {expected[number]}")
                except QuireError as error:
                    load.failures.append(error)
                    if tokens != expected[number][: len(tokens)]:
                        load.wrong.append(f"{number}: {tokens} is no beginning of {expected[number]}")
                    time.sleep(0.2)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield load
    finally:
        load.stop.set()
        for thread in threads:
            thread.join(CALL_S + 10)
        assert not any(thread.is_alive() for thread in threads), "a call hangs"


@pytest.fixture
def expected(client: Client) -> dict[int, list[int]]:
    def solo(number: int) -> list[int]:
        return [
            token
            for event in client.generate(f"Question {number}", **question(number))
            for token in event.delta.token_ids
        ]

    return {number: solo(number) for number in range(CLIENTS)}


def busy(load: Load) -> None:
    """Return when every client is in the middle of an answer."""
    end = time.monotonic() + CALL_S
    while time.monotonic() < end:
        if len(load.begun) == CLIENTS and all(0 < tokens < TOKENS - 20 for tokens in list(load.begun.values())):
            return
        time.sleep(0.005)
    raise AssertionError(f"never busy: {load.begun} {load.failures}")


def more(load: Load, count: int = 2 * CLIENTS) -> None:
    """Return when so many more answers have come whole."""
    before, end = load.whole, time.monotonic() + 2 * CALL_S
    while load.whole < before + count:
        assert time.monotonic() < end, f"no answers any more: {load.failures[-3:]}"
        time.sleep(0.05)


def replaced(incarnation: str) -> Any:
    """All serve, and this one is not among them."""
    return lambda found: all_serve(2)(found) and incarnation not in {group.incarnation for group in found.groups}


def end_well(client: Client, load: Load) -> None:
    assert load.wrong == []
    assert {error.reason for error in load.failures} <= CLEAR
    until(client, lambda found: all_serve(2)(found) and idle(found), "idle and consistent")


def some_group(client: Client) -> Group:
    """The one with most to do."""
    found: Cluster = until(
        client, lambda found: any(group.load.running_requests for group in found.groups), "a group is busy"
    )
    return max(found.groups, key=lambda group: group.load.running_requests)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_is_killed_or_frozen(
    served: Served, client: Client, expected: dict[int, list[int]], number: signal.Signals
) -> None:
    with loaded(served, expected) as load:
        victim = some_group(client)
        busy(load)
        process = psutil.Process(victim.rank_pids[0])
        process.send_signal(number)
        more(load)
        until(client, replaced(victim.incarnation), "a new group")
        assert not is_alive(process), "a frozen rank stays behind"
        more(load)
    assert load.failures == [], "another group was there: streams move, none breaks"
    end_well(client, load)


def test_a_supervisor_is_killed(served: Served, client: Client, expected: dict[int, list[int]]) -> None:
    before = {group.incarnation: group.rank_pids[0] for group in client.cluster().groups}

    def one_is_new(found: Cluster) -> bool:
        return all_serve(2)(found) and sum(group.incarnation in before for group in found.groups) == 1

    with loaded(served, expected) as load:
        busy(load)
        replicas = [one for one in served.descendants() if "ServeReplica:quire:Group" in command_line(one)]
        next(one for one in replicas if is_alive(one)).kill()
        more(load)
        found = until(client, one_is_new, "one group is replaced, the other goes on")
        kept = {group.incarnation for group in found.groups}
        assert [pid for incarnation, pid in before.items() if incarnation not in kept and psutil.pid_exists(pid)] == []
    assert load.failures == []
    end_well(client, load)


def test_the_router_is_killed(served: Served, client: Client, expected: dict[int, list[int]]) -> None:
    groups = {group.incarnation for group in client.cluster().groups}
    with loaded(served, expected) as load:
        busy(load)
        router = served.find("ServeReplica:quire:Router")
        router.kill()
        end = time.monotonic() + CALL_S
        while len(load.failures) < CLIENTS and time.monotonic() < end:
            time.sleep(0.05)
        assert {error.code for error in load.failures} == {"UNAVAILABLE"}
        more(load)
    found = until(client, lambda found: all_serve(2)(found) and idle(found), "a router at the same address")
    assert {group.incarnation for group in found.groups} == groups, "groups do not care"
    assert load.wrong == []


def test_redis_is_killed(served: Served, client: Client, expected: dict[int, list[int]]) -> None:
    groups = {group.incarnation for group in client.cluster().groups}
    with loaded(served, expected) as load:
        busy(load)
        redis = served.redis("control")
        redis.kill()
        more(load)
        until(client, lambda found: found.membership_live, "membership is live again")
        assert served.redis("control").pid != redis.pid
        more(load)
    assert load.failures == []
    found = until(client, all_serve(2), "both groups")
    assert {group.incarnation for group in found.groups} == groups
    end_well(client, load)


def test_a_new_group_is_found_after_redis_lost_everything(served: Served, client: Client) -> None:
    served.redis("control").kill()
    until(client, lambda found: found.membership_live, "membership is live again")
    victim = client.cluster().groups[0]
    psutil.Process(victim.rank_pids[0]).kill()
    until(client, replaced(victim.incarnation), "a new group is announced and found")
    assert client.generate_text("a", max_tokens=4, ignore_eos=True, timeout_s=CALL_S)
