"""A tier's orders and reports as bytes, between a leader and its other ranks: all little-endian, nothing pickled."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

import numpy as np

from cluster.blocks import BlockHash
from cluster.errors import ProtocolError
from workers.tier import PROBLEMS, Chunk, FetchOrder, StoreOrder, TransferReport

_ORDER = struct.Struct("<qdIIB")  # ticket, seconds, chunks, pages of each, bytes of the suffix
_REPORT = struct.Struct("<qIQdBI")  # ticket, chunks, bytes, seconds, problem, corrupt ones
_HASH_BYTES = 32
_INT32 = np.dtype("<i4")


def encode_fetch(order: FetchOrder) -> bytes:
    """A FetchOrder."""
    return _encode(order.ticket, order.timeout_s, order.chunks, b"", ())


def encode_store(order: StoreOrder) -> bytes:
    """A StoreOrder."""
    return _encode(order.ticket, 0.0, order.chunks, order.suffix, order.ttls_s)


def decode_fetch(data: bytes) -> FetchOrder:
    """Raises ProtocolError."""
    ticket, seconds, chunks, _, _ = _decode(data, ttls=False)
    return FetchOrder(ticket, chunks, seconds)


def decode_store(data: bytes) -> StoreOrder:
    """Raises ProtocolError."""
    ticket, _, chunks, suffix, ttls_s = _decode(data, ttls=True)
    return StoreOrder(ticket, chunks, ttls_s, suffix)


def encode_report(report: TransferReport) -> bytes:
    """A TransferReport; a problem without a name of its own is "error"."""
    problem = PROBLEMS.index(report.problem if report.problem in PROBLEMS else "error") + 1 if report.problem else 0
    head = (report.ticket, report.chunks, report.bytes, report.seconds, problem, len(report.corrupt))
    return _REPORT.pack(*head) + np.array(report.corrupt, _INT32).tobytes()


def decode_report(data: bytes) -> TransferReport:
    """Raises ProtocolError."""
    try:
        ticket, chunks, size, seconds, problem, corrupt = _REPORT.unpack_from(data)
    except struct.error as error:
        raise ProtocolError(f"a report of {len(data)} bytes") from error
    if len(data) != _REPORT.size + 4 * corrupt or problem > len(PROBLEMS):
        raise ProtocolError(f"a report of {len(data)} bytes that contradicts itself")
    places = tuple(np.frombuffer(data, _INT32, corrupt, _REPORT.size).tolist())
    return TransferReport(ticket, chunks, size, seconds, places, PROBLEMS[problem - 1] if problem else "")


def _encode(ticket: int, seconds: float, chunks: Sequence[Chunk], suffix: bytes, ttls_s: Iterable[int]) -> bytes:
    pages = len(chunks[0].pages) if chunks else 0
    numbers = [np.array([(chunk.number, *chunk.pages) for chunk in chunks], _INT32).tobytes()]
    hashes = [chunk.hash for chunk in chunks]
    ttls = np.array(list(ttls_s), _INT32).tobytes()
    return b"".join((_ORDER.pack(ticket, seconds, len(chunks), pages, len(suffix)), suffix, *hashes, *numbers, ttls))


def _decode(data: bytes, *, ttls: bool) -> tuple[int, float, tuple[Chunk, ...], bytes, tuple[int, ...]]:
    try:
        ticket, seconds, count, pages, suffix_bytes = _ORDER.unpack_from(data)
    except struct.error as error:
        raise ProtocolError(f"an order of {len(data)} bytes") from error
    hashes_at = _ORDER.size + suffix_bytes
    numbers_at = hashes_at + count * _HASH_BYTES
    ttls_at = numbers_at + 4 * count * (1 + pages)
    if len(data) != ttls_at + (4 * count if ttls else 0):
        raise ProtocolError(f"an order of {len(data)} bytes that contradicts itself")
    numbers = np.frombuffer(data, _INT32, count * (1 + pages), numbers_at).reshape(count, 1 + pages).tolist()
    hashes = [data[at : at + _HASH_BYTES] for at in range(hashes_at, numbers_at, _HASH_BYTES)]
    chunks = tuple(Chunk(BlockHash(name), index, tuple(at)) for name, (index, *at) in zip(hashes, numbers, strict=True))
    kept = tuple(np.frombuffer(data, _INT32, count if ttls else 0, ttls_at).tolist())
    return ticket, seconds, chunks, data[_ORDER.size : hashes_at], kept
