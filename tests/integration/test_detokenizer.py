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


@settings(max_examples=300, deadline=None)
@given(st.lists(sp_ids, max_size=12), chunked(sp_ids), st.booleans())
def test_sentencepiece_deltas_complete_any_prompt(prompt: list[int], pieces: list[list[int]], skip: bool) -> None:
    """Whatever the prompt ends with: what the output adds to a word, and to a character that the prompt begins."""
    every = [token for piece in pieces for token in piece]
    deltas = feed(Detokenizer(sentencepiece(), prompt, skip_special_tokens=skip), pieces)
    seen = [token for token in prompt if not (skip and token < 3)]
    begun: list[int] = []
    for length in (1, 2, 3):
        end = seen[-length:]
        if len(end) == length and all(map(sentencepiece().is_byte, end)) and is_begun(bytes(i - 3 for i in end)):
            begun = end
    before = WORD if len(seen) > len(begun) else []
    whole = sentencepiece().decode([*before, *begun, *every], skip_special_tokens=skip)
    assert text_of(deltas) == whole.removeprefix(sentencepiece().decode(before))


def is_begun(data: bytes) -> bool:
    """Whether more bytes can make one character of these; by trying, not by the rules of UTF-8."""
    return any(character[:-1].startswith(data) for character in ALL_LENGTHS)


ALL_LENGTHS = [chr(i).encode() for i in (*range(0x80, 0xD800), *range(0xE000, 0x11_0000, 61))]
WORD = [259 + 1]  # "▁Hello"

unspelt = st.text(st.sampled_from("語言한👩\u200d\u0301\ufffdßx \n"), min_size=20, max_size=120)


@settings(max_examples=200, deadline=None)
@given(unspelt, unspelt, st.booleans(), st.booleans(), st.integers(1, 9))
def test_long_runs_of_byte_tokens(prompt: str, output: str, word_first: bool, word_last: bool, cut: int) -> None:
    """Text that the vocabulary has no words for, longer than what is held back, in the prompt and behind it."""
    before = [*(WORD if word_first else []), *byte_tokens(prompt)]
    after = [*byte_tokens(output), *(WORD if word_last else [])]
    pieces = [after[i : i + cut] for i in range(0, len(after), cut)]
    tail = " Hello" if word_last else ""
    assert text_of(feed(Detokenizer(sentencepiece(), before), pieces)) == output + tail
    # At the very beginning the decoder strips a space.
    assert text_of(feed(Detokenizer(sentencepiece(), []), pieces)) == (output + tail).removeprefix(" ")


def byte_tokens(text: str) -> list[int]:
    return [3 + byte for byte in text.encode()]


@pytest.mark.parametrize("cut", range(1, 4))
def test_a_long_run_in_the_prompt_is_not_repeated(cut: int) -> None:
    """Text: the first delta repeats the prompt; here, as U+FFFD."""
    run = byte_tokens("語" * 40)
    deltas = feed(Detokenizer(sentencepiece(), WORD + run[:-cut]), [run[-cut:], WORD])
    # One byte or two complete the prompt's last character; three are a character of their own.
    assert text_of(deltas) == "語 Hello"


def test_special_tokens_are_text_where_they_are_asked_for() -> None:
    for tokenizer, end in ((byte_level(), "<|im_end|>"), (sentencepiece(), "</s>")):
        ids = [*tokenizer.encode("Hello", add_special_tokens=False), *tokenizer.eos_token_ids[:1]]
        assert text_of(feed(Detokenizer(tokenizer, []), [ids])) == "Hello"
        assert text_of(feed(Detokenizer(tokenizer, [], skip_special_tokens=False), [ids])) == "Hello" + end
        # A stop string may be one that is left out: then it is not in the text.
        assert feed(Detokenizer(tokenizer, [], stop=[end]), [ids])[-1].stopped is None
        stopping = Detokenizer(tokenizer, [], stop=[end], skip_special_tokens=False)
        assert stopping.push(ids) == TextDelta("Hello", end, len(ids))


