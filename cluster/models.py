"""Where a model's files are, and what they say: its configuration and its digests. No torch, no weights.

A model is a name that is built in, a folder in Hugging Face form (safetensors), a GGUF file, or a hub id.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cluster import gguf_header
from cluster.errors import ModelLoadError
from cluster.model_cache import BUILT_IN, ProgressCallback, fetch_built_in, file_digest

_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]
_HUB_TIMEOUT_S = 10

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on this host's disk."""

    name: str
    """What requests say."""
    path: Path
    """The folder, or the .gguf file."""
    kind: Literal["hf", "gguf"]


def resolve(model: str, *, name: str | None = None, progress: ProgressCallback | None = None) -> ModelFiles:
    """Find a model, fetching it where it is built in or on a hub and not here yet. ``name``: what requests shall say.

    Raises ModelLoadError that says what was looked for, and where.
    """
    if model in BUILT_IN:
        return ModelFiles(name or model, fetch_built_in(model, progress), "gguf")
    if found := _existing(model):
        return _local(found, name)
    if _HUB_ID.fullmatch(model):
        return ModelFiles(name or model, _from_hub(model), "hf")
    raise ModelLoadError(
        f"model: {model!r} is neither a folder or file here, nor a hub id (owner/name), nor built in "
        f"({', '.join(BUILT_IN)})",
        field="model",
        value=model,
    )


def fetch(model: str, *, progress: ProgressCallback | None = None) -> ModelFiles:
    """As ``resolve``: afterwards the model is on this host. Raises ModelLoadError."""
    return resolve(model, progress=progress)


def _existing(model: str) -> Path | None:
    if not model:  # Path("") is the working folder
        return None
    try:
        path = Path(model).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError, ValueError):  # too long, of an unknown user, with a NUL: names no file
        return None


def _local(path: Path, name: str | None) -> ModelFiles:
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelLoadError(
                f"model: the folder {path} has no config.json; a model in Hugging Face form has one", field="model"
            )
        return ModelFiles(name or path.resolve().name, path, "hf")
    if path.suffix.lower() != ".gguf":
        raise ModelLoadError(f"model: {path} is neither a folder nor a .gguf file", field="model", value=str(path))
    return ModelFiles(name or path.stem, path, "gguf")


def _from_hub(model: str) -> Path:
    """The snapshot in the local hub cache, and only without a whole one there the hub's.

    In this order a cluster starts the same revision on every host and without a network. Raises ModelLoadError.
    """
    import huggingface_hub  # half a second that built-in and local models do not pay
    from huggingface_hub.errors import HfHubHTTPError

    cached = _cached_snapshot(model)
    if cached is not None:
        return cached
    hooks = huggingface_hub.get_session().event_hooks["request"]
    if _bound_wait not in hooks:
        hooks.append(_bound_wait)
    try:
        folder = Path(huggingface_hub.snapshot_download(model, allow_patterns=_HUB_FILES, etag_timeout=_HUB_TIMEOUT_S))
    except HfHubHTTPError as error:
        raise _hub_error(model, f"the hub refuses it: {_first_line(error)}") from error
    except Exception as error:  # whatever its HTTP, file and validation layers raise
        raise _hub_error(
            model,
            f"it is not in the local hub cache, and cannot be downloaded ({_first_line(error)}); fetch it where "
            "there is a network, or give a folder",
        ) from error
    if not _holds_a_model(folder):
        raise _hub_error(model, f"it has no config.json with *.safetensors in {folder}")
    return folder


def _bound_wait(request: Any) -> None:
    """A hook of the hub's HTTP client, whose calls ask for no timeout: a hub that goes silent would hang them."""
    asked = request.extensions.get("timeout") or {}
    parts = ("connect", "read", "write", "pool")
    request.extensions["timeout"] = {part: asked.get(part) or _HUB_TIMEOUT_S for part in parts}


def _cached_snapshot(model: str) -> Path | None:
    import huggingface_hub

    try:
        folder = Path(huggingface_hub.snapshot_download(model, allow_patterns=_HUB_FILES, local_files_only=True))
    except (OSError, ValueError):  # absent, incomplete, or no id that a hub could have
        return None
    return folder if _holds_a_model(folder) else None


def _holds_a_model(folder: Path) -> bool:
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)[:200]


def _hub_error(model: str, what: str) -> ModelLoadError:
    return ModelLoadError(f"model: {model!r}: {what}", field="model", value=model)


# -- configuration -----------------------------------------------------------------------------------------------------


def hf_config(files: ModelFiles) -> dict[str, Any]:
    """The configuration in Hugging Face form; ``eos_token_id`` is a list.

    Of a folder: config.json, with generation_config.json's end tokens, which are what chats end with. Of a GGUF file:
    made from its metadata. Raises ModelLoadError.
    """
    if files.kind == "gguf":
        metadata = gguf_header.read_metadata(files.path)
        names = {tensor.name for tensor in gguf_header.read_tensors(files.path)}
        return _gguf_config(files.path, metadata, tied="output.weight" not in names)
    config = _read_json(files.path / "config.json")
    generation_path = files.path / "generation_config.json"
    generation = _read_json(generation_path) if generation_path.is_file() else {}
    eos = generation.get("eos_token_id")
    eos = config.get("eos_token_id") if eos is None else eos
    return {**config, "eos_token_id": _as_ids(files.path, eos)}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: not readable as JSON: {error}", path=path) from error
    if not isinstance(found, dict):
        raise ModelLoadError(f"{path}: must hold a JSON object", path=path)
    return found


