"""`quire bench`: the engine on a small model of random weights, and a router with scripted groups."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster.cli.bench import engine_run, load, stats, workload
from cluster.cli.bench.workload import Item
from cluster.cli.program import run
from cluster.config import EngineConfig
from cluster.errors import ContextExceeded
from router.client import AsyncClient, RetryPolicy
from tests.support.models import tiny_llama
from tests.support.ports import free_port
from tests.support.redis import RedisServer, running_redis
from tests.support.routers import World, world
from workers.offline import Offline, load_offline

_NAMES = itertools.count()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("bench") / "tiny", layers=1, hidden=32).path


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


@pytest.fixture
def here(redis_server: RedisServer) -> tuple[str, str]:
    return redis_server.url, f"b{next(_NAMES)}"


def offline(model: Path, **settings: Any) -> Offline:
    from cluster.models import resolve

    return load_offline(resolve(str(model)), EngineConfig(threads=1, **settings), default_kv_tokens=4096)


# -- engine ------------------------------------------------------------------------------------------------------------


def test_bench_engine_prints_json_of_what_it_ran(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    requests = tmp_path / "requests.jsonl"
    lines = [{"prompt": "Hello world", "max_tokens": 5}, {"prompt_token_ids": list(range(100, 140)), "max_tokens": 7}]
    requests.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ["bench", "engine", "--model", str(model), "--requests", str(requests), "--threads", "1", "--json"]
    assert run([*arguments, "--repeats", "2", "--kv-memory", "8MiB"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["requests"], report["output_tokens"], report["repeats"]) == (2, 12, 2)
    assert report["prompt_tokens"] > 41
    assert report["threads"] == 1
    assert report["overhead_share_at_32"] is None
    for rate in ("output_tok_s", "prompt_tok_s", "single_tok_s"):
        assert report[rate] > 0
    parts = report["totals"]
    split = sum(parts[f"{name}_s"] for name in ("schedule", "forward", "sample", "other"))
    assert split == pytest.approx(parts["total_s"])
    assert report["num_blocks"] == (8 << 20) // (2 * 1 * 2 * 8 * 4 * 16)


def test_bench_engine_prints_a_table(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run(["bench", "engine", "--model", str(model), "--threads", "1", "--num-requests", "2", "--warm-up", "0"]) == 0
    )
    printed = capsys.readouterr()
    for words in ("output tok/s", "schedule", "forward", "KV slots allocated but empty", "peak memory"):
        assert words in printed.out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--dtype", "float8"], "engine.dtype"),
        (["--block-tokens", "7"], "engine.block_tokens"),
        (["--kv-memory", "much"], "--kv-memory: must be a size"),
        (["--kv-memory", "900TiB"], "only"),
        (["--requests", "/no/such/file"], "cannot be read"),
        (["--model", "/no/such/model"], "model"),
    ],
)
def test_bench_engine_says_in_one_line_what_is_wrong(
    model: Path, flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", "engine", "--model", str(model), *flags]) == 1
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert said in errors[0]


def test_32_sequences_make_steps_of_which_the_overhead_is_told(model: Path) -> None:
    items = [Item(prompt=(100 + i, 7, 8), max_tokens=6) for i in range(32)]
    found = engine_run.run(offline(model), items)
    assert found.output_tokens == 32 * 6
    assert found.most_running == 32
    assert found.decode_times.steps >= 5
    assert found.decode_times.overhead_share is not None
    assert 0 < found.decode_times.overhead_share < 1


def test_waste_is_what_the_arithmetic_says(model: Path) -> None:
    """One request: n tokens lie in whole pages of 16, at every step."""
    made = engine_run.run(offline(model), [Item(prompt=tuple(range(100, 120)), max_tokens=30)])
    lengths = range(20, 50)  # after the prompt, then one more with each step; the last draws without being computed
    expected = [1 - n / (16 * -(-n // 16)) for n in lengths]
    assert made.waste == pytest.approx(expected)


def test_waste_counts_shared_pages_once(model: Path) -> None:
    prompt = tuple(range(100, 164))
    items = [Item(prompt=(*prompt, 5 + i), max_tokens=4) for i in range(4)]
    warm = engine_run.run(offline(model), [items[0], *items])
    assert warm.cached_tokens >= 4 * 64
    assert all(0 <= share < 1 for share in warm.waste)


def test_a_page_that_is_used_again_counts_from_its_first_slot(model: Path) -> None:
    few = load_offline(tiny_files(model), EngineConfig(threads=1, prefix_cache=False), default_kv_tokens=64)
    items = [Item(prompt=tuple(range(100 + i, 140 + i)), max_tokens=10) for i in range(3)]
    made = engine_run.run(few, items)
    assert made.output_tokens == 30
    lengths = [n for _ in range(3) for n in range(40, 50)]
    assert made.waste == pytest.approx([1 - n / (16 * -(-n // 16)) for n in lengths])


def tiny_files(model: Path) -> Any:
    from cluster.models import resolve

    return resolve(str(model))


def test_a_request_that_cannot_fit_is_refused(model: Path) -> None:
    with pytest.raises(ContextExceeded):
        engine_run.run(offline(model), [Item(prompt=tuple(np.full(4000, 9).tolist()), max_tokens=4096)])


# -- serve -------------------------------------------------------------------------------------------------------------


async def drive(running: World, items: list[Item], settings: load.LoadSettings, stop: asyncio.Event) -> load.Outcome:
    async with AsyncClient(running.address, retry=RetryPolicy(attempts=1)) as client:
        return await asyncio.wait_for(load.run(client, items, settings, stop), 60)


async def test_a_closed_loop_ends_every_request(here: tuple[str, str]) -> None:
    async with world(*here) as running:
        items = workload.built_in(12, prompt=(4, 8), output=(2, 6))
        done: list[stats.Record] = []
        async with AsyncClient(running.address) as client:
            outcome = await load.run(client, items, load.LoadSettings(concurrency=3), asyncio.Event(), done.append)
    found = stats.summarize(outcome.records, outcome.duration_s, {})
    assert (found["completed"], found["errors"], len(done)) == (12, {}, 12)
    assert found["output_tokens"] == sum(item.max_tokens for item in items)
    assert found["prompt_tokens"] == sum(len(item.token_ids) for item in items)
    assert not outcome.interrupted


async def test_an_open_loop_counts_from_when_a_request_was_due(here: tuple[str, str]) -> None:
    async with world(*here) as running:
        items = workload.built_in(10, prompt=(4, 8), output=(2, 3))
        settings = load.LoadSettings(rate=200.0, seed=3)
        outcome = await drive(running, items, settings, asyncio.Event())
    due = [record.due for record in outcome.records]
    assert np.diff(due) == pytest.approx(np.diff(load.due_times(items, settings)), abs=1e-6)
    assert all(record.completed for record in outcome.records)


async def test_refusals_are_counted_by_reason_and_not_sent_again(here: tuple[str, str]) -> None:
    async with world(*here) as running:
        items = [Item(prompt=(5, 6), max_tokens=2), Item(prompt=(999_999,), max_tokens=2)]
        outcome = await drive(running, items, load.LoadSettings(concurrency=1), asyncio.Event())
    found = stats.summarize(outcome.records, outcome.duration_s, {"ttft_ms": 1e9})
    assert found["completed"] == 1
    assert found["errors"] == {"INVALID_FIELD": 1}
    assert found["goodput_share"] == 0.5


async def test_stopped_half_way_it_tells_what_it_has(here: tuple[str, str]) -> None:
    async with world(*here) as running:
        stop = asyncio.Event()
        items = [Item(prompt=(5, 6), max_tokens=2), *[Item(prompt=(5, 6), max_tokens=1_000_000)] * 3]
        async with AsyncClient(running.address) as client:
            settings = load.LoadSettings(concurrency=2)
            outcome = await asyncio.wait_for(load.run(client, items, settings, stop, lambda record: stop.set()), 60)
    assert outcome.interrupted
    found = stats.summarize(outcome.records, outcome.duration_s, {})
    assert found["completed"] == 1
    assert set(found["errors"]) == {"UNFINISHED"}


async def test_after_its_duration_nothing_is_sent(here: tuple[str, str]) -> None:
    async with world(*here) as running:
        items = workload.built_in(50, prompt=(4, 8), output=(2, 3))
        outcome = await drive(running, items, load.LoadSettings(rate=20.0, duration_s=0.5), asyncio.Event())
    due = load.due_times(items, load.LoadSettings(rate=20.0))
    assert len(outcome.records) <= sum(one < 0.5 for one in due) < 50
    assert all(record.completed for record in outcome.records)


async def test_the_command_writes_json_and_a_plot(here: tuple[str, str], tmp_path: Path) -> None:
    report, plot = tmp_path / "out.json", tmp_path / "out.png"
    async with world(*here) as running:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "cluster.cli", "bench", "serve", "--address", running.address),
            *("--num-requests", "6", "--concurrency", "2", "--workload", "sessions", "--slo", "ttft_ms=60000"),
            *("--json", str(report), "--plot", str(plot), "--warm-up", "1"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0, err.decode()
    assert b"6 of 6 requests" in out
    assert b"first token" in out
    written = json.loads(report.read_text())
    assert (written["completed"], written["errors"], written["goodput_share"]) == (6, {}, 1.0)
    assert plot.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--rate", "1", "--concurrency", "2"], "--rate: an open loop has no --concurrency"),
        (["--rate", "0"], "--rate: must be a number above 0"),
        (["--slo", "quick"], "--slo: must be"),
        (["--plot", "/no/such/folder/x.png"], "--plot: the folder"),
        (["--requests", "a", "--trace", "b"], "--trace: give either"),
    ],
)
def test_the_command_says_in_one_line_what_is_wrong(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", "serve", *flags]) == 1
    errors = capsys.readouterr().err
    assert said in errors
    assert errors.count("\n") == 1


def test_no_cluster_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "serve", "--address", f"127.0.0.1:{free_port()}"]) == 1
    assert capsys.readouterr().err.startswith("error:")


def test_without_matplotlib_a_plot_is_refused_before_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run(["bench", "serve", "--plot", "x.png"]) == 1
    assert "--plot: needs matplotlib; install it with: pip install 'quire[bench]'" in capsys.readouterr().err
