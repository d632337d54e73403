"""What commands share on the terminal: consoles, one-line errors, progress that is quiet when nobody watches."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.status import Status

from cluster.errors import QuireError

out = Console(highlight=False, soft_wrap=True)
"""Results. Soft-wrapped, so that a pipe gets lines as they are."""

err = Console(stderr=True, highlight=False, soft_wrap=True)
"""Progress, hints and errors."""


def error(problem: QuireError) -> None:
    """One line. Markup is off: a message may hold brackets, and an operator's paths do."""
    line = " ".join(problem.message.split())
    hint = f" (try again in {problem.retry_after_ms / 1000:.1f} s)" if problem.retry_after_ms else ""
    err.print("error:", style="bold red", end=" ")
    err.print(line + hint, markup=False)


def is_interactive() -> bool:
    """Whether a person types and watches."""
    return sys.stdin.isatty() and sys.stdout.isatty()


class Steps:
    """The steps of a start. On a terminal a spinner that becomes a tick; elsewhere one plain line per step."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._text = ""
        self._status: Status | None = err.status("") if err.is_terminal else None

    def __enter__(self) -> Steps:
        if self._status:
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._finish()
        self._text = ""
        if self._status:
            self._status.stop()

    def begin(self, text: str) -> None:
        """The step before this one is done."""
        self._finish()
        self._text = text
        if self._status:
            self._status.update(text)

    def detail(self, text: str) -> None:
        """Say more about the step that runs; printed only where it changed."""
        if text == self._text:
            return
        self._text = text
        if self._status:
            self._status.update(text)

    def _finish(self) -> None:
        if not self._text:
            return
        if self._status:
            err.print("[green]✓[/]", end=" ")
        err.print(f"{self._text} ({time.monotonic() - self._began:.1f} s)", markup=False)
