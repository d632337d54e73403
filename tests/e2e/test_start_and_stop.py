"""Starts that must fail fail with one line and leave nothing; every kind of end leaves nothing."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from cluster.lifecycle import kill_tree
from tests.support.models import smollm2, tiny_llama
from tests.support.ports import free_port
from tests.support.served import QUIRE, Served, command_line, is_alive, run_quire, serving


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_llama(tmp_path_factory.mktemp("tiny")).path)


@pytest.fixture
def small(tiny: str) -> list[str]:
    """Arguments of a cluster that starts fast."""
    return ["--model", tiny, "--groups", "1", "--kv-memory", "32MiB", "--set", "engine.max_context_tokens=2048"]


def ours() -> set[int]:
    """Processes that a start may leave behind, anywhere below this one."""
    names = ("raylet", "gcs_server", "redis-server", "ray::")
    return {
        one.pid
        for one in psutil.Process().children(recursive=True)
        if is_alive(one) and any(name in " ".join(one.cmdline()) for name in names)
    }


def refused(*arguments: str) -> str:
    """Starts what must not start; returns its one line."""
    return _refusal(*arguments).splitlines()[-1]


def refused_early(*arguments: str) -> str:
    """As ``refused``, of what must be found before the seconds that Ray takes."""
    told = _refusal(*arguments).splitlines()
    assert not [line for line in told if line.startswith("ray (")], told
    return told[-1]


def _refusal(*arguments: str) -> str:
    before = ours()
    done = run_quire("serve", *arguments)
    assert done.returncode == 1, (done.stdout, done.stderr)
    assert done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, done.stderr
    assert done.stderr.splitlines()[-1] == lines[0]
    assert "Traceback" not in done.stderr
    assert ours() <= before
    return done.stderr


def test_a_missing_model_is_refused() -> None:
    assert "/nowhere/at/all" in refused("--model", "/nowhere/at/all", "--port", "0")


@pytest.mark.parametrize("kept", [0, 40, 200_000, 90_000_000])
def test_a_cut_model_file_is_refused(tmp_path: Path, kept: int) -> None:
    broken = tmp_path / "model.gguf"
    with smollm2().path.open("rb") as whole:
        broken.write_bytes(whole.read(kept))
    assert str(broken) in refused("--model", str(broken), "--port", "0")


def test_a_damaged_folder_is_refused(tiny: str, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        folder = tmp_path / name
        folder.mkdir()
        for file in Path(tiny).iterdir():
            content = file.read_bytes()
            (folder / file.name).write_bytes(content[: len(content) // 2] if file.name == name else content)
        assert name in refused("--model", str(folder), "--port", "0", "--kv-memory", "32MiB")


def test_a_port_in_use_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = refused("--port", str(port))
    assert str(port) in line
    assert "--port" in line


def test_too_large_a_pool_is_refused() -> None:
    assert "kv_memory" in refused("--port", "0", "--kv-memory", "900TiB")


def test_a_pool_without_a_page_is_refused_before_ray_starts(tiny: str) -> None:
    line = refused_early("--model", tiny, "--port", "0", "--kv-memory", "1KiB", "--device", "cpu")
    assert "engine.kv_memory_bytes: 1024 bytes hold no KV page of" in line


def test_a_malformed_file_of_keys_is_refused_before_ray_starts(tmp_path: Path) -> None:
    keys = tmp_path / "keys.txt"
    keys.write_text("# ours\nsomebody notadigest\n")
    line = refused_early("--api-keys", str(keys), "--port", "0")
    assert f"{keys}, line 2: must be 'tenant sha256hex'" in line
    assert "notadigest" not in line
    assert "No such file" in refused_early("--api-keys", str(tmp_path / "none"), "--port", "0")


@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="there is a card")
def test_a_card_that_is_not_there_is_refused() -> None:
    """Ray would wait for one for ever."""
    assert "--device cpu" in refused("--device", "cuda", "--port", "0")


def test_an_unreachable_redis_is_refused() -> None:
    url = f"redis://127.0.0.1:{free_port()}"
    assert url.removeprefix("redis://") in refused("--port", "0", "--redis", url)


def test_wrong_settings_are_refused(tmp_path: Path) -> None:
    assert "engine.max_runing" in refused("--set", "engine.max_runing=3")
    assert "tp: 10 ranks, but the model has 9 query heads; set tp to 9 at most" in refused("--tp", "10")
    file = tmp_path / "quire.yaml"
    file.write_text("engine: {max_running: -1}\n")
    assert "engine.max_running" in refused("--config", str(file))


# -- ends ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, *(pytest.param(one, marks=pytest.mark.slow) for one in (signal.SIGINT, signal.SIGHUP))]
)
def test_a_signal_drains_and_leaves_nothing(small: list[str], tmp_path: Path, number: signal.Signals) -> None:
    with serving(tmp_path, *small) as served, served.client() as client:
        stream = client.generate("a", max_tokens=400, ignore_eos=True, timeout_s=120.0)
        next(stream)
        served.descendants()
        served.process.send_signal(number)
        tokens = sum(len(event.delta.token_ids) for event in stream)
        assert tokens >= 399, "the running stream was cut"
        assert served.process.wait(60) == 0
        assert served.left() == []
        assert served.errors.read_text().splitlines()[-1] == "stopped"


def test_a_second_signal_does_not_wait_for_streams(small: list[str], tmp_path: Path) -> None:
    with serving(tmp_path, *small) as served, served.client() as client:
        stream = client.generate("a", max_tokens=1900, ignore_eos=True, timeout_s=120.0)
        next(stream)
        served.descendants()
        for _ in range(2):
            served.process.send_signal(signal.SIGINT)
            time.sleep(0.5)
        assert served.process.wait(60) == 0
        assert served.left() == []


def test_a_signal_during_the_start_leaves_nothing(small: list[str], tmp_path: Path) -> None:
    for delay_s in (1.5, 6.0, 11.0):
        before = ours()
        with (tmp_path / "out").open("wb") as out:
            process = subprocess.Popen([*QUIRE, "serve", "--port", "0", *small], stdout=out, stderr=out)
        time.sleep(delay_s)
        started = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        assert process.wait(90) in (0, 130), (tmp_path / "out").read_text()
        _, left = psutil.wait_procs(started, timeout=20)
        assert [one for one in left if is_alive(one)] == []
        assert ours() <= before
        assert "Traceback" not in (tmp_path / "out").read_text()


def test_sigterm_as_ray_starts_is_a_clean_end(small: list[str], tmp_path: Path) -> None:
    """Ray takes SIGTERM when ray.init begins, to end us without our cleanup."""
    with ends_cleanly(tmp_path / "out", *QUIRE, "serve", "--port", "0", *small) as process:
        process.send_signal(signal.SIGTERM)


HIT_AS_IT_CONNECTS = """
import os, signal, sys, time
from cluster.serve import environment
environment.prepare()
import ray
from ray._private import worker
from cluster.cli.program import run

