"""The sampler against a slow oracle, over the whole order of proto/common.proto (bugs: Sampling)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.draw import gumbel, stream_key
from workers.plan import MASK_EMPTY, NOT_FINITE, Draw
from workers.request import SamplingParams
from workers.sampler import Sampler

VOCAB = 60
EOS = (2, 5)


def draw_of(
    params: SamplingParams,
    prompt: tuple[int, ...] = (),
    output: tuple[int, ...] = (),
    *,
    row: int = 0,
    index: int = 0,
    allow_stop: bool = True,
) -> Draw:
    return Draw(row, params, index, np.array(prompt, np.int32), np.array(output, np.int32), allow_stop)


def params_of(**changes: Any) -> SamplingParams:
    return replace(SamplingParams(max_tokens=100, seed=0), **changes)


def sample(logits: Any, *draws: Draw, vocab: int = VOCAB, eos: tuple[int, ...] = EOS) -> tuple[int, ...]:
    rows = torch.tensor(np.atleast_2d(np.asarray(logits, np.float32)))
    return Sampler(vocab, eos).sample(rows, draws)[0]


# -- the oracle --------------------------------------------------------------------------------------------------------


def edited(logits: list[float], draw: Draw) -> list[float]:
    """Bias, masks, penalties and min_tokens, token by token."""
    params, out = draw.params, []
    prompt, output = draw.prompt_tokens.tolist(), draw.output_tokens.tolist()
    for token, logit in enumerate(logits):
        x = float(np.float32(logit) + np.float32(params.logit_bias.get(token, 0.0)))
        if params.allowed_token_ids and token not in params.allowed_token_ids:
            x = -math.inf
        for bad in params.bad_token_sequences:
            head = list(bad[:-1])
            if token == bad[-1] and (not head or output[-len(head) :] == head):
                x = -math.inf
        if token in prompt or token in output:
            x = x / params.repetition_penalty if x > 0 else x * params.repetition_penalty
        count = output.count(token)
        if count:
            x -= params.presence_penalty + params.frequency_penalty * count
        if not draw.allow_stop and (token in params.stop_token_ids or (token in EOS and not params.ignore_eos)):
            x = -math.inf
        out.append(x)
    return out


def oracle(logits: list[float], draw: Draw) -> set[int]:
    """The token, or those between which rounding decides."""
    params = draw.params
    x = edited(logits, draw)
    order = sorted(range(len(x)), key=lambda token: (-x[token], token))
    order = [token for token in order if x[token] > -math.inf]
    if not order:
        return {MASK_EMPTY}
    top = x[order[0]]
    if params.temperature == 0:
        return {token for token in order if top - x[token] < 1e-5}
    kept = order[: params.top_k] if params.top_k else order
    weights = [math.exp((x[token] - top) / params.temperature) for token in kept]
    total, reached, count = math.fsum(weights), 0.0, 0
    near = False  # whether the nucleus' border is within rounding
    for weight in weights:
        count += 1
        reached += weight
        near = near or abs(reached / total - params.top_p) < 1e-6
        if reached >= params.top_p * total and params.top_p < 1:
            break
    if near and params.top_p < 1:
        return set(range(len(x)))
    kept = [token for token, weight in zip(kept[:count], weights, strict=False) if weight >= params.min_p * (1 - 1e-9)]
    key = stream_key(params.seed, draw.sample_index, draw.position)
    scores = {token: (x[token] - top) / params.temperature + gumbel(key, token) for token in kept}
    best = max(scores.values())
    return {token for token, score in scores.items() if best - score < 1e-4 / min(1.0, params.temperature)}


tokens = st.integers(0, VOCAB - 1)
all_params = st.builds(
    SamplingParams,
    max_tokens=st.just(100),
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.0, 1e-5, 0.1, 0.7, 1.0, 2.0, 100.0]),
    top_k=st.sampled_from([0, 1, 2, 5, VOCAB - 1, VOCAB, 10_000]),
    top_p=st.sampled_from([1.0, 1e-6, 0.1, 0.5, 0.9, 0.999]),
    min_p=st.sampled_from([0.0, 0.01, 0.2, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.3]),
    presence_penalty=st.sampled_from([0.0, -1.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, -0.5, 0.3]),
    logit_bias=st.dictionaries(tokens, st.sampled_from([-100.0, -3.0, 2.5, 100.0]), max_size=4),
    allowed_token_ids=st.one_of(st.just(()), st.lists(tokens, min_size=1, max_size=6, unique=True).map(tuple)),
    bad_token_sequences=st.lists(st.lists(tokens, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
    stop_token_ids=st.frozensets(tokens, max_size=2),
    ignore_eos=st.booleans(),
)
all_draws = st.builds(
    draw_of,
    all_params,
    st.lists(tokens, max_size=8).map(tuple),
    st.lists(tokens, max_size=8).map(tuple),
    index=st.integers(0, 3),
    allow_stop=st.booleans(),
)
# Few different values, so that there are ties.
all_logits = st.lists(st.sampled_from([-8.0, -1.5, 0.0, 0.25, 1.0, 3.0, 9.0]), min_size=VOCAB, max_size=VOCAB)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(all_logits, all_draws), min_size=1, max_size=5))
def test_every_row_of_a_mixed_batch_is_what_the_oracle_draws(rows: list[tuple[list[float], Draw]]) -> None:
    drawn = sample([logits for logits, _ in rows], *(draw for _, draw in rows))
    for (logits, draw), token in zip(rows, drawn, strict=True):
        assert token in oracle(logits, draw)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(all_logits, all_draws), min_size=2, max_size=6), st.randoms())
def test_a_row_draws_the_same_alone_and_in_any_company(rows: list[tuple[list[float], Draw]], random: Any) -> None:
    """Sampling: a greedy row in a mixed batch; a seeded request changes when a neighbour has no seed."""
    alone = [sample(logits, draw)[0] for logits, draw in rows]
    order = list(range(len(rows)))
    random.shuffle(order)
    drawn = sample([rows[i][0] for i in order], *(rows[i][1] for i in order))
    assert list(drawn) == [alone[i] for i in order]


# -- a real vocabulary -------------------------------------------------------------------------------------------------


LARGE = 49_152
ROWS: dict[str, Callable[[Any], Any]] = {
    "smooth": lambda random: random.standard_normal(LARGE) * 3,
    "peaked": lambda random: np.where(np.arange(LARGE) == 77, 40.0, random.standard_normal(LARGE)),
    "flat": lambda random: random.standard_normal(LARGE) * 1e-3,
    "negative, with ties": lambda random: np.round(random.standard_normal(LARGE) * 8) / 4 - 500,
    "two values": lambda random: random.integers(0, 2, LARGE) * 2.0,
    "mostly masked": lambda random: np.where(random.random(LARGE) < 0.999, -np.inf, random.standard_normal(LARGE)),
    "signed zeros": lambda random: random.choice([-0.0, 0.0, -1.0], LARGE),
    "wide": lambda random: random.standard_normal(LARGE) * 1e30,
}
LIMITS: list[dict[str, Any]] = [
    {},
    {"top_k": 40},
    {"top_k": LARGE - 1},
    {"top_p": 0.9},
    {"top_p": 0.0005},
    {"min_p": 0.02},
    {"top_k": 300, "top_p": 0.5},
    {"top_k": 300, "top_p": 1 - 2**-53},
    {"top_k": 20, "top_p": 0.95, "min_p": 0.1},
]


@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_pruning_is_exact_over_a_large_vocabulary(rows: str, limits: dict[str, Any]) -> None:
    random = np.random.default_rng(7)
    for seed, temperature in enumerate([1e-5, 0.05, 0.7, 1.0, 5.0, 1e6]):
        logits = ROWS[rows](random).astype(np.float32)
        draw = draw_of(params_of(seed=seed, temperature=temperature, **limits))
        assert sample(logits, draw, vocab=LARGE) == (big_oracle(logits, draw),)


def test_tokens_far_below_the_first_are_drawn_when_they_are_many() -> None:
    logits = np.full(LARGE, -12.0, np.float32)
    logits[77] = 0.0
    drawn: list[int] = []
    for seed in range(30):
        draw = draw_of(params_of(seed=seed))
        drawn += sample(logits, draw, vocab=LARGE)
        assert drawn[-1] == big_oracle(logits, draw)
    assert 77 in drawn
    assert len(set(drawn)) > 3


def big_oracle(logits: Any, draw: Draw) -> int:
    """By sorting everything, in numpy."""
    params = draw.params
    order = np.argsort(-logits.astype(np.float64), kind="stable")
    order = order[logits[order] > -np.inf]
    x = (logits[order].astype(np.float64) - float(logits.max())) / params.temperature
    if params.top_k:
        order, x = order[: params.top_k], x[: params.top_k]
    if params.top_p < 1:
        mass = np.cumsum(np.exp(x))
        count = int(np.searchsorted(mass, params.top_p * mass[-1])) + 1
        order, x = order[:count], x[:count]
    if params.min_p:
        order, x = order[x >= math.log(params.min_p)], x[x >= math.log(params.min_p)]
    return int(order[np.argmax(x + noise_of(stream_key(params.seed, draw.sample_index, draw.position), order))])


def noise_of(key: int, ids: Any) -> Any:
    z = np.uint64(key) + (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    v = 1.0 - ((z >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return -np.log(-np.log1p(-v))


def test_draws_follow_the_distribution() -> None:
    """Chi-square over 20,000 draws of eight tokens; the noise of neighbouring positions and samples is independent."""
    wanted = np.array([0.4, 0.3, 0.1, 0.1, 0.05, 0.03, 0.015, 0.005])
    logits = np.log(wanted).astype(np.float32)
    for vary in ("seed", "index", "position"):
        draws = []
        for i in range(20_000):
            changes: dict[str, Any] = {"seed": i} if vary == "seed" else {"seed": 11}
            draw = draw_of(params_of(**changes), index=i if vary == "index" else 0)
            if vary == "position":
                draw = replace(draw, prompt_tokens=np.broadcast_to(np.int32(0), (i,)))
            draws.append(draw)
        drawn = sample(np.tile(logits, (len(draws), 1)), *draws, vocab=8)
        counts = np.bincount(drawn, minlength=8)
        chi_square = float(((counts - wanted * len(draws)) ** 2 / (wanted * len(draws))).sum())
        assert chi_square < 24.3, f"{vary}: {counts}"  # 7 degrees of freedom: exceeded by chance once in 1,000


KEYS = {  # seed, sample index, position
    (0, 0, 0): 0x1E35CDB4BF4F6F16,
    (1, 0, 0): 0xDA0909B7E1251B72,
    (0, 1, 0): 0xDF1FEE48C3407A10,
    (0, 0, 1): 0x8D0312E892F28CFB,
    (2**64 - 1, 63, 131_071): 0xAA312EC9401E83BB,
}
DRAWN = (56, 7, 15, 55, 14, 52, 19, 2, 2, 40, 40, 53)


def test_the_noise_is_the_one_that_every_version_draws() -> None:
    """Fixed: a stream that moves to a group of another version goes on as it would have."""
    assert [stream_key(*numbers) for numbers in KEYS] == list(KEYS.values())
    assert gumbel(0, 0) == pytest.approx(2.0868436769674386, rel=1e-14)
    assert gumbel(2**64 - 1, 49_151) == pytest.approx(1.0111985217600739, rel=1e-14)
    logits = np.sin(np.arange(VOCAB))
    drawn = tuple(sample(logits, draw_of(params_of(seed=2026), (1, 2), tuple(range(at))))[0] for at in range(12))
    assert drawn == DRAWN


def test_no_noise_is_infinite() -> None:
    inverse = pow(0x9E3779B97F4A7C15, -1, 2**64)
    for word in (0, 2**64 - 1):  # the ends of what the hash can be
        assert math.isfinite(gumbel(unmixed(word) - 0x9E3779B97F4A7C15, 0))
        token = (unmixed(word) * inverse - 1) % 2**64
        assert gumbel(0, token) == gumbel(unmixed(word) - 0x9E3779B97F4A7C15, 0)
    assert gumbel(unmixed(2**64 - 1) - 0x9E3779B97F4A7C15, 0) == pytest.approx(53 * math.log(2))


def unmixed(word: int) -> int:
    """What SplitMix64's finalizer turns into ``word``."""
    for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
        undone = word
        for _ in range(3):
            undone = word ^ (undone >> shift)
        word = undone * pow(factor, -1, 2**64) % 2**64
    return word


