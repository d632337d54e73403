"""One engine on one thread. Everything else talks to it through a bounded queue, and hears of it once per step.

    event loop                                engine's thread
    submit, cancel, snapshot ──▶ queue ──▶ taken in between two steps ─▶ engine.step() ─┐
    on_report(StepReport) ◀── call_soon_threadsafe, once per step ◀───────────────────┘

The event loop never waits for a step; a step waits for the loop only where that is many reports behind. An exception
inside a step leaves the pool in a state that nobody knows: the engine is broken for good, every open request ends, and
the owner of the process is told. So it is when a report cannot be handed over: somebody would wait for it for ever.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from cluster.blocks import BlockHash
from cluster.errors import GroupLost, Overloaded, QuireError
from cluster.telemetry import get_logger
from workers.request import Failed, Finished, Output, Request, RequestKey

if TYPE_CHECKING:
    from workers.engine import CacheEvents, Engine, Load
    from workers.tier import TierLoad

_log = get_logger("engine")

_IDLE_WAKE_S = 1.0
"""An idle thread looks up this often, so that no lost wake-up can put it to sleep for good."""

_TIER_WAKE_S = 0.005
"""While requests only wait for the tier: it wakes the thread, but a deadline does not."""

_MAX_REPORTS = 16
"""Reports that the event loop may be behind. Then steps wait for it: tokens that nobody sends would only pile up."""

_QUEUE_SLACK = 64
"""Submits that may queue for the next step beyond what the engine accepts as waiting; more are refused at once."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Is the step loop alive? A long step is, as long as it gets on; an idle loop is, unless the group has failed."""

    steps: int
    busy: bool  # there is work
    step_age_s: float  # since the last progress, of a step or inside one; 0 when idle
    failure: str | None  # what broke the engine; the group must be replaced
    pool_consistent: bool


@dataclass(frozen=True, slots=True)
class StepReport:
    """What changed since the last report. Its parts are of one moment: the end of a step, or of an idle round."""

    step: int  # 0 when nothing has run yet
    outputs: Mapping[str, Sequence[Output]]  # by owner
    load: Load
    taken_in: Mapping[str, int]  # owner -> highest Submit.sequence seen since the last report, refused ones too
    events: CacheEvents
    snapshots: Mapping[str, Sequence[BlockHash]]  # owner -> all cached blocks, ``events`` of this report included
    pool_consistent: bool


class Listener(Protocol):
    """Called on the event loop."""

    def on_report(self, report: StepReport) -> None:
        """After each step, and after each idle round in which something was asked for."""

    def on_failure(self, error: BaseException, outputs: Mapping[str, Sequence[Output]]) -> None:
        """Once, instead of any further report: the engine is broken. ``outputs`` end every open request, by owner, and
        once more those whose end was in a report that ``on_report`` raised at, or that was held back since."""


