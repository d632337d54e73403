"""Engines in the test's own process, on a real model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from cluster.blocks import BlockHash
from cluster.config import AttentionName
from workers.engine import Engine, EngineSettings
from workers.group import LocalGroup
from workers.model.config import ModelConfig
from workers.model.llama import Model
from workers.plan import StepPlan, StepResult
from workers.request import Failed, Finished, PositionLogprobs, Request, RequestKey, SamplingParams
from workers.runner import Runner
from workers.sampler import Sampler

ROOT = BlockHash(bytes(32))


@dataclass
class Result:
    """What came of one request."""

    tokens: list[list[int]]  # of each sample
    cached_tokens: int = 0
    preemptions: int = 0
    ends: list[Finished | Failed] = field(default_factory=list)
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()


class CountingGroup(LocalGroup):
    """Remembers the shapes of its steps."""

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner)
        self.rows: list[list[int]] = []  # tokens of each row, per step

    def execute(self, plan: StepPlan) -> StepResult:
        starts = plan.row_starts.tolist()
        self.rows.append([stop - start for start, stop in pairwise(starts)])
        return super().execute(plan)


def settings_for(
    config: ModelConfig, *, block_tokens: int, max_batch_tokens: int, max_running: int, prefix_cache: bool
) -> EngineSettings:
    """For any number of requests of the model's whole context."""
    return EngineSettings(
        block_tokens=block_tokens,
        max_batch_tokens=max_batch_tokens,
        max_running=max_running,
        max_waiting=10_000,
        max_context_tokens=config.max_context,
        prefix_cache=prefix_cache,
        eos_token_ids=frozenset(config.eos_token_ids),
        vocab_size=config.vocab_size,
    )


class Driven:
    """An engine that runs requests to their ends."""

    def __init__(
        self,
        model: Model,
        *,
        num_blocks: int = 1000,
        max_batch_tokens: int = 512,
        max_running: int = 32,
        prefix_cache: bool = True,
        attention: AttentionName = "auto",
        block_tokens: int = 16,
    ) -> None:
        sampler = Sampler(model.config.vocab_size, model.config.eos_token_ids)
        runner = Runner(model, block_tokens=block_tokens, num_blocks=num_blocks, attention=attention, sampler=sampler)
        settings = settings_for(
            model.config,
            block_tokens=block_tokens,
            max_batch_tokens=max_batch_tokens,
            max_running=max_running,
            prefix_cache=prefix_cache,
        )
        self.group = CountingGroup(runner)
        self.engine = Engine(self.group, settings)
        self._count = 0

    def run(
        self,
        requests: Sequence[tuple[Sequence[int], SamplingParams]],
        outputs: Sequence[tuple[tuple[int, ...], ...]] = (),
    ) -> list[Result]:
        """All at once; ``outputs``: what the samples of each have put out already. Checks the pool at the end."""
        results: dict[str, Result] = {}
        for i, (prompt, sampling) in enumerate(requests):
            self._count += 1
            name = str(self._count)
            before = outputs[i] if outputs else ()
            results[name] = Result([list(output) for output in before] or [[] for _ in range(sampling.n)])
            key = RequestKey("test", name, 1)
            self.engine.submit(Request(key=key, prompt=prompt, outputs=before, sampling=sampling, root=ROOT))
        for step in range(100_000):
            for output in self.engine.step(float(step)):
                result = results[output.key.request_id]
                result.tokens[output.index] += output.token_ids
                if output.admitted is not None:
                    result.cached_tokens = output.admitted.cached_tokens
                    result.prompt_logprobs = output.admitted.prompt_logprobs
                if output.end is not None:
                    result.ends.append(output.end)
                    if isinstance(output.end, Finished):
                        result.preemptions = max(result.preemptions, output.end.usage.preemptions)
            if not self.engine.has_work:
                break
        self.engine.check()
        assert self.engine.load().used_blocks == 0
        return list(results.values())
