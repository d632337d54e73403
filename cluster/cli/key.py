"""``quire key``: make an API key."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
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
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", tenant):
        raise ConfigError(f"tenant: 1 to 64 letters, digits, '-', '_' or '.'; got {tenant!r}", field="tenant")
    secret = f"quire_{secrets.token_urlsafe(32)}"
    line = f"{tenant} {hashlib.sha256(secret.encode()).hexdigest()}\n"
    try:
        # Not for other users: a hash is not the key, but who has which tenant's is nobody's business.
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "a") as keys:
            keys.write(line)
    except OSError as error:
        raise ConfigError(f"--file {file}: {error.strerror or error}", field="file") from error
    terminal.out.print(secret, markup=False)
    terminal.err.print(f"the hash is in {file}; the key itself is kept nowhere", markup=False)
