"""The fused kernels equal the oracle on any layout of pages, rows and positions."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.errors import ConfigError, OutOfMemory, ProtocolError
from tests.support import cpu_kernels
from tests.support.hf import our_model, random_model
from workers.attention import cpu_chunks, cpu_singles
from workers.attention.interface import Batch, KVPages, spell_out
from workers.attention.reference import ReferenceAttention
from workers.model import backend, ops
from workers.model.config import RopeConfig
from workers.model.rope import RotaryTable
from workers.plan import StepPlan

CPU = torch.device("cpu")


def plan_of(rows: list[tuple[int, int]], block_tokens: int, num_blocks: int, seed: int = 0) -> StepPlan:
    """Rows of (computed, new tokens), their pages drawn at random without repetition."""
    rng = np.random.default_rng(seed)
    needed = [-(-(computed + new) // block_tokens) for computed, new in rows]
    return StepPlan(
        step=0,
        token_ids=np.zeros(sum(new for _, new in rows), np.int32),
        row_starts=np.array(list(accumulate((new for _, new in rows), initial=0)), np.int32),
        num_computed=np.array([computed for computed, _ in rows], np.int32),
        carried_from=np.full(len(rows), -1, np.int32),
        block_starts=np.array(list(accumulate(needed, initial=0)), np.int32),
        blocks=rng.permutation(num_blocks)[: sum(needed)].astype(np.int32),
        draws=(),
        copies=np.zeros((0, 2), np.int32),
    )


def batch_of(plan: StepPlan, block_tokens: int) -> Batch:
    return spell_out(plan.for_ranks(plan.token_ids), block_tokens, CPU)


ROW = st.tuples(st.integers(0, 70), st.one_of(st.just(1), st.integers(1, 40)))


@settings(deadline=None, max_examples=60)
@given(
    rows=st.lists(ROW, min_size=1, max_size=6),
    block_tokens=st.sampled_from([8, 16, 32]),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    head_dim=st.sampled_from([8, 24, 64, 128]),
    window=st.one_of(st.none(), st.sampled_from([1, 2, 7, 8, 9, 16, 33, 64, 1000])),
    seed=st.integers(0, 2**20),
)
def test_cpu_attention_equals_the_reference(
    rows: list[tuple[int, int]],
    block_tokens: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    window: int | None,
    seed: int,
) -> None:
    plan = plan_of(rows, block_tokens, num_blocks=100, seed=seed)
    batch = batch_of(plan, block_tokens)
    generator = torch.Generator().manual_seed(seed)
    # Every slot holds something large: one that is read beyond a row's length shows.
    keys, values = (torch.randn(100, kv_heads, block_tokens, head_dim, generator=generator) * 3 for _ in range(2))
    q = torch.randn(plan.num_tokens, kv_heads * group, head_dim, generator=generator)
    found = cpu_kernels.attend(q, keys, values, batch, window)
    want = ReferenceAttention().attend(q, keys, values, batch, window)
    assert found.shape == (plan.num_tokens, kv_heads * group * head_dim)
    torch.testing.assert_close(found, want, atol=3e-5, rtol=3e-5)


@settings(deadline=None, max_examples=60)
@given(
    row=ROW,
    shape=st.sampled_from([(8, 8), (16, 64), (16, 80), (8, 6)]),
    window=st.one_of(st.none(), st.sampled_from([1, 3, 8, 17, 40])),
)
def test_what_a_row_does_not_see_reaches_no_result(
    row: tuple[int, int], shape: tuple[int, int], window: int | None
) -> None:
    """Pages: a broken sequence leaves NaNs in its pages, and the next owner has not yet written all of their slots."""
    block_tokens, head_dim = shape
    plan = plan_of([row], block_tokens, 20)
    batch = batch_of(plan, block_tokens)
    computed, new = row
    keys, values = torch.full((2, 20, 2, block_tokens, head_dim), float("nan"))
    first = 0 if window is None else max(0, computed + 1 - window)
    for position in range(first, computed + new):
        page = int(plan.blocks[position // block_tokens])
        keys[page, :, position % block_tokens] = torch.randn(2, head_dim)
        values[page, :, position % block_tokens] = torch.randn(2, head_dim)
    q = torch.randn(new, 6, head_dim)
    found = cpu_kernels.attend(q, keys, values, batch, window)
    assert torch.isfinite(found).all()
    keys, values = keys.nan_to_num(7.0), values.nan_to_num(7.0)
    torch.testing.assert_close(found, ReferenceAttention().attend(q, keys, values, batch, window), atol=1e-5, rtol=1e-5)


def test_no_kernel_reads_memory_that_was_given_back() -> None:
    """The allocator overwrites what is freed: nothing of the result may change."""
    names = ("test_cpu_attention_equals_the_reference", "test_many_long_rows_on_all_threads")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(f"{__file__}::{n}" for n in names)]
    overwriting = {**os.environ, "MALLOC_PERTURB_": "165"}
    root = Path(__file__).parents[2]
    ended = subprocess.run(command, env=overwriting, cwd=root, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stdout[-3000:]


def test_many_long_rows_on_all_threads() -> None:
    """Beyond what an allocator keeps for itself, and of very different lengths."""
    plan = plan_of([(length, 1) for length in (9000, 1, 300, 4000, 17, 2500)], 16, 1100)
    batch = batch_of(plan, 16)
    keys, values = torch.randn(2, 1100, 2, 16, 16)
    q = torch.randn(6, 16, 16)
    for window in (None, 1000):
        found = cpu_kernels.attend(q, keys, values, batch, window)
        want = ReferenceAttention().attend(q, keys, values, batch, window)
        torch.testing.assert_close(found, want, atol=3e-5, rtol=3e-5)


def test_extreme_scores_do_not_overflow() -> None:
    batch = batch_of(plan_of([(20, 1), (30, 3)], 8, 10), 8)
    keys, values = torch.randn(10, 1, 8, 16) * 1e4, torch.randn(10, 1, 8, 16)
    q = torch.randn(4, 2, 16) * 1e2
    found = cpu_kernels.attend(q, keys, values, batch, None)
    torch.testing.assert_close(found, ReferenceAttention().attend(q, keys, values, batch, None), atol=1e-3, rtol=1e-3)


@settings(deadline=None, max_examples=40)
@given(
    rows=st.lists(ROW, min_size=1, max_size=4),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 3), (5, 1)]),
    head_dim=st.sampled_from([2, 8, 64]),
    seed=st.integers(0, 2**20),
)
def test_fused_rope_and_store_equals_the_plain_one(
    rows: list[tuple[int, int]], heads: tuple[int, int], head_dim: int, seed: int
) -> None:
    heads_q, kv_heads = heads
    batch = batch_of(plan_of(rows, 8, num_blocks=80, seed=seed), 8)
    table = RotaryTable(RopeConfig(kind="default", theta=100.0), head_dim, 128, CPU)
    table.cover(batch.max_position + 1)
    qkv = torch.randn(len(batch.positions), (heads_q + 2 * kv_heads) * head_dim)
    before = torch.randn(2, 80, kv_heads, 8, head_dim)
    results = []
    for kind in (ops, cpu_kernels):
        keys, values = before.clone()
        results.append((kind.rope_and_store(qkv, table, batch, keys, values), keys, values))
    for plain, fused in zip(*results, strict=True):
        torch.testing.assert_close(fused, plain, atol=1e-6, rtol=1e-5)
    written = (results[0][2] != before[1]).flatten(2).any(-1).any(-1).sum()
    assert written <= len(set(batch.pages.tolist()))


@pytest.mark.parametrize("shape", [(1, 16), (7, 576), (300, 33)])
def test_fused_norms_and_gate_equal_the_plain_ones(shape: tuple[int, int]) -> None:
    x, residual, weight = torch.randn(shape) * 4, torch.randn(shape), torch.randn(shape[1])
    plain, fused = ops, cpu_kernels
    torch.testing.assert_close(fused.rms_norm(x, weight, 1e-5), plain.rms_norm(x, weight, 1e-5))
    ours, theirs = residual.clone(), residual.clone()
    torch.testing.assert_close(fused.add_rms_norm(ours, x, weight, 1e-5), plain.add_rms_norm(theirs, x, weight, 1e-5))
    torch.testing.assert_close(ours, theirs)
    gate_up = torch.cat((x * 10, residual), dim=1)
    torch.testing.assert_close(fused.silu_mul(gate_up), plain.silu_mul(gate_up), atol=1e-6, rtol=1e-5)


def test_fused_norm_of_heads_equals_the_plain_one() -> None:
    qkv, q_norm, k_norm = torch.randn(7, (6 + 2 * 2) * 24) * 4, torch.randn(24), torch.randn(24)
    ours, theirs = qkv.clone(), qkv.clone()
    cpu_kernels.norm_heads(ours, q_norm, k_norm, 6, 2, 1e-5)
    ops.norm_heads(theirs, q_norm, k_norm, 6, 2, 1e-5)
    torch.testing.assert_close(ours, theirs)
    assert torch.equal(ours[:, 8 * 24 :], qkv[:, 8 * 24 :])


def test_gate_at_the_ends_of_fp32() -> None:
    gates = torch.tensor([[-1e30, -200.0, -88.0, -1e-30, 0.0, 1e-30, 88.0, 200.0, 1e30]])
    gate_up = torch.cat((gates, torch.ones_like(gates)), dim=1)
    torch.testing.assert_close(cpu_kernels.silu_mul(gate_up), ops.silu_mul(gate_up), atol=1e-8, rtol=1e-5)


def test_read_only_and_strided_plans_compile_nothing_anew() -> None:
    """A compilation in mid-service would stop every stream for seconds."""
    plan = plan_of([(20, 1), (30, 3)], 8, 10)
    q, keys, values = torch.randn(4, 2, 16), torch.randn(10, 1, 8, 16), torch.randn(10, 1, 8, 16)
    want = cpu_kernels.attend(q, keys, values, batch_of(plan, 8), None)
    kernels = (cpu_singles.attend_singles, cpu_chunks.attend_chunks)
    compiled = [len(kernel.signatures) for kernel in kernels]

    def odd(values: np.ndarray) -> np.ndarray:
        strided = np.repeat(values, 2)[::2]
        strided.flags.writeable = False
        return strided

    names = ("row_starts", "num_computed", "block_starts", "blocks")
    other = dataclasses.replace(plan, **{name: odd(getattr(plan, name)) for name in names})
    assert torch.equal(cpu_kernels.attend(q, keys, values, batch_of(other, 8), None), want)
    assert [len(kernel.signatures) for kernel in kernels] == compiled


def test_a_row_with_too_few_pages_is_refused() -> None:
    """Otherwise it would write into the next row's first page."""
    plan = plan_of([(7, 1), (3, 2)], 8, 10)
    short = dataclasses.replace(plan, num_computed=np.array([8, 3], np.int32))
    with pytest.raises(ProtocolError, match="row 0"):
        batch_of(short, 8)


