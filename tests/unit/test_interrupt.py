"""Ending a task from outside: the error comes out, once, and somebody else's cancellation wins."""

from __future__ import annotations

import asyncio

import pytest

from cluster.errors import Draining, QuireError, SlowConsumer
from router.interrupt import Interrupt


async def interrupted(*errors: QuireError, cleaned: list[bool]) -> None:
    """Wait for long, be ended by the first error, and wait again on the way out."""
    with Interrupt() as interrupt:
        for error in errors:
            asyncio.get_running_loop().call_soon(interrupt, error)
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            cleaned.append(True)


async def test_it_ends_any_wait_with_its_first_error_and_cleaning_up_may_wait() -> None:
    cleaned: list[bool] = []
    with pytest.raises(SlowConsumer):
        await interrupted(SlowConsumer("first"), Draining("second"), cleaned=cleaned)
    assert cleaned == [True]
    await asyncio.sleep(0)  # no cancellation is left over


async def test_a_block_that_ends_by_itself_is_not_touched() -> None:
    with Interrupt() as interrupt:
        await asyncio.sleep(0)
    with pytest.raises(KeyError), Interrupt():
        raise KeyError
    interrupt(QuireError("nobody there"))
    await asyncio.sleep(0)


async def test_a_cancellation_by_somebody_else_wins() -> None:
    begun = asyncio.Event()
    interrupts: list[Interrupt] = []

    async def work() -> None:
        with Interrupt() as interrupt:
            interrupts.append(interrupt)
            begun.set()
            await asyncio.sleep(60)

    task = asyncio.create_task(work())
    await begun.wait()
    interrupts[0](Draining("now"))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
