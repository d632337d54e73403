"""The state of a request and of each of its samples between steps.

A sequence has tokens *known* (prompt and outputs) and tokens *computed* (their KV is in pages). Nothing here says
prefill or decode: a step computes some of the difference, and a sequence that has caught up draws one more token.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from cluster.blocks import BlockHash
from workers.plan import Draw, Int32, Score
from workers.request import Admitted, Finished, FinishReason, PositionLogprobs, PrefixUse, Request, Usage


class Int32Buffer:
    """A list of int32 that grows at its end and hands out views: a view taken earlier never changes its content
    under appends, since these write behind it or into a new array."""

    __slots__ = ("_array", "_length")

    def __init__(self, values: Iterable[int] | Int32 = ()) -> None:
        self._array = np.array(values if isinstance(values, np.ndarray) else list(values), dtype=np.int32)
        self._length = len(self._array)

    def __len__(self) -> int:
        return self._length

    def view(self, start: int = 0, stop: int | None = None) -> Int32:
        """[start, stop) without a copy."""
        return self._array[start : self._length if stop is None else stop]

    def extend(self, values: Iterable[int]) -> None:
        """Append."""
        added = list(values)
        end = self._length + len(added)
        if end > len(self._array):
            grown = np.empty(max(end, 2 * len(self._array), 16), dtype=np.int32)
            grown[: self._length] = self._array[: self._length]
            self._array = grown
        self._array[self._length : end] = added
        self._length = end

    def replace(self, index: int, value: int) -> None:
        """Change one value in place (views see it: only for what no plan in flight still reads)."""
        self._array[index] = value

    def clear(self) -> list[int]:
        """Empty it; returns what it held."""
        held: list[int] = self.view().tolist()
        self._array, self._length = np.empty(0, dtype=np.int32), 0
        return held


class RequestState:
    """One accepted request: what its samples share."""

    def __init__(self, request: Request, serial: int) -> None:
        self.request = request
        self.rank = (request.priority, request.arrival, serial)  # smaller runs first and is preempted last
        self.prompt: Int32 = np.array(request.prompt, dtype=np.int32)
        self.cached_tokens = 0  # of the prompt, at the first admission
        self.tier_tokens = 0  # of those, fetched from the tier for this request
        self.prefix_use: PrefixUse | None = None  # None: the tier was not asked
        self.admitted_at: float | None = None
        self.announced = False
        self.preemptions = 0
        self.num_scored = 0  # prompt tokens, from the second on, whose logprobs have been computed
        self._prompt_logprobs: list[PositionLogprobs] = []  # of those, until they are told
        outputs = request.outputs or ((),) * request.sampling.n
        self.samples = [Sequence(self, index, output) for index, output in enumerate(outputs)]
        self.unfinished = len(self.samples)
        self.ended = False  # nothing more will be told about it

    def admit(self, cached_tokens: int, now: float) -> bool:
        """Note the first admission of any sample; False when it was noted before."""
        if self.admitted_at is not None:
            return False
        self.admitted_at = now
        self.cached_tokens = min(cached_tokens, len(self.prompt))
        if self.prefix_use is not None:
            self.tier_tokens = min(self.prefix_use.fetched_tokens, self.cached_tokens)
        return True

    @property
    def is_scored(self) -> bool:
        """Whether all prompt logprobs that were asked for are there. The first sample computes them."""
        asked = self.request.sampling.prompt_logprobs is not None
        return not asked or self.num_scored == len(self.prompt) - 1

    def take_scores(self, found: Iterable[PositionLogprobs]) -> None:
        """The logprobs of the next prompt tokens."""
        before = len(self._prompt_logprobs)
        self._prompt_logprobs.extend(found)
        self.num_scored += len(self._prompt_logprobs) - before

    def announce(self) -> Admitted | None:
        """What the request's first output tells, once."""
        if self.announced or self.admitted_at is None:
            return None
        self.announced = True
        queued = max(0.0, self.admitted_at - self.request.arrival)
        told, self._prompt_logprobs = tuple(self._prompt_logprobs), []
        return Admitted(self.cached_tokens, queued, told, self.tier_tokens, self.prefix_use)

    def usage(self) -> Usage:
        """Of all samples so far."""
        completion = sum(len(sample.outputs) for sample in self.samples)
        return Usage(len(self.prompt), completion, self.cached_tokens, self.preemptions, self.tier_tokens)


