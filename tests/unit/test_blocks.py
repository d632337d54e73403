"""Identity of KV blocks: equal exactly when everything that decides is equal, in every process."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.blocks import BlockHash, Namespace, chain, next_hash, root

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=200)
NAMESPACE = Namespace(
    model="m",
    weights_digest="w",
    quantization="none",
    compute_dtype="float32",
    kv_dtype="float32",
    tokenizer_digest="t",
    layers=2,
    kv_heads=3,
    head_dim=64,
    rope="default(1e5)",
    attention="full",
    block_tokens=16,
    chunk_tokens=256,
)
START = root(b"secret", "tenant", NAMESPACE.digest())


@given(TOKENS, st.sampled_from([1, 4, 16]))
def test_chain_names_full_blocks_and_equals_the_step_by_step_form(tokens: list[int], size: int) -> None:
    hashes = chain(START, tokens, size)
    assert len(hashes) == len(tokens) // size
    previous = START
    for i, block in enumerate(hashes):
        previous = next_hash(previous, tokens[i * size : (i + 1) * size])
        assert previous == block


@given(TOKENS, TOKENS, st.sampled_from([1, 4]))
def test_chains_agree_exactly_as_far_as_the_tokens(a: list[int], b: list[int], size: int) -> None:
    for i, (x, y) in enumerate(zip(chain(START, a, size), chain(START, b, size), strict=False), start=1):
        assert (x == y) == (a[: i * size] == b[: i * size])


@pytest.mark.parametrize("field", [f.name for f in fields(Namespace)])
def test_every_field_of_the_namespace_decides(field: str) -> None:
    """Bug row: model, weights, dtype or adapter missing from the key, so another model's KV is loaded."""
    value = getattr(NAMESPACE, field)
    other = replace(NAMESPACE, **{field: value + (1 if isinstance(value, int) else "x")})
    assert other.digest() != NAMESPACE.digest()


def test_an_unknown_field_is_no_namespace() -> None:
    with pytest.raises(ValueError, match="weights_digest"):
        replace(NAMESPACE, weights_digest="").digest()


@given(st.tuples(*[st.text(max_size=8)] * 4), st.tuples(*[st.text(max_size=8)] * 4))
def test_roots_differ_when_domain_namespace_adapter_or_salt_do(a: tuple[str, ...], b: tuple[str, ...]) -> None:
    assert (root(b"s", *a) == root(b"s", *b)) == (a == b)
    assert root(b"other", *a) != root(b"s", *a)


def test_hashes_are_the_same_in_another_process() -> None:
    """Bug row: Python's hash() differs between processes."""
    code = "from cluster.blocks import *; print(chain(BlockHash(bytes(32)), list(range(32)), 16)[-1].hex())"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert out.stdout.strip() == chain(BlockHash(bytes(32)), list(range(32)), 16)[-1].hex()
