"""``quire bench``: measure an engine in this process, or a running cluster. Nothing here is loaded until it runs."""

from __future__ import annotations

import typer

from cluster.cli.bench import engine, serve


def register(app: typer.Typer) -> None:
    """Add the two commands below ``bench``."""
    group = typer.Typer(help="Measure an engine offline, or a running cluster.", no_args_is_help=True)
    engine.register(group)
    serve.register(group)
    app.add_typer(group, name="bench")
