"""What benches ask for, and how times become figures."""

from __future__ import annotations

import gzip
import itertools
import json
import random
import statistics
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.cli.bench import load, stats, workload
from cluster.cli.bench.stats import Record
from cluster.cli.bench.workload import Item
from cluster.errors import ConfigError


def reference_requests(n: int = 32, seed: int = 0) -> list[tuple[list[int], int]]:
    """As the scripts for other engines make them; kept here so that the comparison stays one."""
    rng = random.Random(seed)
    return [([rng.randrange(10, 49_000) for _ in range(rng.randint(32, 384))], rng.randint(32, 192)) for _ in range(n)]


def test_the_built_in_set_is_the_one_that_other_engines_were_measured_with() -> None:
    items = workload.built_in()
    assert [(list(item.token_ids), item.max_tokens) for item in items] == reference_requests()
    assert sum(len(item.token_ids) for item in items) == 6733
    assert sum(item.max_tokens for item in items) == 3479


def test_sessions_share_a_system_prompt_and_grow() -> None:
    items = workload.sessions(20, turns=4, system_tokens=50)
    assert len(items) == 20
    assert len({item.token_ids[:50] for item in items}) == 1
    by_session: dict[str, list[Item]] = {}
    for item in items:
        by_session.setdefault(item.session, []).append(item)
    assert len(by_session) == 5
    for turns in by_session.values():
        for before, after in itertools.pairwise(turns):
            assert after.token_ids[: len(before.token_ids)] == before.token_ids
            assert len(after.token_ids) > len(before.token_ids)


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return path


def test_jsonl_holds_texts_or_ids(tmp_path: Path) -> None:
    lines = ({"prompt": "Hi"}, "\n", {"prompt_token_ids": [1, 2], "max_tokens": 3}, {"prompt": [4]})
    path = write(tmp_path / "x.jsonl", *lines)
    items = workload.read_jsonl(path, default_max_tokens=9)
    assert [(item.prompt, item.max_tokens) for item in items] == [("Hi", 9), ((1, 2), 3), ((4,), 9)]
    encoded = workload.encoded(items, lambda text: [len(text)])
    assert [item.token_ids for item in encoded] == [(2,), (1, 2), (4,)]
    assert len(workload.read_jsonl(path, limit=2)) == 2
    assert [item.prompt for item in workload.that_fit(items, 5)] == ["Hi", (1, 2)]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 1: no JSON"),
        ("[]\n", "line 1: must be a JSON object"),
        ({}, "needs either prompt or prompt_token_ids"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "needs either"),
        ({"prompt": ""}, "prompt: must be a text that is not empty"),
        ({"prompt_token_ids": [-1]}, "prompt_token_ids: must be a list of token ids"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens: must be at least 1; got 0"),
        ("", "holds no request"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        workload.read_jsonl(write(tmp_path / "x.jsonl", line))


def test_an_absent_file_is_one_line() -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        workload.read_jsonl(Path("/no/such/file"))


def test_a_trace_shares_prefixes_as_its_hash_ids_do(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    lines = [
        {"timestamp": 1000, "input_length": 1200, "output_length": 10, "hash_ids": [0, 1, 2]},
        {"timestamp": 3000, "input_length": 1100, "output_length": 20, "hash_ids": [0, 1, 3]},
        {"timestamp": 3000, "input_length": 700, "output_length": 20, "hash_ids": [4, 1]},
    ]
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    first, second, third = workload.read_trace(path, speed=2.0)
    assert [len(item.token_ids) for item in (first, second, third)] == [1200, 1100, 700]
    assert first.token_ids[:1024] == second.token_ids[:1024]
    assert first.token_ids[1024:1100] != second.token_ids[1024:]
    assert third.token_ids[:512] != first.token_ids[:512]
    assert load.due_times([first, second], load.LoadSettings()) == [0.0, 1.0]
    small = workload.read_trace(path, scale=16)
    assert len(small[0].token_ids) == 75
    assert small[0].token_ids[:64] == small[1].token_ids[:64]


def test_poisson_arrivals_have_their_rate_and_repeat() -> None:
    first = list(itertools.islice(load.poisson(5.0, 1), 5000))
    assert first == list(itertools.islice(load.poisson(5.0, 1), 5000))
    assert first != list(itertools.islice(load.poisson(5.0, 2), 5000))
    gaps = [after - before for before, after in itertools.pairwise(first)]
    assert statistics.fmean(gaps) == pytest.approx(0.2, rel=0.06)
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=0.06)  # of an exponential it equals the mean


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60), st.floats(0, 100))
@settings(max_examples=200, deadline=None)
def test_percentiles_are_numpys(values: list[float], percent: float) -> None:
    assert stats.percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)), abs=1e-6)


def record(start: float, *times: float, error: str = "", ended: bool = True) -> Record:
    arrivals = [(start + time, 1) for time in times]
    finished = start + (times[-1] if times else 1.0) if ended else None
    return Record(due=start, prompt_tokens=10, cached_tokens=5, arrivals=arrivals, finished=finished, error=error)


def test_a_run_is_summarized() -> None:
    records = [
        record(0.0, 0.1, 0.2, 0.3),
        record(1.0, 0.5, 0.6, 0.9),
        record(2.0, 0.2),  # one token: no time per token, which no limit can refuse
        record(3.0, 0.1, error="OVERLOADED"),
        record(4.0, ended=False),
    ]
    found = stats.summarize(records, 10.0, {"ttft_ms": 300.0, "tpot_ms": 150.0})
    assert (found["requests"], found["completed"]) == (5, 3)
    assert found["errors"] == {"OVERLOADED": 1, "UNFINISHED": 1}
    assert found["output_tok_s"] == pytest.approx(0.7)
    assert found["cached_tokens_share"] == pytest.approx(0.5)
    assert found["ttft_ms"]["p50"] == pytest.approx(200)
    assert found["tpot_ms"]["mean"] == pytest.approx(150)
    assert found["itl_ms"]["p99"] == pytest.approx(100 + 200 * 0.97)
    assert found["goodput_request_s"] == pytest.approx(0.2)
    assert found["goodput_share"] == pytest.approx(0.4)


def test_a_run_of_nothing_has_no_figures_and_does_not_fail() -> None:
    found = stats.summarize([], 0.0, {})
    assert found["ttft_ms"] is None
    assert found["goodput_share"] is None


def test_tokens_that_come_together_are_counted_apart() -> None:
    together = Record(due=0.0, arrivals=[(1.0, 2), (2.0, 4)], finished=2.0)
    assert together.tpot_s == pytest.approx(0.25)
    assert together.itl_s == [1.0]
    assert Record(due=0.0, arrivals=[(1.0, 3)], finished=1.0).tpot_s is None


def test_slos() -> None:
    assert stats.parse_slo("") == {}
    assert stats.parse_slo("ttft_ms=500, tpot_ms=50.5") == {"ttft_ms": 500.0, "tpot_ms": 50.5}
    for wrong in ("ttft=5", "ttft_ms", "ttft_ms=-1", "ttft_ms=nan", "e2e_ms=x"):
        with pytest.raises(ConfigError, match="--slo: must be name=milliseconds"):
            stats.parse_slo(wrong)
