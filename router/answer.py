"""From a group's deltas, which hold token ids, to a client's events, which hold text.

Per sample: tokens ─▶ Detokenizer (holds back incomplete characters and heads of stop strings) ─▶ Delta. A stop string
ends a sample here, whatever the group goes on to send; no token behind it is sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from cluster.pb import common_pb2, inference_pb2, worker_pb2
from router.detokenizer import Detokenizer
from router.relay import Relay
from router.tokenizer import Tokenizer
from router.validation import ValidRequest


@dataclass(slots=True)
class _Sample:
    """One sample's text, and what of it has not been sent yet."""

    index: int
    detokenizer: Detokenizer
    tokens: int = 0  # received and kept
    sent_any: bool = False
    done: bool = False
    sent: list[str] = field(default_factory=list)  # the whole text so far, less what is in ``text``
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[common_pb2.PositionLogprobs] = field(default_factory=list)

    def take(self) -> inference_pb2.GenerateEvent:
        """Everything that has not been sent yet, as one delta."""
        text = "".join(self.text)
        delta = inference_pb2.Delta(index=self.index, text=text, token_ids=self.token_ids, logprobs=self.logprobs)
        self.sent.append(text)
        self.text, self.token_ids, self.logprobs = [], [], []
        self.sent_any = True
        return inference_pb2.GenerateEvent(delta=delta)


