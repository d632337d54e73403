"""Token ids to text as they come, and the stop strings in it.

Two invariants, whatever the tokens and however they are grouped. The texts put together are the text of all tokens:
what ``Tokenizer.decode`` makes of prompt and output, less what it makes of the prompt. And no part of a stop string is
ever handed out (unless asked for), though it may begin in one token and end in another.

Text is held back only while it may change: the bytes of a character that is not complete, a run of byte-fallback tokens
(which decodes as a whole or not at all), a head of a stop string. Each token costs a bounded amount of work.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from router.tokenizer import Tokenizer

MAX_RUN_TOKENS = 64
"""Byte-fallback tokens that are held back at most: longer runs are handed out character by character."""

MAX_INCOMPLETE_TOKENS = 4
"""A character has at most four bytes: text that still ends in U+FFFD after as many tokens means it."""

_REPLACEMENT = "\ufffd"


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What some tokens added."""

    text: str
    stopped: str | None = None
    """The stop string that was completed; nothing follows it."""
    token_count: int = 0
    """How many of the tokens belong to the answer; those behind a stop string do not."""


class Detokenizer:
    """Of one sample.

    Of several stop strings the one that is complete first counts, and of those that end at one character the longest,
    so that it does not matter how the text is cut into tokens. One that is complete before ``min_tokens`` tokens, or
    that began in the prompt, is text like any other.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        kind = _ByteLevel if tokenizer.is_byte_level else _Windowed
        self._decoder: _Decoder = kind(tokenizer, prompt_ids, skip_special_tokens)
        self._stops = _StopStrings(stop, include_stop)
        self._min_tokens = min_tokens
        self._tokens = 0

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """The next output tokens. Not to be called after a stop."""
        pieces: list[str] = []
        for count, token_id in enumerate(token_ids, start=1):
            self._tokens += 1
            text, stopped = self._stops.push(self._decoder.push(token_id), self._tokens >= self._min_tokens)
            pieces.append(text)
            if stopped is not None:
                return TextDelta("".join(pieces), stopped, count)
        return TextDelta("".join(pieces), None, len(token_ids))

    def flush(self) -> TextDelta:
        """The output has ended: what was held back. It may complete a stop string."""
        text, stopped = self._stops.push(self._decoder.flush(), self._tokens >= self._min_tokens)
        return TextDelta(text if stopped is not None else text + self._stops.flush(), stopped)


class _Decoder(Protocol):
    """Tokens to text, as far as it cannot change any more."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool) -> None: ...

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class _ByteLevel:
    """For vocabularies of byte strings (GPT-2, Llama 3, Qwen): an incremental UTF-8 decoder does it all.

    Both it and the tokenizer's own decoder put one U+FFFD for each maximal invalid part.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        tail = b""
        for token_id in reversed(prompt_ids):
            tail = self._bytes(token_id) + tail
            if len(tail) >= MAX_INCOMPLETE_TOKENS:
                break
        # A character that the prompt begins belongs to whoever completes it.
        self._utf8.decode(_incomplete_end(tail))

    def push(self, token_id: int) -> str:
        return self._utf8.decode(self._bytes(token_id))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)

    def _bytes(self, token_id: int) -> bytes:
        if self._skip and self._tokenizer.is_special(token_id):
            return b""
        return self._tokenizer.token_bytes(token_id)


def _incomplete_end(data: bytes) -> bytes:
    """The beginning of a character that the last one to three bytes are; empty where there is none."""
    for length in range(1, min(3, len(data)) + 1):
        end = data[-length:]
        if codecs.getincrementaldecoder("utf-8")("replace").decode(end) == "":
            return end
    return b""


class _Windowed:
    """For all other vocabularies: decode the new tokens behind a few old ones, and take what the old ones did not give.

    The old ones are there because decoders treat a beginning differently (they strip a space), and bytes run on.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._context: list[int] = []  # ends where text cannot change any more
        self._pending: list[int] = []
        self._given = 0  # characters of decode(context + pending) that are the prompt's, or were handed out
        for token_id in prompt_ids[-MAX_RUN_TOKENS:]:
            if self._counts(token_id):
                self._pending.append(token_id)
                if not tokenizer.is_byte(token_id):
                    self._context, self._pending = [token_id], []
        complete = [self._tokenizer.byte_value(token_id) for token_id in self._pending]
        self._given = len(self._decode(self._context)) + len(_valid_prefix(bytes(complete)))

    def push(self, token_id: int) -> str:
        if not self._counts(token_id):
            return ""
        self._pending.append(token_id)
        if self._tokenizer.is_byte(token_id):
            return self._release_run() if len(self._pending) >= MAX_RUN_TOKENS else ""
        text = self._decode(self._context + self._pending)
        if text.endswith(_REPLACEMENT) and len(self._pending) < MAX_INCOMPLETE_TOKENS:
            return ""
        return self._close(text)

    def flush(self) -> str:
        return self._close(self._decode(self._context + self._pending)) if self._pending else ""

    def _close(self, text: str) -> str:
        new = text[self._given :]
        self._context, self._pending = self._pending, []
        self._given = len(self._decode(self._context))
        return new

    def _release_run(self) -> str:
        """A run that has become too long: hand out its complete characters, and forget them."""
        for kept in range(MAX_INCOMPLETE_TOKENS):
            head = self._pending[: len(self._pending) - kept]
            text = self._decode(self._context + head)[self._given :]
            if _REPLACEMENT not in text:
                self._pending = self._pending[len(head) :]
                self._given = len(self._decode(self._context))
                return text
        text = self._decode(self._context + self._pending)[self._given :]
        self._pending, self._given = [], len(self._decode(self._context))
        return text

    def _counts(self, token_id: int) -> bool:
        """Whether the decoder sees it at all."""
        return self._tokenizer.is_known(token_id) and not (self._skip and self._tokenizer.is_special(token_id))

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)


