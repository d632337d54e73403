"""How a sequence is cut into steps, and who shares them, changes nothing; a plan that contradicts itself is refused."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.config import AttentionName
from cluster.errors import ProtocolError
from tests.support.hf import our_model, random_model
from tests.support.plans import GreedySampler, Row, Stepper
from workers.model.llama import Model
from workers.plan import MASK_EMPTY
from workers.runner import Runner, bytes_per_block

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("random-model")
    random_model(folder)
    return our_model(folder)


def stepper(model: Model, attention: AttentionName = "cpu", seed: int = 0) -> tuple[Stepper, GreedySampler]:
    sampler = GreedySampler()
    return Stepper(Runner(model, block_tokens=8, num_blocks=120, attention=attention, sampler=sampler), seed), sampler


def tokens_of(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 320, length).tolist()


def alone(model: Model, tokens: list[int]) -> torch.Tensor:
    """The oracle: the whole sequence in one step, by the reference attention. [vocab]."""
    driver, sampler = stepper(model, "reference")
    driver.step([(Row(tokens), len(tokens))])
    return sampler.logits[0]


@settings(deadline=None, max_examples=25)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    budgets=st.lists(st.integers(1, 50), min_size=1, max_size=4),
    attention=st.sampled_from(["reference", "cpu"]),
    seed=st.integers(0, 2**20),
)
def test_chunks_and_neighbours_change_nothing(
    model: Model, lengths: list[int], budgets: list[int], attention: AttentionName, seed: int
) -> None:
    """Chunked = whole and batched = alone, for any cut and any mix of chunks and decodes.

    Sampling: a row changes with its neighbours. This looks at the whole model, and also where the CPU lacks the vectors
    of our own kernels.
    """
    driver, sampler = stepper(model, attention, seed)
    rows = [Row(tokens_of(seed + i, length)) for i, length in enumerate(lengths)]
    found: dict[int, torch.Tensor] = {}
    step = 0
    while len(found) < len(rows):
        budget, work = budgets[step % len(budgets)], []
        for i, row in enumerate(rows):
            count = min(budget, len(row.tokens) - row.computed)
            if count:
                work.append((i, count))
                budget -= count
        plan = driver.plan([(rows[i], count) for i, count in work])
        driver.runner.execute(plan)
        found.update((work[draw.row][0], sampler.logits[j]) for j, draw in enumerate(plan.draws))
        step += 1
    for i, row in enumerate(rows):
        assert (found[i] - alone(model, row.tokens)).abs().max() < TOLERANCE


def test_a_step_in_which_nobody_draws(model: Model) -> None:
    driver, sampler = stepper(model)
    row = Row(tokens_of(1, 30))
    result = driver.step([(row, 13)])
    assert (result.tokens, result.logprobs) == ((), ())
    driver.step([(row, 17)])
    assert (sampler.logits[0] - alone(model, row.tokens)).abs().max() < TOLERANCE


def test_a_token_can_be_named_by_the_row_that_drew_it(model: Model) -> None:
    driver, sampler = stepper(model)
    first, second = Row(tokens_of(1, 9)), Row(tokens_of(2, 5))
    drawn = driver.step([(first, 9), (second, 5)]).tokens
    second.tokens.append(-7)  # must not be read
    driver.runner.execute(driver.plan([(second, 1)], carried=[1]))
    assert (sampler.logits[0] - alone(model, [*second.tokens[:-1], drawn[1]])).abs().max() < TOLERANCE


def test_a_carried_token_that_was_not_drawn_is_refused(model: Model) -> None:
    driver, _ = stepper(model)
    row = Row(tokens_of(1, 9))
    driver.step([(row, 9)])
    row.tokens.append(0)
    plan = driver.plan([(row, 1)], carried=[4])
    with pytest.raises(ProtocolError, match="row 4"):
        driver.runner.execute(plan)
    late = dataclasses.replace(plan, carried_from=np.array([0], np.int32), step=plan.step + 3)
    with pytest.raises(ProtocolError, match="did not draw"):
        driver.runner.execute(late)


def test_an_emptied_mask_that_is_carried_does_not_kill_the_runner(model: Model) -> None:
    driver, sampler = stepper(model)
    row = Row(tokens_of(1, 9))
    sample = sampler.sample
    sampler.sample = lambda logits, draws: ((MASK_EMPTY,), sample(logits, draws)[1])  # type: ignore[method-assign]
    driver.step([(row, 9)])
    row.tokens.append(0)
    driver.runner.execute(driver.plan([(row, 1)], carried=[0]))


def test_a_forked_sequence_goes_on_from_copied_pages(model: Model) -> None:
    """Copies happen before the step writes: the fork's page is the one of before."""
    driver, sampler = stepper(model)
    parent, fork = Row(tokens_of(1, 12)), Row(tokens_of(1, 12))
    driver.step([(parent, 12)])
    fork.blocks, fork.computed = [parent.blocks[0], driver._free.pop()], 12
    parent.tokens.append(11)
    fork.tokens.append(22)
    plan = driver.plan([(parent, 1), (fork, 1)])
    copies = np.array([[parent.blocks[1], fork.blocks[1]]], np.int32)
    driver.runner.execute(dataclasses.replace(plan, copies=copies))
    for i, row in enumerate((parent, fork)):
        assert (sampler.logits[i] - alone(model, row.tokens)).abs().max() < TOLERANCE


