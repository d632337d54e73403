"""One pool of threads for everything that computes on the CPU, and the compiler of our kernels.

torch and numba would each keep a pool of spinning threads on the same cores. numba's ``omp`` layer binds to the OpenMP
that torch has already loaded, so that both share one pool; torch must therefore be imported first. numpy's BLAS has a
third pool: no matrix product on the way of a step goes through numpy.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

os.environ["OMP_DYNAMIC"] = "false"  # a step's threads wait for each other: all that were asked for must come

import torch  # before numba: see above

import numba  # isort: skip
import numpy as np

from cluster.model_cache import cache_folder

log = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])

# Sums may be reordered, else no reduction uses vectors; infinities and NaNs keep their meaning.
_FAST = {"reassoc", "contract", "arcp", "nsz"}


KERNEL_SOURCES = (
    "draw.py", "logprobs.py", "native.py", "plan.py", "shared_memory.py", "team.py", "threads.py", "tiles.py",
    "vectors.py",
    "attention/cpu_chunks.py", "attention/cpu_singles.py",
    "model/compiled.py", "model/gemm.py", "model/gemm8.py", "model/ops_cpu.py",
)  # fmt: skip
"""Every file in which something stands that is compiled, or a number that is compiled in."""


def _choose_layer() -> str:
    try:
        importlib.import_module("numba.np.ufunc.omppool")
    except ImportError:
        log.warning("no system OpenMP (libgomp) was found: CPU kernels run on numba's own slower thread pool")
        return "workqueue"
    return "omp"


def _kernel_folder() -> Path:
    """Where compiled kernels are kept.

    numba compiles a kernel anew when the file changes that it stands in, and looks at no other, whence it may take
    something too: all of them name the folder.
    """
    shared = [Path(__file__).parent / name for name in KERNEL_SOURCES]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in shared)).hexdigest()
    return Path(os.environ.get("NUMBA_CACHE_DIR") or cache_folder() / "kernels") / digest[:16]


numba.config.THREADING_LAYER = _choose_layer()
numba.config.CACHE_DIR = str(_kernel_folder())


def parallel_kernel(function: F) -> F:
    """Compile, with loops over ``numba.prange`` for any number of threads. Without the GIL; kept on disk."""
    return _compile_cached(function, parallel=True, fastmath=_FAST)


def kernel(function: F) -> F:
    """Compile what one thread does. Without the GIL; the result is kept on disk where a folder can be written."""
    return _compile_cached(function, fastmath=_FAST)


def _compile_cached(function: F, **options: Any) -> F:
    options = {"nogil": True, "error_model": "numpy", **options}
    try:
        compiled: F = numba.njit(cache=True, **options)(function)
    except RuntimeError:  # no folder for the cache: compiled anew in every process
        compiled = numba.njit(**options)(function)
    return compiled


def helper(function: F) -> F:
    """A function that kernels call; compiled into them."""
    compiled: F = numba.njit(nogil=True, fastmath=_FAST, error_model="numpy")(function)
    return compiled


def precise_helper(function: F) -> F:
    """As ``helper``, in strict floating point: what is compared with a threshold must not depend on the vectorizer."""
    compiled: F = numba.njit(nogil=True, error_model="numpy")(function)
    return compiled


@helper
def exp32(x: Any) -> Any:
    """e**x in fp32 to 2 units in the last place, x held between -87 and 88; no call, so that a loop becomes vectors.

    Cody-Waite reduction by ln 2 in two parts and a polynomial of degree 6 (Cephes' coefficients).
    """
    x = min(max(x, np.float32(-87.0)), np.float32(88.0))
    n = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    r = x - n * np.float32(0.693359375)
    r = r - n * np.float32(-2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1)
    return p * np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)


def set_threads(count: int) -> None:
    """Let every computation of this process use ``count`` threads, at most the cores that numba saw at its import."""
    torch.set_num_threads(count)
    numba.set_num_threads(min(count, numba.config.NUMBA_NUM_THREADS))
