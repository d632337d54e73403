"""The oracles of the design (section 9) over random mixes of every parameter: the request alone decides its tokens.

The reference runs each request alone, in one piece, with nothing cached. Against it: all together with random arrivals,
tenants, priorities and cancels; the same on a warm cache; hardly any pages; chunks of any size; moved in the middle.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.engines import ROOT, settings_for
from tests.support.hf import our_model, random_model
from tests.support.plans import GreedySampler, Row, Stepper
from workers.engine import Engine
from workers.group import LocalGroup
from workers.model.llama import Model
from workers.plan import Draw
from workers.request import Failed, Finished, Output, PositionLogprobs, Request, RequestKey, SamplingParams
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
    ends: dict[int, Finished] = field(default_factory=dict)
    failure: Failed | None = None
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
    cancelled: bool = False

    @property
    def has_ended(self) -> bool:
        return self.failure is not None or len(self.ends) == len(self.tokens)


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

    max_tokens = draw(st.one_of(st.integers(1, 16), st.integers(17, 28)))
    allowed = rarely((), st.lists(ids, min_size=1, max_size=8, unique=True).map(tuple))
    bad = rarely((), st.lists(st.lists(ids, min_size=1, max_size=3).map(tuple), max_size=6).map(tuple))
    if allowed and draw(st.sampled_from([False, False, True])):
        bad += tuple(product(allowed, repeat=2))  # any of them may come first, and none behind it
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
        allowed_token_ids=allowed,
        bad_token_sequences=bad,
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
    # The pages still hold what the reference computed. It would be right, also where it is read before it is there.
    for kept in (*runner.pages.keys, *runner.pages.values):
        kept.fill_(math.nan)
    limits = settings_for(
        runner.model.config, block_tokens=BLOCK, max_batch_tokens=budget, max_running=running, prefix_cache=cache
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
            assert all(one.has_ended or one.cancelled for one in heard)
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


def _take(heard: Heard, output: Output) -> None:
    assert not heard.cancelled, "a cancelled request said something"
    assert heard.failure is None, "a request that had failed said something"
    if isinstance(output.end, Failed):  # of the whole request, whichever of its samples had ended
        heard.failure = output.end
        return
    assert output.index not in heard.ends, "a sample that had ended said something"
    heard.tokens[output.index] += output.token_ids
    heard.logprobs[output.index] += output.logprobs
    if output.admitted is not None:
        heard.prompt_logprobs = output.admitted.prompt_logprobs
    if output.end is not None:
        heard.ends[output.index] = output.end


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


class Oracle:
    """Runs workloads in every way, compares each with the reference, and counts in ``seen`` what came up."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.seen: Counter[str] = Counter()

    def check(self, workload: Sequence[Asked], budget: int, cut: int) -> None:
        """Every way against the reference."""
        reference = [self._run(workload=[asked], cache=False, at_once=True)[0] for asked in workload]
        warm = engine_on(self._runner, budget=budget)
        self._compare(workload, reference, run(warm, workload))
        self._compare(workload, reference, run(warm, workload, at_once=True))
        self.seen["cached tokens"] += warm.load().cached_prompt_tokens
        longest = max(len(asked.prompt) + asked.sampling.max_tokens for asked in workload)
        for spare, at_once in ((cut % 4, True), (1, False)):
            tiny = self._run(workload=workload, at_once=at_once, pages=-(-longest // BLOCK) + spare, budget=budget)
            self._compare(workload, reference, tiny)
        self._compare(workload, reference, self._run(workload=workload, cache=False, running=3))
        self._check_moved(workload, reference, budget, cut)

    def _run(self, *, workload: Sequence[Asked], at_once: bool = False, **settings: Any) -> list[Heard]:
        engine = engine_on(self._runner, **settings)
        heard = run(engine, workload, at_once=at_once)
        self.seen["preemptions"] += engine.load().preemptions
        return heard

    def _check_moved(self, workload: Sequence[Asked], reference: Sequence[Heard], budget: int, cut: int) -> None:
        """What had been said after so many steps is given to another engine, which goes on."""
        broken_off = run(engine_on(self._runner, budget=budget), workload, at_once=True, steps=cut)
        going_on = [i for i, heard in enumerate(broken_off) if heard.failure is None]
        said = [broken_off[i].tokens for i in going_on]
        self.seen["moved"] += sum(any(broken_off[i].tokens) and not broken_off[i].has_ended for i in going_on)
        kept, wanted = [workload[i] for i in going_on], [reference[i] for i in going_on]
        resumed = run(engine_on(self._runner, budget=budget), kept, at_once=True, outputs=said)
        self._compare(kept, wanted, resumed, said)

    def _compare(
        self,
        workload: Sequence[Asked],
        reference: Sequence[Heard],
        found: Sequence[Heard],
        before: Sequence[list[list[int]]] | None = None,
    ) -> None:
        for i, (asked, want, got) in enumerate(zip(workload, reference, found, strict=True)):
            had = before[i] if before else [[] for _ in got.tokens]
            # Which sample meets with an empty mask first is a matter of steps: then all that came before is the same.
            whole = not (got.cancelled or want.failure or got.failure)
            tied = [self._is_tied(asked, want, got, sample, had[sample], whole) for sample in range(len(got.tokens))]
            self.seen["cancelled midway"] += got.cancelled and any(got.tokens) and not got.has_ended
            self.seen["failed"] += got.failure is not None
            if any(tied):
                continue  # what follows depends on it
            _assert_ends(want, got)
            if not got.cancelled and got.failure is None and not any(had):
                _assert_logprobs(got.prompt_logprobs, want.prompt_logprobs)

    def _is_tied(self, asked: Asked, want: Heard, got: Heard, sample: int, had: list[int], whole: bool) -> bool:
        """Whether rounding parted a sample from the reference; if not, all that both have of it is the same.

        ``had``: what it had put out elsewhere. ``whole``: neither may have more than the other.
        """
        ours, reference = had + got.tokens[sample], want.tokens[sample]
        common = min(len(ours), len(reference))
        parted = next((i for i in range(common) if ours[i] != reference[i]), common)
        self.seen["tokens"] += len(got.tokens[sample])
        told = got.logprobs[sample][: max(0, parted - len(had))]
        _assert_logprobs(told, want.logprobs[sample][len(had) :][: max(0, parted - len(had))])
        if parted < common:
            both = {ours[parted], reference[parted]}
            assert is_tie(self._runner, asked, sample, reference[:parted], both), (asked, sample, ours, reference)
            self.seen["ties"] += 1
            return True
        assert not whole or len(ours) == len(reference)
        return False


def _assert_ends(want: Heard, got: Heard) -> None:
    """The same ends; of a request whose client gave up, those that there are."""
    if got.failure is not None or (want.failure is not None and not got.cancelled):
        assert type(want.failure and want.failure.error) is type(got.failure and got.failure.error)
        return
    for sample, end in got.ends.items():
        if sample in want.ends or want.failure is None:
            other = want.ends[sample]
            assert (end.reason, end.stop_token_id) == (other.reason, other.stop_token_id)


def _assert_logprobs(ours: Sequence[PositionLogprobs], theirs: Sequence[PositionLogprobs]) -> None:
    assert [position.token.token_id for position in ours] == [position.token.token_id for position in theirs]
    for one, other in zip(ours, theirs, strict=True):
        entries, others = (one.token, *one.top), (other.token, *other.top)
        values = [entry.logprob for entry in entries]
        assert values == pytest.approx([entry.logprob for entry in others], abs=ROUNDING, rel=1e-5)
        # Rounding may exchange neighbours that are as good as equal, in the list and in the rank of the token.
        ordered = sorted(entry.logprob for entry in one.top)
        if all(b - a > 4 * ROUNDING for a, b in pairwise(ordered)):
            assert [entry.token_id for entry in one.top[:-1]] == [entry.token_id for entry in other.top[:-1]]
            assert [entry.rank for entry in one.top] == [entry.rank for entry in other.top]
        assert abs(one.token.rank - other.token.rank) <= 2


KINDS = ("preemptions", "cached tokens", "moved", "cancelled midway", "failed")
MAX_ROUNDS = 4
CHECK = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}


def check_random_mixes(runner: Runner, examples: int) -> None:
    """So many workloads, which must have met with every kind of trouble: an oracle of calm ones says little."""
    oracle = Oracle(runner)

    @settings(max_examples=examples, **CHECK)  # type: ignore[arg-type]
    @given(workloads, st.sampled_from([1, 3, 8, 20, 512]), st.integers(1, 20))
    def check(workload: list[Asked], budget: int, cut: int) -> None:
        oracle.check(workload, budget, cut)

    for _ in range(
        MAX_ROUNDS
    ):  # as a rule one: again only while something has not come up, which is a matter of chance
        check()
        if all(oracle.seen[kind] for kind in KINDS):
            break
    assert all(oracle.seen[kind] for kind in KINDS), oracle.seen
    assert oracle.seen["ties"] <= max(3, oracle.seen["tokens"] // 2_000), oracle.seen


def test_random_mixes(runner: Runner) -> None:
    check_random_mixes(runner, 50)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_500_random_mixes(runner: Runner) -> None:
    check_random_mixes(runner, 500)