def test_what_a_page_held_before_does_not_matter(model: Model) -> None:
    driver, sampler = stepper(model)
    for pages in (*driver.runner.pages.keys, *driver.runner.pages.values):
        pages.fill_(1e4)
    row = Row(tokens_of(5, 29))
    driver.step([(row, 20)])
    driver.step([(row, 9)])
    assert (sampler.logits[0] - alone(model, row.tokens)).abs().max() < TOLERANCE


def test_a_step_writes_into_no_page_but_its_own(model: Model) -> None:
    """Pages: a padding slot of -1 writes into the last page."""
    driver, _ = stepper(model)
    pages = driver.runner.pages
    assert not pages.keys[0].any(), "the warm-up leaves pages empty"
    row = Row(tokens_of(5, 21))
    driver.step([(row, 21)])
    for page in range(pages.num_blocks):
        assert bool(pages.keys[0][page].any()) == (page in row.blocks)
    last = pages.values[-1][row.blocks[-1]]
    assert last[:, :5].any(-1).all()
    assert not last[:, 5:].any(), "slots behind the last token"


def test_bytes_of_a_block_are_what_the_pages_take(model: Model) -> None:
    driver, _ = stepper(model)
    pages = driver.runner.pages
    held = sum(tensor.nbytes for tensor in (*pages.keys, *pages.values))
    assert bytes_per_block(model.config, 8, torch.float32) * pages.num_blocks == held
    assert bytes_per_block(model.config, 8, torch.bfloat16) * 2 == bytes_per_block(model.config, 8, torch.float32)


def test_times_are_told_apart(model: Model) -> None:
    driver, _ = stepper(model)
    row = Row(tokens_of(1, 9))
    result = driver.step([(row, 9)])
    assert result.step == 0
    assert result.forward_s > 0
    assert result.sample_s > 0


@pytest.mark.parametrize(("name", "numbers"), [("blocks", [120]), ("blocks", [-1]), ("token_ids", [320, 3])])
def test_what_leads_out_of_the_pages_or_the_vocabulary_is_refused(model: Model, name: str, numbers: list[int]) -> None:
    """A kernel would read and write whatever lies there."""
    driver, _ = stepper(model)
    plan = driver.plan([(Row([1, 2]), 2)])
    with pytest.raises(ProtocolError, match=r"a (page|token) outside 0 to (119|319)"):
        driver.runner.execute(dataclasses.replace(plan, **{name: np.array(numbers, np.int32)}))
