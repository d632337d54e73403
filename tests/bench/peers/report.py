"""Medians and spread of what the rounds gave, as a table and a plot. Pure but for the plot's file."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Round = Mapping[str, Mapping[str, float]]
"""Engine -> figure -> value; an engine that failed in a round is missing from it."""

COMPARED = ("output_tok_s", "single_tok_s")


def series(rounds: Sequence[Round], engine: str, figure: str) -> list[float]:
    """One figure over the rounds in which the engine was measured."""
    return [one[engine][figure] for one in rounds if engine in one and figure in one[engine]]


def ratios(rounds: Sequence[Round], ours: str, theirs: str, figure: str) -> list[float]:
    """Ours over theirs, within each round: what both met of the machine's moods is divided out."""
    return [
        one[ours][figure] / one[theirs][figure]
        for one in rounds
        if ours in one and theirs in one and figure in one[ours] and figure in one[theirs]
    ]


def spread(values: Sequence[float], digits: int) -> str:
    """Median, and the range in brackets."""
    if not values:
        return "-"
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def markdown(rounds: Sequence[Round], engines: Mapping[str, str], missing: Mapping[str, str]) -> str:
    """``engines``: each with the engine of ours that it is compared with. ``missing``: why one was not measured."""
    lines = [
        "# Beside other engines\n",
        f"{len(rounds)} rounds, engines taking turns, each in a process and an environment of its own: the better pass "
        "of two over the built-in 32 requests, then one request alone. Medians, lowest and highest; ratios are "
        "within a round.\n",
        "| engine | output tok/s | ours / theirs | one alone, tok/s | ours / theirs |",
        "|---|---|---|---|---|",
    ]
    for engine, ours in engines.items():
        row = [engine]
        for figure in COMPARED:
            row.append(spread(series(rounds, engine, figure), 0))
            row.append("" if engine == ours else spread(ratios(rounds, ours, engine, figure), 2))
        lines.append("| " + " | ".join(row) + " |")
    for engine in dict.fromkeys(engines.values()):
        shares = series(rounds, engine, "single_share_of_memory_limit")
        overhead = series(rounds, engine, "overhead_share_at_32")
        lines.append(
            f"\n{engine}: one request alone reaches {spread(shares, 2)} of what a copy's speed would allow if it only "
            f"read the weights; all but the forward pass is {spread([100 * share for share in overhead], 1)} % of a "
            "step of 32 sequences."
        )
    lines += [f"\nNot measured: {engine}: {why}" for engine, why in missing.items()]
    return "\n".join(lines) + "\n"


def plot(rounds: Sequence[Round], engines: Mapping[str, str], path: Path) -> None:
    """Both figures as bars, with every round as a dot."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    for place, (name, title) in enumerate(zip(COMPARED, ("32 requests", "one request alone"), strict=True), 1):
        axes = figure.add_subplot(1, 2, place)
        for index, engine in enumerate(engines):
            values: list[Any] = series(rounds, engine, name)
            if values:
                axes.bar(
                    index, statistics.median(values), color="tab:blue" if engine in engines.values() else "tab:gray"
                )
                axes.plot([index] * len(values), values, "k.", markersize=4)
        axes.set_xticks(range(len(engines)), [engine.replace(" ", "\n") for engine in engines], fontsize=8)
        axes.set_title(title)
        axes.set_ylabel("output tokens/s")
    figure.savefig(path)
