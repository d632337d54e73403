"""Layers that a group's ranks hold together, so that the decoder reads as if it were on one device.

Which part each rank has: workers/model/partition.py. Layers whose columns are split (q, k, v, gate, up) need nothing:
their results stay on the rank until a layer whose rows are split has summed them up.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from workers.collective import Collective
from workers.model.linear import Linear


class Summed:
    """A linear layer whose inputs are split: each rank's product is a part of the sum."""

    def __init__(self, linear: Linear, ranks: Collective) -> None:
        self.linear = linear
        self._ranks = ranks

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, this rank's K] → the whole [T, N]."""
        return self._ranks.sum(self.linear(x))


class Embedding:
    """Rows of the vocabulary."""

    def __init__(self, rows: torch.Tensor, vocab: range, ranks: Collective) -> None:
        self.rows = rows
        self.vocab = vocab
        self._ranks = ranks

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[T] → [T, hidden]. A token that another rank holds counts as zeros here: the sum is exact."""
        if self._ranks.ranks == 1:
            return torch.nn.functional.embedding(token_ids, self.rows)
        local = token_ids - self.vocab.start
        here = (local >= 0) & (local < len(self.vocab))
        found = torch.nn.functional.embedding(local.where(here, 0), self.rows)
        return self._ranks.sum(found.masked_fill_(~here[:, None], 0))


class Head:
    """Logits of rows of the vocabulary."""

    def __init__(self, linear: Linear, widths: Sequence[int], ranks: Collective) -> None:
        """``widths``: how many rows each rank holds."""
        self.linear = linear
        self._widths = tuple(widths)
        self._ranks = ranks

    def __call__(self, x: torch.Tensor) -> torch.Tensor | None:
        """x [S, hidden] → [S, vocabulary] on rank 0, else None."""
        return self._ranks.gather(self.linear(x), self._widths)
