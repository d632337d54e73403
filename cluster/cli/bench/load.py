"""Sends requests at a cluster and notes when what came back. One event loop; the clock is ``time.perf_counter``."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.cli.bench.stats import Record
from cluster.cli.bench.workload import Item
from cluster.errors import QuireError
from router.client import AsyncClient

Progress = Callable[[Record], None]
"""Told of each request that has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSettings:
    """How requests are sent: ``concurrency`` at once, or else at ``rate`` a second (open loop), or else when due."""

    rate: float | None = None
    concurrency: int | None = None
    duration_s: float | None = None  # none is sent after it; those under way may finish
    timeout_s: float | None = None  # of each request
    seed: int = 0
    model: str = ""


def poisson(rate: float, seed: int) -> Iterator[float]:
    """Times in seconds of arrivals at ``rate`` a second: gaps are exponential. The same for the same seed; endless."""
    generator = random.Random(seed)
    now = 0.0
    while True:
        now += generator.expovariate(rate)
        yield now


def due_times(items: Sequence[Item], settings: LoadSettings) -> list[float]:
    """When each request is to be sent, in an open loop; seconds after the start."""
    if settings.rate is not None:
        return [due for due, _ in zip(poisson(settings.rate, settings.seed), items, strict=False)]
    first = min((item.at_s for item in items if item.at_s is not None), default=0.0)
    return [0.0 if item.at_s is None else item.at_s - first for item in items]


@dataclass(slots=True)
class Outcome:
    """Everything that was seen, also of a run that was cut short."""

    records: list[Record]
    duration_s: float
    interrupted: bool = False


async def run(
    client: AsyncClient,
    items: Sequence[Item],
    settings: LoadSettings,
    stop: asyncio.Event,
    progress: Progress = lambda record: None,
) -> Outcome:
    """Send all; return when all have ended. ``stop``: cancel what is under way and return what there is."""
    records: list[Record] = []
    start = time.perf_counter()
    sender = asyncio.create_task(_send(client, items, settings, start, records, progress))
    stopper = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({sender, stopper}, return_when=asyncio.FIRST_COMPLETED)
        if sender.done():
            sender.result()
        return Outcome(records, time.perf_counter() - start, interrupted=not sender.done())
    finally:
        for task in (sender, stopper):
            task.cancel()
        await asyncio.gather(sender, stopper, return_exceptions=True)


async def _send(
    client: AsyncClient,
    items: Sequence[Item],
    settings: LoadSettings,
    start: float,
    records: list[Record],
    progress: Progress,
) -> None:
    free = asyncio.Semaphore(settings.concurrency or len(items))
    async with asyncio.TaskGroup() as group:
        async for item, due in _paced(items, settings, start):
            await free.acquire()
            now = time.perf_counter()
            if settings.duration_s is not None and now - start >= settings.duration_s:
                return
            # In a closed loop a request is due when a place is free.
            record = Record(due=now if settings.concurrency else start + due)
            records.append(record)
            group.create_task(_one(client, item, settings, record, free, progress))


async def _paced(items: Sequence[Item], settings: LoadSettings, start: float) -> AsyncIterator[tuple[Item, float]]:
    """Each request with its due time, not before it; in a closed loop at once."""
    if settings.concurrency:
        for item in items:
            yield item, 0.0
        return
    timed = sorted(zip(due_times(items, settings), range(len(items)), strict=True))
    for due, index in timed:
        if settings.duration_s is not None and due >= settings.duration_s:
            return
        await asyncio.sleep(max(0.0, start + due - time.perf_counter()))
        yield items[index], due


async def _one(
    client: AsyncClient,
    item: Item,
    settings: LoadSettings,
    record: Record,
    free: asyncio.Semaphore,
    progress: Progress,
) -> None:
    """Errors are results here: they go into the record."""
    try:
        stream = client.generate(
            item.prompt,
            model=settings.model,
            max_tokens=item.max_tokens,
            temperature=0.0,
            seed=0,
            ignore_eos=True,
            session_id=item.session or None,
            timeout_s=settings.timeout_s,
        )
        async with stream:
            async for event in stream:
                _note(record, event, time.perf_counter())
    except QuireError as error:
        record.error = error.reason
    finally:
        free.release()
    record.finished = time.perf_counter()
    progress(record)


def _note(record: Record, event: Any, now: float) -> None:
    if event.HasField("started"):
        record.prompt_tokens = event.started.prompt_tokens
        cached = event.started.cached_tokens
        record.cached_tokens = cached.group + cached.redis
    elif event.HasField("delta") and event.delta.token_ids:
        record.arrivals.append((now, len(event.delta.token_ids)))
