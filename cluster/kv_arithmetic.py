"""What a KV cache costs: pure arithmetic over a model's shape. Sizes are bytes, lengths are tokens.

Every layer keeps a key and a value of every KV head for every token: 2 · L · H_kv · d · bytes. With one KV head for all
query heads (MQA: Shazeer, "Fast Transformer Decoding", 2019) or one for some (GQA: Ainslie et al., 2023) it shrinks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from cluster.errors import ConfigError, ModelLoadError

DTYPE_BYTES: Mapping[str, int] = {
    "float32": 4,
    "fp32": 4,
    "bfloat16": 2,
    "bf16": 2,
    "float16": 2,
    "fp16": 2,
    "fp8": 1,
    "int8": 1,
}

_UNITS = {"": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "B": 1}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShape:
    """What of a model decides the size of its KV cache."""

    name: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_context: int | None = None
    window: int | None = None  # some layer attends to this many tokens only; counted as if it kept all

    def __post_init__(self) -> None:
        for field in ("layers", "heads", "kv_heads", "head_dim"):
            if getattr(self, field) < 1:
                raise ConfigError(f"{_flag(field)}: must be at least 1; got {getattr(self, field)}", field=field)
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"--kv-heads: must divide the {self.heads} query heads; got {self.kv_heads}", field="kv_heads"
            )

    @property
    def kind(self) -> str:
        """MHA (a KV head per query head), MQA (one for all), else GQA."""
        if self.kv_heads == self.heads:
            return "MHA"
        return "MQA" if self.kv_heads == 1 else "GQA"

    def bytes_per_token(self, dtype_bytes: int, kv_heads: int | None = None) -> int:
        """Keys and values of one token over all layers; of ``kv_heads`` of the heads where given (a rank's)."""
        return 2 * self.layers * (self.kv_heads if kv_heads is None else kv_heads) * self.head_dim * dtype_bytes


SHAPES: Mapping[str, KVShape] = {
    shape.name: shape
    for shape in (
        KVShape(name="llama-7b", layers=32, heads=32, kv_heads=32, head_dim=128, max_context=2048),
        KVShape(name="llama-13b", layers=40, heads=40, kv_heads=40, head_dim=128, max_context=2048),
        KVShape(name="llama-65b", layers=80, heads=64, kv_heads=64, head_dim=128, max_context=2048),
        KVShape(name="llama-2-70b", layers=80, heads=64, kv_heads=8, head_dim=128, max_context=4096),
        KVShape(name="llama-3-8b", layers=32, heads=32, kv_heads=8, head_dim=128, max_context=8192),
        KVShape(name="llama-3-70b", layers=80, heads=64, kv_heads=8, head_dim=128, max_context=8192),
    )
}
"""Published shapes, to reckon without any file."""


def shape_of(name: str, config: Mapping[str, Any]) -> KVShape:
    """Read a config in Hugging Face form; of any decoder, served by Quire or not. Raises ModelLoadError."""
    nested = config.get("text_config")  # of a model that also sees or hears
    raw = nested if isinstance(nested, Mapping) else config
    heads = _count(raw, "num_attention_heads", "n_head")
    head_dim = raw.get("head_dim")
    return KVShape(
        name=name,
        layers=_count(raw, "num_hidden_layers", "n_layer"),
        heads=heads,
        kv_heads=heads if raw.get("num_key_value_heads") is None else _count(raw, "num_key_value_heads"),
        head_dim=_count(raw, "hidden_size", "n_embd") // heads if head_dim is None else _count(raw, "head_dim"),
        max_context=_optional(raw, "max_position_embeddings"),
        window=_optional(raw, "sliding_window"),
    )


def _count(raw: Mapping[str, Any], *names: str) -> int:
    for name in names:
        value = raw.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        if value is not None:
            raise ModelLoadError(f"config {name}: must be a positive integer; got {value!r}", field=name, value=value)
    raise ModelLoadError(f"config: says no {names[0]}, without which a KV cache has no size", field=names[0])


def _optional(raw: Mapping[str, Any], name: str) -> int | None:
    value = raw.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def variants(shape: KVShape) -> list[KVShape]:
    """The same model as MHA, GQA and MQA; the model's own KV heads are one of them.

    A model that is not GQA itself is shown with 8 KV heads (Ainslie et al.), or the next smaller divisor.
    """
    grouped = shape.kv_heads
    if shape.kind != "GQA":
        grouped = max(k for k in range(1, min(8, shape.heads) + 1) if shape.heads % k == 0)
    counts = dict.fromkeys((shape.heads, grouped, 1))
    return [replace(shape, kv_heads=count) for count in counts]


def heads_per_rank(shape: KVShape, tp: int) -> list[int]:
    """KV heads that each of ``tp`` ranks keeps (design, section 5).

    Up to as many ranks as KV heads: whole heads, contiguous, as even as possible. More: each rank keeps a copy of one
    head and a part of its query heads. Raises ConfigError where ranks would have no query head.
    """
    if not 1 <= tp <= shape.heads:
        raise ConfigError(f"--tp: must be from 1 to the {shape.heads} query heads; got {tp}", field="tp", value=tp)
    if tp > shape.kv_heads:
        return [1] * tp
    whole, more = divmod(shape.kv_heads, tp)
    return [whole + (rank < more) for rank in range(tp)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """A cache reckoned for one rank, or for the whole model."""

    kv_heads: int
    bytes_per_token: int
    bytes_per_block: int
    blocks_per_sequence: int
    sequence_bytes: int  # in whole blocks
    batch_bytes: int  # of the tokens themselves: 2 · L · H_kv · d · bytes · tokens · batch
    batch_block_bytes: int  # in whole blocks: what the pool must hold
    memory_blocks: int | None  # blocks that the memory holds
    memory_sequences: int | None  # sequences of this length that fit the memory


def reckon(
    shape: KVShape,
    *,
    dtype_bytes: int,
    tokens: int,
    batch: int,
    block_tokens: int,
    memory_bytes: int | None = None,
    kv_heads: int | None = None,
) -> Costs:
    """Costs of ``batch`` sequences of ``tokens`` tokens; ``memory_bytes``: for KV alone, of one rank."""
    per_token = shape.bytes_per_token(dtype_bytes, kv_heads)
    per_block = per_token * block_tokens
    blocks = -(-tokens // block_tokens)
    fit = None if memory_bytes is None else memory_bytes // per_block
    return Costs(
        kv_heads=shape.kv_heads if kv_heads is None else kv_heads,
        bytes_per_token=per_token,
        bytes_per_block=per_block,
        blocks_per_sequence=blocks,
        sequence_bytes=blocks * per_block,
        batch_bytes=per_token * tokens * batch,
        batch_block_bytes=blocks * per_block * batch,
        memory_blocks=fit,
        memory_sequences=None if fit is None else fit // blocks,
    )


def group_costs(per_rank: list[Costs]) -> tuple[int | None, int | None]:
    """Blocks and sequences of a whole group: the rank with the fewest decides. None, None without a memory."""
    blocks = [costs.memory_blocks for costs in per_rank if costs.memory_blocks is not None]
    sequences = [costs.memory_sequences for costs in per_rank if costs.memory_sequences is not None]
    return min(blocks, default=None), min(sequences, default=None)


def parse_size(text: str, field: str = "--memory") -> int:
    """Bytes of "24GiB", "80GB", "512 MiB" or "1000". Raises ConfigError."""
    match = _SIZE.fullmatch(text)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or float(match[1]) * unit < 1:
        raise ConfigError(f"{field}: must be a size such as 24GiB, 80GB or 512MiB; got {text!r}", field=field)
    return int(float(match[1]) * unit)


def format_size(count: int) -> str:
    """Two decimals of the largest binary unit that is at least one: 1.00 GiB."""
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")
