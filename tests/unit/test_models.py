"""Which files a model is, what they say, and their digests: made by hand, without a network."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from cluster import model_cache
from cluster.errors import ModelLoadError
from cluster.models import ModelFiles, hf_config, resolve, tokenizer_digest, weights_digest

UINT32, FLOAT32, STRING, ARRAY = 4, 6, 8, 9


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache"))


def folder(path: Path, **files: Any) -> ModelFiles:
    """A model in Hugging Face form of what is given; ``config`` makes config.json."""
    path.mkdir()
    for name, content in {"config": {}, "tokenizer": {}, **files}.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    (path / "model.safetensors").write_bytes(b"weights")
    return resolve(str(path))


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def _value(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _text(value)
    if isinstance(value, float):
        return struct.pack("<If", FLOAT32, value)
    if isinstance(value, list):
        return struct.pack("<IIQ", ARRAY, STRING, len(value)) + b"".join(map(_text, value))
    return struct.pack("<II", UINT32, value)


LLAMA = {
    "general.architecture": "llama",
    "llama.context_length": 4096,
    "llama.block_count": 3,
    "llama.embedding_length": 96,
    "llama.feed_forward_length": 200,
    "llama.attention.head_count": 6,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 0.5,
    "llama.rope.freq_base": 500_000.0,
    "llama.rope.dimension_count": 16,
    "tokenizer.ggml.tokens": ["a", "b", "c"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}


def gguf(path: Path, changes: dict[str, Any] | None = None, *, tensors: tuple[str, ...] = ()) -> ModelFiles:
    """A GGUF file of LLAMA's metadata; a change of None takes a key away. Tensors are one fp32 each."""
    metadata = {key: value for key, value in {**LLAMA, **(changes or {})}.items() if value is not None}
    head = struct.pack("<IIQQ", 0x46554747, 3, len(tensors), len(metadata))
    head += b"".join(_text(key) + _value(value) for key, value in metadata.items())
    head += b"".join(_text(name) + struct.pack("<IQIQ", 1, 1, 0, 32 * i) for i, name in enumerate(tensors))
    head += bytes(-len(head) % 32)
    path.write_bytes(head + bytes(32 * len(tensors)))
    return resolve(str(path))


# -- found -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model", ["", "no-such-model", "./no/such/folder", "gone.gguf", "a\0b", "a" * 5000, "~nobody-x/y"]
)
def test_what_is_no_model_is_refused_by_name_with_what_there_is(model: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        resolve(model)
    assert caught.value.metadata["value"] == model
    assert repr(model) in caught.value.message
    assert "smollm2-135m" in caught.value.message


def test_a_folder_and_a_gguf_file_are_named_after_themselves_or_as_asked(tmp_path: Path) -> None:
    assert folder(tmp_path / "mine") == ModelFiles("mine", tmp_path / "mine", "hf")
    assert gguf(tmp_path / "yours.gguf") == ModelFiles("yours", tmp_path / "yours.gguf", "gguf")
    assert resolve(str(tmp_path / "mine"), name="served").name == "served"


def test_a_folder_without_config_and_a_file_of_another_kind_are_refused(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"x")
    for path, lacks in ((tmp_path, r"config\.json"), (tmp_path / "weights.bin", r"\.gguf")):
        with pytest.raises(ModelLoadError, match=lacks):
            resolve(str(path))


def test_importing_models_loads_neither_torch_nor_ray_nor_transformers() -> None:
    code = "import sys, cluster.models; print([m for m in ('torch', 'ray', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


# -- configuration -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "generation", "eos"),
    [
        ({"eos_token_id": 2}, {}, [2]),
        ({"eos_token_id": 2}, {"eos_token_id": [2, 7]}, [2, 7]),
        ({"eos_token_id": 2}, {"eos_token_id": None}, [2]),
        ({"eos_token_id": [0]}, {"eos_token_id": 0}, [0]),
        ({"eos_token_id": None}, {}, []),
        ({}, {}, []),
    ],
)
def test_end_tokens_are_those_of_generation_where_it_names_any(
    tmp_path: Path, config: dict[str, Any], generation: dict[str, Any], eos: list[int]
) -> None:
    files = folder(tmp_path / "m", config={"model_type": "llama", **config}, generation_config=generation)
    assert hf_config(files) == {"model_type": "llama", "eos_token_id": eos}


@pytest.mark.parametrize("content", ["[]", "{", '{"eos_token_id": "x"}', '{"eos_token_id": [true]}', "[" * 100_000])
def test_a_damaged_config_is_refused_naming_the_file(tmp_path: Path, content: str) -> None:
    files = folder(tmp_path / "m")
    (files.path / "config.json").write_text(content)
    with pytest.raises(ModelLoadError, match=str(files.path)):
        hf_config(files)


def test_a_gguf_files_metadata_in_hugging_face_form(tmp_path: Path) -> None:
    assert hf_config(gguf(tmp_path / "m.gguf")) == {
        "model_type": "llama",
        "max_position_embeddings": 4096,
        "num_hidden_layers": 3,
        "hidden_size": 96,
        "intermediate_size": 200,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "rms_norm_eps": 0.5,
        "head_dim": 16,
        "vocab_size": 3,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_theta": 500_000.0, "rope_type": "default"},
        "bos_token_id": 1,
        "eos_token_id": [2],
    }


def test_a_gguf_file_with_an_output_matrix_is_not_tied(tmp_path: Path) -> None:
    assert hf_config(gguf(tmp_path / "a.gguf", tensors=("token_embd.weight",)))["tie_word_embeddings"] is True
    untied = gguf(tmp_path / "b.gguf", tensors=("token_embd.weight", "output.weight"))
    assert hf_config(untied)["tie_word_embeddings"] is False


