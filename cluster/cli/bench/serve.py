"""``quire bench serve``: a running cluster under load."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from cluster.cli import sampling, terminal

if TYPE_CHECKING:
    from cluster.cli.bench.load import LoadSettings, Outcome
    from cluster.cli.bench.workload import Item
    from router.client import AsyncClient

WorkloadName = Literal["random", "sessions"]
DEFAULT_REQUESTS = 64
DEFAULT_CONCURRENCY = 8
INTERRUPTED = 130


def register(group: typer.Typer) -> None:
    """Add the command."""
    group.command(name="serve")(bench_serve)


def bench_serve(
    address: sampling.Address = sampling.DEFAULT_ADDRESS,
    api_key: sampling.ApiKey = None,
    model: sampling.Model = "",
    rate: Annotated[float | None, typer.Option(help="Requests a second on average, at random (Poisson).")] = None,
    concurrency: Annotated[int | None, typer.Option(min=1, help="Requests at once, in place of --rate.")] = None,
    num_requests: Annotated[int | None, typer.Option(min=1, help="How many; unset: 64, or the whole file.")] = None,
    duration: Annotated[float | None, typer.Option(help="Send none after this many seconds.")] = None,
    workload: Annotated[WorkloadName, typer.Option(help="Built-in requests: of their own, or sharing prefixes.")] = (
        "random"
    ),
    requests: Annotated[Path | None, typer.Option(help="JSONL: prompt or prompt_token_ids, and max_tokens.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Trace with timestamp, input_length, hash_ids ...; .gz too.")] = (
        None
    ),
    trace_scale: Annotated[float, typer.Option(help="Divide the trace's lengths by this.")] = 1.0,
    trace_speed: Annotated[float, typer.Option(help="Replay the trace this many times faster.")] = 1.0,
    warm_up: Annotated[int, typer.Option(min=0, help="Requests that are sent first and not counted.")] = 4,
    slo: Annotated[str, typer.Option(help="Limits for goodput: ttft_ms=500,tpot_ms=50,e2e_ms=9000.")] = "",
    seed: Annotated[int, typer.Option(help="Of prompts and arrivals.")] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds that one request may take.")] = 300.0,
    json: Annotated[Path | None, typer.Option("--json", help="Also write the figures here; - for stdout.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw latencies here (.png, .svg, .pdf).")] = None,
) -> None:
    """Send requests to a cluster; show latencies, throughput, errors, and what met an SLO.

    Greedy, and EOS is ignored. Refused requests are not sent again: they are counted. Ctrl-C shows the results so far.

    [bold]Examples[/]

      quire bench serve --concurrency 16 --num-requests 200

      quire bench serve --rate 2 --duration 60 --slo ttft_ms=500,tpot_ms=50 --json out.json --plot out.png

      quire bench serve --trace conversation_trace.jsonl.gz --trace-scale 16 --num-requests 200 --rate 4
    """
    from cluster.cli.bench import plot as plots
    from cluster.cli.bench import stats
    from cluster.cli.bench.load import LoadSettings

    _check(rate, concurrency, duration, timeout, trace_scale, trace_speed, requests, trace)
    limits = stats.parse_slo(slo)
    if plot is not None:
        plots.require()
        plots.check_writable(plot, "--plot")
    if json is not None and str(json) != "-":
        plots.check_writable(json, "--json")
    if rate is None and concurrency is None and trace is None:
        concurrency = DEFAULT_CONCURRENCY
    settings = LoadSettings(
        rate=rate, concurrency=concurrency, duration_s=duration, timeout_s=timeout, seed=seed, model=model
    )
    source = {
        "workload": workload,
        "requests": requests,
        "trace": trace,
        "scale": trace_scale,
        "speed": trace_speed,
        "count": num_requests,
        "seed": seed,
    }
    outcome, items = asyncio.run(_bench(address, api_key, settings, source, warm_up))
    report = _report(outcome, len(items), settings, source, limits)
    _show(report, json)
    if plot is not None:
        plots.latencies(outcome.records, f"{report['completed']} requests, {report['output_tok_s']:.0f} tok/s", plot)
    if outcome.interrupted:
        raise typer.Exit(INTERRUPTED)


def _check(
    rate: float | None,
    concurrency: int | None,
    duration: float | None,
    timeout: float,
    scale: float,
    speed: float,
    requests: Path | None,
    trace: Path | None,
) -> None:
    from cluster.errors import ConfigError

    if rate is not None and concurrency is not None:
        raise ConfigError("--rate: an open loop has no --concurrency; give one of them", field="rate")
    if requests is not None and trace is not None:
        raise ConfigError("--trace: give either --requests or --trace", field="trace")
    numbers = {
        "--rate": rate,
        "--duration": duration,
        "--timeout": timeout,
        "--trace-scale": scale,
        "--trace-speed": speed,
    }
    for name, value in numbers.items():
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"{name}: must be a number above 0; got {value}", field=name.lstrip("-"))


def load_items(source: dict[str, Any], vocab_size: int, max_context_tokens: int) -> list[Item]:
    """What was asked for, without what the cluster's context cannot hold. Raises ConfigError."""
    from cluster.cli.bench import workload
    from cluster.errors import ConfigError

    vocab, count = min(workload.VOCAB, vocab_size), source["count"]
    if source["trace"] is not None:
        items = workload.read_trace(
            source["trace"], vocab=vocab, scale=source["scale"], speed=source["speed"], limit=count
        )
    elif source["requests"] is not None:
        items = workload.read_jsonl(source["requests"], limit=count)
    elif source["workload"] == "sessions":
        items = workload.sessions(count or DEFAULT_REQUESTS, seed=source["seed"], vocab=vocab)
    else:
        items = workload.built_in(count or DEFAULT_REQUESTS, source["seed"], vocab)
    fitting = workload.that_fit(items, max_context_tokens)
    if not fitting:
        raise ConfigError(
            f"workload: none of {len(items)} requests fits the context of {max_context_tokens} tokens"
            " (--trace-scale shortens a trace)",
            field="workload",
        )
    if len(fitting) < len(items):
        terminal.err.print(f"left out: {len(items) - len(fitting)} of {len(items)} requests, longer than the context")
    return fitting


