"""Groups of several ranks as processes on this host: the same tokens as one rank, and a loud end when one is lost."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.blocks import BlockHash
from cluster.config import CollectiveName, EngineConfig
from cluster.errors import ConfigError, GroupLost, QuireError
from cluster.models import ModelFiles, resolve
from tests.support.hf import CPU, random_model
from workers import assembly
from workers.collective import Alone
from workers.engine import Engine
from workers.model.loading import load_model
from workers.model.partition import part_of
from workers.offline import Offline, load_offline, offline_ranks
from workers.rank_group import RankedGroup
from workers.request import Failed, Finished, Output, Request, RequestKey, SamplingParams

ROOT = BlockHash(bytes(32))
TIE = 1e-4

Found = dict[str, tuple[list[int], list[float]]]
"""Of each request its tokens, and how far the two most likely ones were apart."""


def requests_for(vocab: int, count: int = 20) -> list[Request]:
    """Half greedy, half seeded, of many lengths; some with prompt logprobs, so that scoring is gathered too."""
    generator = random.Random(7)
    made = []
    for i in range(count):
        prompt = tuple(generator.randrange(10, vocab) for _ in range(generator.randint(1, 60)))
        sampling = SamplingParams(
            max_tokens=12,
            seed=i,
            temperature=0.0 if i % 2 else 0.8,
            ignore_eos=True,
            logprobs=2,
            prompt_logprobs=0 if i % 5 == 0 else None,
        )
        made.append(Request(key=RequestKey("test", str(i), 1), prompt=prompt, sampling=sampling, root=ROOT))
    return made


def tokens_of(offline: Offline, requests: list[Request], together: bool) -> Found:
    engine, _ = offline.engine()
    found: Found = {one.key.request_id: ([], []) for one in requests}

    def run() -> None:
        while engine.has_work:
            for output in engine.step(time.monotonic()):
                take(output)

    def take(output: Output) -> None:
        assert not isinstance(output.end, Failed), output.end
        tokens, gaps = found[output.key.request_id]
        tokens += output.token_ids
        gaps += [one.top[0].logprob - one.top[1].logprob for one in output.logprobs]

    for request in requests:
        engine.submit(request)
        if not together:
            run()
    run()
    engine.check()
    return found


def assert_same(one: Found, other: Found) -> None:
    parted = 0
    for name, (tokens, gaps) in one.items():
        theirs = other[name][0]
        assert len(tokens) == len(theirs) > 0
        at = next((i for i, pair in enumerate(zip(tokens, theirs, strict=True)) if pair[0] != pair[1]), None)
        if at is not None:
            assert gaps[at] < TIE, f"request {name} parts at {at}"
            parted += 1
    assert parted <= 1


@pytest.fixture(scope="module")
def smollm2() -> ModelFiles:
    return resolve("smollm2-135m")


@pytest.fixture(scope="module")
def alone(smollm2: ModelFiles) -> Offline:
    return load_offline(smollm2, EngineConfig(), default_kv_tokens=4096)


@pytest.fixture(scope="module")
def expected(alone: Offline) -> Found:
    return tokens_of(alone, requests_for(49_000), together=True)


@pytest.mark.parametrize("ranks", [2, 3])
def test_smollm2_gives_the_same_tokens_on_any_number_of_ranks(
    smollm2: ModelFiles, alone: Offline, expected: Found, ranks: int
) -> None:
    with offline_ranks(smollm2, EngineConfig(), ranks, default_kv_tokens=4096) as offline:
        requests = requests_for(49_000)
        assert_same(expected, tokens_of(offline, requests, together=True))
        assert_same(expected, tokens_of(offline, requests[:6], together=False) | _rest(expected, 6))
        assert isinstance(offline.group, RankedGroup)
        parts = [offline.model.weight_bytes, *(rank.weight_bytes for rank in offline.group.ranks())]
    whole = alone.model.weight_bytes
    print(f"{ranks} ranks: weights of {[f'{part / 1e6:.0f} MB' for part in parts]}, of {whole / 1e6:.0f} MB")
    assert sum(parts) == whole, "nothing twice"
    assert max(parts) < 1.1 * whole / ranks


def test_8_bits_on_two_ranks_are_as_good_and_know_no_neighbours(smollm2: ModelFiles, alone: Offline) -> None:
    """Not the same as on one: sums in another order round activations to other integers here and there."""
    settings = EngineConfig(weights="int8")
    requests = requests_for(49_000)[:8]
    exact = prompt_logprobs(alone)
    one_rank = prompt_logprobs(load_offline(smollm2, settings, default_kv_tokens=4096))
    with offline_ranks(smollm2, settings, 2, default_kv_tokens=4096) as offline:
        two_ranks = prompt_logprobs(offline)
        together, apart = (tokens_of(offline, requests, together=together) for together in (True, False))
    assert together == apart, "to the last bit"
    errors = [float(np.abs(found - exact).mean()) for found in (one_rank, two_ranks)]
    print(f"mean error of log-probabilities in 8 bits: one rank {errors[0]:.4f}, two ranks {errors[1]:.4f}")
    assert 0 < errors[1] < 1.3 * errors[0]


def prompt_logprobs(offline: Offline) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    engine, _ = offline.engine()
    generator = random.Random(3)
    for i in range(8):
        prompt = tuple(generator.randrange(10, 49_000) for _ in range(80))
        sampling = SamplingParams(max_tokens=1, seed=0, temperature=0.0, prompt_logprobs=0)
        engine.submit(Request(key=RequestKey("test", str(i), 1), prompt=prompt, sampling=sampling, root=ROOT))
    found: dict[str, list[float]] = {}
    while engine.has_work:
        for output in engine.step(0.0):
            if output.admitted is not None:
                told = output.admitted.prompt_logprobs
                found[output.key.request_id] = [position.token.logprob for position in told]
    return np.array([found[str(i)] for i in range(8)]).ravel()


def _rest(found: Found, first: int) -> Found:
    return {name: value for name, value in found.items() if int(name) >= first}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    """Two KV heads for eight query heads, biases, and a vocabulary that three does not divide."""
    folder = tmp_path_factory.mktemp("small")
    random_model(folder, family="qwen2", num_attention_heads=8, num_key_value_heads=2, head_dim=8, vocab_size=322)
    return ModelFiles("small", folder, "hf")


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (4, {}),
        (3, {"attention": "reference"}),
        (3, {"collective": "torch"}),
        (2, {"weights": "int8"}),
    ],
    ids=["more ranks than KV heads", "reference", "gloo", "int8"],
)
def test_a_small_model_gives_the_same_tokens(small: ModelFiles, ranks: int, settings: dict[str, str]) -> None:
    config = EngineConfig(threads=1, **settings)  # type: ignore[arg-type]
    requests = requests_for(322)
    expected = tokens_of(load_offline(small, config, default_kv_tokens=4096), requests, together=False)
    with offline_ranks(small, config, ranks, default_kv_tokens=4096) as offline:
        found = tokens_of(offline, requests, together=True)
    if settings.get("weights") != "int8":  # heads of 8 numbers share scales across ranks: rounding differs there
        assert_same(expected, found)


@pytest.mark.parametrize("embeddings", ["tied, present once", "tied, present twice", "apart"])
def test_tied_embeddings_present_absent_or_both(tmp_path: Path, embeddings: str) -> None:
    """And a vocabulary not divisible, whose padded rows must never be sampled: 325 tokens on 4 ranks."""
    tied = embeddings != "apart"
    model = random_model(tmp_path, tie_word_embeddings=tied, vocab_size=325, num_attention_heads=4)
    if embeddings == "tied, present twice":
        file = tmp_path / "model.safetensors"
        tensors = load_file(file)
        assert "lm_head.weight" not in tensors
        save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file)
    files = ModelFiles("embeddings", tmp_path, "hf")
    prompt = [5, 324, 17, 320, 3]
    ids = torch.tensor([prompt])
    for _ in range(12):
        ids = torch.cat((ids, model(ids).logits[:, -1:].argmax(-1)), 1)
    config = EngineConfig(threads=1)
    with offline_ranks(files, config, 4, default_kv_tokens=4096) as offline:
        assert offline.model.config.tied_embeddings == tied
        greedy = SamplingParams(max_tokens=12, seed=0, temperature=0.0, ignore_eos=True, logprobs=2)
        asked = Request(key=RequestKey("test", "0", 1), prompt=tuple(prompt), sampling=greedy, root=ROOT)
        assert tokens_of(offline, [asked], together=True)["0"][0] == ids[0, len(prompt) :].tolist()
        hot = SamplingParams(max_tokens=400, seed=1, temperature=50.0, ignore_eos=True, logprobs=20)
        wild = Request(key=RequestKey("test", "1", 1), prompt=tuple(prompt), sampling=hot, root=ROOT)
        drawn = tokens_of(offline, [wild], together=True)["1"][0]
    assert max(drawn) <= 324
    assert {token * 4 // 325 for token in drawn} == {0, 1, 2, 3}, "tokens of every rank are drawn"


def test_every_rank_loads_its_own_part_not_shard_0(small: ModelFiles) -> None:
    """Right shapes, wrong numbers: parts of equal shape are told apart by what they hold."""
    tensors = load_file(small.path / "model.safetensors")
    x = torch.randn(3, 80)
    whole = x @ tensors["model.layers.1.mlp.down_proj.weight"].T
    for ranks in (2, 4):
        parts = [load_model(small, torch.float32, CPU, int8=False, ranks=Apart(rank, ranks)) for rank in range(ranks)]
        assert torch.equal(torch.cat([part.embedding.rows for part in parts]), tensors["model.embed_tokens.weight"])
        columns = [part_of(part.whole, rank, ranks).columns for rank, part in enumerate(parts)]
        assert len({len(one) for one in columns}) < ranks, "some parts have one shape"
        products = [
            part.layers[1].down.linear(x[:, own.start : own.stop].contiguous())
            for part, own in zip(parts, columns, strict=True)
        ]
        torch.testing.assert_close(sum(products), whole, rtol=1e-5, atol=1e-5)
        twice = [part.layers[1].down.linear(x[:, : len(columns[0])].contiguous()) for part in parts[:2]]
        assert not torch.allclose(*twice), "equal inputs meet unequal parts"


class Apart(Alone):
    """One of several ranks, that computes nothing with the others."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks


