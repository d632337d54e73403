"""Memory in huge pages: zeros of any shape, aligned, apart from each other, and refused where there is too little."""

from __future__ import annotations

import pytest
import torch

from workers import memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3,), (7, 5), (1000, 1000), (2, 0), (4, 3, 17, 1 << 16)])
def test_zeros_of_any_shape(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    found = memory.zeros(shape, dtype)
    assert found.shape == shape
    assert found.dtype == dtype
    assert found.is_contiguous()
    assert found.data_ptr() % 64 == 0 or not found.numel()
    assert (found == 0).all()


def test_nobody_writes_into_a_neighbour() -> None:
    sizes = [1, 63, 64, 65, 1 << 20, 20 << 20, 3]
    taken = [memory.zeros((size,), torch.uint8) for size in sizes]
    for i, tensor in enumerate(taken):
        tensor.fill_(i + 1)
    for i, tensor in enumerate(taken):
        assert (tensor == i + 1).all()


def test_a_copy_is_contiguous_and_equal() -> None:
    tensor = torch.randn(30, 20).T
    found = memory.kept(tensor)
    assert found.is_contiguous()
    assert torch.equal(found, tensor)


def test_more_than_there_is_raises() -> None:
    with pytest.raises(MemoryError, match="bytes"):
        memory.zeros((1 << 50,), torch.float32)
