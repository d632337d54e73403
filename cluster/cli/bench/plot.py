"""Plots of a run. matplotlib is an extra: a server needs none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cluster.cli.bench.stats import Record
from cluster.errors import ConfigError


def require() -> None:
    """Raises ConfigError where matplotlib is absent: before a long run, not after it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "--plot: needs matplotlib; install it with: pip install 'quire[bench]'", field="plot"
        ) from error


def check_writable(path: Path, option: str) -> None:
    """Raises ConfigError where a result could not be written."""
    if not path.parent.is_dir():
        raise ConfigError(f"{option}: the folder {path.parent} does not exist", field=option.lstrip("-"))
    if path.is_dir():
        raise ConfigError(f"{option}: {path} is a folder", field=option.lstrip("-"))


def latencies(records: Sequence[Record], title: str, path: Path) -> None:
    """TTFT, TPOT, inter-token and end-to-end latency as cumulative shares. Raises ConfigError for a bad file name."""
    from matplotlib.figure import Figure

    done = [record for record in records if record.completed]
    parts = {
        "time to first token": [r.ttft_s for r in done if r.ttft_s is not None],
        "time per output token": [r.tpot_s for r in done if r.tpot_s is not None],
        "between deltas": [gap for r in done for gap in r.itl_s],
        "end to end": [r.e2e_s for r in done if r.e2e_s is not None],
    }
    figure = Figure(figsize=(9, 6), layout="constrained")  # without pyplot nothing global is touched
    figure.suptitle(title)
    for index, (name, seconds) in enumerate(parts.items(), 1):
        axes = figure.add_subplot(2, 2, index)
        _cumulative(axes, name, sorted(1000 * value for value in seconds))
    save(figure, path)


def _cumulative(axes: Any, name: str, values: Sequence[float]) -> None:
    shares = [(index + 1) / len(values) for index in range(len(values))]
    axes.step(values, shares, where="post")
    axes.set_title(name)
    axes.set_xlabel("ms")
    axes.set_ylabel("share of requests" if name != "between deltas" else "share of gaps")
    axes.set_ylim(0, 1.02)
    axes.grid(alpha=0.3)


def save(figure: Any, path: Path) -> None:
    """In the format of the file's suffix. Raises ConfigError."""
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot: {path} cannot be written: {error}", field="plot") from error
