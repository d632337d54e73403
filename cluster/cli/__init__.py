"""The ``quire`` command. One file per command; each imports what it needs when it runs, so that --help is instant."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 a QuireError (one line on stderr), 2 wrong usage, 130 interrupted."""
    from cluster.cli.program import run

    sys.exit(run(sys.argv[1:] if arguments is None else arguments))