def test_pages_are_copied_as_if_all_were_read_first() -> None:
    pages = KVPages(2, (4, 1, 8, 2), torch.float32, CPU)
    for layer in range(2):
        for page in range(4):
            pages.keys[layer][page] = 10 * layer + page
            pages.values[layer][page] = 100 + 10 * layer + page
    pages.copy(np.array([[0, 1], [1, 2]], np.int32))
    assert [int(page[0, 0, 0]) for page in pages.keys[1]] == [10, 10, 11, 13]
    assert [int(page[0, 0, 0]) for page in pages.values[0]] == [100, 100, 101, 103]


def test_a_pool_beyond_the_memory_names_its_bytes_and_the_way_out() -> None:
    with pytest.raises(OutOfMemory, match=r"9,007,199,254,740,992 bytes.*kv_memory_bytes"):
        KVPages(1, (2**40, 8, 16, 8), torch.float32, CPU)


def test_cpu_kernels_are_refused_where_they_cannot_run(tmp_path: Path) -> None:
    random_model(tmp_path)
    pages = KVPages(3, (4, 2, 8, 8), torch.float32, CPU)
    half, whole = (our_model(tmp_path, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    with pytest.raises(ConfigError, match=r"engine\.attention.*bfloat16"):
        backend.choose("cpu", half, pages)
    assert backend.choose("auto", half, pages).name == "reference"
    assert backend.choose("auto", whole, pages).name == "cpu"
    assert backend.choose("reference", whole, pages).name == "reference"
