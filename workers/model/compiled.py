"""The decoder of workers/model/llama.py as one compiled call a step, for CPUs in fp32.

A step is 300 operations, and in Python each costs more than the small ones take. Here the layers are a table of
addresses, the loop over them is compiled, and all threads go through it together (workers/team.py).
"""

from __future__ import annotations

import logging
from typing import Any

import numba
import numpy as np
import torch
from numba.core import types

from workers import tiles as tile_kernels
from workers.attention.cpu_chunks import attend_chunks
from workers.attention.cpu_singles import EVERYTHING, attend_singles, parts_of, put_together, width_for
from workers.attention.interface import Batch, KVPages
from workers.model import gemm, gemm8, ops_cpu
from workers.model.linear import Linear
from workers.model.llama import Layer, Model
from workers.native import FAILED, Kernels, pointer_to
from workers.shared_memory import SharedMemory
from workers.team import can_meet, clock, is_broken, make_team, meet, meet_across
from workers.threads import kernel, parallel_kernel
from workers.tiles import PANEL

log = logging.getLogger(__name__)

# Columns of the table of layers: addresses (0: there is none), and the layer's window.
_NORM, _MLP_NORM, _Q_NORM, _K_NORM, _BIAS, _KEYS, _VALUES, _WINDOW = range(8)
# … and for each linear layer the address of its weights, behind it that of its scales.
_QKV, _OUTPUT, _GATE_UP, _DOWN = range(8, 16, 2)

# Entries of the shape.
_HIDDEN, _HEADS, _KV_HEADS, _HEAD_DIM, _INTERMEDIATE, _BLOCKS, _BLOCK_TOKENS, _WIDTH, _INT8 = range(9)

# Entries of what is known of a group's ranks.
_RANKS, _RANK, _ALL_THREADS, _SLOTS, _SLOT_BYTES, _FIRST_TOKEN, _TURN = range(7)

# What a step's time goes into.
_LINEAR, _ATTENTION_TIME, _OTHER = range(3)

# Buffers of a step, addresses. The last three hold a linear layer's input in 8 bits.
_RESIDUAL, _X, _BESIDE, _WIDE, _NARROW, _QUANTIZED, _SCALES, _STARTS = range(8)


_F32, _I64 = types.float32, types.int64
_ROWS, _NUMBERS, _HEADS_OF, _PAGES_OF = (types.Array(_F32, dimensions, "C") for dimensions in (2, 1, 3, 4))
_INT32S, _INT64S = types.Array(types.int32, 1, "C"), types.Array(_I64, 1, "C")
_ACTIVATION = types.int8 if torch.int8 == gemm8.ACTIVATION else types.int16
_IN_8_BITS = (types.Array(_ACTIVATION, 2, "C"), _ROWS, types.Array(types.int32, 2, "C"))
_TABLE = types.Array(_I64, 2, "C")
_ATTENTION = (_HEADS_OF, _PAGES_OF, _PAGES_OF, _INT64S, *[_INT32S] * 4, _I64)

