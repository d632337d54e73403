"""What is asked of an engine or a cluster: the built-in sets, JSONL files, and traces of real services. Pure but for
reading a file; everything random comes from a seed."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from cluster.errors import ConfigError

VOCAB = 49_000
FIRST_TOKEN = 10  # those below are special tokens of most vocabularies
TRACE_BLOCK_TOKENS = 512
"""Tokens of the prompt that one id of ``hash_ids`` stands for in the trace format."""

Encode = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One request. ``at_s``: when it is due, seconds after the start; None: the load generator decides."""

    prompt: tuple[int, ...] | str
    max_tokens: int
    at_s: float | None = None
    session: str = ""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The prompt, which must have been encoded."""
        if isinstance(self.prompt, str):
            raise TypeError("a text prompt has no token ids yet; see encoded()")
        return self.prompt


def built_in(
    count: int = 32,
    seed: int = 0,
    vocab: int = VOCAB,
    prompt: tuple[int, int] = (32, 384),
    output: tuple[int, int] = (32, 192),
) -> list[Item]:
    """``count`` random prompts, so that no cache helps, with fixed output lengths; ranges are inclusive.

    The same for the same arguments: this is the set that other engines have been measured with.
    """
    generator = random.Random(seed)
    items = []
    for _ in range(count):
        length = generator.randint(*prompt)
        ids = tuple(generator.randrange(FIRST_TOKEN, vocab) for _ in range(length))
        items.append(Item(prompt=ids, max_tokens=generator.randint(*output)))
    return items


def sessions(
    count: int,
    *,
    seed: int = 0,
    vocab: int = VOCAB,
    turns: int = 4,
    system_tokens: int = 128,
    turn_tokens: tuple[int, int] = (16, 96),
    output: tuple[int, int] = (16, 64),
) -> list[Item]:
    """``count`` requests of conversations that share a system prompt and grow turn by turn.

    Turns of different sessions are interleaved. A turn extends the last by what stands for answer and question.
    """
    generator = random.Random(seed)

    def some(length: int) -> tuple[int, ...]:
        return tuple(generator.randrange(FIRST_TOKEN, vocab) for _ in range(length))

    system = some(system_tokens)
    histories = [system] * -(-count // turns)
    items: list[Item] = []
    for turn in range(turns):
        for index, history in enumerate(histories):
            histories[index] = history + some(generator.randint(*turn_tokens) * (1 if turn == 0 else 2))
            items.append(
                Item(prompt=histories[index], max_tokens=generator.randint(*output), session=f"bench-{seed}-{index}")
            )
    return items[:count]


# -- files -------------------------------------------------------------------------------------------------------------


def read_jsonl(path: Path, *, default_max_tokens: int = 128, limit: int | None = None) -> list[Item]:
    """Requests of a JSONL file, each line with ``prompt`` (text) or ``prompt_token_ids``, and ``max_tokens``.

    Raises ConfigError that names the line.
    """
    items = [_request(path, number, line, default_max_tokens) for number, line in _lines(path, limit)]
    return _some(path, items)


def read_trace(
    path: Path, *, vocab: int = VOCAB, scale: float = 1.0, speed: float = 1.0, limit: int | None = None
) -> list[Item]:
    """A trace with ``timestamp`` (ms), ``input_length``, ``output_length`` and ``hash_ids`` in each line.

    Equal hash ids become equal tokens, so prefixes are shared as they were. ``scale`` divides every length (a block of
    the trace too), for models with shorter contexts; ``speed`` divides the time between arrivals. May be gzipped.
    Raises ConfigError that names the line.
    """
    items = [_traced(path, number, line, vocab, scale, speed) for number, line in _lines(path, limit)]
    return _some(path, items)


def encoded(items: list[Item], encode: Encode) -> list[Item]:
    """Every prompt as token ids."""
    return [
        replace(item, prompt=tuple(encode(item.prompt))) if isinstance(item.prompt, str) else item for item in items
    ]


def that_fit(items: list[Item], max_context_tokens: int) -> list[Item]:
    """Without those longer than a context: a trace may be of a larger model. Text prompts are left to the server."""
    return [
        item
        for item in items
        if isinstance(item.prompt, str) or len(item.prompt) + item.max_tokens <= max_context_tokens
    ]


def _lines(path: Path, limit: int | None) -> Iterator[tuple[int, Mapping[str, Any]]]:
    try:
        with _opened(path) as lines:
            found = 0
            for number, line in enumerate(lines, 1):
                if limit is not None and found >= limit:
                    return
                if line.strip():
                    found += 1
                    yield number, _object(path, number, line)
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}", field="workload") from error


def _opened(path: Path) -> IO[str]:
    return gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")


def _object(path: Path, number: int, line: str) -> Mapping[str, Any]:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise _wrong(path, number, f"no JSON: {error}") from error
    if not isinstance(found, dict):
        raise _wrong(path, number, "must be a JSON object")
    return found


def _some(path: Path, items: list[Item]) -> list[Item]:
    if not items:
        raise ConfigError(f"{path}: holds no request", field="workload")
    return items


def _request(path: Path, number: int, line: Mapping[str, Any], default_max_tokens: int) -> Item:
    text, ids = line.get("prompt"), line.get("prompt_token_ids")
    if isinstance(text, list):  # as vLLM's own files may have it
        text, ids = None, text
    if (text is None) == (ids is None):
        raise _wrong(path, number, "needs either prompt or prompt_token_ids")
    if text is not None and (not isinstance(text, str) or not text):
        raise _wrong(path, number, f"prompt: must be a text that is not empty; got {text!r}")
    if ids is not None and not (isinstance(ids, list) and ids and all(_is_count(one, 0) for one in ids)):
        raise _wrong(path, number, "prompt_token_ids: must be a list of token ids that is not empty")
    wanted = line.get("max_tokens", default_max_tokens)
    if not _is_count(wanted, 1):
        raise _wrong(path, number, f"max_tokens: must be at least 1; got {wanted!r}")
    return Item(prompt=tuple(ids or ()) if text is None else text, max_tokens=wanted)


def _traced(path: Path, number: int, line: Mapping[str, Any], vocab: int, scale: float, speed: float) -> Item:
    lengths = [line.get(name) for name in ("input_length", "output_length")]
    hash_ids, timestamp = line.get("hash_ids"), line.get("timestamp")
    if not all(_is_count(one, 1) for one in lengths) or not isinstance(timestamp, int | float):
        raise _wrong(path, number, "a trace needs timestamp, input_length and output_length in each line")
    if not isinstance(hash_ids, list) or not all(_is_count(one, 0) for one in hash_ids):
        raise _wrong(path, number, "hash_ids: must be a list of block ids")
    prompt_tokens, output_tokens = (max(1, round(length / scale)) for length in lengths if length is not None)
    block_tokens = max(1, round(TRACE_BLOCK_TOKENS / scale))
    prompt: list[int] = []
    for index in range(-(-prompt_tokens // block_tokens)):
        # Beyond the listed ids a prompt is its own; a line number is an id that no other line has.
        known = index < len(hash_ids)
        generator = random.Random(f"block {hash_ids[index]}" if known else f"line {number} block {index}")
        prompt += [generator.randrange(FIRST_TOKEN, vocab) for _ in range(block_tokens)]
    return Item(prompt=tuple(prompt[:prompt_tokens]), max_tokens=output_tokens, at_s=timestamp / 1000 / speed)


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _wrong(path: Path, number: int, what: str) -> ConfigError:
    return ConfigError(f"{path}, line {number}: {what}", field="workload")
