"""Ctrl-C and SIGTERM as an exception that ends whatever runs, cleanup included.

The first one unwinds the program: every context manager ends what it began, streams drain. A second one, during that,
cuts the cleanup step that runs short; the others still follow, and what is left is killed. Later ones are ignored, so
that an impatient user cannot leave processes behind.

A library's compiled code is not written for exceptions that appear from nowhere: raised inside Ray, this one became a
SystemError, and once a segmentation fault. So around Ray signals are held: they are counted, and ``check`` or
``check_again``, called wherever we wait, raise instead.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_MAX_RAISES = 2


class Interrupted(BaseException):
    """Not an Exception: nothing that retries or logs errors may swallow it."""


class Interrupts:
    """Counts the signals of one command."""

    def __init__(self) -> None:
        self._count = 0
        self._are_held = False

    def install(self) -> None:
        """Take the signals."""
        for number in _SIGNALS:
            signal.signal(number, self._on_signal)

    def check(self) -> None:
        """Raise Interrupted when a signal has come. For waits of the work, not of the cleanup."""
        if self._count:
            raise Interrupted

    def check_again(self) -> None:
        """Raise Interrupted when a second signal has come. For waits of the cleanup."""
        if self._count >= _MAX_RAISES:
            raise Interrupted

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Within the block a signal is only counted. Nothing is raised at its end: that may be amid a cleanup."""
        with self._set_held(True):
            yield

    @contextlib.contextmanager
    def let_through(self) -> Iterator[None]:
        """Within a block that holds signals, a block that does not."""
        with self._set_held(False):
            self.check()
            yield

    @contextlib.contextmanager
    def _set_held(self, held: bool) -> Iterator[None]:
        before, self._are_held = self._are_held, held
        try:
            yield
        finally:
            self._are_held = before

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._count += 1
        if self._count <= _MAX_RAISES and not self._are_held:
            raise Interrupted


@contextlib.contextmanager
def interruptible() -> Iterator[Interrupts]:
    """Take the signals for the time of the block, which ends quietly when one comes."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    interrupts = Interrupts()
    interrupts.install()
    try:
        yield interrupts
    except Interrupted:
        pass
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
