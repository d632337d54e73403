"""Print a stream of events as it comes; hand back what a caller needs for the next turn."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.cli import terminal

if TYPE_CHECKING:
    from cluster.pb.inference_pb2 import Finished, GenerateEvent, Started


@dataclass(frozen=True, slots=True)
class Answer:
    """What came over one stream."""

    text: str
    started: Started
    finished: Finished

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed again."""
        cached = self.finished.usage.cached_tokens
        return int(cached.group + cached.redis)


def print_events(events: Iterable[GenerateEvent]) -> Answer:
    """Write the text of sample 0 to stdout while it comes, then a newline. Raises QuireError as the stream does."""
    from cluster.pb.inference_pb2 import Finished, Started

    pieces: list[str] = []
    started, finished = Started(), Finished()
    for event in events:
        if event.HasField("started"):
            started = event.started
        elif event.HasField("delta") and event.delta.index == 0:
            pieces.append(event.delta.text)
            # Not through rich: model text may hold what looks like markup, and it must come out at once.
            terminal.out.file.write(event.delta.text)
            terminal.out.file.flush()
        elif event.HasField("finished"):
            finished = event.finished
    terminal.out.file.write("\n")
    terminal.out.file.flush()
    return Answer("".join(pieces), started, finished)


def print_usage(answer: Answer) -> None:
    """One dim line on stderr: counts, cache, speed, place."""
    usage, timings = answer.finished.usage, answer.finished.timings
    decode_s = (timings.total_ms - timings.ttft_ms) / 1000
    speed = f", {(usage.completion_tokens - 1) / decode_s:.0f} tokens/s" if decode_s > 0 else ""
    terminal.err.print(
        f"{usage.prompt_tokens} prompt tokens ({answer.cached_tokens} cached), {usage.completion_tokens} generated, "
        f"first after {timings.ttft_ms:.0f} ms{speed}, on {answer.started.group_id}",
        style="dim",
        markup=False,
    )
