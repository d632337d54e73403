"""The tokenizer against transformers' own of the same file, and what it does with templates and threads."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import tokenizers.models
import tokenizers.pre_tokenizers
import tokenizers.processors
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.errors import InvalidRequest, ModelLoadError
from cluster.models import ModelFiles, hf_config, tokenizer_digest, weights_digest
from router.tokenizer import Tokenizer
from tests.support.models import smollm2, tiny_llama
from tests.support.routers import tokenizer

TEXTS = (
    "",
    " ",
    "  two  spaces  ",
    "\n\n\t\r\n",
    "The capital of France is Paris.",
    "naïve café — “quoted”… e\u0301",
    "素早い茶色の狐がのろまな犬を飛び越える。",
    "안녕하세요 세계",
    "العربية עברית ไทย हिन्दी",
    "👩‍👩‍👧‍👦🇫🇷 🏳️‍🌈",
    "def f(x):\n\treturn {**x, 'a': 0x1F}  # ½\n",
    "1234567890 3.14159 1e-5",
    "\x00\x01\x7f\ufffd\ufeff\u202e",
    "<|im_start|>user\nhi<|im_end|>\n",
    "no<|endoftext|>space <|im_end|> <|im_start",
    "<repo_name>a<file_sep>b<gh_stars>7",
    "a" * 3000,
)
PIECES = ("<|im_start|>", "<|im_end|>", "<|im", "|>", " ", "\n", "<repo_name>")
LOST = frozenset(b"\xf1\xf2\x04\x06\x13\x14\x16\x1d")
"""Bytes for which SmolLM2's vocabulary has no token: planes 4 to 11, and six control characters. They get lost."""
CHATS: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " 素 "}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b<|im_end|>"},
        {"role": "user", "content": ""},
    ],
)


@functools.cache
def _transformers_own() -> Any:
    files = smollm2()
    return transformers.AutoTokenizer.from_pretrained(files.path.parent, gguf_file=files.path.name)


@pytest.fixture(scope="module")
def theirs() -> Any:
    return _transformers_own()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


# -- as transformers' --------------------------------------------------------------------------------------------------


def _assert_same(theirs: Any, text: str) -> None:
    for special in (True, False):
        ids = tokenizer().encode(text, add_special_tokens=special)
        assert ids == theirs.encode(text, add_special_tokens=special)
        assert tokenizer().decode(ids, skip_special_tokens=special) == theirs.decode(ids, skip_special_tokens=special)


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_texts_encode_and_decode_as_with_transformers(theirs: Any, text: str) -> None:
    _assert_same(theirs, text)
    assert tokenizer().decode(tokenizer().encode(text), skip_special_tokens=False) == text


@settings(deadline=None, max_examples=300)
@given(st.lists(st.one_of(st.text(max_size=12), st.sampled_from(PIECES)), max_size=12).map("".join))
def test_any_text_encodes_as_with_transformers_and_comes_back(text: str) -> None:
    _assert_same(_transformers_own(), text)
    if not LOST.intersection(text.encode()):
        assert tokenizer().decode(tokenizer().encode(text), skip_special_tokens=False) == text


@settings(deadline=None, max_examples=300)
@given(st.lists(st.integers(0, 49_151), max_size=24), st.booleans())
def test_any_ids_decode_as_with_transformers(ids: list[int], skip: bool) -> None:
    ours = tokenizer().decode(ids, skip_special_tokens=skip)
    assert ours == _transformers_own().decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("prompted", [True, False])
@pytest.mark.parametrize("messages", CHATS, ids=range(len(CHATS)))
def test_chats_render_as_with_transformers(theirs: Any, messages: list[dict[str, str]], prompted: bool) -> None:
    ours = tokenizer().apply_chat_template(messages, add_generation_prompt=prompted)
    assert ours == theirs.apply_chat_template(messages, add_generation_prompt=prompted, return_dict=False)
    assert ours[0] == 1
    assert ours[1] != 1


