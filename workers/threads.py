"""One pool of threads for everything that computes on the CPU, and the compiler of our kernels.

torch and numba would each keep a pool of spinning threads on the same cores. numba's ``omp`` layer binds to the OpenMP
that torch has already loaded, so that both share one pool; torch must therefore be imported first. numpy's BLAS has a
third pool: no matrix product on the way of a step goes through numpy.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch  # before numba: see above

import numba  # isort: skip

log = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])

# Sums may be reordered, else no reduction uses vectors; infinities and NaNs keep their meaning.
_FAST = {"reassoc", "contract", "arcp", "nsz"}


def _choose_layer() -> str:
    try:
        importlib.import_module("numba.np.ufunc.omppool")
    except ImportError:
        log.warning("no system OpenMP (libgomp) was found: CPU kernels run on numba's own slower thread pool")
        return "workqueue"
    return "omp"


numba.config.THREADING_LAYER = _choose_layer()


def kernel(function: F) -> F:
    """Compile for any number of threads, without the GIL; the result is kept on disk where a folder can be written."""
    options: dict[str, Any] = {"parallel": True, "nogil": True, "fastmath": _FAST, "error_model": "numpy"}
    try:
        compiled: F = numba.njit(cache=True, **options)(function)
    except RuntimeError:  # no folder for the cache: compiled anew in every process
        compiled = numba.njit(**options)(function)
    return compiled


def inline(function: F) -> F:
    """A helper that kernels call; compiled into them."""
    compiled: F = numba.njit(nogil=True, fastmath=_FAST, error_model="numpy", inline="always")(function)
    return compiled


def set_threads(count: int) -> None:
    """Let every computation of this process use ``count`` threads, at most the cores that numba saw at its import."""
    torch.set_num_threads(count)
    numba.set_num_threads(min(count, numba.config.NUMBA_NUM_THREADS))
