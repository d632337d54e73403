"""``quire chat``: a conversation on the terminal.

Without ``--session`` the history lives here and each turn sends all of it; with it the cluster keeps the history, each
turn sends only what was typed, and another ``quire chat`` may go on with it.
"""

from __future__ import annotations

import contextlib
import sys
import uuid
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.cli import sampling, terminal
from cluster.errors import ConfigError, QuireError, SessionNotFound

if TYPE_CHECKING:
    from collections.abc import Callable

    from router.client import Client

HELP = "/new starts over, /quit or Ctrl-D leaves, Ctrl-C stops an answer"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(chat)


def chat(
    once: Annotated[str | None, typer.Option(help="Ask this, print the answer, leave.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    session: Annotated[
        str | None, typer.Option(help="Let the cluster keep the conversation under this name, or go on with it.")
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

      quire chat --session trip; quire chat --session trip --once "And of Italy?"

    With --session, /new drops what is stored under that name and begins again. `quire session` looks at it.
    """
    from router.client import Client

    options: dict[str, Any] = {
        "model": model,
        "session_id": "" if session else uuid.uuid4().hex,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
        "stop": stop or [],
        "timeout_s": timeout,
    }
    beginning = [{"role": "system", "content": system}] if system else []
    with Client(address, api_key=api_key) as client:
        talk = Stored(client, session, beginning, options) if session else Local(client, beginning, options)
        if once is not None:
            talk.turn(sys.stdin.read() if once == "-" else once)
        else:
            _converse(talk)


class Local:
    """A conversation that lives here."""

    def __init__(self, client: Client, beginning: list[dict[str, str]], options: dict[str, Any]) -> None:
        self._client = client
        self._beginning = beginning
        self._options = options
        self._messages = list(beginning)

    def turn(self, text: str) -> None:
        """Ask one question, and print the answer. A broken turn is not added to the conversation."""
        asked = [*self._messages, {"role": "user", "content": text}]
        answer = _ask(self._client, asked, **self._options)
        self._messages = [*asked, {"role": "assistant", "content": answer}]

    def restart(self) -> None:
        """Forget everything but the beginning."""
        self._messages = list(self._beginning)
        self._options["session_id"] = uuid.uuid4().hex


class Stored:
    """A conversation that the cluster keeps."""

    def __init__(self, client: Client, name: str, beginning: list[dict[str, str]], options: dict[str, Any]) -> None:
        """Looks whether it exists. Raises ConfigError for a system message that would come amid the conversation."""
        self._client = client
        self._name = name
        self._beginning = beginning
        self._options = options
        self._is_new = not self._show()
        if beginning and not self._is_new:
            raise ConfigError(
                f"--system: session {name} has begun already; use another name, or `quire session delete {name}`",
                field="system",
            )

    def turn(self, text: str) -> None:
        """Send one question, and print the answer. A broken turn is not stored."""
        new = [*(self._beginning if self._is_new else []), {"role": "user", "content": text}]
        _ask(self._client, new, session=self._name, **self._options)
        self._is_new = False

    def restart(self) -> None:
        """Drop what is stored."""
        with contextlib.suppress(SessionNotFound):
            self._client.delete_session(self._name)
        self._is_new = True

    def _show(self) -> bool:
        from cluster.cli.session import summary

        try:
            found = self._client.get_session(self._name)
        except SessionNotFound:
            return False
        terminal.err.print(summary(found), style="dim", markup=False)
        return True


def _ask(client: Client, messages: list[dict[str, str]], **options: Any) -> str:
    from cluster.cli.stream import print_events, print_usage

    answer = print_events(client.chat(messages, **options))
    print_usage(answer)
    return answer.text


def _converse(talk: Local | Stored) -> None:
    terminal.err.print(HELP, style="dim", markup=False)
    while True:
        try:
            text = input("> " if terminal.is_interactive() else "").strip()
        except EOFError:
            return
        if text in ("/quit", "/exit"):
            return
        if text == "/new":
            _one_step(talk.restart)
        elif text:
            _one_step(partial(talk.turn, text))


def _one_step(step: Callable[[], None]) -> None:
    """In a conversation neither an error nor Ctrl-C ends the program: the user may want to try again."""
    try:
        step()
    except QuireError as error:
        if not terminal.is_interactive():
            raise
        terminal.error(error)
    except KeyboardInterrupt:
        if not terminal.is_interactive():
            raise
        terminal.err.print("\nstopped", style="dim")
