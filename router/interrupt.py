"""One way to end a call from outside: a deadline, a client that does not read, a router that goes down.

The task may be anywhere, often in a write that a slow client blocks. It is cancelled, which ends any wait, and at the
edge of the block the cancellation becomes the error that it stands for.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

from cluster.errors import QuireError


class Interrupt:
    """``with Interrupt() as interrupt:`` in a task; ``interrupt(error)`` from elsewhere ends the block with ``error``.

    As in asyncio.timeout, a cancellation by somebody else wins: the client is gone, and nobody reads the error.
    """

    def __init__(self) -> None:
        self._task: asyncio.Task[object] | None = None
        self._error: QuireError | None = None

    def __call__(self, error: QuireError) -> None:
        """The first error counts; outside of the block nothing happens."""
        if self._task is not None and self._error is None:
            self._error = error
            self._task.cancel()

    def __enter__(self) -> Interrupt:
        self._task = asyncio.current_task()
        return self

    def __exit__(self, kind: type[BaseException] | None, raised: BaseException | None, _: TracebackType | None) -> None:
        task, self._task = self._task, None
        if task is None or self._error is None:
            return
        still_cancelled = task.uncancel()
        if kind is asyncio.CancelledError and not still_cancelled:
            raise self._error from None