class Answer:
    """Turns the deltas of one request into its events: Started, Deltas, one Finished per sample."""

    def __init__(self, request: ValidRequest, relay: Relay, tokenizer: Tokenizer, accepted_at: float) -> None:
        """``accepted_at``: when the call came in, on the clock of the ``now`` that ``events`` gets."""
        self.cached_tokens = common_pb2.CachedTokens()
        self.finish_reasons: list[str] = []
        self.ttft_ms = 0.0
        self._request = request
        self._relay = relay
        self._tokenizer = tokenizer
        self._accepted_at = accepted_at
        self._started = False
        self._queue_ms = 0.0
        self._preemptions = 0
        self._samples = [_Sample(index, self._detokenizer()) for index in range(request.sampling.n)]

    @property
    def done(self) -> bool:
        """Whether every sample has sent its Finished."""
        return all(sample.done for sample in self._samples)

    @property
    def started(self) -> bool:
        """Whether a group began to compute it."""
        return self._started

    @property
    def text(self) -> str:
        """Of the first sample, as far as it was sent; without echo."""
        return "".join(self._samples[0].sent)

    @property
    def completion_tokens(self) -> int:
        """Over all samples, as far as they were sent or are about to be."""
        return sum(sample.tokens for sample in self._samples)

    def events(self, delta: worker_pb2.SequenceDelta, now: float) -> Iterator[inference_pb2.GenerateEvent]:
        """What one delta of the group means to the client; often nothing, with a stream interval."""
        if not self._started:
            yield from self._start(delta, now)
        if delta.index >= len(self._samples) or self._samples[delta.index].done:
            return  # behind a stop string
        sample = self._samples[delta.index]
        finished = self._absorb(sample, delta)
        if finished is None:
            interval = self._request.stream_interval_tokens
            if sample.token_ids and (not sample.sent_any or len(sample.token_ids) >= interval):
                yield sample.take()
            return
        sample.done = True
        if sample.token_ids or sample.text:
            yield sample.take()
        yield self._finish(sample, finished, now)

    def _detokenizer(self) -> Detokenizer:
        request = self._request
        return Detokenizer(
            self._tokenizer,
            request.prompt,
            skip_special_tokens=request.skip_special_tokens,
            stop=request.stop,
            include_stop=request.include_stop,
            min_tokens=request.sampling.min_tokens,
        )

    # -- the beginning -----------------------------------------------------------------------------------------------

    def _start(self, delta: worker_pb2.SequenceDelta, now: float) -> Iterator[inference_pb2.GenerateEvent]:
        self._started = True
        self.ttft_ms = 1000 * (now - self._accepted_at)
        self.cached_tokens = delta.admitted.cached_tokens
        self._queue_ms = delta.admitted.queue_ms
        yield inference_pb2.GenerateEvent(started=self._started_event(delta.admitted))
        if self._request.echo:
            text = self._tokenizer.decode(self._request.prompt, skip_special_tokens=self._request.skip_special_tokens)
            for sample in self._samples:
                echo = inference_pb2.Delta(index=sample.index, text=text, token_ids=self._request.prompt)
                yield inference_pb2.GenerateEvent(delta=echo)

    def _started_event(self, admitted: worker_pb2.Admitted) -> inference_pb2.Started:
        request, link, choice = self._request, self._relay.link, self._relay.choice
        started = inference_pb2.Started(
            request_id=request.request_id,
            prompt_tokens=len(request.prompt),
            cached_tokens=admitted.cached_tokens,
            queue_ms=admitted.queue_ms,
            seed=request.sampling.seed,
            prompt_logprobs=[self._with_text(position) for position in admitted.prompt_logprobs],
            prefix=admitted.prefix if admitted.HasField("prefix") else None,
        )
        if link is not None:
            started.group_id, started.incarnation = link.record.group_id, link.record.incarnation
        if choice is not None:
            started.routing.predicted_ttft_ms = choice.predicted_ttft_ms
            started.routing.expected_cached_tokens = choice.expected_cached_tokens
            started.routing.candidates = choice.candidates
            started.routing.decision = "moved" if self._relay.attempts > 1 else choice.decision
        return started

    # -- text --------------------------------------------------------------------------------------------------------

    def _absorb(self, sample: _Sample, delta: worker_pb2.SequenceDelta) -> inference_pb2.Finished | None:
        """Take tokens into the sample; returns its end when this is it."""
        token_ids = list(delta.token_ids)
        ended = delta.WhichOneof("end") == "finished"
        by_token = ended and delta.finished.HasField("stop_token_id")
        # The stop token is one of the ids, and no text, unless asked for.
        silent = 1 if by_token and not self._request.include_stop and token_ids else 0
        piece = sample.detokenizer.push(token_ids[: len(token_ids) - silent])
        sample.text.append(piece.text)
        if piece.stopped is not None:
            self._keep(sample, token_ids[: piece.token_count], delta.logprobs)
            return inference_pb2.Finished(reason=common_pb2.FINISH_REASON_STOP, stop=piece.stopped)
        self._keep(sample, token_ids, delta.logprobs)
        if not ended:
            return None
        self._preemptions = max(self._preemptions, delta.finished.usage.preemptions)
        last = sample.detokenizer.flush()
        sample.text.append(last.text)
        if last.stopped is not None:  # in text that was held back until now
            return inference_pb2.Finished(reason=common_pb2.FINISH_REASON_STOP, stop=last.stopped)
        finished = inference_pb2.Finished(reason=delta.finished.reason)
        if by_token:
            finished.stop_token_id = delta.finished.stop_token_id
        return finished

    def _keep(self, sample: _Sample, token_ids: Sequence[int], logprobs: Sequence[common_pb2.PositionLogprobs]) -> None:
        sample.tokens += len(token_ids)
        sample.token_ids.extend(token_ids)
        sample.logprobs.extend(self._with_text(position) for position in logprobs[: len(token_ids)])

    def _with_text(self, position: common_pb2.PositionLogprobs) -> common_pb2.PositionLogprobs:
        for entry in (position.token, *position.top):
            entry.text = self._tokenizer.token_text(entry.token_id)
        return position

    # -- the end -----------------------------------------------------------------------------------------------------

    def _finish(self, sample: _Sample, finished: inference_pb2.Finished, now: float) -> inference_pb2.GenerateEvent:
        finished.index = sample.index
        finished.usage.prompt_tokens = len(self._request.prompt)
        finished.usage.completion_tokens = self.completion_tokens
        finished.usage.cached_tokens.CopyFrom(self.cached_tokens)
        finished.usage.preemptions = self._preemptions
        finished.timings.ttft_ms = self.ttft_ms
        finished.timings.queue_ms = self._queue_ms
        finished.timings.total_ms = 1000 * (now - self._accepted_at)
        self.finish_reasons.append(common_pb2.FinishReason.Name(finished.reason).removeprefix("FINISH_REASON_").lower())
        return inference_pb2.GenerateEvent(finished=finished)
