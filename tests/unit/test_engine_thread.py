"""The engine's thread, around a scripted engine: what it takes in, what it tells, and how it breaks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import pytest

from cluster.blocks import BlockHash
from cluster.errors import GroupLost, Overloaded, QuireError
from tests.support.scripted_engine import ScriptedEngine
from workers.engine_thread import EngineThread, StepReport
from workers.request import Failed, Output, Request, RequestKey, SamplingParams


class Listener:
    def __init__(self) -> None:
        self.reports: list[StepReport] = []
        self.failures: list[BaseException] = []
        self.outputs: list[Output] = []
        self.threads: set[int] = set()
        self.deaf_to: str | None = None  # raises at the report that holds this request's end
        self.raised: Exception | None = None
        self.late: list[StepReport] = []  # that came behind the one that was refused, or behind the failure

    def on_report(self, report: StepReport) -> None:
        if self.failures or self.raised is not None:
            self.late.append(report)
        self.threads.add(threading.get_ident())
        for output in (output for outputs in report.outputs.values() for output in outputs):
            if output.key.request_id == self.deaf_to and output.end is not None:
                self.raised = RuntimeError("cannot tell")
                raise self.raised
        self.reports.append(report)
        self._keep(report.outputs)

    def on_failure(self, error: BaseException, outputs: Mapping[str, Sequence[Output]]) -> None:
        self.failures.append(error)
        self._keep(outputs)

    def _keep(self, outputs: Mapping[str, Sequence[Output]]) -> None:
        for owner, some in outputs.items():
            assert all(output.key.owner == owner for output in some)
            self.outputs += some

    def ends(self, request_id: str) -> list[Output]:
        return [output for output in self.outputs if output.key.request_id == request_id and output.end is not None]


class Running:
    def __init__(self, **settings: Any) -> None:
        self.engine = ScriptedEngine()
        self.listener = Listener()
        loop = asyncio.get_running_loop()
        settings = {"max_waiting": 10, **settings}
        self.thread = EngineThread(cast(Any, self.engine), self.listener, loop, **settings)

    async def __aenter__(self) -> Running:
        self.thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.engine.gate.set()
        assert await asyncio.to_thread(self.thread.stop, 30)


def request(request_id: str, owner: str = "r", *, max_tokens: int = 3, n: int = 1, sequence: int = 1) -> Request:
    key = RequestKey(owner, request_id, 1)
    sampling = SamplingParams(max_tokens=max_tokens, seed=0, n=n)
    return Request(key=key, prompt=(1, 2), sampling=sampling, root=BlockHash(bytes(32)), submit_sequence=sequence)


async def eventually(condition: Callable[[], object], what: str) -> None:
    try:
        async with asyncio.timeout(30):
            while not condition():  # noqa: ASYNC110 - of another thread, which sets no event
                await asyncio.sleep(0.002)
    except TimeoutError:
        raise AssertionError(f"never: {what}") from None


async def test_outputs_come_on_the_loop_in_one_report_for_each_step() -> None:
    async with Running() as running:
        for name in ("a", "b"):
            running.thread.submit(request(name, owner=name, n=2))
        await eventually(lambda: running.listener.ends("a") and running.listener.ends("b"), "both end")
        listener = running.listener
        assert listener.threads == {threading.get_ident()}
        with_outputs = [report.step for report in listener.reports if report.outputs]
        assert len(with_outputs) == len(set(with_outputs))
        assert len(listener.ends("a")) == 2
        await eventually(lambda: running.thread.open_requests == 0, "none is open")


async def test_when_it_goes_idle_the_pool_is_checked_once() -> None:
    async with Running() as running:
        running.thread.submit(request("a"))
        await eventually(lambda: running.listener.ends("a"), "it ends")
        await eventually(lambda: running.engine.checks == 1, "one check")
        beat = running.thread.heartbeat()
        assert not beat.busy
        assert beat.step_age_s == 0
        assert beat.pool_consistent
        running.engine.inconsistent = True
        running.thread.submit(request("b"))
        await eventually(lambda: not running.listener.reports[-1].pool_consistent, "the report says so")
        assert running.engine.checks == 2
        assert not running.thread.heartbeat().pool_consistent


async def test_an_idle_thread_takes_no_steps() -> None:
    async with Running() as running:
        running.thread.submit(request("a"))
        await eventually(lambda: running.engine.checks == 1, "it is idle")
        steps = running.engine.steps
        running.thread.cancel(RequestKey("r", "unknown", 1))
        await eventually(lambda: running.engine.checks == 2, "it was woken, and looked")
        assert running.engine.steps == steps


async def test_a_long_step_is_busy_and_its_age_is_on_the_clock_that_was_given() -> None:
    now = 100.0
    async with Running(clock=lambda: now) as running:
        running.engine.gate.clear()
        running.thread.submit(request("a"))
        await eventually(running.engine.stepping.is_set, "a step begins")
        now = 142.0
        beat = running.thread.heartbeat()
        assert beat.busy
        assert beat.step_age_s == 42.0
        assert beat.failure is None


async def test_a_step_that_gets_on_is_young_however_long_it_takes() -> None:
    """Health is progress: a long prefill is healthy, a step that stands still is not."""
    now = 100.0
    async with Running(clock=lambda: now) as running:
        running.engine.gate.clear()
        running.thread.submit(request("a"))
        await asyncio.to_thread(running.engine.stepping.wait, 30)
        for _ in range(3):
            now += 60.0
            assert running.thread.heartbeat().step_age_s >= 60.0
            running.engine.layers += 1
            assert running.thread.heartbeat().step_age_s == 0.0
        now += 7.0
        assert running.thread.heartbeat().step_age_s == 7.0


async def test_a_group_that_loses_a_rank_while_it_rests_breaks_too() -> None:
    async with Running() as running:
        running.engine.lost = "rank 1 is gone"
        assert running.thread.heartbeat().failure == "rank 1 is gone", "before the thread has noticed"
        await eventually(lambda: running.listener.failures, "the owner is told")
        assert str(running.thread.failed) == "rank 1 is gone"
        with pytest.raises(GroupLost):
            running.thread.submit(request("a"))


async def test_the_queue_is_bounded_and_cancels_are_never_refused() -> None:
    async with Running(max_waiting=4) as running:
        running.engine.gate.clear()
        running.thread.submit(request("first"))
        await eventually(running.engine.stepping.is_set, "a step begins")
        names = [f"r{number}" for number in range(4 + 64)]
        for name in names:
            running.thread.submit(request(name))
        with pytest.raises(Overloaded):
            running.thread.submit(request("one too many"))
        for name in names:
            running.thread.cancel(RequestKey("r", name, 1))
        running.engine.gate.set()
        await eventually(lambda: running.thread.open_requests == 0, "all are gone")
        assert {output.key.request_id for output in running.listener.outputs} == {"first"}


async def test_losing_an_owner_cancels_what_runs_and_what_is_queued() -> None:
    async with Running() as running:
        running.engine.gate.clear()
        running.thread.submit(request("runs", max_tokens=1000))
        running.thread.submit(request("other", owner="stays", max_tokens=1000))
        await eventually(running.engine.stepping.is_set, "a step begins")
        running.thread.submit(request("queued", max_tokens=1000))
        running.thread.cancel_owner("r")
        running.thread.cancel_owner("r")
        running.engine.gate.set()
        await eventually(lambda: running.thread.open_requests == 1, "one is left")
        assert [key.owner for key in running.engine.requests] == ["stays"]
        assert not running.listener.ends("runs")
        assert "queued" not in {output.key.request_id for output in running.listener.outputs}


async def test_a_broken_step_ends_every_request_running_or_queued() -> None:
    async with Running() as running:
        running.engine.gate.clear()
        running.thread.submit(request("runs", n=2))
        await eventually(running.engine.stepping.is_set, "a step begins")
        running.thread.submit(request("queued"))
        running.engine.breakage = RuntimeError("no more pages on this card")
        running.engine.gate.set()
        await eventually(lambda: running.listener.failures, "the owner is told")
        assert running.listener.failures == [running.engine.breakage]
        for name in ("runs", "queued"):
            (end,) = running.listener.ends(name)
            assert isinstance(end.end, Failed)
            assert isinstance(end.end.error, GroupLost)
        assert running.thread.failed is running.engine.breakage
        assert running.thread.open_requests == 0
        with pytest.raises(GroupLost):
            running.thread.submit(request("late"))
        running.thread.cancel(RequestKey("r", "late", 1))


async def test_a_report_that_cannot_be_told_ends_every_request_once() -> None:
    """Those that end in it or behind it, the ones that run on, and the ones that are queued."""
    async with Running() as running:
        listener = running.listener
        listener.deaf_to = "untold"
        running.thread.submit(request("told", max_tokens=1))
        await eventually(lambda: listener.ends("told"), "the first ends")
        running.engine.gate.clear()
        running.thread.submit(request("untold", max_tokens=1, n=2))
        running.thread.submit(request("runs on", owner="other", max_tokens=10_000))
        running.engine.gate.set()
        await eventually(lambda: listener.failures, "the owner is told")
        assert listener.failures == [listener.raised]
        for name in ("untold", "runs on"):
            (end,) = listener.ends(name)
            assert isinstance(end.end, Failed)
            assert isinstance(end.end.error, GroupLost)
        (end,) = listener.ends("told")
        assert not isinstance(end.end, Failed)
        assert running.thread.heartbeat().failure == "RuntimeError: cannot tell"
        assert running.thread.open_requests == 0


async def test_reports_behind_one_that_could_not_be_told_are_told_as_lost() -> None:
    async with Running() as running:
        listener = running.listener
        listener.deaf_to = "first"
        running.engine.gate.clear()
        for tokens, name in enumerate(("first", "second", "third"), start=1):
            running.thread.submit(request(name, max_tokens=tokens))
        running.engine.gate.set()
        threading.Event().wait(0.3)  # this blocks the loop, on purpose: all reports are queued before one is told
        assert running.engine.steps >= 3
        await eventually(lambda: listener.failures, "the owner is told")
        assert listener.failures == [listener.raised]
        assert listener.late == []
        for name in ("first", "second", "third"):
            (end,) = listener.ends(name)
            assert isinstance(end.end, Failed)


async def test_an_engine_that_breaks_while_a_report_is_made_loses_no_end() -> None:
    async with Running() as running:
        running.engine.gate.clear()
        running.thread.submit(request("ends", max_tokens=1))
        running.thread.submit(request("runs", max_tokens=1000))
        await eventually(running.engine.stepping.is_set, "a step begins")
        await eventually(lambda: running.thread.open_requests == 2, "both are submitted")
        broken = RuntimeError("a count is negative")

        def load() -> Any:
            raise broken

        running.engine.load = load  # type: ignore[method-assign]
        running.engine.gate.set()
        await eventually(lambda: running.listener.failures, "the owner is told")
        assert running.listener.failures == [broken]
        assert [len(running.listener.ends(name)) for name in ("ends", "runs")] == [1, 1]


async def test_a_request_that_breaks_submit_ends_alone() -> None:
    async with Running() as running:
        bad = request("bad", sequence=7)
        bad = Request(
            key=bad.key,
            prompt=bad.prompt,
            sampling=SamplingParams(max_tokens=1, seed=0, top_k=666),
            root=bad.root,
            submit_sequence=7,
        )
        running.thread.submit(bad)
        running.thread.submit(request("good", sequence=8))
        await eventually(lambda: running.listener.ends("good"), "the good one ends")
        (end,) = running.listener.ends("bad")
        assert isinstance(end.end, Failed)
        assert type(end.end.error) is QuireError
        assert max(report.taken_in.get("r", 0) for report in running.listener.reports) == 8
        assert running.thread.failed is None


async def test_a_snapshot_contains_the_events_of_its_own_report() -> None:
    async with Running() as running:
        engine = running.engine
        blocks = [BlockHash(bytes([number]) * 32) for number in range(5)]
        engine.store(blocks[:3])
        running.thread.snapshot("r")
        await eventually(lambda: any(report.snapshots for report in running.listener.reports), "a snapshot")
        report = next(report for report in running.listener.reports if report.snapshots)
        assert set(report.snapshots["r"]) == set(blocks[:3])
        assert set(report.events.stored) == set(blocks[:3])
        engine.store(blocks[3:], dropped=blocks[:1])
        running.thread.submit(request("a"))
        await eventually(lambda: running.listener.ends("a"), "a later report")
        later = [stored for report in running.listener.reports[1:] for stored in report.events.stored]
        assert set(later) == set(blocks[3:])


async def test_stop_while_idle_while_stepping_and_before_start() -> None:
    never = Running()
    assert never.thread.stop(1)
    async with Running():
        pass
    stuck = Running()
    stuck.thread.start()
    stuck.engine.gate.clear()
    stuck.thread.submit(request("a", max_tokens=1000))
    await eventually(stuck.engine.stepping.is_set, "a step begins")
    assert not stuck.thread.stop(0.05)
    stuck.engine.gate.set()
    assert await asyncio.to_thread(stuck.thread.stop, 30)
    with pytest.raises(GroupLost):
        stuck.thread.submit(request("b"))


async def test_steps_wait_for_an_event_loop_that_is_far_behind() -> None:
    async with Running() as running:
        running.thread.submit(request("a", max_tokens=10_000))
        await eventually(running.engine.stepping.is_set, "it runs")
        before = running.engine.steps
        threading.Event().wait(0.5)  # this blocks the loop, on purpose
        assert running.engine.steps - before <= 20
        running.thread.cancel_owner("r")
