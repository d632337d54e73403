"""A small process that ends what a killed one leaves behind.

The kernel can end children with their parent (``lifecycle.dies_with_parent``), but not children that a library starts,
nor theirs: Ray's agents outlive a driver that got SIGKILL by minutes. The reaper watches from outside: when its parent
is gone it ends every process that descended from it, and removes a folder.

    python -m cluster.reaper PARENT_PID FOLDER     (its standard input stays open while the parent lives)
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

_LOOK_S = 0.5
_GRACE_S = 3.0


@contextlib.contextmanager
def reaped(folder: Path) -> Iterator[None]:
    """What this process starts within the block does not outlive it, even by SIGKILL; nor does ``folder``."""
    reaper = subprocess.Popen(
        [sys.executable, "-Im", "cluster.reaper", str(os.getpid()), str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the parent, which ends things in order
    )
    try:
        yield
    finally:
        if reaper.stdin is not None:
            reaper.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            reaper.wait(4 * _GRACE_S)
        reaper.kill()
        reaper.wait()


def main() -> None:
    """Watch, and clean up."""
    parent, folder = int(sys.argv[1]), Path(sys.argv[2])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends when its parent does, and not before
    earlier = _descendants(parent)  # not ours to end: what stands around the block outlives it in good order
    seen: set[psutil.Process] = set()
    while not select.select([sys.stdin], [], [], _LOOK_S)[0]:
        seen |= _descendants(parent)
    seen |= _descendants(parent)
    _end(seen - earlier)
    shutil.rmtree(folder, ignore_errors=True)


def _descendants(pid: int) -> set[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return set(psutil.Process(pid).children(recursive=True)) - {psutil.Process()}
    return set()


def _end(seen: set[psutil.Process]) -> None:
    """Give them a moment to end by themselves; then kill them, and what they have started meanwhile."""
    _, alive = psutil.wait_procs(list(seen), timeout=_GRACE_S)
    for process in alive:
        for one in (process, *_descendants(process.pid)):
            with contextlib.suppress(psutil.Error):
                one.kill()  # psutil looks whether the id has gone to another process since


if __name__ == "__main__":
    main()
