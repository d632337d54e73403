"""Text as tokens come: equal to decoding all of them at once, and never a part of a stop string (bugs: Text)."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from cluster.models import ModelFiles
from router.detokenizer import MAX_RUN_TOKENS, Detokenizer, TextDelta
from router.tokenizer import Tokenizer
from tests.support.models import smollm2

TEXTS = [
    "Hello, world! It's 12345 o'clock.\n\n\tTabs   and spaces ",
    "日本語のテキスト、한국어 텍스트, 中文文本",
    "👩‍👩‍👧‍👦 family, 🏴󠁧󠁢󠁳󠁣󠁴󠁿 flag, e\u0301 combining, \u200dZWJ, ﷽",
    "Ελληνικά עברית العربية हिन्दी ខ្មែរ",
    "mixed <|im_end|> special <|endoftext|> tokens",
    "a\ufffdb genuine replacement \ufffd",
]


@functools.cache
def byte_level() -> Tokenizer:
    return Tokenizer(smollm2())


@functools.cache
def sentencepiece() -> Tokenizer:
    """As Llama 2's: words that carry their space, and byte tokens for what the vocabulary lacks."""
    folder = Path(_folder())
    words = [
        "▁",
        "▁Hello",
        "▁world",
        "Hello",
        "lo",
        "▁the",
        "t",
        "h",
        "e",
        "l",
        "o",
        ",",
        "!",
        "日",
        "▁▁",
        "é",
        "1",
        "2",
    ]
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocabulary |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    vocabulary |= {word: 259 + i for i, word in enumerate(dict.fromkeys(words))}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.save(str(folder / "tokenizer.json"))
    settings_ = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings_))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 2}))
    return Tokenizer(ModelFiles("sp", folder, "hf"))


@functools.cache
def _folder() -> str:
    import tempfile

    return tempfile.mkdtemp(prefix="quire-test-sp-")


@pytest.fixture(scope="module", autouse=True)
def _remove_folder() -> object:
    import shutil

    yield
    shutil.rmtree(_folder(), ignore_errors=True)


def feed(detokenizer: Detokenizer, pieces: Sequence[Sequence[int]]) -> list[TextDelta]:
    """Push the pieces until one stops; then nothing more. The last delta is the flush, where none stopped."""
    deltas = []
    for piece in pieces:
        deltas.append(detokenizer.push(piece))
        if deltas[-1].stopped is not None:
            return deltas
    return [*deltas, detokenizer.flush()]


def text_of(deltas: Sequence[TextDelta]) -> str:
    return "".join(delta.text for delta in deltas)


