"""The tier in Redis: what it costs where nothing is reused, and whether it fetches exactly where that is faster.

Cost: CPU time of the whole process per 1,000 tokens, tier on and off in interleaved pairs, on one thread beside the
tier's own; Redis, a process of its own, is told apart.

Choice: over a link of several speeds, the time to the first token when everything is fetched, when everything is
computed, and as the cost model chooses.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import psutil

from cluster.config import ClusterConfig
from cluster.lifecycle import EmbeddedRedis
from cluster.models import resolve
from cluster.tiers.cost import Decision
from tests.bench.common import MODEL, Result, step, submit, tokens, workload
from tests.support.proxy import slow_proxy
from workers import assembly
from workers.engine import Engine
from workers.group import LocalGroup
from workers.offline import Offline
from workers.prefix_tier import PrefixTier

POOL_TOKENS = 4096
SETTLE_S = 20.0


class Tiered:
    """Engines over the model, each empty, with a tier behind their pages."""

    def __init__(self, base: Offline, url: str, stack: ExitStack) -> None:
        from workers import tier_start

        self.config = ClusterConfig.model_validate(
            {"model": MODEL, "engine": {"step_target_ms": None}, "prefix": {"redis": url, "deadline_ms": 60_000}}
        )
        self._settings = assembly.make_settings(self.config, base.model.config)
        runner = assembly.make_runner(base.model, self.config.engine, POOL_TOKENS // self.config.engine.block_tokens)
        self._group = LocalGroup(runner)
        files = resolve(MODEL)
        self.tier: PrefixTier = tier_start.make_tier(self.config, files, base.model)
        own = tier_start.make_transfers(
            self.config, files, base.model, runner, lambda report: self.tier.report(0, report)
        )
        self.tier.start([own])
        stack.callback(own.close)
        stack.callback(self.tier.close)

    def engine(self, *, tier: bool = True) -> Engine:
        return Engine(self._group, self._settings, self.tier if tier else None)

    def settle(self) -> None:
        """Until all is written."""
        end = time.monotonic() + SETTLE_S
        while self.tier.load().unwritten_bytes and time.monotonic() < end:
            time.sleep(0.002)


def run(base: Offline) -> Result:
    """The ratio on/off, and for each speed what was chosen."""
    from workers.threads import set_threads

    settings = workload("prefix_tier")
    with ExitStack() as stack:
        redis = stack.enter_context(EmbeddedRedis(maxmemory_bytes=600 << 20, policy="allkeys-lru"))
        tiered = Tiered(base, redis.url, stack)
        set_threads(1)
        try:
            pairs, redis_s = _pairs(tiered, settings, psutil.Process(redis.pid))
        finally:
            set_threads(base.threads)
        swept = _sweep(base, tiered, settings, redis)
    ratios = [on / off for on, off in pairs]
    rows = [
        (
            "no reuse: CPU s per 1,000 tokens, off / on",
            f"{statistics.median(off for _, off in pairs):.3f} / {statistics.median(on for on, _ in pairs):.3f}",
            f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}); Redis itself {redis_s:.3f} s",
        )
    ]
    rows += [
        (
            f"{rate} MB/s: first token, all fetched / all computed",
            f"{fetched:.2f} s / {computed:.2f} s",
            f"chosen: {reason}, {chosen:.2f} s, {chosen / min(fetched, computed):.2f} of the better one",
        )
        for rate, fetched, computed, chosen, reason in swept
    ]

    def plot(axes: Any) -> None:
        rates = [row[0] for row in swept]
        for place, label in ((1, "all fetched"), (2, "all computed"), (3, "as chosen")):
            axes.plot(rates, [row[place] for row in swept], "o-", label=label)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("link, MB/s")
        axes.set_ylabel("first token, s")
        axes.legend()

    return Result(
        title="The prefix tier",
        heading=("what", "measured", "result"),
        rows=rows,
        figures={"cpu_ratio_at_0%": statistics.median(ratios), "cpu_ratios_at_0%": ratios, "sweep": swept},
        note=f"{settings['pairs']} interleaved pairs; tokens are those of prompts and outputs.",
        plot=plot,
        settings=settings,
    )


def _pairs(tiered: Tiered, settings: dict[str, Any], redis: psutil.Process) -> tuple[list[tuple[float, float]], float]:
    """CPU seconds per 1,000 tokens, (on, off), of each pair; and of Redis, on."""
    generator = random.Random(settings["seed"])
    pairs, by_redis = [], []
    for index in range(settings["pairs"] + 1):
        took = {}
        for on in (True, False) if index % 2 else (False, True):
            prompts = [tokens(generator, settings["prompt_tokens"]) for _ in range(settings["requests"])]
            count = sum(map(len, prompts)) + len(prompts) * settings["output_tokens"]
            before, redis_before = time.process_time(), _cpu_s(redis)
            engine = tiered.engine(tier=on)
            for number, prompt in enumerate(prompts):
                submit(engine, str(number), prompt, settings["output_tokens"])
            _finish(engine)
            tiered.settle()
            took[on] = (time.process_time() - before) / count * 1000
            if on:
                by_redis.append((_cpu_s(redis) - redis_before) / count * 1000)
        pairs.append((took[True], took[False]))
    return pairs[1:], statistics.median(by_redis[1:])


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _finish(engine: Engine) -> None:
    while engine.has_work:
        step(engine)
        if engine.waits_for_tier:
            time.sleep(0.0005)


def _sweep(
    base: Offline, stored: Tiered, settings: dict[str, Any], redis: EmbeddedRedis
) -> list[tuple[int, float, float, float, str]]:
    prompt = tokens(random.Random(settings["seed"] + 1), settings["sweep_prompt_tokens"])
    _first_token_s(stored.engine(), prompt)
    stored.settle()
    found = []
    for rate in settings["sweep_mb_per_s"]:
        with ExitStack() as stack:
            proxy = stack.enter_context(slow_proxy(redis.port))
            proxy.bytes_per_s = rate * 1e6
            tiered = Tiered(base, redis.url.replace(f":{redis.port}/", f":{proxy.port}/"), stack)
            computed = statistics.median(_first_token_s(tiered.engine(tier=False), prompt) for _ in range(3))
            with _always(tiered.tier):
                fetched = _first_token_s(tiered.engine(), prompt)
            engine = tiered.engine()
            chosen = _first_token_s(engine, prompt)
            reason = "fetch" if engine.load().tier_prompt_tokens else "compute"
            found.append((rate, fetched, computed, chosen, reason))
    return found


@contextmanager
def _always(tier: PrefixTier) -> Iterator[None]:
    """Fetch, whatever it costs."""
    usual = tier.decide
    tier.decide = lambda stored, *rest: Decision(stored, 0.0, 0.0, "fetch")  # type: ignore[method-assign]
    yield
    tier.decide = usual  # type: ignore[method-assign]


def _first_token_s(engine: Engine, prompt: tuple[int, ...]) -> float:
    begun = time.perf_counter()
    submit(engine, "one", prompt, 1)
    _finish(engine)
    return time.perf_counter() - begun