def test_the_noise_is_gumbel() -> None:
    values = np.array([gumbel(stream_key(seed, 0, 0), token) for seed in range(100) for token in range(100)])
    assert abs(values.mean() - 0.5772) < 0.05
    assert abs(values.var() - math.pi**2 / 6) < 0.1


# -- one bug each ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e-5])
def test_a_tiny_temperature_is_greedy_and_finite(temperature: float) -> None:
    """Sampling: temperature 1e-5 gives inf."""
    logits = np.linspace(-300, 300, VOCAB)
    for seed in range(20):
        assert sample(logits, draw_of(params_of(temperature=temperature, seed=seed))) == (VOCAB - 1,)


def test_top_k_above_the_vocabulary_keeps_all() -> None:
    """Sampling: top_k above the vocabulary."""
    for seed in range(50):
        free = sample(np.zeros(VOCAB), draw_of(params_of(seed=seed)))
        assert sample(np.zeros(VOCAB), draw_of(params_of(seed=seed, top_k=2**31))) == free


def test_masks_that_leave_nothing_are_told_not_drawn() -> None:
    """Sampling: everything masked → token 0 comes out. The neighbour draws on."""
    empty = params_of(allowed_token_ids=(7,), bad_token_sequences=((7,),))
    assert sample(np.zeros((2, VOCAB)), draw_of(empty), draw_of(params_of(temperature=0.0)))[0] == MASK_EMPTY
    stop_only = params_of(allowed_token_ids=EOS)
    assert sample(np.zeros(VOCAB), draw_of(stop_only, allow_stop=False)) == (MASK_EMPTY,)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_fail_their_row_alone(broken: float, temperature: float) -> None:
    logits = np.zeros((3, VOCAB))
    logits[1, 30] = broken
    draws = [draw_of(params_of(temperature=temperature, logprobs=1)) for _ in range(3)]
    drawn, told = Sampler(VOCAB, EOS).sample(torch.tensor(logits, dtype=torch.float32), draws)
    assert drawn[1] == NOT_FINITE
    assert told[1] is None
    assert drawn[0] == drawn[2] >= 0