def test_ids_beyond_the_vocabulary_are_no_text() -> None:
    for tokenizer in (byte_level(), sentencepiece()):
        ids = tokenizer.encode("Hello", add_special_tokens=False)
        beyond = tokenizer.vocab_size + 5
        delta = Detokenizer(tokenizer, [beyond]).push([beyond, *ids, beyond])
        assert delta.text.strip() == "Hello"
        assert delta.token_count == len(ids) + 2


class Counting(Tokenizer):
    """Counts the tokens that it decodes."""

    decoded = 0

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        self.decoded += len(ids)
        return super().decode(ids, skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        self.decoded += 1
        return super().token_bytes(token_id)


@pytest.mark.parametrize("which", [byte_level, sentencepiece])
def test_the_thousandth_token_costs_what_the_tenth_did(which: object) -> None:
    tokenizer = Counting.__new__(Counting)
    tokenizer.__dict__.update(which().__dict__)  # type: ignore[operator]
    ids = tokenizer.encode("Hello the world, 語言 🙂! ", add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, ids * 50)
    begun = tokenizer.decoded
    assert begun <= 8  # of the prompt, only its end
    rounds = []
    for _ in range(200):
        before = tokenizer.decoded
        detokenizer.push(ids)
        rounds.append(tokenizer.decoded - before)
    assert rounds[5] > 0
    assert max(rounds[5:]) == min(rounds[5:]) <= 4 * len(ids)


def test_a_long_stop_string_costs_no_more_than_a_short_one() -> None:
    reads = 0

    class Counted(str):
        __slots__ = ()

        def __getitem__(self, key: object) -> str:
            nonlocal reads
            reads += 1
            return super().__getitem__(key)  # type: ignore[index]

    for stop, text in (("a" * 1023 + "b", "z y x w " * 200), ("a" * 1023 + "b", "a" * 1600), ("ab" * 512, "aab" * 500)):
        reads = 0
        ids = byte_level().encode(text)
        detokenizer = Detokenizer(byte_level(), [], stop=[Counted(stop)])
        assert text_of(feed(detokenizer, [[token] for token in ids])) == text
        assert len(text) <= reads <= 8 * len(text)


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


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """An oracle: every place of every stop string; the first end, then the longest. Returns its end."""
    ends = [
        (start + len(stop), -len(stop), stop)
        for stop in stops
        for start in range(len(text))
        if text.startswith(stop, start)
    ]
    return (min(ends)[0], min(ends)[2]) if ends else None


@pytest.mark.parametrize("which", [byte_level, sentencepiece])
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), include=st.booleans())
def test_stop_strings_out_of_the_text_itself(which: object, data: st.DataObject, include: bool) -> None:
    """Any tokens, any stop strings that are in their text, any grouping; nothing is shown that is taken back."""
    tokenizer: Tokenizer = which()  # type: ignore[operator]
    pieces = data.draw(chunked(smol_ids if which is byte_level else sp_ids))
    text = tokenizer.decode([token for piece in pieces for token in piece])
    places = st.tuples(st.integers(0, max(0, len(text) - 1)), st.integers(1, 8))
    cuts = data.draw(st.lists(places, max_size=4))
    stops = [text[start : start + length] for start, length in cuts if text[start : start + length]]
    deltas = feed(Detokenizer(tokenizer, [], stop=stops, include_stop=include), pieces)
    found = first_stop(text, stops)
    if found is None:
        assert text_of(deltas) == text
        return
    end, stop = found
    kept = text[: end if include else end - len(stop)]
    assert (text_of(deltas), deltas[-1].stopped) == (kept, stop)
    shown = ""
    for delta in deltas:
        shown += delta.text
        assert kept.startswith(shown)


@pytest.mark.parametrize("include", [False, True])
def test_an_end_by_length_shows_what_was_held_back(include: bool) -> None:
    ids = byte_level().encode("one two STO")
    detokenizer = Detokenizer(byte_level(), [], stop=["STOP", "two STOP!"], include_stop=include)
    before = "".join(detokenizer.push([token]).text for token in ids)
    assert before == ("one two STO" if include else "one ")
    assert detokenizer.flush() == TextDelta("" if include else "two STO", None, 0)


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
