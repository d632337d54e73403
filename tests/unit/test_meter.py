"""What the engine says of its own speed."""

from __future__ import annotations

import numpy as np
import pytest

from workers.meter import Meter
from workers.plan import Draw, StepPlan, StepResult
from workers.request import SamplingParams

NONE = np.zeros(0, np.int32)


def record(meter: Meter, tokens: int, draws: int, seconds: float) -> None:
    params = SamplingParams(max_tokens=1, seed=0)
    plan = StepPlan(
        step=1,
        token_ids=np.zeros(tokens, np.int32),
        row_starts=NONE,
        num_computed=NONE,
        carried_from=NONE,
        block_starts=NONE,
        blocks=NONE,
        draws=tuple(Draw(row, params, 0, NONE, NONE, True) for row in range(draws)),
        copies=NONE,
    )
    meter.record(plan, StepResult(1, (0,) * draws, (None,) * draws, seconds, 0.0), 0)


def test_rates_are_tokens_over_seconds() -> None:
    meter = Meter()
    record(meter, tokens=512, draws=1, seconds=0.5)
    record(meter, tokens=8, draws=8, seconds=0.1)
    assert meter.prefill_tokens_per_s == pytest.approx(1024)
    assert meter.decode_tokens_per_s == pytest.approx(80)
    assert meter.steps == 2


def test_a_short_prompt_says_nothing_about_the_prefill_rate() -> None:
    """Three tokens take as long as any step: a group that got only such a one looked a dozen times slower for ever."""
    meter = Meter()
    record(meter, tokens=3, draws=1, seconds=0.03)
    assert meter.prefill_tokens_per_s == 0
    assert meter.decode_tokens_per_s == 0
    assert meter.step_ms == pytest.approx(30)
