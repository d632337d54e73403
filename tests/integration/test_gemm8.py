"""Products with weights of 8 bits: what rounding to 8 bits gives, and to the last bit the same in every batch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numba
import pytest
import torch

from cluster.errors import ConfigError
from tests.support.hf import our_model, random_model
from tests.support.plans import GreedySampler, Row, Stepper
from workers.model import gemm8
from workers.model.linear import Linear
from workers.runner import Runner
from workers.threads import set_threads

SHAPES = [(960, 576), (576, 1536), (100, 64), (gemm8.PANEL, 8), (gemm8.PANEL + 1, 65), (33, 7), (1, 1), (4099, 48)]

pytestmark = pytest.mark.skipif(not gemm8.is_supported(), reason="this CPU has no AVX2")


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    set_threads(request.param)
    yield request.param
    set_threads(2)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """To 8 bits, by the largest number of each row."""
    scale = x.double().abs().amax(-1, keepdim=True) / 127
    return torch.where(scale > 0, (x.double() / scale).round() * scale, 0.0)


def rounded_in_groups(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([rounded(part) for part in x.split(gemm8.GROUP, dim=1)], dim=1)


@pytest.mark.parametrize(("columns", "depth"), SHAPES)
def test_products_are_those_of_the_rounded_numbers(columns: int, depth: int, threads: int) -> None:
    random = torch.Generator().manual_seed(columns)
    weight, bias = torch.randn(columns, depth, generator=random), torch.randn(columns, generator=random)
    layer, biased = Linear(weight, int8=True), Linear(weight, bias, int8=True)
    for rows in (1, 2, 5, gemm8.MAX_ROWS, gemm8.MAX_ROWS + 1, 61, gemm8.ROWS_OF_A_TASK + 3):
        x = torch.randn(rows, depth, generator=random) * torch.randn(rows, 1, generator=random).exp()
        x[0] = 0
        wanted = rounded_in_groups(x) @ rounded(weight).T
        found = layer(x)
        assert found.shape == (rows, columns)
        assert (found[0] == 0).all()
        # Where a number lies in the middle between two, fp32 and fp64 may round it to different sides.
        assert (found - wanted).norm() <= 2e-3 * wanted.norm() + 1e-6
        assert (found - x @ weight.T).norm() <= 0.02 * (x @ weight.T).norm() + 1e-6
        assert torch.equal(biased(x), found + bias)


def test_no_row_depends_on_its_neighbours(threads: int) -> None:
    """Sampling: a row changes with its neighbours, there by a scale that the batch shared: here one is 10^6 larger."""
    random = torch.Generator().manual_seed(0)
    weight, x = torch.randn(200, 96, generator=random), torch.randn(300, 96, generator=random)
    x[100:] *= 1e6
    layer = Linear(weight, int8=True)
    whole = layer(x)
    for rows in range(1, 45):
        assert torch.equal(layer(x[:rows].contiguous()), whole[:rows])
        assert torch.equal(layer(x[rows : 4 * rows].contiguous()), whole[rows : 4 * rows])
    set_threads(1)
    assert torch.equal(layer(x), whole)


def test_an_outlier_costs_its_group_alone() -> None:
    """Activations have channels that are a hundred times the others: their scale must not be the whole token's."""
    random = torch.Generator().manual_seed(0)
    weight, x = torch.randn(64, 512, generator=random), torch.randn(9, 512, generator=random)
    x[:, 5] = 300.0
    rest = x.clone()
    rest[:, : gemm8.GROUP] = 0
    layer = Linear(weight, int8=True)
    beside = layer(x) - layer(x - rest)
    assert (beside - rest @ weight.T).norm() < 0.02 * (rest @ weight.T).norm()


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_stays_alone_and_shows(broken: float) -> None:
    x = torch.randn(20, 160)
    layer = Linear(torch.randn(70, 160), int8=True)
    clean = layer(x)
    x[7, 150] = broken
    found = layer(x)
    assert not found[7].isfinite().any()
    keep = torch.arange(20) != 7
    assert torch.equal(found[keep], clean[keep])