async def _bench(
    address: str, api_key: str | None, settings: LoadSettings, source: dict[str, Any], warm_up: int
) -> tuple[Outcome, list[Item]]:
    from cluster.cli.bench import load, workload
    from router.client import AsyncClient, RetryPolicy

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    try:
        # A refused request is a result: the client must not hide it behind a retry.
        async with AsyncClient(address, api_key, retry=RetryPolicy(attempts=1)) as client:
            served = await client.model(settings.model, timeout_s=10.0)
            items = load_items(source, served.vocab_size, served.max_context_tokens)
            warm = workload.built_in(warm_up, source["seed"] + 1, min(workload.VOCAB, served.vocab_size), output=(4, 8))
            warm = workload.that_fit(warm, served.max_context_tokens)
            if warm:
                await load.run(client, warm, load.LoadSettings(concurrency=4, model=settings.model, timeout_s=60), stop)
            return await _with_bar(client, items, settings, stop), items
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


async def _with_bar(client: AsyncClient, items: list[Item], settings: LoadSettings, stop: asyncio.Event) -> Outcome:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from cluster.cli.bench import load

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=terminal.err, disable=not terminal.err.is_terminal, transient=True) as bar:
        task = bar.add_task("requests", total=len(items))
        return await load.run(client, items, settings, stop, lambda record: bar.advance(task))


# -- what is said ------------------------------------------------------------------------------------------------------


def _report(
    outcome: Outcome, planned: int, settings: LoadSettings, source: dict[str, Any], limits: dict[str, float]
) -> dict[str, Any]:
    from dataclasses import asdict

    from cluster.cli.bench import stats

    described = {name: str(value) if isinstance(value, Path) else value for name, value in source.items()}
    return {
        "planned": planned,
        "interrupted": outcome.interrupted,
        "load": asdict(settings),
        "source": described,
        **stats.summarize(outcome.records, outcome.duration_s, limits),
    }


def _show(report: dict[str, Any], path: Path | None) -> None:
    import json

    from cluster.errors import ConfigError

    if path is not None and str(path) == "-":
        terminal.out.print(json.dumps(report, indent=2), markup=False)
        return
    terminal.out.print(table(report))
    if path is None:
        return
    try:
        path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json: {path} cannot be written: {error.strerror or error}", field="json") from error


def table(report: dict[str, Any]) -> Any:
    """Latencies in a grid, everything else in its caption and title."""
    from rich.table import Table

    ended = "interrupted: " if report["interrupted"] else ""
    title = f"{ended}{report['completed']} of {report['planned']} requests in {report['duration_s']:.1f} s"
    grid = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    grid.add_column("ms", no_wrap=True)
    columns = ("mean", "p50", "p90", "p95", "p99")
    for heading in columns:
        grid.add_column(heading, justify="right", no_wrap=True)
    names = {
        "ttft_ms": "first token",
        "tpot_ms": "per output token",
        "itl_ms": "between deltas",
        "e2e_ms": "end to end",
    }
    for key, name in names.items():
        found = report[key]
        grid.add_row(name, *(["-"] * len(columns) if found is None else [f"{found[c]:.1f}" for c in columns]))
    grid.caption = "\n".join(_lines(report))
    grid.caption_justify = "left"
    return grid


def _lines(report: dict[str, Any]) -> list[str]:
    lines = [
        f"output {report['output_tok_s']:.1f} tok/s · all {report['total_tok_s']:.1f} tok/s · "
        f"{report['request_s']:.2f} requests/s",
        f"{report['cached_tokens_share']:.1%} of prompt tokens cached",
    ]
    if report["goodput_share"] is not None:
        limits = ", ".join(f"{name} {limit:g}" for name, limit in report["slo"].items())
        lines.append(f"goodput {report['goodput_request_s']:.2f}/s, {report['goodput_share']:.1%} ({limits})")
    if report["errors"]:
        lines.append("errors: " + ", ".join(f"{reason} {count}" for reason, count in report["errors"].items()))
    return lines
