"""``quire bench engine``: the engine alone, offline."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.cli import terminal

if TYPE_CHECKING:
    from cluster.cli.bench.workload import Item
    from cluster.config import EngineConfig
    from cluster.models import ModelFiles
    from workers.offline import Offline


def register(group: typer.Typer) -> None:
    """Add the command."""
    group.command(name="engine")(bench_engine)


def bench_engine(
    model: Annotated[str, typer.Option(help="Built-in name, folder, GGUF file, or hub id.")] = "smollm2-135m",
    requests: Annotated[
        Path | None, typer.Option(help="JSONL: prompt or prompt_token_ids, and max_tokens. Unset: the built-in set.")
    ] = None,
    num_requests: Annotated[int | None, typer.Option(min=1, help="How many; unset: all, or 32.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of a rank; unset: all cores.")] = None,
    tp: Annotated[int, typer.Option(min=1, help="Ranks, each a process of its own on this host.")] = 1,
    weights: Annotated[str, typer.Option(help="auto (as dtype) or int8.")] = "auto",
    attention: Annotated[str, typer.Option(help="auto, reference or cpu.")] = "auto",
    max_batch_tokens: Annotated[int, typer.Option(min=1, help="Token budget of a step.")] = 512,
    step_target_ms: Annotated[
        int | None,
        typer.Option(min=1, help="Time of a step in which sequences decode; unset: unbounded, for throughput."),
    ] = None,
    max_running: Annotated[int, typer.Option(min=1, help="Sequences at once.")] = 32,
    block_tokens: Annotated[int, typer.Option(help="Tokens of a KV block: 8, 16, 32, 64 or 128.")] = 16,
    kv_memory: Annotated[str | None, typer.Option(help="Memory for KV pages, as 2GiB; unset: 32,768 tokens.")] = None,
    prefix_cache: Annotated[bool, typer.Option("--prefix-cache/--no-prefix-cache", help="Share prefixes.")] = True,
    repeats: Annotated[int, typer.Option(min=1, help="Passes, each through an empty engine.")] = 1,
    warm_up: Annotated[int, typer.Option(min=0, help="Short requests before anything is measured.")] = 4,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run requests through an engine in this process and say how fast, where the time goes, and what pages waste.

    Greedy, and EOS is ignored, so that every run makes the same number of tokens. Text prompts are tokenized first.

    [bold]Examples[/]

      quire bench engine

      quire bench engine --repeats 3 --json | jq .output_tok_s

      quire bench engine --tp 2 --json | jq .output_tok_s

      quire bench engine --requests mine.jsonl --max-running 8 --no-prefix-cache
    """
    from cluster import kv_arithmetic, models
    from cluster.config import parse

    settings = {
        "device": device,
        "dtype": dtype,
        "threads": threads,
        "weights": weights,
        "attention": attention,
        "max_batch_tokens": max_batch_tokens,
        "step_target_ms": step_target_ms,
        "max_running": max_running,
        "block_tokens": block_tokens,
        "kv_memory_bytes": None if kv_memory is None else kv_arithmetic.parse_size(kv_memory, "--kv-memory"),
        "prefix_cache": prefix_cache,
    }
    config = parse({"engine": settings}, source="flags").engine
    files = models.resolve(model)
    items = _items(files, requests, num_requests)
    found = _measure(files, config, tp, items, repeats, warm_up)
    report = {"model": files.name, "requests": len(items), "settings": settings, "tp": tp, **found}
    if json:
        import json as json_module

        terminal.out.print(json_module.dumps(report, indent=2), markup=False)
    else:
        terminal.out.print(table(report))


def _items(files: ModelFiles, path: Path | None, count: int | None) -> list[Item]:
    from cluster import models
    from cluster.cli.bench import workload

    if path is None:
        vocab = int(models.hf_config(files).get("vocab_size", workload.VOCAB))
        return workload.built_in(32 if count is None else count, vocab=min(workload.VOCAB, vocab))
    items = workload.read_jsonl(path, limit=count)
    if any(isinstance(item.prompt, str) for item in items):
        from router.tokenizer import Tokenizer

        items = workload.encoded(items, Tokenizer(files).encode)
    return items


