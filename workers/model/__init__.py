"""Model families, their weights, and the files they come from."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from cluster.models import ModelFiles
    from workers.collective import Collective
    from workers.model.llama import Model


def load(
    files: ModelFiles,
    dtype: torch.dtype,
    device: torch.device,
    *,
    int8: bool = False,
    ranks: Collective | None = None,
) -> Model:
    """Read a model's config and weights, or the part of one of several ``ranks``; ``int8`` rounds those of linear
    layers to 8 bits.

    Raises ModelLoadError that names the file, field or tensor; ConfigError where 8 bits cannot be computed.
    """
    # Imported here: whoever wants only a ModelConfig gets it without torch.
    from workers.model.loading import load_model

    return load_model(files, dtype, device, int8=int8, ranks=ranks)