_OF_THREAD = (_I64, _I64)  # me, threads
_kernels = Kernels()
_take_rows = _kernels.add(ops_cpu.take_rows, _ROWS, _INT64S, _ROWS, *_OF_THREAD)
_take_some_rows = _kernels.add(ops_cpu.take_some_rows, _ROWS, _INT64S, _I64, _ROWS, *_OF_THREAD)
_sum_slots = _kernels.add(ops_cpu.sum_slots, _ROWS, _ROWS, *_OF_THREAD)
_rms_norm = _kernels.add(ops_cpu.rms_norm, _ROWS, _NUMBERS, _F32, _ROWS, *_OF_THREAD)
_add_rms_norm = _kernels.add(ops_cpu.add_rms_norm, _ROWS, _ROWS, _NUMBERS, _F32, _ROWS, *_OF_THREAD)
_add = _kernels.add(ops_cpu.add, _ROWS, _ROWS, _ROWS, *_OF_THREAD)
_add_bias = _kernels.add(ops_cpu.add_bias, _ROWS, _NUMBERS, *_OF_THREAD)
_silu_mul = _kernels.add(ops_cpu.silu_mul, _ROWS, _ROWS, *_OF_THREAD)
_norm_heads = _kernels.add(ops_cpu.norm_heads, _ROWS, _NUMBERS, _NUMBERS, _I64, _I64, _F32, *_OF_THREAD)
_rope = _kernels.add(ops_cpu.rope_and_store, *[_ROWS] * 3, *[_INT64S] * 3, _PAGES_OF, _PAGES_OF, _HEADS_OF, *_OF_THREAD)
_attend_singles = _kernels.add(attend_singles, *_ATTENTION, _I64, _HEADS_OF, _HEADS_OF, _HEADS_OF, *_OF_THREAD)
_put_together = _kernels.add(
    put_together, _INT64S, _INT32S, _INT32S, _I64, _HEADS_OF, _HEADS_OF, _HEADS_OF, *_OF_THREAD
)
_attend_chunks = _kernels.add(attend_chunks, *_ATTENTION, _INT64S, _HEADS_OF, *_OF_THREAD)
_multiply = _kernels.add(gemm.multiply_rows, _ROWS, _HEADS_OF, _INT64S, _ROWS, *_OF_THREAD)
_quantize = _kernels.add(gemm8.quantize_rows, _ROWS, *_IN_8_BITS, *_OF_THREAD)
_multiply8 = _kernels.add(
    gemm8.multiply_rows, *_IN_8_BITS, types.Array(types.int8, 4, "C"), _NUMBERS, _INT64S, _ROWS, *_OF_THREAD
)