def children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


@pytest.fixture
def nothing_left() -> Iterator[None]:
    before, shared = children(), set(os.listdir("/dev/shm"))
    yield
    assert not [one for one in children() - before if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
    assert set(os.listdir("/dev/shm")) <= shared


def step_for(engine: Engine, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        engine.step(0.0)


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(("busy", "collective"), [(True, "memory"), (False, "memory"), (True, "torch")])
def test_a_rank_that_is_killed_ends_the_group_at_once_and_is_named(
    small: ModelFiles, busy: bool, collective: CollectiveName
) -> None:
    """One rank dies and the others wait in the collective for ever."""
    with offline_ranks(small, EngineConfig(threads=1, collective=collective), 3, default_kv_tokens=4096) as offline:
        assert isinstance(offline.group, RankedGroup)
        engine, _ = offline.engine()
        victim = offline.group.ranks()[1]
        for request in requests_for(322):
            engine.submit(request)
        if busy:
            for _ in range(3):
                engine.step(0.0)
        os.kill(victim.pid, signal.SIGKILL)
        with pytest.raises(GroupLost, match="rank 2 is gone"):
            step_for(engine, 20.0)
        assert str(offline.group.failure()).startswith("rank 2 is gone: "), "the first cause, not what came of it"


@pytest.mark.usefixtures("nothing_left")
def test_a_rank_that_is_stopped_gets_no_further_and_falls_silent(small: ModelFiles) -> None:
    with offline_ranks(small, EngineConfig(threads=1), 2, default_kv_tokens=4096) as offline:
        assert isinstance(offline.group, RankedGroup)
        (rank,) = offline.group.ranks()
        time.sleep(1.2)
        assert offline.group.ranks()[0].heartbeat_age_s < 1.0
        os.kill(rank.pid, signal.SIGSTOP)
        time.sleep(2.0)
        assert offline.group.ranks()[0].heartbeat_age_s > 1.5
        os.kill(rank.pid, signal.SIGKILL)


@pytest.mark.usefixtures("nothing_left")
def test_what_a_rank_could_not_start_with_is_the_leaders_error(tmp_path: Path) -> None:
    random_model(tmp_path, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    files = ModelFiles("small", tmp_path, "hf")
    with pytest.raises(ConfigError, match="tp: 5 ranks, but the model has 4 query heads"):  # noqa: SIM117
        with offline_ranks(files, EngineConfig(threads=1), 5):
            pass


def test_the_ends_of_requests_on_ranks(small: ModelFiles) -> None:
    """A stop and a length, an error of one request, and the group goes on."""
    with offline_ranks(small, EngineConfig(threads=1), 2, default_kv_tokens=512) as offline:
        engine, _ = offline.engine()
        with pytest.raises(QuireError):
            engine.submit(
                Request(
                    key=RequestKey("t", "x", 1), prompt=(), sampling=SamplingParams(max_tokens=1, seed=0), root=ROOT
                )
            )
        engine.submit(requests_for(322)[0])
        ends = []
        while engine.has_work:
            ends += [output.end for output in engine.step(0.0) if output.end is not None]
        assert [type(end) for end in ends] == [Finished]


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(
    ("number", "said"), [(signal.SIGKILL, "rank 1 is gone"), (signal.SIGSTOP, "rank 1 has been silent")]
)
def test_a_rank_that_is_lost_in_the_trial_step_ends_the_start_soon(
    small: ModelFiles, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, said: str
) -> None:
    """The leader waits for it inside compiled code."""
    make_runner = assembly.make_runner
    victims: list[psutil.Process] = []

    def lose_one(*arguments: Any, **settings: Any) -> Any:
        victims.extend(one for one in children() if "workers.rank" in one.cmdline() and one.cmdline()[3] == "1")
        for victim in victims:
            victim.send_signal(number)
        return make_runner(*arguments, **settings)

    monkeypatch.setattr(assembly, "make_runner", lose_one)
    monkeypatch.setattr(RankedGroup.begin, "__defaults__", (2.0,))
    begun = time.monotonic()
    with pytest.raises(GroupLost, match=said), offline_ranks(small, EngineConfig(threads=1), 3):
        pass
    assert victims
    assert time.monotonic() - begun < 60
