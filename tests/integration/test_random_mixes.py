"""The oracles of the design (section 9) over random mixes of every parameter: the request alone decides its tokens.

The reference runs each request alone, in one piece, with nothing cached. Against it: all together with random arrivals,
tenants, priorities and cancels; the same on a warm cache; hardly any pages; chunks of any size; moved in the middle.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.engines import ROOT
from tests.support.hf import our_model, random_model
from tests.support.plans import GreedySampler, Row, Stepper
from workers.engine import Engine, EngineSettings
from workers.group import LocalGroup
from workers.model.llama import Model
from workers.plan import Draw
from workers.request import Failed, Finished, PositionLogprobs, Request, RequestKey, SamplingParams
from workers.runner import Runner
from workers.sampler import Sampler

BLOCK, PAGES, VOCAB = 8, 400, 320
ROUNDING = 1e-4
STEM = [(11 * i * i + 5 * i) % VOCAB for i in range(40)]


@dataclass(frozen=True)
class Asked:
    """One request of a workload, when it comes, and when its client gives up."""

    prompt: list[int]
    sampling: SamplingParams
    tenant: str
    priority: int
    arrives: int
    cancelled: int | None


@dataclass
class Heard:
    """What came of it: by sample, and in all."""

    tokens: list[list[int]]
    logprobs: list[list[PositionLogprobs]]
    ends: list[Finished | Failed] = field(default_factory=list)
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
    cancelled: bool = False

    @property
    def failed(self) -> bool:
        return any(isinstance(end, Failed) for end in self.ends)


# -- workloads -------------------------------------------------------------------------------------------------------

ids = st.integers(0, 11)  # few, so that allowed, bad, biased and stop tokens meet
prompts = st.one_of(
    st.sampled_from([1, 7, 8, 9, 16, 17, 24, 40]).map(lambda length: STEM[:length]),
    st.tuples(st.sampled_from([8, 13, 16, 31]), st.lists(ids, min_size=1, max_size=20)).map(
        lambda parts: STEM[: parts[0]] + parts[1]
    ),
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30),
)


@st.composite
def samplings(draw: Any) -> SamplingParams:
    """Any parameters, most of them at rest most of the time."""

    def rarely(default: Any, other: Any) -> Any:
        return draw(st.one_of(st.just(default), st.just(default), other))

    max_tokens = draw(st.integers(1, 16))
    return SamplingParams(
        max_tokens=max_tokens,
        seed=draw(st.integers(0, 2**64 - 1)),
        min_tokens=rarely(0, st.integers(0, max_tokens)),
        temperature=draw(st.sampled_from([0.0, 0.0, 1e-5, 0.7, 1.0, 1.5])),
        top_k=rarely(0, st.sampled_from([1, 3, 50, 10_000])),
        top_p=rarely(1.0, st.sampled_from([1e-6, 0.5, 0.95])),
        min_p=rarely(0.0, st.sampled_from([0.05, 0.5, 1.0])),
        repetition_penalty=rarely(1.0, st.sampled_from([0.5, 1.3, 100.0])),
        presence_penalty=rarely(0.0, st.sampled_from([-1.0, 2.0])),
        frequency_penalty=rarely(0.0, st.sampled_from([-0.5, 1.5])),
        logit_bias=rarely({}, st.dictionaries(ids, st.sampled_from([-100.0, -2.0, 3.0, 100.0]), max_size=4)),
        allowed_token_ids=rarely((), st.lists(ids, min_size=1, max_size=8, unique=True).map(tuple)),
        bad_token_sequences=rarely(
            (), st.lists(st.lists(ids, min_size=1, max_size=3).map(tuple), max_size=6).map(tuple)
        ),
        stop_token_ids=rarely(frozenset(), st.frozensets(ids, max_size=4)),
        ignore_eos=draw(st.booleans()),
        n=rarely(1, st.integers(1, 3)),
        logprobs=rarely(None, st.integers(0, 5)),
        prompt_logprobs=rarely(None, st.integers(0, 3)),
    )


workloads = st.lists(
    st.builds(
        Asked,
        prompt=prompts,
        sampling=samplings(),
        tenant=st.sampled_from("ab"),
        priority=st.integers(-1, 1),
        arrives=st.integers(0, 12),
        cancelled=st.one_of(st.none(), st.none(), st.none(), st.integers(0, 25)),
    ),
    min_size=2,
    max_size=6,
)


# -- engines ---------------------------------------------------------------------------------------------------------


class Pages(LocalGroup):
    """A runner of whose pages an engine sees only some."""

    def __init__(self, runner: Runner, count: int) -> None:
        super().__init__(runner)
        self._count = count

    @property
    def num_blocks(self) -> int:
        return self._count


@pytest.fixture(scope="module", params=[{"family": "llama"}, {"family": "mistral", "sliding_window": 21}], ids=str)
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    folder = tmp_path_factory.mktemp("model")
    random_model(folder, **request.param)
    model = our_model(folder)
    sampler = Sampler(model.config.vocab_size, model.config.eos_token_ids)
    return Runner(model, block_tokens=BLOCK, num_blocks=PAGES, sampler=sampler)


def engine_on(
    runner: Runner, *, pages: int = PAGES, budget: int = 512, cache: bool = True, running: int = 16
) -> Engine:
    config = runner.model.config
    limits = EngineSettings(
        block_tokens=BLOCK,
        max_batch_tokens=budget,
        max_running=running,
        max_waiting=100,
        max_context_tokens=config.max_context,
        prefix_cache=cache,
        eos_token_ids=frozenset(config.eos_token_ids),
        vocab_size=config.vocab_size,
    )
    return Engine(Pages(runner, pages), limits)


names = itertools.count()


def run(
    engine: Engine,
    workload: Sequence[Asked],
    *,
    at_once: bool = False,
    steps: int = 10_000,
    outputs: Sequence[list[list[int]]] | None = None,
) -> list[Heard]:
    """Drive an engine over a workload until all has ended or for so many steps, then check its books."""
    heard = [Heard([[] for _ in range(a.sampling.n)], [[] for _ in range(a.sampling.n)]) for a in workload]
    keys = [RequestKey("test", str(next(names)), 1) for _ in workload]
    by_key = dict(zip(keys, heard, strict=True))
    for step in range(steps):
        for i, asked in enumerate(workload):
            if step == (0 if at_once else asked.arrives):
                before = tuple(map(tuple, outputs[i])) if outputs else ()
                # A request says nothing of what it had said elsewhere.
                engine.submit(_request(keys[i], asked, before))
            if not at_once and step == asked.cancelled and step >= asked.arrives:
                engine.cancel(keys[i])
                heard[i].cancelled = True
        for output in engine.step(float(step)):
            _take(by_key[output.key], output)
        if not engine.has_work and (at_once or step > 25):
            break
    engine.check()
    return heard


def _request(key: RequestKey, asked: Asked, outputs: tuple[tuple[int, ...], ...]) -> Request:
    sampling = replace(asked.sampling, prompt_logprobs=None) if any(outputs) else asked.sampling
    return Request(
        key=key,
        prompt=asked.prompt,
        outputs=outputs,
        sampling=sampling,
        root=ROOT,
        tenant=asked.tenant,
        priority=asked.priority,
    )


def _take(heard: Heard, output: Any) -> None:
    assert not heard.cancelled, "a cancelled request said something"
    heard.tokens[output.index] += output.token_ids
    heard.logprobs[output.index] += output.logprobs
    if output.admitted is not None:
        heard.prompt_logprobs = output.admitted.prompt_logprobs
    if output.end is not None:
        heard.ends.append(output.end)


# -- comparing -------------------------------------------------------------------------------------------------------


def is_tie(runner: Runner, asked: Asked, sample: int, output: list[int], tokens: set[int]) -> bool:
    """Whether rounding can decide between these tokens: the draw gives each of them on logits that it moved."""
    model: Model = runner.model
    known = [*asked.prompt, *output]
    greedy = GreedySampler()
    alone = Runner(model, block_tokens=BLOCK, num_blocks=len(known) // BLOCK + 1, sampler=greedy)
    Stepper(alone).step([(Row(known), len(known))])
    moved = greedy.logits.repeat(200, 1)
    moved += (torch.rand(moved.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1) * ROUNDING
    allow_stop = len(output) >= asked.sampling.min_tokens
    draw = Draw(
        0, asked.sampling, sample, np.array(asked.prompt, np.int32), np.array(output, np.int32), allow_stop=allow_stop
    )
    drawn, _ = Sampler(model.config.vocab_size, model.config.eos_token_ids).sample(moved, [draw] * len(moved))
    return tokens <= set(drawn)


def assert_like(runner: Runner, asked: Asked, want: Heard, got: Heard, before: Sequence[list[int]] = ()) -> None:
    """The same tokens, ends and logprobs; a beginning of them where the client gave up."""
    if want.failed:
        assert got.cancelled or got.failed
        return
    assert not got.failed
    for sample in range(asked.sampling.n):
        had = list(before[sample]) if before else []
        ours, reference = had + got.tokens[sample], want.tokens[sample]
        if got.cancelled:
            reference = reference[: len(ours)]
        parted = next((i for i, (a, b) in enumerate(zip(ours, reference, strict=False)) if a != b), None)
        if parted is not None:
            both = {ours[parted], reference[parted]}
            assert is_tie(runner, asked, sample, reference[:parted], both), (asked, sample, parted, ours, reference)
            return  # what follows depends on it
        assert len(ours) == len(reference)
        _assert_logprobs(got.logprobs[sample], want.logprobs[sample][len(had) :][: len(got.logprobs[sample])])
    if not got.cancelled:
        assert sorted(map(_end, got.ends)) == sorted(map(_end, want.ends))
        if not any(before):
            _assert_logprobs(got.prompt_logprobs, want.prompt_logprobs)


def _end(end: Any) -> tuple[str, int]:
    return end.reason.value, -1 if end.stop_token_id is None else end.stop_token_id


def _assert_logprobs(ours: Sequence[PositionLogprobs], theirs: Sequence[PositionLogprobs]) -> None:
    assert [position.token.token_id for position in ours] == [position.token.token_id for position in theirs]
    for one, other in zip(ours, theirs, strict=True):
        values = [[entry.logprob for entry in (position.token, *position.top)] for position in (one, other)]
        assert values[0] == pytest.approx(values[1], abs=2 * ROUNDING, rel=1e-5)


def check_workload(runner: Runner, workload: Sequence[Asked], budget: int, cut: int) -> None:
    """Every way against the reference."""
    reference = [run(engine_on(runner, cache=False), [asked], at_once=True)[0] for asked in workload]
    for asked, one in zip(workload, reference, strict=True):
        assert len(one.ends) == (1 if one.failed else asked.sampling.n)

    def compare(found: list[Heard], before: Sequence[list[list[int]]] | None = None) -> None:
        for i, (asked, want, got) in enumerate(zip(workload, reference, found, strict=True)):
            assert_like(runner, asked, want, got, before[i] if before else ())

    warm = engine_on(runner, budget=budget)
    compare(run(warm, workload))
    compare(run(warm, workload, at_once=True))
    longest = max(len(asked.prompt) + asked.sampling.max_tokens for asked in workload)
    compare(run(engine_on(runner, pages=-(-longest // BLOCK) + 1, budget=budget), workload))
    compare(run(engine_on(runner, cache=False, running=3), workload))
    broken_off = run(engine_on(runner, budget=budget), workload, at_once=True, steps=cut)
    going_on = [i for i, heard in enumerate(broken_off) if not heard.failed]
    workload, reference = [workload[i] for i in going_on], [reference[i] for i in going_on]
    said = [broken_off[i].tokens for i in going_on]
    resumed = run(engine_on(runner, budget=budget), workload, at_once=True, outputs=said)
    compare(resumed, said)


CHECK = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]}


@settings(max_examples=50, **CHECK)  # type: ignore[arg-type]
@given(workloads, st.sampled_from([1, 3, 8, 20, 512]), st.integers(1, 20))
def test_random_mixes(runner: Runner, workload: list[Asked], budget: int, cut: int) -> None:
    check_workload(runner, workload, budget, cut)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@settings(max_examples=500, **CHECK)  # type: ignore[arg-type]
@given(workloads, st.sampled_from([1, 3, 8, 20, 512]), st.integers(1, 20))
def test_500_random_mixes(runner: Runner, workload: list[Asked], budget: int, cut: int) -> None:
    check_workload(runner, workload, budget, cut)
