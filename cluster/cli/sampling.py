"""Flags that `chat` and `generate` share."""

from __future__ import annotations

from typing import Annotated

import typer

Address = Annotated[str, typer.Option(envvar="QUIRE_ADDRESS", help="host:port of a router.")]
ApiKey = Annotated[str | None, typer.Option(envvar="QUIRE_API_KEY", help="Where the cluster asks for one.")]
Model = Annotated[str, typer.Option(help="Which model; needed where several are served.")]
MaxTokens = Annotated[int | None, typer.Option(help="Tokens to generate at most.")]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy; unset: 1.")]
TopK = Annotated[int | None, typer.Option(help="Draw among the k most likely tokens.")]
TopP = Annotated[float | None, typer.Option(help="Draw among the most likely tokens of this total probability.")]
Seed = Annotated[int | None, typer.Option(help="Equal seeds give equal answers.")]
Stop = Annotated[list[str] | None, typer.Option(help="End before this text; may be given several times.")]
Timeout = Annotated[float | None, typer.Option(help="Seconds until the answer must be complete.")]

DEFAULT_ADDRESS = "127.0.0.1:50051"
