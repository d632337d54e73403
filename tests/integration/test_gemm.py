"""The linear layers' own kernel: right for every shape, and to the last bit the same in every batch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from workers.model import gemm
from workers.model.linear import Linear
from workers.threads import set_threads

SHAPES = [(960, 576), (576, 1536), (100, 64), (gemm.PANEL, 8), (gemm.PANEL + 1, 3), (33, 7), (1, 1), (4099, 48)]

pytestmark = pytest.mark.skipif(not gemm.is_supported(), reason="this CPU has no vector multiply-add")


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    set_threads(request.param)
    yield request.param
    set_threads(2)


@pytest.mark.parametrize(("columns", "depth"), SHAPES)
def test_products_are_right(columns: int, depth: int, threads: int) -> None:
    random = torch.Generator().manual_seed(columns)
    weight, bias = torch.randn(columns, depth, generator=random), torch.randn(columns, generator=random)
    layer, biased = Linear(weight), Linear(weight, bias)
    for rows in (1, 2, 5, gemm.MAX_ROWS, gemm.MAX_ROWS + 1, 61, gemm.ROWS_OF_A_TASK + 3):
        x = torch.randn(rows, depth, generator=random)
        wanted = x.double() @ weight.double().T
        found = layer(x)
        assert found.shape == (rows, columns)
        assert found.is_contiguous()
        assert torch.allclose(found.double(), wanted, atol=1e-6 * depth, rtol=1e-5)
        assert torch.equal(biased(x), found + bias)


def test_no_row_depends_on_its_neighbours(threads: int) -> None:
    """Sampling: a row changes with its neighbours, there by a scale that the batch shared.

    Here alone and in any batch it is the same to the last bit, and on any number of threads.
    """
    random = torch.Generator().manual_seed(0)
    weight, x = torch.randn(200, 96, generator=random), torch.randn(300, 96, generator=random)
    layer = Linear(weight)
    whole = layer(x)
    for rows in range(1, 45):
        assert torch.equal(layer(x[:rows].contiguous()), whole[:rows])
        assert torch.equal(layer(x[rows : 2 * rows].contiguous()), whole[rows : 2 * rows])
    set_threads(1)
    assert torch.equal(layer(x), whole)


def test_no_rows_give_nothing() -> None:
    assert Linear(torch.randn(40, 8))(torch.empty(0, 8)).shape == (0, 40)


def test_a_row_that_is_not_finite_stays_alone() -> None:
    x = torch.randn(20, 64)
    layer = Linear(torch.randn(70, 64))
    clean = layer(x)
    x[7] = float("nan")
    broken = layer(x)
    assert broken[7].isnan().all()
    keep = torch.arange(20) != 7
    assert torch.equal(broken[keep], clean[keep])