def test_tiny_and_huge_numbers() -> None:
    weight = torch.randn(40, 64)
    layer = Linear(weight, int8=True)
    for size in (1e-25, 1e25):
        x = torch.randn(3, 64) * size
        assert (layer(x) / size - x @ weight.T / size).norm() < 0.02 * (x @ weight.T / size).norm()
    assert (layer(torch.full((1, 64), 1e-40)).abs() < 1e-30).all()
    assert (Linear(torch.zeros(40, 64), int8=True)(torch.randn(3, 64)) == 0).all()


def test_no_rows_give_nothing() -> None:
    assert Linear(torch.randn(40, 8), int8=True)(torch.empty(0, 8)).shape == (0, 40)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_whole_models_in_8_bits_compute_what_one_operation_after_the_other_gives(tmp_path: Path, family: str) -> None:
    """The compiled model against the plain one, alone against batched, whole against in chunks: to the last bit."""
    random_model(tmp_path, family=family)
    model, exact = our_model(tmp_path, int8=True), our_model(tmp_path)
    tokens = torch.randint(0, 320, (60,), generator=torch.Generator().manual_seed(1)).tolist()

    def logits(model_: object, attention: str, cuts: list[int], neighbours: int = 0) -> torch.Tensor:
        sampler = GreedySampler()
        runner = Runner(model_, block_tokens=8, num_blocks=60, attention=attention, sampler=sampler)  # type: ignore[arg-type]
        stepper, row = Stepper(runner), Row(tokens)
        beside = [Row(tokens[i : i + 20]) for i in range(neighbours)]
        for i, count in enumerate(cuts):
            stepper.step([(row, count), *((other, 20) for other in beside if i == len(cuts) - 1)])
        return sampler.logits[0]

    alone = logits(model, "cpu", [60])
    assert torch.equal(logits(model, "cpu", [60], neighbours=5), alone)
    assert torch.equal(logits(model, "cpu", [7, 40, 13]), alone)
    assert (logits(model, "reference", [60]) - alone).abs().max() < 0.05 * alone.abs().max()
    unrounded = logits(exact, "cpu", [60])
    error = (alone - unrounded).norm() / (unrounded - unrounded.mean()).norm()
    assert 1e-4 < error < 0.15


def test_8_bits_are_refused_where_they_cannot_be_computed(tmp_path: Path) -> None:
    random_model(tmp_path)
    with pytest.raises(ConfigError, match=r"engine\.weights: 'int8'.*not in bfloat16 on cpu"):
        our_model(tmp_path, torch.bfloat16, int8=True)


OLDER = {
    "AVX2": "+avx2,+fma,+avx,+sse4.2,+ssse3,+bmi,+bmi2,+f16c,+popcnt",
    "AVX-512 without VNNI": "+avx512f,+avx512bw,+avx512vl,+avx512dq,+avx512cd,+avx2,+fma,+avx,+bmi,+bmi2,+f16c,+popcnt",
}


@pytest.mark.parametrize("machine", ["AVX2", pytest.param("AVX-512 without VNNI", marks=pytest.mark.slow)])
def test_older_machines_compute_the_same(machine: str, tmp_path: Path) -> None:
    """The kernels of CPUs without the newest instructions, on this one."""
    from workers import vectors

    features = OLDER[machine]
    if numba.config.CPU_FEATURES is not None or not {f[1:] for f in features.split(",")} <= vectors.features():
        pytest.skip("this CPU is itself that old, or has been made to")
    older = {**os.environ, "NUMBA_CPU_FEATURES": features, "NUMBA_CPU_NAME": "x86-64", "NUMBA_CACHE_DIR": str(tmp_path)}
    tests = [f"tests/integration/{name}.py" for name in ("test_gemm", "test_gemm8", "test_attention_kernels")]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        "not older and not given_back",
        *tests,
    ]
    root = Path(__file__).parents[2]
    ended = subprocess.run(command, env=older, cwd=root, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stdout[-3000:]
    assert " passed" in ended.stdout