connect, shutdown = worker.connect, ray.shutdown

def hit(*arguments, **options):
    connect(*arguments, **options)
    os.kill(os.getpid(), signal.SIGTERM)

def slow_shutdown():
    time.sleep(5)
    shutdown()

worker.connect, ray.shutdown = hit, slow_shutdown
sys.exit(run(["serve", "--port", "0", *sys.argv[1:]]))
"""


def test_sigterm_as_ray_connects_is_a_clean_end(small: list[str], tmp_path: Path) -> None:
    """Ray's native code takes it too, hands it on, and would abort the process three seconds later."""
    with ends_cleanly(tmp_path / "out", sys.executable, "-c", HIT_AS_IT_CONNECTS, *small):
        pass


@contextmanager
def ends_cleanly(out: Path, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    """A start, given out as soon as its Ray starts; behind the block it must end with success, and leave nothing."""
    with out.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        wait_for_child(process, "gcs_server")
        yield process
        started = psutil.Process(process.pid).children(recursive=True)
        assert process.wait(90) == 0, out.read_text()
        _, left = psutil.wait_procs(started, timeout=20)
        assert [one for one in left if is_alive(one)] == []
        assert ours() == set()
        assert "Traceback" not in out.read_text()
        assert out.read_text().splitlines()[-1] == "stopped"
    finally:
        kill_tree(process.pid)
        process.wait(10)


def wait_for_child(process: subprocess.Popen[bytes], name: str) -> None:
    """Until one of those below it has this in its command line."""
    end = time.monotonic() + 60
    while not any(name in command_line(one) for one in psutil.Process(process.pid).children(recursive=True)):
        assert process.poll() is None
        assert time.monotonic() < end, f"no {name} was started"
        time.sleep(0.02)


def test_nothing_outlives_a_killed_quire_serve(small: list[str], tmp_path: Path) -> None:
    served = Served(tmp_path, *small)
    try:
        assert len(served.descendants()) >= 5
        served.stop(signal.SIGKILL)
        assert served.left(60.0) == []
    finally:
        for one in served.descendants():
            if is_alive(one):
                one.kill()


@pytest.fixture
def config_file(tiny: str, tmp_path: Path) -> tuple[Path, int]:
    port = free_port()
    file = tmp_path / "quire.yaml"
    file.write_text(
        f"model: {tiny}\nmodel_name: tiny\ngroups: 1\n"
        f"engine: {{kv_memory_bytes: 33554432, max_context_tokens: 1024}}\nrouter: {{port: {port}}}\n"
    )
    return file, port


def test_a_file_of_settings_and_a_port_of_ones_own(config_file: tuple[Path, int], tmp_path: Path) -> None:
    file, port = config_file
    process = subprocess.Popen(
        [*QUIRE, "serve", "--config", str(file)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == f"serving on 127.0.0.1:{port}\n"
        shown = run_quire("status", "--once", "--address", f"127.0.0.1:{port}")
        assert "tiny (cpu, float32, tp 1)" in shown.stdout
        # A second one on the same port is told so, and the first goes on.
        assert str(port) in refused("--config", str(file))
        assert run_quire("generate", "a", "--max-tokens", "2", "--address", f"127.0.0.1:{port}").returncode == 0
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)
        process.stdout.close()
    assert process.returncode == 0