def test_its_facts_are_those_of_the_model(theirs: Any) -> None:
    ours = tokenizer()
    assert (ours.vocab_size, ours.bos_token_id, ours.eos_token_ids) == (len(theirs), theirs.bos_token_id, (2,))
    assert ours.vocab_size == hf_config(smollm2())["vocab_size"]
    assert ours.has_chat_template
    assert ours.token_text(2) == "<|im_end|>"
    assert ours.token_text(ours.encode(" Paris")[0]) == " Paris"
    assert "\ufffd" in ours.token_text(ours.encode("😀")[0])


def test_the_configuration_made_of_the_gguf_file_is_the_models() -> None:
    assert hf_config(smollm2()) == {
        "model_type": "llama",
        "max_position_embeddings": 8192,
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "rms_norm_eps": pytest.approx(1e-5),
        "head_dim": 64,
        "vocab_size": 49_152,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_theta": 100_000.0, "rope_type": "default"},
        "bos_token_id": 1,
        "eos_token_id": [2],
    }


# -- a process without torch -------------------------------------------------------------------------------------------


def test_a_router_reads_tokenizers_without_torch_and_ray(tiny: ModelFiles) -> None:
    code = f"""
import sys
from pathlib import Path
from cluster.models import ModelFiles, resolve
from router.tokenizer import Tokenizer
for model in ("smollm2-135m", {str(tiny.path)!r}):
    made = Tokenizer(resolve(model))
    print(made.apply_chat_template([{{"role": "user", "content": "hi"}}]) != [], made.decode(made.encode("hi")))
print([name for name in ("torch", "ray") if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2]
    )
    assert done.stdout.splitlines() == ["True hi", "True hi", "[]"], done.stderr


# -- BOS ---------------------------------------------------------------------------------------------------------------


def _with_bos(folder: Path, template: str) -> Tokenizer:
    """A tokenizer of words that puts <s> before every text, as Llama's do."""
    words = {"<s>": 0, "</s>": 1, "<unk>": 2, "hello": 3, "world": 4}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["<s>", "</s>"])
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text('{"eos_token_id": 1}')
    return Tokenizer(ModelFiles("m", folder, "hf"))


def test_a_bos_comes_once_whoever_writes_it(tmp_path: Path) -> None:
    """Text: two BOS tokens after a chat template."""
    made = _with_bos(tmp_path / "m", "{{ bos_token }}{% for m in messages %} {{ m.content }}{% endfor %}")
    assert made.encode("hello world") == [0, 3, 4]
    assert made.encode("<s> hello world") == [0, 3, 4]
    assert made.encode("hello <s> <s>") == [0, 3, 0, 0]
    assert made.encode("hello", add_special_tokens=False) == [3]
    assert made.encode("") == made.encode("<s>") == [0]
    assert made.apply_chat_template([{"role": "user", "content": "hello"}]) == [0, 3]


def test_a_tokenizer_that_adds_no_bos_takes_none_away() -> None:
    assert tokenizer().encode("<|im_start|><|im_start|>user") == [1, 1, *tokenizer().encode("user")]


# -- templates ---------------------------------------------------------------------------------------------------------

HELLO = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[7].content }}", "messages"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ ().__class__.__base__.__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
        ("{% include '/etc/passwd' %}", "loader"),
        ("{% if %}", "Expected an expression"),
        ("{{ '\\ud800' }}", "TextInputSequence"),
    ],
)
def test_a_template_that_fails_or_escapes_is_an_error_of_the_messages(tmp_path: Path, template: str, said: str) -> None:
    made = _with_bos(tmp_path / "m", template)
    with pytest.raises(InvalidRequest, match=r"^messages: ") as caught:
        made.apply_chat_template(HELLO)
    assert said in caught.value.message
    assert made.encode("hello") == [0, 3]  # and it goes on


def test_variables_reach_the_template_and_cannot_replace_it(tmp_path: Path) -> None:
    made = _with_bos(tmp_path / "m", "{{ greeting | default('world') }}")
    assert made.apply_chat_template(HELLO) == [4]
    assert made.apply_chat_template(HELLO, greeting="hello") == [3]
    for name in ("chat_template", "tokenize", "conversation", "return_tensors"):
        with pytest.raises(InvalidRequest, match=name):
            made.apply_chat_template(HELLO, **{name: "x"})