class Sequence:
    """One sample of a request."""

    __slots__ = (
        "cut_off",
        "finished",
        "hashes",
        "held_on",
        "index",
        "num_computed",
        "num_offered",
        "num_published",
        "outputs",
        "rank",
        "state",
        "table",
    )

    def __init__(self, state: RequestState, index: int, outputs: Iterable[int]) -> None:
        self.state = state
        self.index = index
        self.rank = (*state.rank, index)
        self.outputs = Int32Buffer(outputs)
        self.table = Int32Buffer()  # pages; position p lies in page p // block_tokens of it
        self.num_computed = 0
        self.hashes: list[BlockHash] = []  # of the full blocks of what is known; kept over preemption
        self.num_published = 0  # blocks of the table that are published
        self.num_offered = 0  # chunks that the tier has, or was given
        self.cut_off = False  # it took no more of them
        self.held_on: BlockHash | None = None  # the block that another sequence is computing for this one
        self.finished = False

    @property
    def num_known(self) -> int:
        """Tokens of prompt and outputs."""
        return len(self.state.prompt) + len(self.outputs)

    @property
    def num_reusable(self) -> int:
        """First tokens whose KV may come from elsewhere: it is all that is known of them then, no logits."""
        if self.index == 0 and not self.state.is_scored:
            return self.state.num_scored
        return self.num_known - 1

    @property
    def awaits_sample(self) -> bool:
        """Whether another sample is computing the prompt, or its logprobs, for this one too."""
        first = self.state.samples[0]
        if self is not first and not first.finished and not self.state.is_scored:
            return True
        wanted = len(self.state.prompt) - 1
        running = [sample.num_computed for sample in self.state.samples if len(sample.table)]
        return bool(running) and max(running) < wanted

    @property
    def num_missing(self) -> int:
        """Tokens known and not computed."""
        return self.num_known - self.num_computed

    def tokens(self, start: int, stop: int) -> Int32:
        """Known tokens [start, stop), as a view where they lie together."""
        prompt = self.state.prompt
        border = len(prompt)
        if stop <= border:
            return prompt[start:stop]
        if start >= border:
            return self.outputs.view(start - border, stop - border)
        return np.concatenate((prompt[start:], self.outputs.view(0, stop - border)))

    def draw(self, row: int) -> Draw:
        """What is to be drawn when everything known has been computed."""
        sampling = self.state.request.sampling
        allow_stop = len(self.outputs) >= sampling.min_tokens
        return Draw(row, sampling, self.index, self.state.prompt, self.outputs.view(), allow_stop)

    def score(self, row: int, count: int) -> Score | None:
        """Which prompt logprobs come out when the next ``count`` tokens are computed; None when none do."""
        state = self.state
        if self.index != 0 or state.is_scored:
            return None
        done = state.num_scored  # the logits of token i are about token i + 1
        targets = state.prompt[max(self.num_computed, done) + 1 : self.num_computed + count + 1]
        if not len(targets):
            return None
        return Score(row, max(0, done - self.num_computed), targets, state.request.sampling.prompt_logprobs or 0)

    def end(self, eos_token_ids: frozenset[int]) -> Finished | None:
        """How the sample has ended by its last output token, if it has."""
        sampling = self.state.request.sampling
        count = len(self.outputs)
        last = int(self.outputs.view()[-1]) if count else None
        stops = last in sampling.stop_token_ids or (last in eos_token_ids and not sampling.ignore_eos)
        # The token that ends a sample is itself one of its tokens, hence >: min_tokens is what comes before it.
        if stops and count > sampling.min_tokens:
            return Finished(FinishReason.STOP, last, self.state.usage())
        if count >= sampling.max_tokens:
            return Finished(FinishReason.LENGTH, None, self.state.usage())
        return None

    def forget_pages(self) -> list[int]:
        """Give up the block table, and with it everything computed; returns its pages."""
        self.num_computed = self.num_published = 0
        return self.table.clear()
