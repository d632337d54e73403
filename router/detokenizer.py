"""Token ids to text as they come, and the stop strings in it.

Two invariants, whatever the tokens and however they are grouped. The texts put together are the text of all tokens:
what ``Tokenizer.decode`` makes of prompt and output, less what it makes of the prompt. And no part of a stop string is
ever handed out (unless asked for), though it may begin in one token and end in another.

Text is held back only while it may change: the bytes of a character that is not complete, a run of byte-fallback tokens
(which decodes as a whole or not at all), a head of a stop string. Each token costs a bounded amount of work, whatever
came before it.

"Less what it makes of the prompt", because a decoder strips the space from a text's first word: an answer that begins
with "▁world" is " world" behind a prompt. For byte-level vocabularies it is the same as decoding the output alone. A
character that the prompt begins and the output completes is the output's, whole. Where the output goes on with bytes
that belong to nothing, they are U+FFFD, and what was handed out or was the prompt's stays as it is.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from router.tokenizer import Tokenizer

MAX_RUN_TOKENS = 64
"""Byte-fallback tokens that are held back at most. Longer runs are handed out in parts, each decoded by itself."""

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
    """For all other vocabularies: decode new tokens behind an old one, and take what the old one did not give.

    The old one is there because decoders treat a beginning differently (they strip a space). Byte-fallback tokens are
    kept apart: a run of them is one character per byte, all U+FFFD, unless the whole of it is UTF-8.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._context: list[int] = []  # the last token whose text is settled; none at the very beginning
        self._pending: list[int] = []  # behind it: tokens that end inside a character, though no byte tokens
        self._run: list[int] = []  # or byte tokens; one of the two is empty
        self._begin(prompt_ids)

    def push(self, token_id: int) -> str:
        if not self._counts(token_id):
            return ""
        if self._tokenizer.is_byte(token_id):
            settled = self._settle_pending()
            self._run.append(token_id)
            return settled + (self._release() if len(self._run) >= MAX_RUN_TOKENS else "")
        settled = self._settle_run(self._run)
        self._run = []
        self._pending.append(token_id)
        text = self._behind_context(self._pending)
        if text.endswith(_REPLACEMENT) and len(self._pending) < MAX_INCOMPLETE_TOKENS:
            return settled
        self._context, self._pending = self._pending, []
        return settled + text

    def flush(self) -> str:
        run, self._run = self._run, []
        return self._settle_pending() + self._settle_run(run)

    def _begin(self, prompt_ids: Sequence[int]) -> None:
        """The prompt's last settled token, and the bytes of a character that it begins and does not complete."""
        tail: list[int] = []
        for token_id in reversed(prompt_ids):
            if self._counts(token_id):
                tail.insert(0, token_id)
                # Three bytes at most are incomplete; the token before them is the context.
                if not self._tokenizer.is_byte(token_id) or len(tail) == MAX_INCOMPLETE_TOKENS:
                    break
        run = [token_id for token_id in tail if self._tokenizer.is_byte(token_id)]
        settled = len(tail) - len(_incomplete_end(self._bytes(run)))
        self._context, self._run = tail[:settled][-1:], tail[settled:]

    def _release(self) -> str:
        """A run that has become too long: hand out all of it but an incomplete character at its end."""
        settled = len(self._run) - len(_incomplete_end(self._bytes(self._run)))
        text = self._settle_run(self._run[:settled])
        self._run = self._run[settled:]
        return text

    def _settle_pending(self) -> str:
        if not self._pending:
            return ""
        text = self._behind_context(self._pending)
        self._context, self._pending = self._pending, []
        return text

    def _settle_run(self, run: list[int]) -> str:
        if not run:
            return ""
        if self._context and self._tokenizer.is_byte(self._context[-1]):
            # The rest of a run whose beginning was handed out: the tokenizer would take them as one.
            text = _run_text(self._bytes(run))
        else:
            text = self._behind_context(run)
        self._context = run[-1:]
        return text

    def _behind_context(self, token_ids: list[int]) -> str:
        """What these add to the text of the context, which is settled."""
        given = len(self._decode(self._context)) if self._context else 0
        return self._decode(self._context + token_ids)[given:]

    def _bytes(self, run: list[int]) -> bytes:
        return bytes(map(self._tokenizer.byte_value, run))

    def _counts(self, token_id: int) -> bool:
        """Whether the decoder sees it at all."""
        return self._tokenizer.is_known(token_id) and not (self._skip and self._tokenizer.is_special(token_id))

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)


def _run_text(data: bytes) -> str:
    """As the tokenizers' ByteFallback decoder has it."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return _REPLACEMENT * len(data)


class _StopStrings:
    """Finds stop strings in text that comes in pieces, and holds back what may be the head of one.

    A character costs each stop string O(1) amortised steps, however long it is: both are the client's to choose, and
    all streams of a router share one event loop. (Comparing the end of the text with every head of every stop string
    took 2 ms a token for sixteen of 1,024 characters.)
    """

    def __init__(self, stop: Sequence[str], include: bool) -> None:
        self._matchers = [_Matcher(text) for text in sorted(set(stop), key=len, reverse=True)]
        self._include = include
        self._held = ""

    def push(self, text: str, may_stop: bool) -> tuple[str, str | None]:
        """New text; returns what can be handed out, and the stop string that was completed."""
        if not self._matchers or not text:
            return text, None
        everything = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            # All of them must see it; of those that it completes the longest counts, which comes first.
            complete = [matcher.stop for matcher in self._matchers if matcher.push(character)]
            if complete and may_stop:
                return everything[: end if self._include else end - len(complete[0])], complete[0]
        held = 0 if self._include else max(matcher.matched for matcher in self._matchers)
        self._held = everything[len(everything) - held :]
        return everything[: len(everything) - held], None

    def flush(self) -> str:
        """What is held back."""
        held, self._held = self._held, ""
        return held


class _Matcher:
    """One stop string, by Knuth, Morris and Pratt (SIAM J. Comput. 6(2), 1977)."""

    __slots__ = ("_borders", "matched", "stop")

    def __init__(self, stop: str) -> None:
        """``stop``: not empty."""
        self.stop = stop
        self.matched = 0
        """Characters of the longest proper head of ``stop`` that the text so far ends with."""
        # Of each head matched so far: its longest proper part that both begins and ends it. Made as the match grows, so
        # that a stop string costs nothing before the text comes near it.
        self._borders: list[int] = []

    def push(self, character: str) -> bool:
        """The next character of the text; returns whether it completes the stop string."""
        self.matched = self._extended(self.matched, character)
        if self.matched > len(self._borders):
            self._borders.append(self._extended(self._borders[-1], character) if self._borders else 0)
        if self.matched < len(self.stop):
            return False
        self.matched = self._borders[-1]
        return True

    def _extended(self, matched: int, character: str) -> int:
        """Length of the longest head that ends with ``character`` behind a head of ``matched`` characters."""
        while matched and self.stop[matched] != character:
            matched = self._borders[matched - 1]
        return matched + 1 if self.stop[matched] == character else 0