def _measure(
    files: ModelFiles, config: EngineConfig, tp: int, items: list[Item], repeats: int, warm_up: int
) -> dict[str, Any]:
    from workers.offline import load_offline, offline_ranks

    with contextlib.ExitStack() as stack:
        with terminal.Steps() as steps:
            steps.begin("loading the model")
            ranked = tp > 1
            offline = stack.enter_context(offline_ranks(files, config, tp)) if ranked else load_offline(files, config)
        return _run(offline, items, repeats, warm_up)


def _run(offline: Offline, items: list[Item], repeats: int, warm_up: int) -> dict[str, Any]:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from cluster.cli.bench import engine_run, workload

    alone, prompts = engine_run.single(items, offline.max_context_tokens), engine_run.prompts_only(items)
    outputs = sum(item.max_tokens for item in items)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed} tokens"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=terminal.err, disable=not terminal.err.is_terminal, transient=True) as bar:
        task = bar.add_task("running", total=repeats * outputs + alone[0].max_tokens + len(prompts))

        def run(some: list[Item]) -> engine_run.Run:
            return engine_run.run(offline, some, lambda tokens: bar.advance(task, tokens))

        if warm_up:
            vocab = min(workload.VOCAB, offline.model.config.vocab_size)
            engine_run.run(offline, _short(workload.built_in(warm_up, vocab=vocab, output=(4, 8)), offline))
        runs = [run(items) for _ in range(repeats)]
        # Before and behind it: on a machine that others use too, memory is twice as fast in one minute as in the next.
        before = engine_run.copy_speed(offline)
        by_itself = run(alone)
        copies = [before, engine_run.copy_speed(offline)]
        return engine_run.report(runs, by_itself, run(prompts), offline, copies)


def _short(items: list[Item], offline: Offline) -> list[Item]:
    from cluster.cli.bench import workload

    return workload.that_fit(items, offline.max_context_tokens)


def _of(times: dict[str, float], part: str) -> str:
    return f"{times[part]:.2f}  {times[part] / max(times['total'], 1e-9):6.1%}"


def table(report: dict[str, Any]) -> Any:
    """One figure a line."""
    from rich.table import Table

    from cluster.kv_arithmetic import format_size

    grid = Table(box=None, show_header=False, padding=(0, 2, 0, 0), title_justify="left")
    grid.title = f"{report['model']} · {report['device']} · {report['dtype']} · {report['threads']} threads"
    grid.add_column(no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    low, high = report["output_tok_s_range"]
    grid.add_row("requests", f"{report['requests']} ({report['prompt_tokens']:,} + {report['output_tokens']:,} tokens)")
    grid.add_row("output tok/s", f"{report['output_tok_s']:.1f} ({low:.1f} to {high:.1f} in {report['repeats']})")
    grid.add_row("prompt tok/s", f"{report['prompt_tok_s']:.1f}")
    grid.add_row("one request alone, tok/s", f"{report['single_tok_s']:.1f}")
    if report["memory_limit_tok_s"] is not None:
        share = report["single_share_of_memory_limit"]
        limit = f"{report['memory_limit_tok_s']:.1f}  {share:6.1%}"
        grid.add_row("  if it only read weights, at a copy's speed", limit)
    for name, times in (("step", report["step_ms"]), ("step of 32 decodes", report["step_ms_at_32"])):
        if times is None:
            grid.add_row(name, "none had 32 sequences")
            continue
        grid.add_row(f"{name}, ms", f"{times['total']:.2f} (mean of {times['steps']})")
        for part in ("schedule", "forward", "sample", "other"):
            grid.add_row(f"  {part}", _of(times, part))
            if part == "forward" and times["linear"]:
                grid.add_row("    linear layers", _of(times, "linear"))
                grid.add_row("    attention", _of(times, "attention"))
    share = report["overhead_share_at_32"]
    grid.add_row("all but forward, at 32 sequences", "not measured" if share is None else f"{share:.1%}")
    grid.add_row("KV slots allocated but empty", f"{report['kv_waste_percent']:.2f} %")
    grid.add_row("preemptions", str(report["preemptions"]))
    grid.add_row("peak memory of the process", format_size(report["peak_rss_bytes"]))
    return grid
