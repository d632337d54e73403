"""The bytes of a chunk in a tier: one value, head by head, each verified by itself. Pure; no Redis.

    header │ checksum, payload of head 0 │ checksum, payload of head 1 │ ...

A payload is ``[layers, K and V, tokens, head_dim]``, so that a rank's heads are one run of the value whatever the
number of ranks: what two ranks have written, three can read. A checksum covers the chunk's name and the head's number
too: right bytes in a wrong place are wrong.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Literal, TypeAlias

import xxhash

from cluster.blocks import BlockHash

StoredDType: TypeAlias = Literal["float32", "bfloat16", "float16", "int8"]

CHECKSUM_BYTES = 16
LEAST_VALUE_BYTES = 1 << 20
"""Of the values that ``chunk_tokens_for`` makes: below, round trips cost more than bytes."""

_MAGIC = b"QUIREKV1"
_FIELDS = struct.Struct("<8s32s32sIIIIB")
_DTYPES: tuple[StoredDType, ...] = ("float32", "bfloat16", "float16", "int8")
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}

HEADER_BYTES = 128
"""Fields, zeros, checksum. A multiple of every number's size, and so is a head's stride: staged numbers lie aligned."""

_SUMMED = HEADER_BYTES - CHECKSUM_BYTES


class CorruptChunk(ValueError):
    """A value is not what its name says."""


@dataclass(frozen=True, slots=True)
class ChunkShape:
    """What all chunks of a namespace have in common."""

    namespace: bytes  # its digest, 32 bytes
    tokens: int
    layers: int
    kv_heads: int  # of the whole model
    head_dim: int
    dtype: StoredDType

    @property
    def scale_bytes(self) -> int:
        """Of a head: with int8, a float32 for each layer, K or V, and token."""
        return 4 * 2 * self.layers * self.tokens if self.dtype == "int8" else 0

    @property
    def head_bytes(self) -> int:
        """Payload of one head: numbers, then scales."""
        numbers = 2 * self.layers * self.tokens * self.head_dim
        return numbers * _ITEM_BYTES[self.dtype] + self.scale_bytes

    @property
    def stride(self) -> int:
        """From one head's checksum to the next one's."""
        return CHECKSUM_BYTES + self.head_bytes

    @property
    def value_bytes(self) -> int:
        """The whole value."""
        return HEADER_BYTES + self.kv_heads * self.stride

    def span(self, heads: range) -> range:
        """Where a run of heads lies in the value, with their checksums."""
        return range(HEADER_BYTES + heads.start * self.stride, HEADER_BYTES + heads.stop * self.stride)


def header(shape: ChunkShape, block_hash: BlockHash) -> bytes:
    """The first HEADER_BYTES of a value."""
    fields = _FIELDS.pack(
        _MAGIC,
        shape.namespace,
        block_hash,
        shape.tokens,
        shape.layers,
        shape.kv_heads,
        shape.head_dim,
        _DTYPES.index(shape.dtype),
    )
    summed = fields.ljust(_SUMMED, b"\0")
    return summed + xxhash.xxh3_128_digest(summed)


def check_header(shape: ChunkShape, block_hash: BlockHash, found: bytes | memoryview) -> None:
    """Raises CorruptChunk where it is not the header of this chunk."""
    if bytes(found) != header(shape, block_hash):
        raise CorruptChunk("another header")


def parse_header(found: bytes) -> tuple[ChunkShape, BlockHash]:
    """The shape and the name of a value that nobody knows anything about. Raises CorruptChunk."""
    if len(found) < HEADER_BYTES or found[_SUMMED:HEADER_BYTES] != xxhash.xxh3_128_digest(found[:_SUMMED]):
        raise CorruptChunk("no header")
    magic, namespace, name, tokens, layers, kv_heads, head_dim, dtype = _FIELDS.unpack_from(found)
    if magic != _MAGIC or dtype >= len(_DTYPES):
        raise CorruptChunk("another format")
    return ChunkShape(namespace, tokens, layers, kv_heads, head_dim, _DTYPES[dtype]), BlockHash(name)


def checksum(block_hash: BlockHash, head: int, payload: bytes | memoryview) -> bytes:
    """16 bytes. ``head``: its number in the whole model."""
    digest = xxhash.xxh3_128(block_hash + head.to_bytes(4, "little"))
    digest.update(payload)
    return digest.digest()


def chunk_key(cluster: str, block_hash: BlockHash) -> bytes:
    """Its name in Redis; the braces keep all keys of a chunk on one server of a cluster."""
    return f"{cluster}:kv:{{{block_hash.hex()}}}".encode()


def claim_key(cluster: str, block_hash: BlockHash) -> bytes:
    """Exists while some group computes the chunk."""
    return chunk_key(cluster, block_hash) + b":claim"


def chunk_tokens_for(bytes_per_token: int, block_tokens: int) -> int:
    """The least power of two, a block at least, that makes a value of LEAST_VALUE_BYTES."""
    tokens = block_tokens
    while tokens * bytes_per_token < LEAST_VALUE_BYTES:
        tokens *= 2
    return tokens