def _as_ids(path: Path, value: object) -> list[int]:
    given = [] if value is None else value if isinstance(value, list) else [value]
    ids = [one for one in given if isinstance(one, int) and not isinstance(one, bool)]
    if len(ids) < len(given):
        raise ModelLoadError(f"{path}: eos_token_id: must be token ids; got {value!r}", path=path)
    return ids


_GGUF_SIZES = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
}
_GGUF_EOS = ("eos_token_id", "eot_token_id", "eom_token_id")
_GGUF_DEFAULT_ROPE_THETA = 10_000.0


def _gguf_config(path: Path, metadata: Mapping[str, Any], *, tied: bool) -> dict[str, Any]:
    architecture = metadata.get("general.architecture")
    prefix = f"{architecture}."
    sizes = {ours: metadata[prefix + theirs] for theirs, ours in _GGUF_SIZES.items() if prefix + theirs in metadata}
    # llama.cpp counts the dimensions that rope turns; where head_dim is not given apart, they are all.
    if "head_dim" not in sizes and prefix + "rope.dimension_count" in metadata:
        sizes["head_dim"] = metadata[prefix + "rope.dimension_count"]
    turned = metadata.get(prefix + "rope.dimension_count", sizes.get("head_dim"))
    if turned != sizes.get("head_dim"):
        raise ModelLoadError(
            f"{path}: {prefix}rope.dimension_count is {turned}, of heads of {sizes['head_dim']}: a rope over a part of "
            "each head is not served",
            path=path,
        )
    ids = {key: metadata.get(f"tokenizer.ggml.{key}") for key in (*_GGUF_EOS, "bos_token_id")}
    eos = [ids[key] for key in _GGUF_EOS if ids[key] is not None]
    return {
        "model_type": architecture,
        **sizes,
        "vocab_size": metadata.get(prefix + "vocab_size", len(metadata.get("tokenizer.ggml.tokens", ()))),
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "rope_parameters": _gguf_rope(path, metadata, prefix),
        "bos_token_id": ids["bos_token_id"],
        "eos_token_id": _as_ids(path, list(dict.fromkeys(eos))),
    }


def _gguf_rope(path: Path, metadata: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """A kind that is not served is passed on: reading the configuration refuses it by name."""
    rope: dict[str, Any] = {"rope_theta": metadata.get(prefix + "rope.freq_base", _GGUF_DEFAULT_ROPE_THETA)}
    kind = metadata.get(prefix + "rope.scaling.type", "none")
    if kind in ("none", ""):
        return {**rope, "rope_type": "default"}
    scaling = {"rope_type": kind, "factor": metadata.get(prefix + "rope.scaling.factor")}
    original = metadata.get(prefix + "rope.scaling.original_context_length")
    if original is not None:
        scaling["original_max_position_embeddings"] = original
    for name in ("attn_factor", "yarn_log_multiplier", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow"):
        if prefix + f"rope.scaling.{name}" in metadata:
            raise ModelLoadError(
                f"{path}: {prefix}rope.scaling.{name} is not served from GGUF; the same model's safetensors are",
                path=path,
            )
    return {**rope, **scaling}


# -- digests -----------------------------------------------------------------------------------------------------------


def tokenizer_digest(files: ModelFiles) -> str:
    """SHA-256 in hex over everything that decides how text becomes token ids. Raises ModelLoadError."""
    digest = hashlib.sha256()
    if files.kind == "gguf":
        metadata = gguf_header.read_metadata(files.path)
        kept = {key: value for key, value in metadata.items() if key.startswith("tokenizer.")}
        digest.update(json.dumps(kept, sort_keys=True).encode())
        return digest.hexdigest()
    present = [files.path / file for file in _TOKENIZER_FILES if (files.path / file).is_file()]
    if files.path / "tokenizer.json" not in present:
        raise ModelLoadError(f"{files.path}: no tokenizer.json, which a model in Hugging Face form has", field="model")
    return _combined(present)


def weights_digest(files: ModelFiles) -> str:
    """SHA-256 in hex over the weights' files; slow once for each file, then remembered. Raises ModelLoadError."""
    if files.kind == "gguf":
        return _digest(files.path)
    shards = sorted(files.path.glob("*.safetensors"))
    if not shards:  # the digest of nothing would let two models exchange KV blocks
        raise ModelLoadError(f"{files.path}: no *.safetensors, in which the weights of a model are", field="model")
    return _combined(shards)


def _combined(paths: list[Path]) -> str:
    return hashlib.sha256("".join(f"{path.name}\0{_digest(path)}\n" for path in paths).encode()).hexdigest()


def _digest(path: Path) -> str:
    try:
        return file_digest(path)
    except OSError as error:
        raise ModelLoadError(f"{path}: {error.strerror or error}", path=path) from error