@pytest.mark.parametrize(
    "masking", [{"allowed_token_ids": (3, 4)}, {"bad_token_sequences": ((30,),)}, {"stop_token_ids": frozenset({30})}]
)
def test_no_mask_hides_a_broken_row(masking: dict[str, Any]) -> None:
    """Else the model's NaN would come out as a token that looks like any other, with a logprob of NaN."""
    logits = np.zeros(VOCAB)
    logits[30] = math.nan
    assert sample(logits, draw_of(params_of(**masking), allow_stop=False)) == (NOT_FINITE,)


@pytest.mark.parametrize("penalty", [1e-38, 3e38])
def test_an_extreme_penalty_breaks_nothing(penalty: float) -> None:
    logits = np.linspace(-50, 50, VOCAB)
    everything = draw_of(params_of(temperature=0.0, repetition_penalty=penalty), prompt=tuple(range(VOCAB)))
    assert sample(logits, everything)[0] >= VOCAB // 2
    masked = np.where(np.arange(VOCAB) == 7, 1.0, -np.inf)
    assert sample(masked, everything) == (7,), "what the model excludes stays excluded"


def test_preemption_and_a_move_go_on_with_the_same_draws() -> None:
    """Sampling: preemption restarts the generator. There is none: a rebuilt draw in another sampler says the same."""
    random = np.random.default_rng(3)
    logits = random.standard_normal((12, VOCAB))
    whole: tuple[int, ...] = ()
    for row in logits:
        whole += sample(row, draw_of(params_of(seed=9), (1, 2, 3), whole))
    assert len(set(whole)) > 3
    for at in range(12):
        company = [draw_of(params_of(seed=at)), draw_of(params_of(seed=9), (1, 2, 3), whole[:at], index=0)]
        assert sample([logits[0], logits[at]], *company)[1] == whole[at]


