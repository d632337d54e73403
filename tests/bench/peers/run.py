"""Quire beside other engines on the same requests: rounds in which they take turns, medians, a table and a plot.

python -m tests.bench.peers.run [--out bench-results] [--rounds 5] [--only ENGINE ...] [--environments .peers]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.cli.bench import engine_run, workload
from tests.bench.common import MODEL
from tests.bench.peers import environments, report

HERE = Path(__file__).parent
SECONDS_TO_MEASURE = 900


@dataclass(frozen=True, slots=True)
class Engine:
    """``command``: prepares the engine where it has to be prepared, and says how to measure it."""

    name: str
    beside: str
    """The engine of ours at the same precision."""
    command: Callable[[Path, str, Path], list[str]]
    environment: dict[str, str]


def _quire(weights: str) -> Callable[[Path, str, Path], list[str]]:
    def command(folder: Path, model: str, requests: Path) -> list[str]:
        quire = str(Path(sys.executable).parent / "quire")
        measure = ["--repeats", "2", "--json", "--weights", weights]
        return [quire, "bench", "engine", "--model", model, *measure, "--requests", str(requests)]

    return command


def _openvino(weight_format: str) -> Callable[[Path, str, Path], list[str]]:
    def command(folder: Path, model: str, requests: Path) -> list[str]:
        python = environments.openvino(folder)
        source = environments.hugging_face_model(folder, model)
        exported = environments.openvino_model(folder, source, weight_format)
        return [str(python), str(HERE / "with_openvino.py"), str(exported), _with_single(requests)]

    return command


def _vllm(folder: Path, model: str, requests: Path) -> list[str]:
    python = environments.vllm(folder)
    source = environments.hugging_face_model(folder, model)
    return [str(python), str(HERE / "with_vllm.py"), str(source), _with_single(requests)]


def _with_single(requests: Path) -> str:
    return str(requests.with_name("requests-and-one.jsonl"))


CORES = sorted(os.sched_getaffinity(0))
# By itself vLLM leaves a core for its server, and on two cores that is half of them.
ALL_CORES = {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, CORES)), "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}

ENGINES = [
    Engine("Quire fp32", "Quire fp32", _quire("auto"), {}),
    Engine("OpenVINO fp32", "Quire fp32", _openvino("fp32"), {}),
    Engine("vLLM fp32", "Quire fp32", _vllm, ALL_CORES),
    Engine("Quire int8", "Quire int8", _quire("int8"), {}),
    Engine("OpenVINO int8", "Quire int8", _openvino("int8"), {}),
]


def main() -> None:
    """Prepare all, then measure in rounds; what was measured is written after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("bench-results"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", choices=[engine.name for engine in ENGINES], default=None)
    parser.add_argument("--environments", type=Path, default=Path(".peers"))
    parser.add_argument("--model", default=MODEL)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    options.environments.mkdir(parents=True, exist_ok=True)
    requests = options.out.resolve() / "requests.jsonl"
    _write_requests(requests)
    wanted = [engine for engine in ENGINES if options.only is None or engine.name in options.only]
    commands: dict[str, list[str]] = {}
    missing: dict[str, str] = {}
    for engine in wanted:
        _say(f"preparing {engine.name}")
        try:
            commands[engine.name] = engine.command(options.environments.resolve(), options.model, requests)
        except environments.Unavailable as error:
            missing[engine.name] = str(error)
            _say(f"not measured: {engine.name}: {error}")
    rounds: list[dict[str, dict[str, float]]] = []
    engines = {engine.name: engine.beside for engine in wanted if engine.name in commands}
    for index in range(options.rounds):
        found: dict[str, dict[str, float]] = {}
        for engine in _turned(wanted, index):
            if engine.name in commands:
                _measure(engine, commands[engine.name], found, f"round {index + 1} of {options.rounds}")
        rounds.append(found)
        text = report.markdown(rounds, engines, missing)
        (options.out / "peers.json").write_text(json.dumps({"rounds": rounds, "missing": missing}, indent=2) + "\n")
        (options.out / "peers.md").write_text(text + "\n![Beside other engines](peers.png)\n", encoding="utf-8")
        report.plot(rounds, engines, options.out / "peers.png")
    sys.stdout.write(report.markdown(rounds, engines, missing))


def _turned(engines: list[Engine], index: int) -> list[Engine]:
    """Each round begins with another one: nobody is always the first on a cool machine."""
    start = index % len(engines)
    return engines[start:] + engines[:start]


def _measure(engine: Engine, command: list[str], found: dict[str, dict[str, float]], where: str) -> None:
    """Adds to ``found``, or says what went wrong: a round without one engine is a round for the others."""
    start = time.perf_counter()
    environment = {**os.environ, **engine.environment}
    try:
        done = subprocess.run(
            command, env=environment, check=True, capture_output=True, text=True, timeout=SECONDS_TO_MEASURE
        )
        figures = _figures(done.stdout)
    except subprocess.CalledProcessError as error:
        _say(f"{where}: {engine.name}: exit code {error.returncode}: {error.stderr.strip()[-800:]}")
        return
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        _say(f"{where}: {engine.name}: {error}")
        return
    found[engine.name] = figures
    rates = f"{figures['output_tok_s']:.0f} output tok/s, one alone {figures['single_tok_s']:.0f}"
    _say(f"{where}: {engine.name}: {rates} ({time.perf_counter() - start:.0f} s)")


def _figures(stdout: str) -> dict[str, float]:
    """Of the JSON among what an engine prints: ours is a report of many lines, theirs one line, in a log or before it.

    Raises ValueError.
    """
    text = stdout.strip()
    lines = [line for line in text.splitlines() if line.startswith('{"output_tok_s"')]
    if not lines and not text.startswith("{"):
        raise ValueError(f"printed no figures: {text[-300:]}")
    told: dict[str, Any] = json.loads(lines[-1] if lines else text)
    figures = {"output_tok_s": told["output_tok_s"], "single_tok_s": told["single_tok_s"]}
    if "output_tok_s_range" in told:
        figures["output_tok_s"] = told["output_tok_s_range"][1]
        for name in ("single_share_of_memory_limit", "overhead_share_at_32", "kv_waste_percent"):
            figures[name] = told[name]
    return figures


def _write_requests(path: Path) -> None:
    """The built-in set, and beside it the same with the single request behind: ours makes that one by itself."""
    items = workload.built_in(32)
    for target, some in ((path, items), (Path(_with_single(path)), items + engine_run.single(items, 2048))):
        lines = [json.dumps({"prompt_token_ids": item.token_ids, "max_tokens": item.max_tokens}) for item in some]
        target.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")


if __name__ == "__main__":
    main()