class EngineThread:
    """Runs an engine. ``submit``, ``cancel`` and the like may be called from any thread and never wait for a step."""

    def __init__(
        self,
        engine: Engine,
        listener: Listener,
        loop: asyncio.AbstractEventLoop,
        *,
        max_waiting: int,
        set_up: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._listener = listener
        self._loop = loop
        self._set_up = set_up
        self._clock = clock
        self._max_queued = max_waiting + _QUEUE_SLACK
        self._wake = threading.Condition()
        # Below: under the lock of _wake.
        self._inbox: deque[Callable[[], None]] = deque()  # in the order of asking
        self._queued: set[RequestKey] = set()  # submits in the inbox
        self._stopping = False
        self._tier_spoke = False
        # Below: written by the engine's thread alone. Others read single attributes, which needs no lock.
        self._open: dict[RequestKey, int] = {}  # samples that have not ended yet
        self._taken_in: dict[str, int] = {}  # since the last report
        self._snapshots: list[str] = []
        self._pending: list[Output] = []
        self._checked = True
        self._pool_consistent = True
        self._steps = 0
        self._busy = False
        self._last_progress = clock()
        self._failure: BaseException | None = None
        self._report_slots = threading.Semaphore(_MAX_REPORTS)
        # Below: of whoever asks for heartbeats.
        self._seen_progress = 0
        self._seen_at = clock()
        # Below: of the event loop alone.
        self._undelivered: list[StepReport] = []  # one that on_report raised at, and all behind it
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # -- from any thread ---------------------------------------------------------------------------------------------

    @property
    def failed(self) -> BaseException | None:
        """What broke the engine, if anything did."""
        return self._failure

    @property
    def open_requests(self) -> int:
        """Submitted ones that have not ended, the queued ones included."""
        return len(self._open) + len(self._queued)

    def now(self) -> float:
        """The engine's clock, in seconds: deadlines and arrivals are of it."""
        return self._clock()

    def heartbeat(self) -> Heartbeat:
        """The state of the step loop now."""
        now, progress = self._clock(), self._engine.progress()
        if progress != self._seen_progress:
            self._seen_progress, self._seen_at = progress, now
        busy, age = self._busy, now - max(self._last_progress, self._seen_at)
        failure = (
            self._engine.failure() if self._failure is None else f"{type(self._failure).__name__}: {self._failure}"
        )
        return Heartbeat(self._steps, busy, max(0.0, age) if busy else 0.0, failure, self._pool_consistent)

    def tier_load(self) -> TierLoad | None:
        """Of the tier behind the engine's pages, now."""
        return self._engine.tier_load()

    def start(self) -> None:
        """Begin. The loop that was given must be running by then."""
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Queue for the next step. Raises Overloaded or GroupLost; the engine's refusal comes as a Failed output."""
        with self._wake:
            if self._failure is not None or self._stopping:
                raise GroupLost("the group's engine does not run")
            if len(self._queued) >= self._max_queued:
                raise Overloaded(f"{len(self._queued)} requests wait for the next step", retry_after_ms=1000)
            self._queued.add(request.key)
            self._inbox.append(lambda: self._take_in(request))
            self._wake.notify()

    def cancel(self, key: RequestKey) -> None:
        """Forget a request before the next step. Idempotent; no output follows."""
        self._ask(lambda: self._drop(key))

    def cancel_owner(self, owner: str) -> None:
        """Forget all requests of an owner before the next step, those that are queued here included."""
        self._ask(lambda: self._drop_owner(owner))

    def snapshot(self, owner: str) -> None:
        """Ask for all cached blocks in the next report."""
        self._ask(lambda: self._snapshots.append(owner))

    def fail_all(self, error: QuireError) -> None:
        """End every open request with ``error`` before the next step."""
        self._ask(lambda: self._end_all(error))

    def stop(self, timeout_s: float) -> bool:
        """End the thread after the step that runs; what is open stays without an end. False when it does not end."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _ask(self, call: Callable[[], None]) -> None:
        # Unbounded on purpose: a cancel that is refused would leave pages taken. Each one answers a submit or a stream.
        with self._wake:
            if self._failure is None and not self._stopping:
                self._inbox.append(call)
                self._wake.notify()

    # -- the engine's thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._set_up()
            self._engine.listen(self._hear_tier)
            while not self._stopping:
                asked = self._take_inbox()
                if self._engine.has_work:
                    self._step()
                    if self._engine.waits_for_tier and not (asked or self._pending or self._snapshots):
                        self._await_tier()
                        continue
                elif not asked and not self._snapshots:
                    self._rest()
                    continue
                self._report()
            self._take_inbox()  # what was asked for before the stop: its answers are still owed
            self._report()
        except BaseException as error:  # noqa: BLE001 - whatever it is, it must not end this thread in silence
            self._break(error)

    def _take_inbox(self) -> bool:
        """Carry out what was asked for; whether there was anything."""
        with self._wake:
            inbox, self._inbox = self._inbox, deque()
        for call in inbox:
            call()
        return bool(inbox)

    def _step(self) -> None:
        if not self._busy:
            self._last_progress = self._clock()
            self._busy = True
        self._checked = False
        self._pending += self._engine.step(self._clock())
        self._steps += 1
        self._last_progress = self._clock()

    def _rest(self) -> None:
        """Nothing to do: check the pool once, then wait to be woken. Raises GroupLost where a rank has been lost."""
        self._busy = False
        if (failure := self._engine.failure()) is not None:
            raise GroupLost(failure)
        if not self._checked:
            self._check()
            self._report()  # of what the check found, and of the freed pages
        with self._wake:
            if not self._inbox and not self._stopping:
                self._wake.wait(_IDLE_WAKE_S)

    def _await_tier(self) -> None:
        with self._wake:
            if not self._inbox and not self._stopping and not self._tier_spoke:
                self._wake.wait(_TIER_WAKE_S)
            self._tier_spoke = False

    def _hear_tier(self) -> None:
        # From any thread.
        with self._wake:
            self._tier_spoke = True
            self._wake.notify()

    def _check(self) -> None:
        self._checked = True
        try:
            self._engine.check()
            self._pool_consistent = True
        except Exception:  # noqa: BLE001 - reported, whatever it is
            self._pool_consistent = False
            _log.exception("the pool of pages is inconsistent")

    def _take_in(self, request: Request) -> None:
        key = request.key
        known = key in self._open
        self._open.setdefault(key, request.sampling.n)  # before it leaves the queue: nobody may count it as ended
        with self._wake:
            self._queued.discard(key)
        self._taken_in[key.owner] = max(request.submit_sequence, self._taken_in.get(key.owner, 0))
        try:
            self._engine.submit(request)
        except QuireError as error:
            self._refuse(key, known, error)
        except Exception as error:  # noqa: BLE001 - one request's fault, as far as known; the idle check looks for more
            _log.exception("request %s could not be taken in", key.request_id)
            self._refuse(key, known, QuireError(f"internal error: {type(error).__name__}"))

    def _refuse(self, key: RequestKey, known: bool, error: QuireError) -> None:
        if not known:  # else one of this key runs, and goes on
            self._open.pop(key, None)
        self._pending.append(Output(key, end=Failed(error)))

    def _drop(self, key: RequestKey) -> None:
        self._checked = False
        self._engine.cancel(key)
        self._open.pop(key, None)

    def _drop_owner(self, owner: str) -> None:
        self._checked = False
        self._engine.cancel_owner(owner)
        for key in [key for key in self._open if key.owner == owner]:
            del self._open[key]

    def _end_all(self, error: QuireError) -> None:
        for key in list(self._open):
            self._drop(key)
            self._pending.append(Output(key, end=Failed(error)))

    def _note_ends(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            if isinstance(output.end, Failed):
                self._open.pop(output.key, None)
            elif isinstance(output.end, Finished) and output.key in self._open:
                self._open[output.key] -= 1
                if not self._open[output.key]:
                    del self._open[output.key]

    def _report(self) -> None:
        events = self._engine.take_cache_events()  # before the snapshots, so that those contain it
        snapshots: dict[str, Sequence[BlockHash]] = {owner: self._engine.cached_hashes() for owner in self._snapshots}
        report = StepReport(
            step=self._steps,
            outputs=_by_owner(self._pending),
            load=self._engine.load(),
            taken_in=self._taken_in,
            events=events,
            snapshots=snapshots,
            pool_consistent=self._pool_consistent,
        )
        # Only now, when nothing of the engine can raise any more: until here _break would tell what is pending.
        self._note_ends(self._pending)
        self._pending, self._taken_in, self._snapshots = [], {}, []
        while not self._report_slots.acquire(timeout=_IDLE_WAKE_S):
            if self._loop.is_closed():
                return
        self._tell(lambda: self._deliver(report))

    def _deliver(self, report: StepReport) -> None:
        # On the event loop.
        self._report_slots.release()
        if self._undelivered:
            self._undelivered.append(report)
            return
        try:
            self._listener.on_report(report)
        except Exception as error:  # noqa: BLE001 - whatever it is, those who wait for this report must hear of it
            self._undelivered.append(report)
            self._ask(partial(_raise, error))

    def _deliver_failure(self, error: BaseException, outputs: Sequence[Output]) -> None:
        # On the event loop, behind every report.
        told = {output.key for output in outputs if output.end is not None}
        held = [output for report in self._undelivered for some in report.outputs.values() for output in some]
        untold = dict.fromkeys(output.key for output in held if output.end is not None and output.key not in told)
        ends = [Output(key, end=Failed(_why_lost(error))) for key in untold]
        self._listener.on_failure(error, _by_owner([*outputs, *ends]))

    def _break(self, error: BaseException) -> None:
        """The end. The engine's state is unknown: nothing of it is asked any more but what this thread knows itself."""
        _log.error("the engine is broken, its group must be replaced", exc_info=error)
        self._note_ends(self._pending)
        with self._wake:
            self._failure = error
            self._inbox.clear()
            lost = [*self._open, *self._queued]
        self._open = {}
        self._queued = set()
        outputs = [*self._pending, *(Output(key, end=Failed(_why_lost(error))) for key in lost)]
        self._tell(lambda: self._deliver_failure(error, outputs))

    def _tell(self, call: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:  # the loop is closed: the process is ending, and nobody listens
            _log.debug("the event loop is gone")


def _raise(error: BaseException) -> None:
    raise error


def _why_lost(error: BaseException) -> GroupLost:
    return GroupLost(f"the group's engine broke: {type(error).__name__}")


def _by_owner(outputs: Sequence[Output]) -> dict[str, list[Output]]:
    grouped: dict[str, list[Output]] = {}
    for output in outputs:
        grouped.setdefault(output.key.owner, []).append(output)
    return grouped
