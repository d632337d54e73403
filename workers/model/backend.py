"""How a model computes, chosen once for a device and a dtype."""

from __future__ import annotations

from typing import Protocol

import torch

from cluster.config import AttentionName
from cluster.errors import ConfigError
from workers.attention.interface import Attention, Batch, KVPages
from workers.attention.reference import ReferenceAttention
from workers.model.llama import Model


class Backend(Protocol):
    """A model over its pages."""

    name: str

    def forward(self, batch: Batch) -> torch.Tensor:
        """Compute the step's tokens and write their keys and values; the hidden states of ``batch.needed``,
        [R, hidden]."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Of hidden states [S, hidden] that ``forward`` returned: [S, vocab_size] in fp32 on rank 0, None on others.

        They may be overwritten.
        """
        ...

    def progress(self) -> int:
        """Layers that have been begun since the start: a number that stands still is a step that hangs."""
        ...

    def shares(self) -> tuple[float, float]:
        """What of the last ``forward`` went into linear layers, and into attention; zeros where it is not known."""
        ...


class TorchModel:
    """One operation after the other, in torch: any device, any dtype."""

    def __init__(self, model: Model, pages: KVPages, attention: Attention) -> None:
        self.name = attention.name
        self._model, self._pages, self._attention = model, pages, attention

    def forward(self, batch: Batch) -> torch.Tensor:
        """See Backend."""
        return self._model.forward(batch, self._pages, self._attention)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """See Backend."""
        return self._model.logits(hidden)

    def progress(self) -> int:
        """See Backend."""
        return self._model.layers_begun

    def shares(self) -> tuple[float, float]:
        """See Backend."""
        return 0.0, 0.0


def choose(name: AttentionName, model: Model, pages: KVPages) -> Backend:
    """``auto``: the compiled model on a CPU in fp32 that has the vectors for it, the reference anywhere else; also
    where a group's ranks do not share memory.

    Raises ConfigError if ``cpu`` is asked for where it cannot run.
    """
    packed = model.head.linear.packed is not None
    together = model.ranks.shares_memory
    if name == "cpu" and not packed:
        where = f"{str(model.dtype).removeprefix('torch.')} on {model.device}"
        raise ConfigError(
            f"engine.attention: 'cpu' runs in float32 on a CPU with vector multiply-add, not in {where}",
            field="engine.attention",
        )
    if name == "cpu" and not together:
        raise ConfigError(
            "engine.attention: 'cpu' needs all ranks of a group on one host; leave it at auto", field="engine.attention"
        )
    if name == "reference" or not packed or not together:
        return TorchModel(model, pages, ReferenceAttention())
    from workers.model.compiled import CompiledModel  # numba is imported only where its kernels run

    return CompiledModel(model, pages)