@st.composite
def chunked(draw: st.DrawFn, ids: st.SearchStrategy[int], most: int = 40) -> list[list[int]]:
    return [list(piece) for piece in draw(st.lists(st.lists(ids, min_size=1, max_size=5), max_size=most // 3))]


smol_ids = st.one_of(st.integers(0, 49_151), st.integers(0, 300), st.sampled_from([0, 1, 2]))
sp_ids = st.one_of(st.integers(0, 276), st.integers(3, 258), st.integers(259, 276))


@settings(max_examples=300, deadline=None)
@given(chunked(smol_ids), st.booleans())
def test_byte_level_deltas_are_the_decoded_whole(pieces: list[list[int]], skip: bool) -> None:
    deltas = feed(Detokenizer(byte_level(), [], skip_special_tokens=skip), pieces)
    every = [token for piece in pieces for token in piece]
    assert text_of(deltas) == byte_level().decode(every, skip_special_tokens=skip)
    assert sum(delta.token_count for delta in deltas) == len(every)


@settings(max_examples=300, deadline=None)
@given(chunked(sp_ids), st.booleans())
def test_sentencepiece_deltas_are_the_decoded_whole(pieces: list[list[int]], skip: bool) -> None:
    deltas = feed(Detokenizer(sentencepiece(), [], skip_special_tokens=skip), pieces)
    every = [token for piece in pieces for token in piece]
    assert text_of(deltas) == sentencepiece().decode(every, skip_special_tokens=skip)


@settings(max_examples=200, deadline=None)
@given(st.lists(smol_ids, max_size=12), chunked(smol_ids), st.booleans())
def test_what_follows_a_prompt_completes_it(prompt: list[int], pieces: list[list[int]], skip: bool) -> None:
    """Prompt text up to its last complete character, then the deltas: the decoded whole."""
    every = [token for piece in pieces for token in piece]
    deltas = feed(Detokenizer(byte_level(), prompt, skip_special_tokens=skip), pieces)
    whole = byte_level().decode([*prompt, *every], skip_special_tokens=skip)
    assert whole.endswith(text_of(deltas))
    before = byte_level().decode(prompt, skip_special_tokens=skip)
    assert whole[: len(whole) - len(text_of(deltas))] in (before, before.removesuffix("\ufffd"))


def test_a_prompt_that_ends_inside_a_character_is_not_repeated() -> None:
    """Text: the first delta repeats the prompt."""
    ids = byte_level().encode("smile: 🙂🙂!")
    for cut in range(len(ids)):
        deltas = feed(Detokenizer(byte_level(), ids[:cut]), [[token] for token in ids[cut:]])
        complete = byte_level().decode(ids[:cut]).rstrip("\ufffd")
        assert complete + text_of(deltas) == "smile: 🙂🙂!"
    ids = sentencepiece().encode("Hello 🙂!")
    for cut in range(2, len(ids)):
        deltas = feed(Detokenizer(sentencepiece(), ids[:cut]), [[token] for token in ids[cut:]])
        complete = sentencepiece().decode(ids[:cut]).rstrip("\ufffd")
        assert complete + text_of(deltas) == sentencepiece().decode(ids)


def test_a_space_between_prompt_and_output_is_kept() -> None:
    world = sentencepiece().encode("world")
    assert text_of(feed(Detokenizer(sentencepiece(), sentencepiece().encode("Hello")), [world])) == " world"
    assert text_of(feed(Detokenizer(sentencepiece(), []), [world])) == "world"


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("which", [byte_level, sentencepiece])
def test_every_language_comes_whole_one_token_at_a_time(text: str, which: object) -> None:
    """Text: characters lost or doubled between deltas. No delta but the last shows half a character."""
    tokenizer: Tokenizer = which()  # type: ignore[operator]
    ids = tokenizer.encode(text, add_special_tokens=False)
    deltas = feed(Detokenizer(tokenizer, [], skip_special_tokens=False), [[token] for token in ids])
    assert text_of(deltas) == tokenizer.decode(ids, skip_special_tokens=False)
    if "\ufffd" not in text:
        assert not any("\ufffd" in delta.text for delta in deltas)


def test_nothing_is_held_back_for_ever() -> None:
    """A stream of bytes that never make a character still comes out."""
    detokenizer = Detokenizer(sentencepiece(), [])
    shown = [detokenizer.push([3 + 0x80]).text for _ in range(3 * MAX_RUN_TOKENS)]
    assert len("".join(shown)) >= 2 * MAX_RUN_TOKENS
    lone = byte_level().encode("🙂")[0]
    byte = Detokenizer(byte_level(), [])
    assert "".join(byte.push([lone]).text for _ in range(10)).count("\ufffd") >= 9


# -- stop strings --------------------------------------------------------------------------------------------------


def expected(texts: Sequence[str], stops: Sequence[str], include: bool, min_tokens: int) -> tuple[str, str | None]:
    """An oracle: add character by character, look for a stop at the end of the whole text."""
    whole = ""
    for count, text in enumerate(texts, start=1):
        for character in text:
            whole += character
            ending = [stop for stop in stops if whole.endswith(stop)]
            if ending and count >= min_tokens:
                stop = max(ending, key=len)
                return (whole if include else whole[: -len(stop)]), stop
    return whole, None


words = ("abcabcab", "aab bb a", "ab\nab", "a", "b", "c", " ", "\n")
ascii_ids = st.deferred(lambda: st.sampled_from(sorted({id_ for word in words for id_ in byte_level().encode(word)})))
stop_lists = st.lists(st.text(alphabet="ab c\n", min_size=1, max_size=5), max_size=4)


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(chunked(ascii_ids), stop_lists, st.booleans(), st.integers(0, 6))
def test_stop_strings_end_the_text_where_they_are_complete(
    pieces: list[list[int]], stops: list[str], include: bool, min_tokens: int
) -> None:
    every = [token for piece in pieces for token in piece]
    text, stopped = expected([byte_level().decode([token]) for token in every], stops, include, min_tokens)
    detokenizer = Detokenizer(byte_level(), [], stop=stops, include_stop=include, min_tokens=min_tokens)
    deltas = feed(detokenizer, pieces)
    assert text_of(deltas) == text
    assert deltas[-1].stopped == stopped if deltas else stopped is None
    # At no moment was more shown than what stays.
    shown = ""
    for delta in deltas:
        shown += delta.text
        assert text.startswith(shown)


def test_the_head_of_a_stop_string_is_never_shown() -> None:
    """Text: a stop string spread over several tokens leaks its head."""
    ids = byte_level().encode("The answer is 42.\nUser: and then")
    detokenizer = Detokenizer(byte_level(), [], stop=["\nUser:"])
    deltas = feed(detokenizer, [[token] for token in ids])
    assert text_of(deltas) == "The answer is 42."
    assert deltas[-1].stopped == "\nUser:"


def test_tokens_behind_a_stop_string_do_not_count() -> None:
    """Text: stop text and EOS in one multi-token step."""
    ids = [*byte_level().encode("one STOP"), *byte_level().encode(" two"), 2]
    delta = Detokenizer(byte_level(), [], stop=["STOP"]).push(ids)
    assert (delta.text, delta.stopped) == ("one ", "STOP")
    assert byte_level().decode(ids[: delta.token_count]) == "one STOP"


def test_stop_strings_wait_for_min_tokens() -> None:
    """Text: min_tokens ignored by stop strings."""
    ids = byte_level().encode("a STOP b STOP c")
    second = len(byte_level().encode("a STOP b STOP"))
    for min_tokens in range(len(ids)):
        deltas = feed(Detokenizer(byte_level(), [], stop=["STOP"], min_tokens=min_tokens), [[token] for token in ids])
        count = sum(delta.token_count for delta in deltas)
        assert count >= min_tokens
        if len(byte_level().encode("a STOP")) < min_tokens <= second:
            assert text_of(deltas) == "a STOP b "


def test_a_stop_string_that_began_in_the_prompt_is_text() -> None:
    prompt, output = byte_level().encode("a ST"), byte_level().encode("OP b")
    assert text_of(feed(Detokenizer(byte_level(), prompt, stop=["STOP"]), [output])) == "OP b"


def test_a_stop_string_in_held_back_bytes_is_found_at_the_end() -> None:
    ids = sentencepiece().encode("Hello 🙂", add_special_tokens=False)
    detokenizer = Detokenizer(sentencepiece(), [], stop=["🙂"])
    assert [detokenizer.push([token]).stopped for token in ids] == [None] * len(ids)
    last = detokenizer.flush()
    assert last.stopped == "🙂"
    assert "🙂" not in last.text
