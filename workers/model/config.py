"""What a model is, parsed once from a Hugging Face style config. Nothing behind this meets an unserved model; no torch.

A family is data, not code: one definition of the decoder (llama.py) reads these fields. What is not served is refused
by name, because a field that is ignored gives numbers that are wrong and look right.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast

from cluster.errors import ModelLoadError

RopeKind = Literal["default", "linear", "llama3", "yarn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What a model_type fixes without saying so in its config, and the defaults of what it leaves out."""

    architecture: str
    qkv_bias: bool = False
    qk_norm: bool = False
    max_context: int
    rms_norm_eps: float = 1e-6
    sliding_window: int | None = None  # where the config is silent
    window_needs_flag: bool = False  # sliding_window counts only with use_sliding_window, from max_window_layers on


FAMILIES: Mapping[str, Family] = {
    "llama": Family(architecture="LlamaForCausalLM", max_context=2048),
    "mistral": Family(architecture="MistralForCausalLM", max_context=131_072, sliding_window=4096),
    "qwen2": Family(
        architecture="Qwen2ForCausalLM", qkv_bias=True, max_context=32_768, sliding_window=4096, window_needs_flag=True
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM", qk_norm=True, max_context=32_768, sliding_window=4096, window_needs_flag=True
    ),
}

DEFAULT_ROPE_THETA = 10_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding. Fields that a kind does not use keep their defaults."""

    kind: RopeKind
    theta: float
    factor: float = 1.0
    original_max_context: int = 0
    low_freq_factor: float = 0.0  # llama3
    high_freq_factor: float = 0.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    attention_factor: float | None = None  # yarn; None: from the factor
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder of the Llama family. Sizes are in numbers of scalars, heads, or tokens."""

    model_type: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_context: int
    rms_norm_eps: float
    tied_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    rope: RopeConfig
    windows: tuple[int | None, ...]  # of each layer: how many positions a token sees, its own among them; None: all
    eos_token_ids: tuple[int, ...]

    @property
    def rope_text(self) -> str:
        """Every rope setting in one canonical text, for the namespace of KV blocks."""
        return json.dumps(asdict(self.rope), sort_keys=True)

    @property
    def attention_text(self) -> str:
        """Every other setting that decides what K and V hold, in one canonical text."""
        facts = {
            "window": self.windows if any(self.windows) else None,
            "scale": "head_dim**-0.5",
            "qk_norm": self.qk_norm,
            "qkv_bias": self.qkv_bias,
            "rms_norm_eps": self.rms_norm_eps,
        }
        return json.dumps(facts, sort_keys=True)

    @property
    def q_size(self) -> int:
        """Columns of a token's queries."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Columns of a token's keys, and of its values."""
        return self.kv_heads * self.head_dim