def _valid_prefix(data: bytes) -> str:
    """The text of the complete characters at the beginning."""
    return codecs.getincrementaldecoder("utf-8")("ignore").decode(data)


class _StopStrings:
    """Finds stop strings in text that comes in pieces, and holds back what may be the head of one."""

    def __init__(self, stop: Sequence[str], include: bool) -> None:
        self._stop = sorted(set(stop), key=len, reverse=True)
        self._include = include
        self._reach = max(map(len, self._stop), default=1) - 1
        self._recent = ""  # the last characters, at most as many as a stop string can have before the new ones
        self._held = 0  # of those, not handed out yet

    def push(self, text: str, may_stop: bool) -> tuple[str, str | None]:
        """New text; returns what can be handed out, and the stop string that was completed."""
        if not self._stop or not text:
            return text, None
        known = len(self._recent)
        everything = self._recent + text
        start = known - self._held
        found = self._first_match(everything, known) if may_stop else None
        if found is not None:
            stop, end = found
            return everything[start : end if self._include else max(start, end - len(stop))], stop
        held = 0 if self._include else self._head_length(everything)
        self._recent = everything[max(0, len(everything) - max(self._reach, held)) :]
        self._held = held
        return everything[start : len(everything) - held], None

    def flush(self) -> str:
        """What is held back."""
        held, self._held = self._held, 0
        return self._recent[len(self._recent) - held :]

    def _first_match(self, everything: str, known: int) -> tuple[str, int] | None:
        """The stop string that ends first behind the known characters, the longest of those; and where it ends."""
        best: tuple[str, int] | None = None
        for stop in self._stop:  # longest first
            at = everything.find(stop, max(0, known - len(stop) + 1))
            if at >= 0 and (best is None or at + len(stop) < best[1]):
                best = stop, at + len(stop)
        return best

    def _head_length(self, everything: str) -> int:
        """Characters at the end that a stop string begins with."""
        for length in range(min(self._reach, len(everything)), 0, -1):
            end = everything[-length:]
            if any(len(stop) > length and stop.startswith(end) for stop in self._stop):
                return length
        return 0
