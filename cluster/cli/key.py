"""``quire key``: make an API key."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from cluster.cli import terminal
from cluster.errors import ConfigError


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(key)


def key(
    tenant: Annotated[str, typer.Argument(help="Who the key belongs to: letters, digits, '-', '_', '.'.")],
    file: Annotated[Path, typer.Option(help="Key file to append to; made when absent.")] = Path("api-keys.txt"),
) -> None:
    """Make an API key for a tenant: the key is printed once, only its SHA-256 is kept.

    [bold]Examples[/]

      quire key alice --file keys.txt

      quire serve --api-keys keys.txt

      QUIRE_API_KEY=quire_... quire chat --once "Hello"
    """
    from router.auth import make_key

    secret, line = make_key(tenant)
    try:
        # Not for other users: a hash is not the key, but who has which tenant's is nobody's business.
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "a") as keys:
            keys.write(line + "\n")
    except OSError as error:
        raise ConfigError(f"--file {file}: {error.strerror or error}", field="file") from error
    terminal.out.print(secret, markup=False)
    terminal.err.print(f"the hash is in {file}; the key itself is kept nowhere", markup=False)
