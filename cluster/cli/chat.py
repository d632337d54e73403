"""``quire chat``: a conversation on the terminal. The history lives here; each turn sends all of it."""

from __future__ import annotations

import sys
import uuid
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.cli import sampling, terminal
from cluster.errors import QuireError

if TYPE_CHECKING:
    from router.client import Client

HELP = "/new starts over, /quit or Ctrl-D leaves, Ctrl-C stops an answer"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(chat)


def chat(
    once: Annotated[str | None, typer.Option(help="Ask this, print the answer, leave.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    session: Annotated[
        str | None, typer.Option(help="Session id: keeps a conversation at the group that knows it.")
    ] = None,
    address: sampling.Address = sampling.DEFAULT_ADDRESS,
    api_key: sampling.ApiKey = None,
    model: sampling.Model = "",
    max_tokens: sampling.MaxTokens = 512,
    temperature: sampling.Temperature = None,
    top_k: sampling.TopK = None,
    top_p: sampling.TopP = None,
    seed: sampling.Seed = None,
    stop: sampling.Stop = None,
    timeout: sampling.Timeout = None,
) -> None:
    """Chat with the model; the answer streams. Without --once: a conversation.

    [bold]Examples[/]

      quire chat

      quire chat --once "What is the capital of France?" --temperature 0

      echo "Summarize: ..." | quire chat --once -
    """
    from router.client import Client

    options: dict[str, Any] = {
        "model": model,
        "session_id": session or uuid.uuid4().hex,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
        "stop": stop or [],
        "timeout_s": timeout,
    }
    messages = [{"role": "system", "content": system}] if system else []
    with Client(address, api_key=api_key) as client:
        if once is not None:
            text = sys.stdin.read() if once == "-" else once
            turn(client, messages, text, options)
        else:
            _converse(client, messages, options)


def turn(client: Client, messages: list[dict[str, str]], text: str, options: dict[str, Any]) -> None:
    """Ask one question, print the answer, and add both to ``messages``. A broken turn is not added."""
    from cluster.cli.stream import print_events, print_usage

    asked = [*messages, {"role": "user", "content": text}]
    answer = print_events(client.chat(asked, **options))
    print_usage(answer)
    messages[:] = [*asked, {"role": "assistant", "content": answer.text}]


def _converse(client: Client, messages: list[dict[str, str]], options: dict[str, Any]) -> None:
    beginning = list(messages)
    terminal.err.print(HELP, style="dim", markup=False)
    while True:
        try:
            text = input("> " if terminal.is_interactive() else "").strip()
        except EOFError:
            return
        if text in ("/quit", "/exit"):
            return
        if text == "/new":
            messages[:] = beginning
            options["session_id"] = uuid.uuid4().hex
        elif text:
            _one_turn(client, messages, text, options)


def _one_turn(client: Client, messages: list[dict[str, str]], text: str, options: dict[str, Any]) -> None:
    """In a conversation neither an error nor Ctrl-C ends the program: the user may want to try again."""
    try:
        turn(client, messages, text, options)
    except QuireError as error:
        if not terminal.is_interactive():
            raise
        terminal.error(error)
    except KeyboardInterrupt:
        if not terminal.is_interactive():
            raise
        terminal.err.print("\nstopped", style="dim")
