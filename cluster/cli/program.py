"""The command tree, and the one place where an error becomes a line and an exit code."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version

import typer

from cluster.cli import bench, chat, configuration, demo, fetch, generate, key, plan, serve, session, status, terminal
from cluster.errors import QuireError

app = typer.Typer(
    name="quire",
    help="Serve large language models to gRPC clients from a cluster of worker groups.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)

for module in (serve, chat, generate, session, status, fetch, demo, plan, bench, key, configuration):
    module.register(app)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"quire {version('quire')}")
        raise typer.Exit


@app.callback()
def _root(
    _version: bool = typer.Option(False, "--version", callback=_show_version, is_eager=True, help="Print the version."),
) -> None:
    """Serve large language models to gRPC clients from a cluster of worker groups."""


def run(arguments: Sequence[str]) -> int:
    """Run one command; returns the exit code."""
    try:
        app(list(arguments), prog_name="quire")  # always exits: typer shows wrong usage itself, and what else it knows
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    except QuireError as error:
        terminal.error(error)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0
