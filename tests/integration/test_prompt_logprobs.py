"""Prompt logprobs are those of transformers, whatever was cached, shared, cut into chunks or preempted."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.engines import Driven, Result
from tests.support.hf import our_model, random_model
from workers.request import Failed, SamplingParams

TOP = 3
PROMPT = [(7 * i * i + 3 * i) % 320 for i in range(75)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    folder = tmp_path_factory.mktemp("model")
    theirs = random_model(folder, family="llama")
    return theirs, our_model(folder)


def check(result: Result, theirs: Any) -> None:
    with torch.inference_mode():
        logits = theirs(torch.tensor([PROMPT])).logits[0].double()
    want = logits.log_softmax(-1)
    assert len(result.prompt_logprobs) == len(PROMPT) - 1
    for i, position in enumerate(result.prompt_logprobs):
        token = PROMPT[i + 1]
        assert position.token.token_id == token
        assert position.token.logprob == pytest.approx(float(want[i, token]), abs=1e-4)
        assert position.token.rank == 1 + int((logits[i] > logits[i, token]).sum())
        best = logits[i].topk(TOP)
        assert [entry.logprob for entry in position.top] == pytest.approx(want[i, best.indices].tolist(), abs=1e-4)


@pytest.mark.parametrize("budget", [3, 16, 64, 512])
def test_cold_and_warm_and_in_chunks(models: tuple[Any, Any], budget: int) -> None:
    driven = Driven(models[1], num_blocks=60, max_batch_tokens=budget)
    asking = SamplingParams(max_tokens=4, seed=1, prompt_logprobs=TOP)
    for turn in range(2):
        plain, asked = driven.run([(PROMPT, SamplingParams(max_tokens=4, seed=1)), (PROMPT, asking)])
        check(asked, models[0])
        assert plain.prompt_logprobs == ()
        assert plain.tokens == asked.tokens
        if turn:
            assert plain.cached_tokens > 0, "the prompt was cached, and its logprobs were computed all the same"
            assert asked.cached_tokens == 0


def test_several_samples_and_hardly_any_pages(models: tuple[Any, Any]) -> None:
    driven = Driven(models[1], num_blocks=10, max_batch_tokens=20)
    asking = SamplingParams(max_tokens=30, seed=1, n=3, prompt_logprobs=TOP, ignore_eos=True)
    results = driven.run([(PROMPT, asking), (PROMPT, asking)])
    assert sum(result.preemptions for result in results) > 0
    for result in results:
        check(result, models[0])


def test_a_prompt_of_one_token_has_none(models: tuple[Any, Any]) -> None:
    (result,) = Driven(models[1], num_blocks=10).run([([5], SamplingParams(max_tokens=2, seed=1, prompt_logprobs=0))])
    assert (len(result.tokens[0]), result.prompt_logprobs) == (2, ())


def test_a_model_that_gives_nan_fails_the_one_request(models: tuple[Any, Any], tmp_path: Path) -> None:
    """A NaN as a logprob looks like any number to a client, and is not JSON."""
    random_model(tmp_path, family="llama")
    model = our_model(tmp_path)
    model.embedding.rows[319] = math.nan
    driven = Driven(model, num_blocks=20, max_batch_tokens=8)
    asking = SamplingParams(max_tokens=2, seed=1, prompt_logprobs=0)
    broken, other = driven.run([([1, 2, 319] + [3] * 30, asking), ([1, 2, 3] * 11, asking)])
    (end,) = broken.ends
    assert isinstance(end, Failed)
    assert "NaN" in end.error.message
    assert len(other.tokens[0]) == 2
    assert all(math.isfinite(position.token.logprob) for position in other.prompt_logprobs)
