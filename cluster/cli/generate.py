"""``quire generate``: continue a text."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from cluster.cli import sampling


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(generate)


def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads it from stdin.")],
    address: sampling.Address = sampling.DEFAULT_ADDRESS,
    api_key: sampling.ApiKey = None,
    model: sampling.Model = "",
    max_tokens: sampling.MaxTokens = 128,
    temperature: sampling.Temperature = None,
    top_k: sampling.TopK = None,
    top_p: sampling.TopP = None,
    seed: sampling.Seed = None,
    stop: sampling.Stop = None,
    timeout: sampling.Timeout = None,
) -> None:
    """Continue a text as it is, without a chat template.

    [bold]Examples[/]

      quire generate "The three primary colours are" --max-tokens 20 --temperature 0

      quire generate - --stop "###" < prompt.txt
    """
    from cluster.cli.stream import print_events, print_usage
    from router.client import Client

    text = sys.stdin.read() if prompt == "-" else prompt
    with Client(address, api_key=api_key) as client:
        events = client.generate(
            text,
            model=model,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            stop=stop or [],
            timeout_s=timeout,
        )
        print_usage(print_events(events))