class CompiledModel:
    """A model over its pages. Must equal Model.forward, which says what is computed."""

    name = "cpu"

    def __init__(self, model: Model, pages: KVPages) -> None:
        """Every linear layer must have been packed, and ranks must share memory. Compiles what is not in the cache."""
        config = model.config
        self._model = model
        self._pages = pages  # the table keeps addresses alone
        int8 = isinstance(model.head.linear.packed, gemm8.Packed)
        shared = model.ranks if isinstance(model.ranks, SharedMemory) else None
        self._shared = shared
        width = width_for(pages.block_tokens, config.head_dim)
        self._shape = np.array(
            (config.hidden, config.heads, config.kv_heads, config.head_dim, config.intermediate, pages.num_blocks,
             pages.block_tokens, width, int8),
            np.int64,
        )  # fmt: skip
        windows = (EVERYTHING if window is None else window for window in config.windows)
        layers = zip(model.layers, pages.keys, pages.values, windows, strict=True)
        self._table = np.array([_row(*layer) for layer in layers], np.int64)
        unused = [_multiply] if int8 else [_quantize, _multiply8]
        unused += [] if config.qk_norm else [_norm_heads]
        unused += [] if config.qkv_bias else [_add_bias]
        unused += [] if shared else [_take_some_rows, _sum_slots]
        self._code = _kernels.addresses(without=unused)
        self._tiles = (tile_kernels.code(), gemm8.code() if int8 else tile_kernels.code())
        self._entry = _entry.addresses()
        self._team = make_team()
        self._everyone = shared.team if shared else self._team
        self._parts = np.array(
            (model.ranks.ranks, model.ranks.rank, 0, shared.slots_address if shared else 0,
             shared.shape.slot_bytes if shared else 0, model.embedding.vocab.start, 0),
            np.int64,
        )  # fmt: skip
        self._progress = np.zeros(1, np.int64)
        self._spent = np.zeros(3, np.int64)
        self._can_meet: dict[int, bool] = {}  # by threads
        self._tokens = 0
        self._buffers: list[torch.Tensor] = []
        self._space = np.zeros(8, np.int64)

    def forward(self, batch: Batch) -> torch.Tensor:
        """See Backend."""
        model, config, plan = self._model, self._model.config, batch.plan
        tokens = len(batch.token_ids)
        if tokens > self._tokens:
            self._make_space(tokens)
        model.rope.cover(batch.max_position + 1)
        hidden = torch.empty(len(batch.needed), config.hidden)
        parts = parts_of(plan.num_computed[batch.single_rows] + 1) * config.kv_heads
        group = config.heads // config.kv_heads
        sums, tops = np.empty((parts, group, config.head_dim), np.float32), np.empty((parts, group, 2), np.float32)
        threads = self._threads()
        self._parts[_ALL_THREADS] = self._shared.threads if self._shared else threads
        _forward(
            self._entry, self._code, *self._tiles, self._table, self._shape, np.float32(config.rms_norm_eps),
            self._space, self._team, self._everyone, self._parts, threads, self._spent, self._progress,
            model.embedding.rows.numpy(), model.rope.cos.numpy(), model.rope.sin.numpy(), batch.token_ids.numpy(),
            batch.positions.numpy(), batch.pages.numpy(), batch.slots.numpy(), batch.needed.numpy(),
            batch.single_rows, batch.chunk_rows, plan.row_starts, plan.num_computed, plan.block_starts, plan.blocks,
            sums, tops, hidden.numpy(),
        )  # fmt: skip
        self._parts[_TURN] += 1 + 2 * (config.layers - (len(batch.needed) == 0))  # sums over the ranks
        self._raise_failures()
        return hidden

    def shares(self) -> tuple[float, float]:
        """See Backend."""
        shares = self._spent / max(1, self._spent.sum())
        return float(shares[_LINEAR]), float(shares[_ATTENTION_TIME])

    def progress(self) -> int:
        """See Backend."""
        return int(self._progress[0])

    def _raise_failures(self) -> None:
        """What went wrong in compiled code, which knows no exceptions; the step means nothing then."""
        broken, failed = is_broken(self._team), bool(self._code[FAILED] or self._entry[FAILED])
        self._team[:] = self._code[FAILED] = self._entry[FAILED] = 0
        if self._shared:
            self._shared.raise_if_broken()
        if broken:
            raise RuntimeError("a thread of a step did not come to where the others waited for it")
        if failed:
            raise MemoryError("a kernel found no memory for what it keeps beside its result")

    def _threads(self) -> int:
        """All that we may use, or one where they cannot meet."""
        count = numba.get_num_threads()
        if count not in self._can_meet:
            self._can_meet[count] = can_meet(count)
            if not self._can_meet[count]:
                log.warning("OpenMP gives fewer threads than %d (OMP_THREAD_LIMIT?): computing on one", count)
        return count if self._can_meet[count] else 1

    def logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """See Backend."""
        normed = torch.empty_like(hidden)
        eps = np.float32(self._model.config.rms_norm_eps)
        ops_cpu.rms_norm(hidden.numpy(), self._model.norm.numpy(), eps, normed.numpy(), 0, 1)
        return self._model.head(normed)

    def _make_space(self, tokens: int) -> None:
        """Buffers for so many tokens. Raises RuntimeError where there is no memory for them."""
        config = self._model.config
        q_size, wide = config.q_size, 2 * config.intermediate
        narrow = max(config.intermediate, q_size)
        depth = max(config.hidden, config.intermediate, q_size)
        groups = -(-depth // gemm8.GROUP)
        widths = (config.hidden, config.hidden, q_size, max(wide, q_size + 2 * config.kv_size), narrow)
        buffers = [torch.empty(tokens, width) for width in widths]
        if self._shape[_INT8]:
            buffers += [
                torch.empty(tokens, groups * gemm8.GROUP, dtype=gemm8.ACTIVATION),
                torch.empty(tokens, groups),
                torch.empty(tokens, groups, dtype=torch.int32),
            ]
        self._space = np.array([*(buffer.data_ptr() for buffer in buffers), 0, 0, 0][:8], np.int64)
        self._tokens, self._buffers = tokens, buffers  # all or nothing: the space is addresses alone


def _row(layer: Layer, keys: torch.Tensor, values: torch.Tensor, window: int) -> list[int]:
    """One layer's row of the table."""
    row = [_address(t) for t in (layer.attention_norm, layer.mlp_norm, layer.q_norm, layer.k_norm, layer.qkv.bias)]
    row += [_address(keys), _address(values), window]
    for linear in (layer.qkv, layer.output.linear, layer.gate_up, layer.down.linear):
        row += _addresses(linear)
    return row


def _addresses(linear: Linear) -> tuple[int, int]:
    packed = linear.packed
    if packed is None:
        raise ValueError("a linear layer that was not packed cannot be compiled")
    return _address(packed.weights), _address(packed.scales) if isinstance(packed, gemm8.Packed) else 0


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


# -- compiled --------------------------------------------------------------------------------------------------------


@kernel
def _step(
    code: Any, tiles: Any, linear_tiles: Any, table: Any, shape: Any, eps: Any, space: Any, team: Any, everyone: Any,
    parts: Any, spent: Any, progress: Any, embedding: Any, cos: Any, sin: Any, token_ids: Any, positions: Any,
    pages: Any, slots: Any, needed: Any, single_rows: Any, chunk_rows: Any, row_starts: Any, num_computed: Any,
    block_starts: Any, blocks: Any, sums: Any, tops: Any, out: Any, me: Any, threads: Any,
) -> None:  # fmt: skip
    """What thread ``me`` does of a step. Operations on rows are shared out alike: behind one and before the next of
    the same rows nobody waits."""
    tokens, size, head_dim = token_ids.shape[0], shape[_HIDDEN], shape[_HEAD_DIM]
    heads, kv_heads = shape[_HEADS], shape[_KV_HEADS]
    residual = _matrix(space[_RESIDUAL], tokens, size)
    x = _matrix(space[_X], tokens, size)
    q = _heads(space[_BESIDE], tokens, heads, head_dim)
    qkv = _matrix(space[_WIDE], tokens, (heads + 2 * kv_heads) * head_dim)
    attended = _heads(space[_NARROW], tokens, heads, head_dim)
    flat = _matrix(space[_NARROW], tokens, heads * head_dim)
    since, turn = clock(), parts[_TURN]
    if parts[_RANKS] == 1:
        _take_rows(code, (embedding, token_ids, residual, me, threads))
    else:
        mine = _slot(parts, turn, tokens, size)
        _take_some_rows(code, (embedding, token_ids, parts[_FIRST_TOKEN], mine, me, threads))
        _sum_up(code, everyone, parts, turn, residual, me, threads)
        turn += 1
    _rms_norm(code, (residual, _vector(table[0, _NORM], size), eps, x, me, threads))
    for i in range(table.shape[0]):
        layer = table[i]
        if me == 0:
            progress[0] += 1
        since = _note(spent, _OTHER, since, me)
        _linear(code, linear_tiles, x, layer, np.int64(_QKV), shape, space, qkv, team, me, threads)
        meet(team, threads)
        since = _note(spent, _LINEAR, since, me)
        if layer[_BIAS] != 0:
            _add_bias(code, (qkv, _vector(layer[_BIAS], qkv.shape[1]), me, threads))
        if layer[_Q_NORM] != 0:
            q_norm, k_norm = _vector(layer[_Q_NORM], head_dim), _vector(layer[_K_NORM], head_dim)
            _norm_heads(code, (qkv, q_norm, k_norm, heads, kv_heads, eps, me, threads))
        keys, values = _pages(layer[_KEYS], shape), _pages(layer[_VALUES], shape)
        _rope(code, (qkv, cos, sin, positions, pages, slots, keys, values, q, me, threads))
        meet(team, threads)
        since = _note(spent, _OTHER, since, me)
        window = layer[_WINDOW]
        if single_rows.shape[0] > 0:
            _attend_singles(code, (
                q, keys, values, single_rows, row_starts, num_computed, block_starts, blocks, window, shape[_WIDTH],
                sums, tops, attended, me, threads,
            ))  # fmt: skip
        if sums.shape[0] > 0:
            meet(team, threads)
            _put_together(code, (single_rows, row_starts, num_computed, window, sums, tops, attended, me, threads))
        if chunk_rows.shape[0] > 0:
            _attend_chunks(code, (
                q, keys, values, chunk_rows, row_starts, num_computed, block_starts, blocks, window, tiles, attended,
                me, threads,
            ))  # fmt: skip
        meet(team, threads)
        since = _note(spent, _ATTENTION_TIME, since, me)
        if i + 1 < table.shape[0]:
            _linear_summed(
                code, linear_tiles, flat, layer, np.int64(_OUTPUT), shape, space, x, team, everyone, parts, turn, me,
                threads,
            )  # fmt: skip
            since = _note(spent, _LINEAR, since, me)
            since = _mlp(
                code, linear_tiles, residual, x, layer, shape, eps, space, team, everyone, parts, turn + 1, spent,
                since, me, threads,
            )  # fmt: skip
            turn += 2
            _add_rms_norm(code, (residual, x, _vector(table[i + 1, _NORM], size), eps, x, me, threads))
        elif needed.shape[0] > 0:  # behind the last keys and values, only what somebody looks at
            rest = _matrix(space[_X], needed.shape[0], size)
            seen = _matrix(space[_BESIDE], needed.shape[0], flat.shape[1])
            _take_rows(code, (flat, needed, seen, me, threads))
            _take_rows(code, (residual, needed, out, me, threads))
            _linear_summed(
                code, linear_tiles, seen, layer, np.int64(_OUTPUT), shape, space, rest, team, everyone, parts, turn, me,
                threads,
            )  # fmt: skip
            since = _note(spent, _LINEAR, since, me)
            since = _mlp(
                code, linear_tiles, out, rest, layer, shape, eps, space, team, everyone, parts, turn + 1, spent, since,
                me, threads,
            )  # fmt: skip
            _add(code, (out, rest, out, me, threads))
    _note(spent, _OTHER, since, me)


@kernel
def _mlp(
    code: Any, linear_tiles: Any, residual: Any, x: Any, layer: Any, shape: Any, eps: Any, space: Any, team: Any,
    everyone: Any, parts: Any, turn: Any, spent: Any, since: Any, me: Any, threads: Any,
) -> Any:  # fmt: skip
    """``residual += x``, and x = the layer's MLP of the norm of that."""
    rows, inner = x.shape[0], shape[_INTERMEDIATE]
    gate_up = _matrix(space[_WIDE], rows, 2 * inner)
    gated = _matrix(space[_NARROW], rows, inner)
    _add_rms_norm(code, (residual, x, _vector(layer[_MLP_NORM], x.shape[1]), eps, x, me, threads))
    since = _note(spent, _OTHER, since, me)
    _linear(code, linear_tiles, x, layer, np.int64(_GATE_UP), shape, space, gate_up, team, me, threads)
    meet(team, threads)
    since = _note(spent, _LINEAR, since, me)
    _silu_mul(code, (gate_up, gated, me, threads))
    since = _note(spent, _OTHER, since, me)
    _linear_summed(
        code, linear_tiles, gated, layer, np.int64(_DOWN), shape, space, x, team, everyone, parts, turn, me, threads
    )
    return _note(spent, _LINEAR, since, me)


@kernel
def _linear(
    code: Any, linear_tiles: Any, x: Any, layer: Any, which: Any, shape: Any, space: Any, out: Any, team: Any, me: Any,
    threads: Any,
) -> None:  # fmt: skip
    """Our panels of x times a layer's weight, into ``out``. Our rows of x must be there."""
    rows, depth, columns = x.shape[0], x.shape[1], out.shape[1]
    if shape[_INT8] != 0:
        groups = (depth + gemm8.GROUP - 1) // gemm8.GROUP
        quantized = _activations(space[_QUANTIZED], rows, groups * gemm8.GROUP)
        scales, starts = _matrix(space[_SCALES], rows, groups), _integers(space[_STARTS], rows, groups)
        panels = (columns + gemm8.PANEL - 1) // gemm8.PANEL
        weights = _bytes(layer[which], panels, groups * gemm8.GROUP // gemm8.STEP)
        column_scales = _vector(layer[which + 1], panels * gemm8.PANEL)
        _quantize(code, (x, quantized, scales, starts, me, threads))
        meet(team, threads)
        _multiply8(code, (quantized, scales, starts, weights, column_scales, linear_tiles, out, me, threads))
    else:
        panels = (columns + PANEL - 1) // PANEL
        meet(team, threads)
        _multiply(code, (x, _heads(layer[which], panels, depth, PANEL), linear_tiles, out, me, threads))


@kernel
def _linear_summed(
    code: Any, linear_tiles: Any, x: Any, layer: Any, which: Any, shape: Any, space: Any, out: Any, team: Any,
    everyone: Any, parts: Any, turn: Any, me: Any, threads: Any,
) -> None:  # fmt: skip
    """out = x times a layer's weight, summed up over the ranks; behind it our rows of ``out`` are there.

    ``turn``: the how-manieth sum over the ranks this is, since they share memory.
    """
    if parts[_RANKS] == 1:
        _linear(code, linear_tiles, x, layer, which, shape, space, out, team, me, threads)
        meet(team, threads)
    else:
        mine = _slot(parts, turn, out.shape[0], out.shape[1])
        _linear(code, linear_tiles, x, layer, which, shape, space, mine, team, me, threads)
        _sum_up(code, everyone, parts, turn, out, me, threads)


@kernel
def _sum_up(code: Any, everyone: Any, parts: Any, turn: Any, out: Any, me: Any, threads: Any) -> None:
    meet_across(everyone, parts[_ALL_THREADS])
    first = parts[_SLOTS] + turn % 2 * parts[_RANKS] * parts[_SLOT_BYTES]
    _sum_slots(code, (_matrix(first, parts[_RANKS], parts[_SLOT_BYTES] // 4), out, me, threads))


@kernel
def _slot(parts: Any, turn: Any, rows: Any, columns: Any) -> Any:
    """Our part of a sum."""
    place = turn % 2 * parts[_RANKS] + parts[_RANK]
    return _matrix(parts[_SLOTS] + place * parts[_SLOT_BYTES], rows, columns)


@kernel
def _note(spent: Any, what: Any, since: Any, me: Any) -> Any:
    """Add to the account of ``what`` the time since then; returns the time."""
    now = clock()
    if me == 0:
        spent[what] += now - since
    return now


_floats_at = pointer_to(types.float32)
_integers_at = pointer_to(types.int32)
_bytes_at = pointer_to(types.int8)
_activations_at = pointer_to(_ACTIVATION)


@kernel
def _vector(address: Any, size: Any) -> Any:
    return numba.carray(_floats_at(address), (size,))


@kernel
def _matrix(address: Any, rows: Any, columns: Any) -> Any:
    return numba.carray(_floats_at(address), (rows, columns))


@kernel
def _heads(address: Any, rows: Any, heads: Any, head_dim: Any) -> Any:
    return numba.carray(_floats_at(address), (rows, heads, head_dim))


@kernel
def _pages(address: Any, shape: Any) -> Any:
    return numba.carray(_floats_at(address), (shape[_BLOCKS], shape[_KV_HEADS], shape[_BLOCK_TOKENS], shape[_HEAD_DIM]))


@kernel
def _integers(address: Any, rows: Any, columns: Any) -> Any:
    return numba.carray(_integers_at(address), (rows, columns))


@kernel
def _activations(address: Any, rows: Any, columns: Any) -> Any:
    return numba.carray(_activations_at(address), (rows, columns))


@kernel
def _bytes(address: Any, panels: Any, steps: Any) -> Any:
    return numba.carray(_bytes_at(address), (panels, steps, gemm8.PANEL, gemm8.STEP))


_entry = Kernels()
_enter = _entry.add(
    _step, *[_INT64S] * 3, _TABLE, _INT64S, _F32, *[_INT64S] * 6, *[_ROWS] * 3, *[_INT64S] * 7, *[_INT32S] * 4,
    *[_HEADS_OF] * 2, _ROWS, *_OF_THREAD,
)  # fmt: skip


@parallel_kernel
def _forward(
    entry: Any, code: Any, tiles: Any, linear_tiles: Any, table: Any, shape: Any, eps: Any, space: Any, team: Any,
    everyone: Any, parts: Any, threads: Any, spent: Any, progress: Any, embedding: Any, cos: Any, sin: Any,
    token_ids: Any, positions: Any, pages: Any, slots: Any, needed: Any, single_rows: Any, chunk_rows: Any,
    row_starts: Any, num_computed: Any, block_starts: Any, blocks: Any, sums: Any, tops: Any, out: Any,
) -> None:  # fmt: skip
    spent[:] = 0
    for me in numba.prange(threads):
        _enter(entry, (
            code, tiles, linear_tiles, table, shape, eps, space, team, everyone, parts, spent, progress, embedding,
            cos, sin, token_ids, positions, pages, slots, needed, single_rows, chunk_rows, row_starts, num_computed,
            block_starts, blocks, sums, tops, out, me, threads,
        ))  # fmt: skip
