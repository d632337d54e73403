"""The oracles of the design (section 9) on the real model: nothing but the request decides its tokens.

Alone or batched, cold or warm, with pages for all or hardly any, in chunks of any size, moved or not, greedy and
seeded: the same tokens. Each scenario also proves that it was what it claims to be, and that the pool adds up after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from router.tokenizer import Tokenizer
from tests.support.engines import Driven, Result
from tests.support.models import smollm2
from tests.support.ties import Ties
from workers.model import load
from workers.model.llama import Model
from workers.request import Finished, SamplingParams

README = Path(__file__).parents[2] / "LICENSE"


def params(seed: int, **changes: Any) -> SamplingParams:
    """Greedy, seeded and penalized in turn."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"temperature": 1.0, "top_p": 0.9, "top_k": 50},
        {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
        {"temperature": 1.2, "min_p": 0.05, "min_tokens": 8},
    ]
    return replace(SamplingParams(max_tokens=12 + 3 * (seed % 4), seed=seed), **kinds[seed % len(kinds)], **changes)


@pytest.fixture(scope="module")
def model() -> Model:
    return load(smollm2(), torch.float32, torch.device("cpu"))


@pytest.fixture(scope="module")
def ties(model: Model) -> Any:
    counted = Ties(model)
    yield counted
    counted.assert_rare()


@pytest.fixture(scope="module")
def requests() -> list[tuple[list[int], SamplingParams]]:
    """Ten, of 7 to 230 tokens; some begin alike."""
    tokenizer = Tokenizer(smollm2())
    prose = tokenizer.encode(README.read_text())
    shared = prose[:100]
    chats = ["What is the capital of France?", "Write a haiku about the sea.", "Count to five."]
    prompts = [tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in chats]
    prompts += [tokenizer.encode("def fibonacci(n):"), prose[300:407], prose[500:730]]
    prompts += [shared + prose[900 : 900 + extra] for extra in (5, 16, 40, 61)]
    return [(prompt, params(seed)) for seed, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def alone(model: Model, requests: list[tuple[list[int], SamplingParams]]) -> list[Result]:
    """The reference: one at a time, nothing cached, each prompt in one piece."""
    driven = Driven(model, max_batch_tokens=4096, prefix_cache=False)
    results = [driven.run([request])[0] for request in requests]
    assert all(rows == [rows[0]] for rows in driven.group.rows)
    assert all(result.tokens[0] and isinstance(result.ends[0], Finished) for result in results)
    return results


def assert_same(
    ties: Ties,
    requests: Sequence[tuple[list[int], SamplingParams]],
    alone: Sequence[Result],
    others: Sequence[Result],
) -> None:
    for (prompt, sampling), reference, other in zip(requests, alone, others, strict=True):
        ties.assert_same(prompt, reference.tokens[0], other.tokens[0], sampling)
        assert len(other.ends) == 1, "exactly one end"


def test_batched(model: Model, ties: Ties, requests: Any, alone: list[Result]) -> None:
    driven = Driven(model, max_batch_tokens=4096, prefix_cache=False)
    assert_same(ties, requests, alone, driven.run(requests))
    assert max(map(len, driven.group.rows)) == len(requests)


def test_cold_then_warm(model: Model, ties: Ties, requests: Any, alone: list[Result]) -> None:
    driven = Driven(model)
    cold, warm = driven.run(requests), driven.run(requests)
    assert_same(ties, requests, alone, cold)
    assert_same(ties, requests, alone, warm)
    assert sum(result.cached_tokens for result in cold) >= 3 * 96, "equal beginnings were computed again"
    for (prompt, _), result in zip(requests, warm, strict=True):
        assert result.cached_tokens == (len(prompt) - 1) // 16 * 16


@pytest.mark.parametrize(("prefix_cache", "left_out", "more"), [(True, 5, (0,)), (False, None, (0, 9))])
def test_a_pool_that_is_too_small_for_all(
    model: Model,
    ties: Ties,
    requests: Any,
    alone: list[Result],
    prefix_cache: bool,
    left_out: int | None,
    more: tuple[int, ...],
) -> None:
    """Small pages, so that sequences outgrow theirs, and hardly more of them than the longest needs alone."""
    kept = [i for i in range(len(requests)) if i != left_out]
    some, references = [requests[i] for i in kept], [alone[i] for i in kept]
    enough = -(-max(len(prompt) + sampling.max_tokens for prompt, sampling in some) // 8)
    preemptions = 0
    for spare in more:
        driven = Driven(model, num_blocks=enough + spare, prefix_cache=prefix_cache, block_tokens=8)
        results = driven.run(some)
        assert_same(ties, some, references, results)
        assert driven.engine.load().preemptions == sum(result.preemptions for result in results)
        preemptions += driven.engine.load().preemptions
    assert preemptions > 0


@pytest.mark.parametrize("chunk", [3, 16, 50])
def test_chunks(model: Model, ties: Ties, requests: Any, alone: list[Result], chunk: int) -> None:
    some = requests if chunk > 3 else requests[:5]
    driven = Driven(model, max_batch_tokens=chunk, prefix_cache=False)
    assert_same(ties, some, alone[: len(some)], driven.run(some))
    assert max(map(sum, driven.group.rows)) <= chunk


def test_one_token_at_a_time(model: Model, ties: Ties, requests: Any, alone: list[Result]) -> None:
    driven = Driven(model, max_batch_tokens=1)
    assert_same(ties, requests[:2], alone[:2], driven.run(requests[:2]))
    assert set(map(tuple, driven.group.rows)) == {(1,)}


@pytest.mark.parametrize("block_tokens", [8, 64])
def test_pages_of_another_size(model: Model, ties: Ties, requests: Any, alone: list[Result], block_tokens: int) -> None:
    assert_same(ties, requests, alone, Driven(model, block_tokens=block_tokens).run(requests))


def test_the_plain_attention(model: Model, ties: Ties, requests: Any, alone: list[Result]) -> None:
    assert_same(ties, requests, alone, Driven(model, attention="reference").run(requests))


def test_moved_in_the_middle(model: Model, ties: Ties, requests: Any, alone: list[Result]) -> None:
    """What another group had put out is computed, not drawn again; what follows is the same."""
    outputs = [((*result.tokens[0][: 3 + i % 6],),) for i, result in enumerate(alone)]
    going_on = [i for i, output in enumerate(outputs) if len(output[0]) < len(alone[i].tokens[0])]
    assert len(going_on) >= 6
    moved = Driven(model).run([requests[i] for i in going_on], [outputs[i] for i in going_on])
    assert_same(ties, [requests[i] for i in going_on], [alone[i] for i in going_on], moved)


def test_samples_of_one_request(model: Model, ties: Ties, requests: Any, alone: list[Result]) -> None:
    """The first of n is the only one of 1; the others differ, and each is the same with a pool for hardly one."""
    prompt, sampling = requests[1]
    many = [(prompt, replace(sampling, n=4))]
    (roomy,), (tight,) = Driven(model).run(many), Driven(model, num_blocks=-(-(len(prompt) + 21) // 16) + 1).run(many)
    ties.assert_same(prompt, alone[1].tokens[0], roomy.tokens[0], sampling)
    assert len({tuple(tokens) for tokens in roomy.tokens}) == 4
    for index in range(4):
        ties.assert_same(prompt, roomy.tokens[index], tight.tokens[index], sampling, index)
    assert tight.preemptions > 0