def test_equal_logits_go_to_the_lower_id() -> None:
    assert sample(np.zeros(VOCAB), draw_of(params_of(temperature=0.0))) == (0,)
    for limits in ({"top_k": 3}, {"top_p": 2.5 / VOCAB}):
        kept = {sample(np.zeros(VOCAB), draw_of(params_of(seed=seed, **limits)))[0] for seed in range(200)}
        assert kept == {0, 1, 2}


def test_penalties_count_the_whole_prompt() -> None:
    """Sampling: penalties that ignore the part of the prompt that came from the cache. A Draw knows no cache."""
    logits = np.zeros(VOCAB)
    logits[[10, 11]] = [3.0, 2.0]
    punished = params_of(temperature=0.0, repetition_penalty=2.0)
    assert sample(logits, draw_of(punished)) == (10,)
    assert sample(logits, draw_of(punished, prompt=(10,) * 3)) == (11,)
    present = params_of(temperature=0.0, presence_penalty=1.5)
    assert sample(logits, draw_of(present, prompt=(10,))) == (10,), "presence counts the output only"
    assert sample(logits, draw_of(present, output=(10,))) == (11,)


def test_min_tokens_forbids_every_end_but_not_what_does_not_end() -> None:
    """Text: min_tokens ignored by second EOS ids."""
    logits = np.zeros(VOCAB)
    logits[[2, 5, 9]] = [9.0, 8.0, 7.0]
    stops = params_of(temperature=0.0, stop_token_ids=frozenset({9}))
    assert sample(logits, draw_of(stops, allow_stop=False)) == (0,)
    assert sample(logits, draw_of(replace(stops, ignore_eos=True), allow_stop=False)) == (2,)
    assert sample(logits, draw_of(stops)) == (2,)


