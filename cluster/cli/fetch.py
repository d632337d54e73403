"""``quire fetch``: get a model before it is needed."""

from __future__ import annotations

from typing import Annotated

import typer

from cluster.cli import terminal


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(fetch)


def fetch(model: Annotated[str, typer.Argument(help="Built-in name or hub id.")] = "smollm2-135m") -> None:
    """Download a model into the cache folder, verified, and print where it lies.

    Does nothing when it is there already. QUIRE_CACHE names another cache folder.

    [bold]Example[/]

      quire fetch smollm2-135m
    """
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    from cluster import models

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=terminal.err, disable=not terminal.err.is_terminal) as bar:
        task = bar.add_task(model, total=None)
        files = models.fetch(model, progress=lambda done, total: bar.update(task, completed=done, total=total or None))
    terminal.out.print(str(files.path), markup=False)
