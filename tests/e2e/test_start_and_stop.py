"""Starts that must fail fail with one line and leave nothing; every kind of end leaves nothing."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.support.models import smollm2, tiny_llama
from tests.support.ports import free_port
from tests.support.served import QUIRE, Served, is_alive, run_quire, serving


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
    before = ours()
    done = run_quire("serve", *arguments)
    assert done.returncode == 1, (done.stdout, done.stderr)
    assert done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, done.stderr
    assert done.stderr.splitlines()[-1] == lines[0]
    assert "Traceback" not in done.stderr
    assert ours() <= before
    return lines[0]


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
