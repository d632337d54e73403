"""The same model code on a CUDA device: the reference attention, fp32 and half precision, against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.hf import our_model, random_model
from tests.support.plans import GreedySampler, Row, Stepper
from workers.runner import Runner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; this machine has none"),
]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 0.06), (torch.float16, 0.01)])
def test_logits_on_a_card_equal_those_of_transformers(tmp_path: Path, dtype: torch.dtype, tolerance: float) -> None:
    """``tolerance`` is relative to the spread of the logits."""
    theirs = random_model(tmp_path)
    tokens = torch.randint(0, 320, (70,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        want = theirs(torch.tensor([tokens])).logits[0]
    sampler = GreedySampler()
    runner = Runner(
        our_model(tmp_path, dtype, torch.device("cuda")),
        block_tokens=8,
        num_blocks=16,
        attention="auto",
        sampler=sampler,
    )
    stepper, row = Stepper(runner), Row(tokens[:40])
    stepper.step([(row, 25)])
    stepper.step([(row, 15)])
    found = [sampler.logits[0]]
    for token in tokens[40:]:
        row.tokens.append(token)
        stepper.step([(row, 1)])
        found.append(sampler.logits[0])
    wanted = want[39:]
    error = (torch.stack(found).cpu() - wanted).norm() / (wanted - wanted.mean()).norm()
    assert error < tolerance
