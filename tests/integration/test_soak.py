"""50,000 short requests with cancels on a tiny model: no page is lost, nothing grows, each ends exactly once."""

from __future__ import annotations

import gc
import random
from collections import Counter
from pathlib import Path

import psutil
import pytest

from tests.support.engines import ROOT, Driven
from tests.support.hf import our_model, random_model
from workers.engine import Engine
from workers.request import Failed, Request, RequestKey, SamplingParams

REQUESTS, WARM_UP = 50_000, 5_000
GROWTH_BYTES = 10 << 20
"""What may be added after the warm-up, some 3 MB as a rule: a leak of a quarter of a kilobyte per request is more."""


class Soak:
    """Clients that come, some of which leave, and what became of each."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self._engine = engine
        self._random = random.Random(seed)
        self._alive: dict[RequestKey, set[int]] = {}  # samples that have not ended
        self._old: RequestKey | None = None
        self.submitted = 0
        self.fates: Counter[str] = Counter()

    def turn(self) -> None:
        """Some requests come, some clients leave, one step."""
        rng = self._random
        while len(self._alive) < 48 and self.submitted < REQUESTS and rng.random() < 0.9:
            self._submit()
        for key in rng.sample(sorted(self._alive), min(len(self._alive), rng.choice([0, 0, 1, 2]))):
            self._cancel(key)
        for output in self._engine.step(float(self.submitted)):
            assert output.key in self._alive, "a request that had ended, or was cancelled, said something"
            assert output.index in self._alive[output.key], "a sample that had ended said something"
            assert not isinstance(output.end, Failed)
            if output.end is not None:
                self._alive[output.key].remove(output.index)
                if not self._alive[output.key]:
                    self._old = output.key
                    del self._alive[output.key]
                    self.fates["finished"] += 1

    @property
    def done(self) -> bool:
        return self.submitted == REQUESTS and not self._alive

    def _submit(self) -> None:
        rng = self._random
        self.submitted += 1
        key = RequestKey(f"router-{self.submitted % 3}", str(self.submitted), 1)
        # A few beginnings that many share, so that pages are shared, published and evicted all the time.
        prompt = [rng.randrange(4)] * rng.choice([1, 8, 17, 30]) + [
            rng.randrange(320) for _ in range(rng.randint(0, 6))
        ]
        n = rng.choice([1, 1, 1, 2])
        sampling = SamplingParams(
            max_tokens=rng.randint(1, 6), seed=self.submitted, n=n, logprobs=rng.choice([None, 1])
        )
        tenant = f"tenant-{self.submitted % 100}"
        self._engine.submit(Request(key=key, prompt=prompt, sampling=sampling, root=ROOT, tenant=tenant))
        self._alive[key] = set(range(n))
        if rng.random() < 0.05:
            self._cancel(key)  # before its first step

    def _cancel(self, key: RequestKey) -> None:
        self._engine.cancel(key)
        if self._random.random() < 0.3:
            self._engine.cancel(key)  # twice
        if self._old is not None:
            self._engine.cancel(self._old)  # and one that has ended
        del self._alive[key]
        self.fates["cancelled"] += 1


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_50000_short_requests(tmp_path: Path) -> None:
    random_model(tmp_path, family="llama", num_hidden_layers=1)
    engine = Driven(our_model(tmp_path), num_blocks=120, block_tokens=8, max_running=32).engine
    soak, process, settled = Soak(engine, seed=7), psutil.Process(), 0
    for turn in range(10 * REQUESTS):
        soak.turn()
        if not settled and soak.submitted >= WARM_UP:
            gc.collect()
            settled = process.memory_info().rss
        if turn % 500 == 0:
            engine.check()
            engine.take_cache_events()
        if soak.done:
            break
    assert soak.done
    assert sum(soak.fates.values()) == REQUESTS
    assert min(soak.fates["finished"], soak.fates["cancelled"]) > REQUESTS // 20, "both kinds of ends were met"
    assert not engine.has_work
    engine.check()
    load = engine.load()
    assert load.free_blocks + load.cached_blocks == load.total_blocks
    assert (load.running_requests, load.waiting_requests, load.requests_finished) == (0, 0, REQUESTS)
    gc.collect()
    assert process.memory_info().rss - settled < GROWTH_BYTES
