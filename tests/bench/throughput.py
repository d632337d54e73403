"""Output tokens per second of one engine in one process; prints one JSON line.

    python -m tests.bench.throughput [--model NAME] [--attention auto|reference|cpu] [--threads N]

The first figure is of 32 requests at once (workload.py), the second of one request alone; greedy, EOS ignored.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import asdict, dataclass

import torch

from cluster.blocks import BlockHash
from cluster.config import AttentionName
from cluster.models import resolve
from tests.bench.workload import requests
from workers.engine import Engine, EngineSettings
from workers.group import LocalGroup
from workers.model import load
from workers.model.llama import Model
from workers.plan import StepPlan, StepResult
from workers.request import Request, RequestKey, SamplingParams
from workers.runner import Runner
from workers.sampler import Sampler
from workers.threads import set_threads

BLOCK_TOKENS = 16
MAX_RUNNING = 32


class TimedGroup(LocalGroup):
    """Adds up where the time of the steps goes."""

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner)
        self.forward_s = 0.0
        self.sample_s = 0.0
        self.steps = 0

    def execute(self, plan: StepPlan) -> StepResult:
        result = super().execute(plan)
        self.forward_s += result.forward_s
        self.sample_s += result.sample_s
        self.steps += 1
        return result


@dataclass(frozen=True)
class Measured:
    """One run. Seconds, and tokens per second."""

    output_tok_s: float
    total_s: float
    forward_s: float
    sample_s: float
    other_s: float
    steps: int


def measure(model: Model, attention: AttentionName, work: list[tuple[list[int], int]], max_batch: int) -> Measured:
    """Run the requests through a fresh engine until all have ended."""
    vocab, eos = model.config.vocab_size, model.config.eos_token_ids
    blocks = MAX_RUNNING * 40
    runner = Runner(
        model, block_tokens=BLOCK_TOKENS, num_blocks=blocks, attention=attention, sampler=Sampler(vocab, eos)
    )
    settings = EngineSettings(
        block_tokens=BLOCK_TOKENS,
        max_batch_tokens=max_batch,
        max_running=MAX_RUNNING,
        max_waiting=len(work),
        max_context_tokens=model.config.max_context,
        prefix_cache=True,
        eos_token_ids=frozenset(eos),
        vocab_size=vocab,
    )
    group = TimedGroup(runner)
    engine = Engine(group, settings)
    start = time.perf_counter()
    for i, (prompt, output) in enumerate(work):
        sampling = SamplingParams(max_tokens=output, seed=i, temperature=0.0, ignore_eos=True)
        key = RequestKey("bench", str(i), 1)
        engine.submit(Request(key=key, prompt=prompt, sampling=sampling, root=BlockHash(bytes(32))))
    made = 0
    while engine.has_work:
        made += sum(len(output.token_ids) for output in engine.step(time.perf_counter()))
    total = time.perf_counter() - start
    if made != sum(output for _, output in work):
        raise SystemExit(f"{made} tokens came out, not what was asked for")
    return Measured(
        output_tok_s=made / total,
        total_s=total,
        forward_s=group.forward_s,
        sample_s=group.sample_s,
        other_s=total - group.forward_s - group.sample_s,
        steps=group.steps,
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--attention", choices=["auto", "reference", "cpu"], default="auto")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--max-batch-tokens", type=int, default=512)
    options = parser.parse_args()
    set_threads(options.threads)
    model = load(resolve(options.model), torch.float32, torch.device("cpu"))

    def run(work: list[tuple[list[int], int]]) -> Measured:
        return measure(model, options.attention, work, options.max_batch_tokens)

    run(requests(4, output=(4, 8)))  # memory is touched, kernels know their shapes
    many, one = run(requests()), run([(requests(1)[0][0][:64], 128)])
    print(
        json.dumps(
            {
                "engine": "quire",
                "output_tok_s": many.output_tok_s,
                "single_tok_s": one.output_tok_s,
                "many": asdict(many),
            }
        )
    )


if __name__ == "__main__":
    main()
