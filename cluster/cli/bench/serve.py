"""placeholder"""

import typer


def register(group: typer.Typer) -> None: ...