def test_every_end_token_of_a_gguf_file_ends_and_none_twice(tmp_path: Path) -> None:
    files = gguf(tmp_path / "m.gguf", {"tokenizer.ggml.eot_token_id": 0, "tokenizer.ggml.eom_token_id": 2})
    assert hf_config(files)["eos_token_id"] == [2, 0]


def test_a_scaled_rope_of_a_gguf_file_is_kept_and_what_is_not_served_is_refused(tmp_path: Path) -> None:
    scaled = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    rope = hf_config(gguf(tmp_path / "a.gguf", scaled))["rope_parameters"]
    assert rope == {"rope_theta": 500_000.0, "rope_type": "linear", "factor": 4.0}
    for changes, named in (
        ({**scaled, "llama.rope.scaling.attn_factor": 2.0}, "attn_factor"),
        ({"llama.attention.key_length": 32}, "rope.dimension_count"),
    ):
        with pytest.raises(ModelLoadError, match=named):
            hf_config(gguf(tmp_path / "b.gguf", changes))


# -- digests -----------------------------------------------------------------------------------------------------------


def test_digests_change_with_what_they_are_of_and_with_nothing_else(tmp_path: Path) -> None:
    one, two = folder(tmp_path / "one"), folder(tmp_path / "two", config={"hidden_size": 1})
    assert weights_digest(one) == weights_digest(two)
    assert tokenizer_digest(one) == tokenizer_digest(two)
    (two.path / "model.safetensors").write_bytes(b"Weights")
    assert weights_digest(one) != weights_digest(two)
    assert tokenizer_digest(one) == tokenizer_digest(two)
    (two.path / "tokenizer.json").write_text('{"a": 1}')
    assert tokenizer_digest(one) != tokenizer_digest(two)


def test_a_second_shard_and_the_split_between_shards_count(tmp_path: Path) -> None:
    digests = set()
    for name, shards in (
        ("a", [b"x"]),
        ("b", [b"x", b""]),
        ("c", [b"", b"x"]),
        ("d", [b"xy", b"z"]),
        ("e", [b"x", b"yz"]),
    ):
        files = folder(tmp_path / name)
        (files.path / "model.safetensors").unlink()
        for i, content in enumerate(shards):
            (files.path / f"model-{i}.safetensors").write_bytes(content)
        digests.add(weights_digest(files))
    assert len(digests) == 5


def test_nothing_has_no_digest(tmp_path: Path) -> None:
    files = folder(tmp_path / "m")
    (files.path / "model.safetensors").unlink()
    (files.path / "tokenizer.json").unlink()
    for digest, lacks in ((weights_digest, "safetensors"), (tokenizer_digest, "tokenizer.json")):
        with pytest.raises(ModelLoadError, match=lacks):
            digest(files)


def test_a_gguf_files_digests(tmp_path: Path) -> None:
    one = gguf(tmp_path / "one.gguf")
    two = gguf(tmp_path / "two.gguf", {"llama.block_count": 4})
    three = gguf(tmp_path / "three.gguf", {"tokenizer.ggml.tokens": ["a", "b", "d"]})
    assert weights_digest(one) == hashlib.sha256(one.path.read_bytes()).hexdigest()
    assert len({weights_digest(files) for files in (one, two, three)}) == 3
    assert tokenizer_digest(one) == tokenizer_digest(two) != tokenizer_digest(three)


def _aged(path: Path, content: bytes, seconds: int = 60) -> Path:
    path.write_bytes(content)
    then = time.time_ns() - seconds * 10**9
    os.utime(path, ns=(then, then))
    return path


def test_a_digest_is_remembered_until_size_or_time_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[str] = []
    real = hashlib.file_digest

    def counted(file: Any, name: str) -> Any:
        hashed.append(name)
        return real(file, name)

    monkeypatch.setattr(hashlib, "file_digest", counted)
    path = _aged(tmp_path / "f", b"one")
    assert model_cache.file_digest(path) == model_cache.file_digest(path) == hashlib.sha256(b"one").hexdigest()
    assert len(hashed) == 1
    _aged(path, b"two", 30)  # as long as before
    assert model_cache.file_digest(path) == hashlib.sha256(b"two").hexdigest()
    assert len(hashed) == 2


def test_a_file_that_has_just_changed_is_not_remembered(tmp_path: Path) -> None:
    path = tmp_path / "f"
    for content in (b"one", b"two"):
        path.write_bytes(content)
        now = time.time_ns()
        os.utime(path, ns=(now, now))
        assert model_cache.file_digest(path) == hashlib.sha256(content).hexdigest()
    assert not (model_cache.cache_folder() / "digests.json").exists()


@pytest.mark.parametrize("manifest", [b"", b"[]", b"{", b'{"PATH": 7}', b'{"PATH": []}', b"\xff"])
def test_a_damaged_manifest_costs_a_hashing(tmp_path: Path, manifest: bytes) -> None:
    path = _aged(tmp_path / "f", b"one")
    model_cache.cache_folder().mkdir()
    (model_cache.cache_folder() / "digests.json").write_bytes(manifest.replace(b"PATH", str(path).encode()))
    assert model_cache.file_digest(path) == hashlib.sha256(b"one").hexdigest()


def test_a_cache_that_cannot_be_written_costs_a_hashing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "taken").write_bytes(b"a file where the folder would be")
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "taken"))
    path = _aged(tmp_path / "f", b"one")
    assert model_cache.file_digest(path) == hashlib.sha256(b"one").hexdigest()
