"""Threads that meet: nobody goes on before all are there, nobody waits for ever, and one alone computes the same."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from numba.core import types

from workers import team
from workers.native import FAILED, Kernels
from workers.threads import kernel, parallel_kernel, set_threads

ROUNDS = 2_000


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    set_threads(2)
    yield
    set_threads(2)


@parallel_kernel
def _pass_on(counters: Any, together: Any, threads: Any, rounds: Any, wrong: Any) -> None:
    """Each adds one to its own number, and then looks whether all the others have."""
    for me in numba.prange(threads):
        for i in range(rounds):
            counters[me * 16] += 1
            team.meet(together, threads)
            for other in range(threads):
                if counters[other * 16] != i + 1:
                    wrong[me] += 1
            team.meet(together, threads)


def test_all_see_what_all_wrote() -> None:
    threads = numba.get_num_threads()
    together, wrong = team.make_team(), np.zeros(threads, np.int64)
    counters = np.zeros(threads * 16, np.int64)
    _pass_on(counters, together, threads, ROUNDS, wrong)
    assert not wrong.any()
    assert (counters[::16] == ROUNDS).all()
    assert not team.is_broken(together)


def test_whoever_waits_in_vain_gives_up_and_then_nobody_waits() -> None:
    together = team.make_team()
    team._wait(together, 2, 10_000, 10_000)
    assert team.is_broken(together)
    team.meet(together, 2)  # would wait for half a minute


def test_shares_cover_everything_once() -> None:
    for count in (0, 1, 2, 7, 100):
        for threads in (1, 2, 3, 8):
            taken = [i for me in range(threads) for i in range(*team.share(count, me, threads))]
            assert taken == list(range(count))


@kernel
def _wants_much(out: Any, size: Any) -> None:
    out[0] = np.empty(size, np.uint8).shape[0]


_kernels = Kernels()
_call = _kernels.add(_wants_much, types.Array(types.int64, 1, "C"), types.int64)


@kernel
def _calls_it(code: Any, out: Any, size: Any) -> None:
    _call(code, (out, size))


def test_a_kernel_that_has_no_memory_is_noticed() -> None:
    """Compiled code that calls by address sees no exception: the result would be that of the step before."""
    code, out = _kernels.addresses(), np.zeros(1, np.int64)
    _calls_it(code, out, 5)
    assert (code[FAILED], out[0]) == (0, 5)
    _calls_it(code, out, 1 << 50)
    assert (code[FAILED], out[0]) == (1, 5)


SCRIPT = """
import sys
from pathlib import Path
import torch
from tests.support.hf import our_model, random_model
from tests.support.plans import GreedySampler, Row, Stepper
from workers import team
from workers.runner import Runner
from workers.threads import set_threads

set_threads(2)
folder = Path(sys.argv[1])
random_model(folder)
sampler = GreedySampler()
runner = Runner(our_model(folder), block_tokens=8, num_blocks=20, attention="cpu", sampler=sampler)
tokens = list(range(40))
Stepper(runner).step([(Row(tokens), 40)])
print(team.can_meet(2), sampler.logits[0].double().sum().item())
"""


def test_fewer_threads_than_asked_for_are_noticed_and_one_computes_the_same(tmp_path: Path) -> None:
    """OpenMP runs the shares of threads that it does not give one after the other: who waits for them would hang."""

    def run(name: str, **more: str) -> tuple[str, str]:
        (tmp_path / name).mkdir()
        command = [sys.executable, "-c", SCRIPT, str(tmp_path / name)]
        environment = {**os.environ, "PYTHONPATH": ".", **more}
        root = Path(__file__).parents[2]
        ended = subprocess.run(
            command, env=environment, cwd=root, capture_output=True, text=True, timeout=200, check=False
        )
        assert ended.returncode == 0, ended.stderr[-2000:]
        met, total = ended.stdout.split()
        return met, total

    assert run("limited", OMP_THREAD_LIMIT="1") == ("False", run("free")[1])
