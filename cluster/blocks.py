"""Identity of KV blocks: which two may be exchanged, and how a block is named. Shared by router and groups.

*Namespace*: a digest over everything that decides what numbers a block holds. *Root*: where a chain begins; it differs
by cache domain, adapter and salt, and cannot be guessed without the cluster's secret, so tenants cannot test each
other's prompts. *Chain*: ``H_i = SHA-256(H_{i-1} || u32le tokens of block i)``; equal hashes mean equal prefixes.
Python's ``hash()`` differs between processes and is never used.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import NewType

BlockHash = NewType("BlockHash", bytes)
"""32 bytes; names a block's tokens and all before it, under one root."""

LAYOUT_VERSION = 1
"""Changes whenever the bytes of a block change their order or meaning."""

WIRE_HASH_BYTES = 16
"""Of a block hash, what cache events carry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """Every fact that decides whether two KV blocks may be exchanged. All are required."""

    model: str
    weights_digest: str  # SHA-256 hex over the weights' bytes, or over file digests
    quantization: str  # "none", or the format that the weights are computed in
    compute_dtype: str
    kv_dtype: str
    tokenizer_digest: str
    layers: int
    kv_heads: int
    head_dim: int
    rope: str  # canonical text of every rope setting
    attention: str  # canonical text of window and scaling settings
    block_tokens: int
    chunk_tokens: int  # of the Redis tier
    layout_version: int = LAYOUT_VERSION

    def digest(self) -> str:
        """SHA-256 hex over the fields, each tagged with its name.

        Raises ValueError where a field is empty: two unknowns must not look equal.
        """
        fields = asdict(self)
        unknown = [name for name, value in fields.items() if value in ("", None)]
        if unknown:
            raise ValueError(f"namespace: {', '.join(unknown)} unknown")
        return hashlib.sha256(json.dumps(["quire-namespace", fields], sort_keys=True).encode()).hexdigest()


def root(secret: bytes, domain: str, namespace: str, adapter: str = "", salt: str = "") -> BlockHash:
    """The root of a chain: HMAC-SHA256 keyed by HMAC(secret, domain), over length-tagged fields."""
    key = hmac.new(secret, b"quire-domain\0" + domain.encode(), hashlib.sha256).digest()
    # JSON keeps the three apart: no adapter can be spelled so that it swallows a salt.
    message = json.dumps([namespace, adapter, salt]).encode()
    return BlockHash(hmac.new(key, message, hashlib.sha256).digest())


def next_hash(previous: BlockHash, tokens: Iterable[int]) -> BlockHash:
    """The hash of the block that holds ``tokens`` after everything that ``previous`` names."""
    digest = hashlib.sha256(previous)
    digest.update(_u32le(tokens))
    return BlockHash(digest.digest())


def chain(start: BlockHash, tokens: Sequence[int], block_tokens: int) -> list[BlockHash]:
    """One hash for each full block of ``tokens``; a partial last block has none."""
    hashes: list[BlockHash] = []
    packed = memoryview(_u32le(tokens))
    step = 4 * block_tokens
    for offset in range(0, len(tokens) // block_tokens * step, step):
        digest = hashlib.sha256(start)
        digest.update(packed[offset : offset + step])
        start = BlockHash(digest.digest())
        hashes.append(start)
    return hashes


def _u32le(tokens: Iterable[int]) -> bytes:
    packed = array("I", tokens)
    assert packed.itemsize == 4
    if _BIG_ENDIAN:
        packed.byteswap()
    return packed.tobytes()


_BIG_ENDIAN = array("H", [1]).tobytes() == b"\0\1"
