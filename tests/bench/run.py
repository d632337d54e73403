"""All benches, one after the other: a Markdown table, JSON and plots into a folder that git ignores.

python -m tests.bench.run [--out bench-results] [--only NAME ...] [--threads N]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from tests.bench import batching, chunked_prefill, kv_cache, paging, prefix_cache, prefix_tier, weight_formats
from tests.bench.common import MODEL, Result, engine_on
from workers.offline import Offline

BENCHES: dict[str, Callable[[Offline], Result]] = {
    "kv_cache": kv_cache.run,
    "batching": batching.run,
    "paging": paging.run,
    "prefix_cache": prefix_cache.run,
    "prefix_tier": prefix_tier.run,
    "chunked_prefill": chunked_prefill.run,
    "weight_formats": weight_formats.run,
}


def main() -> None:
    """Run what was asked for, and write it down as each is done."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench-results"))
    parser.add_argument("--only", nargs="*", choices=list(BENCHES), default=list(BENCHES))
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    base = engine_on(MODEL, threads=options.threads, pool_tokens=16)
    parts = [f"# Benches\n\n{MODEL}, {base.threads} threads, one sitting: ratios hold, absolute figures move.\n"]
    for name in options.only:
        start = time.perf_counter()
        result = BENCHES[name](base)
        sys.stderr.write(f"{name}: {time.perf_counter() - start:.1f} s\n")
        _write(options.out, name, result)
        parts.append(markdown(name, result))
        (options.out / "README.md").write_text("\n".join(parts), encoding="utf-8")
    sys.stdout.write("\n".join(parts))


def markdown(name: str, result: Result) -> str:
    """A section with the table and the plot."""
    lines = [f"## {result.title}\n", "| " + " | ".join(result.heading) + " |", "|---" * len(result.heading) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in result.rows]
    return "\n".join([*lines, "", result.note, "", f"![{result.title}]({name}.png)", ""])


def _write(folder: Path, name: str, result: Result) -> None:
    from matplotlib.figure import Figure

    kept = {key: value for key, value in asdict(result).items() if key != "plot"}
    (folder / f"{name}.json").write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(result.title)
    result.plot(axes)
    figure.savefig(folder / f"{name}.png")


if __name__ == "__main__":
    main()
