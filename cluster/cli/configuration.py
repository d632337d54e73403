"""``quire config``: every setting."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, get_args

import typer

from cluster.cli import terminal


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(name="config")(show)


def show() -> None:
    """Print every setting with its default and meaning, as a YAML file that `quire serve --config` takes.

    [bold]Example[/]

      quire config > cluster.yaml
    """
    from cluster.config import ClusterConfig

    for line in lines(ClusterConfig):
        terminal.out.print(line, markup=False)


def lines(model: Any, indent: str = "") -> Iterator[str]:
    """YAML with comments: one setting after the other, sections nested."""
    from cluster.config import Frozen

    for name, field in model.model_fields.items():
        yield f"{indent}# {field.description}"
        entry = (get_args(field.annotation) or (None,))[-1]
        if isinstance(field.annotation, type) and issubclass(field.annotation, Frozen):
            yield f"{indent}{name}:"
            yield from lines(field.annotation, indent + "  ")
        elif isinstance(entry, type) and issubclass(entry, Frozen):
            yield f"{indent}{name}: {{}}"
            yield f"{indent}#  NAME:"
            yield from (f"{indent}#    {line}" for line in lines(entry))
        else:
            default = field.get_default(call_default_factory=True)
            yield f"{indent}{name}: {json.dumps(default, default=str)}"