@pytest.mark.parametrize("make", [lambda: tokenizer(), lambda: Tokenizer(smollm2())], ids=["sentencepiece", "smollm2"])
@pytest.mark.parametrize("word", ["world", " Hello", "é", "語"])
def test_spellings_are_every_way_to_write_a_word(make: Any, word: str) -> None:
    made: Tokenizer = make()
    found = made.spellings(word, 4)
    assert len(set(map(tuple, found))) == len(found)
    assert [len(ids) for ids in found] == sorted(len(ids) for ids in found)
    before = made.encode("x", add_special_tokens=False)
    for ids in found:
        assert made.decode([*before, *ids]).removeprefix(made.decode(before)) == word
        assert len(ids) <= 4
    usual = made.encode(word, add_special_tokens=False)
    if made.is_byte_level and len(usual) <= 4:
        assert usual in found


def test_a_word_has_spellings_that_encoding_never_gives() -> None:
    assert [2860, 271] in Tokenizer(smollm2()).spellings(" Paris", 4)
    assert Tokenizer(smollm2()).spellings("a" * 5000, 4) == []


def test_a_caller_s_messages_are_not_changed(tmp_path: Path) -> None:
    made = _with_bos(tmp_path / "m", "{% set _ = messages[0].update({'content': 'world'}) %}{{ messages[0].content }}")
    messages = [dict(message) for message in HELLO]
    with pytest.raises(InvalidRequest, match="unsafe"):
        made.apply_chat_template(messages)
    assert messages == HELLO


def test_no_template_is_said_and_not_rendered(tmp_path: Path) -> None:
    made = _with_bos(tmp_path / "m", "")
    assert not made.has_chat_template


# -- threads -----------------------------------------------------------------------------------------------------------


def test_threads_at_once_get_what_one_gets_alone() -> None:
    made = Tokenizer(smollm2())  # its own: nothing is warm

    def work(i: int) -> tuple[Any, ...]:
        text = TEXTS[i % len(TEXTS)] * (1 + i % 3)
        ids = made.encode(text, add_special_tokens=bool(i % 2))
        chat = made.apply_chat_template(CHATS[i % len(CHATS)], add_generation_prompt=bool(i % 2), n=i)
        return ids, chat, made.decode(ids, skip_special_tokens=bool(i % 5)), made.token_text(i)

    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(work, range(600)))
    assert together == [work(i) for i in range(600)]


# -- files that are not whole ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [None, b"", b"{", b"{}", b"[]", b"\xff\xfe"])
def test_a_folder_without_a_readable_tokenizer_is_refused(tmp_path: Path, content: bytes | None) -> None:
    (tmp_path / "config.json").write_text("{}")
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ModelLoadError, match="tokenizer"):
        Tokenizer(ModelFiles("m", tmp_path, "hf"))


@pytest.mark.parametrize("length", [0, 3, 24, 1000, 500_000])
def test_a_gguf_file_cut_short_is_refused(tmp_path: Path, length: int) -> None:
    path = tmp_path / "cut.gguf"
    with smollm2().path.open("rb") as whole:
        path.write_bytes(whole.read(length))
    for read in (Tokenizer, hf_config, tokenizer_digest):
        with pytest.raises(ModelLoadError, match=r"cut\.gguf"):
            read(ModelFiles("m", path, "gguf"))


# -- the tiny model ----------------------------------------------------------------------------------------------------


def test_a_tiny_model_has_the_real_tokenizer_and_its_own_weights(tiny: ModelFiles, tmp_path: Path) -> None:
    made = Tokenizer(tiny)
    for text in TEXTS:
        assert made.encode(text) == tokenizer().encode(text)
    for messages in CHATS:
        assert made.apply_chat_template(messages) == tokenizer().apply_chat_template(messages)
    assert (made.eos_token_ids, made.bos_token_id, made.vocab_size) == ((2,), 1, 49_152)
    same, other = tiny_llama(tmp_path / "same"), tiny_llama(tmp_path / "other", seed=1)
    assert weights_digest(same) == weights_digest(tiny) != weights_digest(other)
    assert tokenizer_digest(same) == tokenizer_digest(tiny) == tokenizer_digest(other)