def test_bad_words_of_several_tokens_are_cut_at_the_last() -> None:
    logits = np.zeros(VOCAB)
    logits[12] = 5.0
    bad = params_of(temperature=0.0, bad_token_sequences=((10, 11, 12), (12, 12)))
    assert sample(logits, draw_of(bad, output=(10, 11))) == (0,)
    assert sample(logits, draw_of(bad, output=(11, 10))) == (12,)
    assert sample(logits, draw_of(bad, output=(12,))) == (0,)
    assert sample(logits, draw_of(bad, prompt=(10, 11))) == (12,), "the prompt is not the output"


# -- logprobs ----------------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(all_logits, all_draws, st.integers(0, 20))
def test_logprobs_are_of_the_raw_distribution(logits: list[float], draw: Draw, top: int) -> None:
    asked = replace(draw, params=replace(draw.params, logprobs=top))
    (token,), (told,) = Sampler(VOCAB, EOS).sample(torch.tensor([logits], dtype=torch.float32), [asked])
    if token < 0:
        assert told is None
        return
    assert told is not None
    expected = torch.log_softmax(torch.tensor(logits, dtype=torch.float64), 0)
    order = sorted(range(VOCAB), key=lambda other: (-logits[other], other))
    assert [entry.token_id for entry in told.top] == order[:top]
    assert told.token.token_id == token
    for entry in (told.token, *told.top):
        assert entry.logprob == pytest.approx(float(expected[entry.token_id]), abs=1e-6)
        assert order[entry.rank - 1] == entry.token_id
    assert token == Sampler(VOCAB, EOS).sample(torch.tensor([logits], dtype=torch.float32), [draw])[0][0]


def test_each_row_gets_as_many_logprobs_as_it_asked_for() -> None:
    random = np.random.default_rng(5)
    logits = random.standard_normal((5, 5_000)).astype(np.float32) * 4
    wanted = [3, None, 0, 20, 1]
    draws = [draw_of(params_of(seed=i, logprobs=top)) for i, top in enumerate(wanted)]
    tokens, told = Sampler(5_000, EOS).sample(torch.tensor(logits), draws)
    expected = torch.log_softmax(torch.tensor(logits, dtype=torch.float64), -1)
    assert [None if position is None else len(position.top) for position in told] == wanted
    for row, position in enumerate(told):
        if position is None:
            continue
        assert position.token.token_id == tokens[row]
        assert position.token.rank == 1 + int((expected[row] > expected[row, tokens[row]]).sum())
        best = torch.topk(expected[row], 20)
        assert [entry.token_id for entry in position.top] == best.indices[: len(position.top)].tolist()
        for entry in (position.token, *position.top):
            assert entry.logprob == pytest.approx(float(expected[row, entry.token_id]), abs=2e-6)


def test_a_logprob_is_finite_even_of_nothing() -> None:
    """Sampling: logprob −inf is not JSON."""
    logits = np.full(VOCAB, -np.inf)
    logits[[3, 4]] = [0.0, -1e38]
    asked = params_of(temperature=0.0, logprobs=5)
    _, (told,) = Sampler(VOCAB, EOS).sample(torch.tensor(logits[None], dtype=torch.float32), [draw_of(asked)])
    assert told is not None
    assert all(math.isfinite(entry.logprob) for entry in (told.token, *told.top))
    assert np.isfinite(np.float32(min(entry.logprob for entry in told.top)))


def test_padded_columns_are_never_drawn() -> None:
    """A head whose vocabulary is padded for the hardware: what lies behind it does not exist."""
    logits = np.zeros((1, VOCAB + 4))
    logits[0, VOCAB:] = 50.0
    assert sample(logits, draw_of(params_of(temperature=0.0))) == (0,)