def parse_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Read a config in Hugging Face form (``rope_parameters``, or ``rope_theta`` with ``rope_scaling``).

    Raises ModelLoadError that names the field, its value and what is served.
    """
    model_type = raw.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise _refusal("model_type", model_type, f"one of {', '.join(FAMILIES)}")
    _refuse_unserved(raw, family)
    hidden, heads = _positive(raw, "hidden_size"), _positive(raw, "num_attention_heads")
    kv_heads = _positive(raw, "num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise _refusal("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads ({heads})")
    head_dim = _positive(raw, "head_dim", default=hidden // heads)
    if head_dim % 2:
        raise _refusal("head_dim", head_dim, "an even number, since rope turns pairs")
    max_context = _positive(raw, "max_position_embeddings", default=family.max_context)
    vocab_size, layers = _positive(raw, "vocab_size"), _positive(raw, "num_hidden_layers")
    return ModelConfig(
        model_type=cast(str, model_type),
        layers=layers,
        hidden=hidden,
        intermediate=_positive(raw, "intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        max_context=max_context,
        rms_norm_eps=_number(raw, "rms_norm_eps", family.rms_norm_eps),
        tied_embeddings=_flag(raw, "tie_word_embeddings"),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        rope=_rope(raw, max_context),
        windows=_windows(raw, family, layers, max_context),
        eos_token_ids=_token_ids(raw, "eos_token_id", vocab_size),
    )


def _refusal(field: str, value: object, served: str) -> ModelLoadError:
    return ModelLoadError(f"config {field}: {value!r} is not served; served is {served}", field=field, value=value)


def _refuse_unserved(raw: Mapping[str, Any], family: Family) -> None:
    """Fields whose other values would need code that is not there."""
    architectures = raw.get("architectures") or [family.architecture]
    if list(architectures) != [family.architecture]:
        raise _refusal("architectures", architectures, f"[{family.architecture!r}]")
    served: dict[str, tuple[object, ...]] = {
        "hidden_act": (None, "silu"),
        "attention_bias": (None, False),
        "mlp_bias": (None, False),
        "quantization_config": (None,),
        "partial_rotary_factor": (None, 1.0),
    }
    for field, values in served.items():
        if raw.get(field) not in values:
            raise _refusal(field, raw[field], " or ".join("unset" if v is None else repr(v) for v in values))


LAYER_TYPES = ("full_attention", "sliding_attention")
DEFAULT_MAX_WINDOW_LAYERS = 28  # of Qwen2 and Qwen3


def _windows(raw: Mapping[str, Any], family: Family, layers: int, max_context: int) -> tuple[int | None, ...]:
    """A window at least as long as the context changes nothing, and counts as none."""
    if family.window_needs_flag and not _flag(raw, "use_sliding_window"):
        return (None,) * layers
    window: int | None = None
    if raw.get("sliding_window", family.sliding_window) is not None:
        window = _positive(raw, "sliding_window", default=family.sliding_window)
        if family.sliding_window is None and window < max_context:
            raise _refusal("sliding_window", window, f"none for {family.architecture}")
    full = _positive(raw, "max_window_layers", default=DEFAULT_MAX_WINDOW_LAYERS, least=0)
    kinds = [LAYER_TYPES[not family.window_needs_flag or layer >= full] for layer in range(layers)]
    if family.window_needs_flag and raw.get("layer_types") is not None:
        kinds = list(raw["layer_types"])
        if len(kinds) != layers or not set(kinds) <= set(LAYER_TYPES):
            raise _refusal("layer_types", raw["layer_types"], f"{layers} of {' or '.join(LAYER_TYPES)}")
    short = window is not None and window < max_context
    return tuple(window if short and kind == "sliding_attention" else None for kind in kinds)


def _rope(raw: Mapping[str, Any], max_context: int) -> RopeConfig:
    # transformers 5 writes one rope_parameters; before it, rope_theta and rope_scaling, with "type" for "rope_type".
    found = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    theta = found.pop("rope_theta", None) or raw.get("rope_theta") or DEFAULT_ROPE_THETA
    legacy = found.pop("type", None)
    kind = found.pop("rope_type", None) or legacy or "default"
    if kind not in _ROPE_FIELDS:
        raise _refusal("rope_type", kind, f"one of {', '.join(_ROPE_FIELDS)}")
    partial = found.pop("partial_rotary_factor", 1.0)
    if partial != 1.0:
        raise _refusal("partial_rotary_factor", partial, "1.0")
    if not _is_number(theta) or theta <= 1:
        raise _refusal("rope_theta", theta, "a number above 1")
    required, optional = _ROPE_FIELDS[kind]
    missing = [name for name in required if found.get(name) is None]
    if missing:
        raise ModelLoadError(f"config rope: type {kind!r} needs {', '.join(missing)}", field=missing[0])
    unknown = [name for name in found if name not in (*required, *optional) and found[name] is not None]
    if unknown and kind != "default":
        raise _refusal(f"rope {unknown[0]}", found[unknown[0]], f"{', '.join((*required, *optional))} for {kind!r}")
    known = {name: found[name] for name in (*required, *optional) if found.get(name) is not None}
    for name, value in known.items():
        if not _is_number(value) and not (name == "truncate" and isinstance(value, bool)):
            raise _refusal(f"rope {name}", value, "a number")
    known = {_ROPE_NAMES.get(name, name): value for name, value in known.items()}
    if kind in ("llama3", "yarn"):
        known.setdefault("original_max_context", max_context)
    return RopeConfig(kind=cast(RopeKind, kind), theta=float(theta), **known)


_ROPE_NAMES = {"original_max_position_embeddings": "original_max_context"}
_YARN_OPTIONAL = ("beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim")
_ROPE_FIELDS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # kind: required, optional
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ("original_max_position_embeddings",)),
    "yarn": (("factor",), ("original_max_position_embeddings", *_YARN_OPTIONAL)),
}


def _positive(raw: Mapping[str, Any], field: str, *, default: int | None = None, least: int = 1) -> int:
    value = raw.get(field)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise _refusal(field, value, f"an integer of at least {least}")
    return value


def _number(raw: Mapping[str, Any], field: str, default: float) -> float:
    value = raw.get(field)
    value = default if value is None else value
    if not _is_number(value) or not 0 <= value < 1:
        raise _refusal(field, value, "a number from 0 to 1")
    return float(value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _flag(raw: Mapping[str, Any], field: str) -> bool:
    value = raw.get(field)
    if not isinstance(value, bool | None):
        raise _refusal(field, value, "true or false")
    return bool(value)


def _token_ids(raw: Mapping[str, Any], field: str, vocab_size: int) -> tuple[int, ...]:
    value = raw.get(field)
    ids = () if value is None else value if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            raise _refusal(field, token, f"a token id below vocab_size ({vocab_size})")
    return tuple(ids)
