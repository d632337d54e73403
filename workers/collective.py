"""What ranks of a group do together inside a forward pass: a sum, and one gathering of logits. Nothing else.

Every rank takes part in each call, in the same order: what a step calls follows from its plan alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


class Collective(Protocol):
    """One rank's end."""

    rank: int
    ranks: int
    shares_memory: bool
    """Whether compiled steps can do it themselves: all ranks are on this host, or there is only one."""

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks of x [T, n], the same to the last bit on each. ``x`` may be overwritten.

        Raises RanksParted where a rank is gone.
        """
        ...

    def gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor | None:
        """On rank 0 the ranks' x [S, widths[rank]] side by side, else None. Raises RanksParted."""
        ...

    def abort(self) -> None:
        """Let whoever waits in a call raise, here and on the other ranks where they can be reached. From any thread."""
        ...

    def close(self) -> None:
        """Give back what is shared. Idempotent."""
        ...


class RanksParted(RuntimeError):
    """A rank did not come to where the others waited for it: what was computed means nothing."""


class Alone:
    """A group of one."""

    rank = 0
    ranks = 1
    shares_memory = True

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """x."""
        return x

    def gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor | None:
        """x."""
        return x

    def abort(self) -> None:
        """Nobody waits."""

    def close(self) -> None:
        """Nothing is shared."""
