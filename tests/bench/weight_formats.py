"""Weights in 8 bits against fp32: what it costs in perplexity, and what it gives in speed.

The text is the manual that comes with Python (``pydoc_data.topics``), the first tokens of it in windows. Perplexities
are from the engine's own prompt logprobs, so everything that computes an answer computes them.
"""

from __future__ import annotations

import hashlib
import math
import pydoc_data.topics
from typing import Any

from cluster.blocks import BlockHash
from cluster.cli.bench import engine_run
from cluster.cli.bench import workload as requests
from cluster.models import resolve
from router.tokenizer import Tokenizer
from tests.bench.common import MODEL, Result, again, engine_on, workload
from workers.offline import Offline
from workers.request import Failed, Request, RequestKey, SamplingParams


def run(base: Offline) -> Result:
    """Perplexity, tokens/s and bytes of weights, in both."""
    settings = workload("weight_formats")
    topics: dict[str, str] = pydoc_data.topics.topics
    text = "\n".join(topics[name] for name in sorted(topics))
    tokens = Tokenizer(resolve(MODEL)).encode(text)[: settings["tokens"]]
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    windows = [tuple(tokens[i : i + settings["window"]]) for i in range(0, len(tokens), settings["window"])]
    formats = {"fp32": base, "int8": engine_on(MODEL, threads=base.threads, pool_tokens=16, weights="int8")}
    measured = {name: _measure(offline, windows) for name, offline in formats.items()}
    exact = measured["fp32"]
    rows = [
        (
            name,
            f"{found['perplexity']:.3f}",
            f"{100 * (found['perplexity'] / exact['perplexity'] - 1):+.2f} %",
            f"{found['output_tok_s']:.0f}",
            f"{found['output_tok_s'] / exact['output_tok_s']:.2f}",
            f"{found['single_tok_s']:.0f}",
            f"{found['weight_bytes'] / 1e6:.0f}",
        )
        for name, found in measured.items()
    ]

    def plot(axes: Any) -> None:
        names = list(measured)
        axes.bar(names, [measured[name]["output_tok_s"] for name in names])
        axes.set_ylabel("output tokens/s, 32 requests")

    return Result(
        title="Weights in 8 bits",
        heading=("weights", "perplexity", "more", "output tok/s", "ratio", "one alone, tok/s", "weights, MB"),
        rows=rows,
        figures=measured,
        note=f"Perplexity of {len(tokens):,} tokens in windows of {settings['window']}, text {digest}; speed of the "
        "built-in 32 requests.",
        plot=plot,
        settings=settings,
    )


def _measure(offline: Offline, windows: list[tuple[int, ...]]) -> dict[str, float]:
    fresh = again(offline, pool_tokens=32 * 1024, weights=offline.config.weights)
    items = requests.built_in(32)
    runs = [engine_run.run(fresh, items) for _ in range(2)]
    alone = engine_run.run(fresh, engine_run.single(items, fresh.max_context_tokens))
    return {
        "perplexity": _perplexity(fresh, windows),
        "output_tok_s": max(one.output_tok_s for one in runs),
        "single_tok_s": alone.output_tok_s,
        "weight_bytes": offline.model.weight_bytes,
    }


def _perplexity(offline: Offline, windows: list[tuple[int, ...]]) -> float:
    """e to the mean of -log p of every token but each window's first."""
    engine, _ = offline.engine()
    for index, window in enumerate(windows):
        sampling = SamplingParams(max_tokens=1, seed=0, temperature=0.0, prompt_logprobs=0)
        key = RequestKey("perplexity", str(index), 1)
        engine.submit(Request(key=key, prompt=window, sampling=sampling, root=BlockHash(bytes(32))))
    total, count = 0.0, 0
    while engine.has_work:
        for output in engine.step(0.0):
            if isinstance(output.end, Failed):
                raise output.end.error
            if output.admitted is not None:
                told = output.admitted.prompt_logprobs
                total -= sum(position.token.logprob for position in told)
                count += len(told)
    return math.exp(total / count)
