"""``quire demo``: the main job from end to end, in one command that checks itself."""

from __future__ import annotations

import time

import psutil
import typer

from cluster.cli import terminal
from cluster.errors import QuireError

QUESTION = "What is the capital of France?"
EXPECTED = "Paris"
FOLLOW_UP = "Name one famous museum there."


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(demo)


def demo() -> None:
    """Start two groups, stream an answer, ask a follow-up in the same session, stop. Fails if any of it does.

    [bold]Example[/]

      quire demo
    """
    from cluster.cli.interrupts import interruptible
    from cluster.cli.local import local_cluster
    from cluster.config import load

    began = time.monotonic()
    done = False
    with interruptible() as interrupts:
        config = load(None, {"groups": 2, "router.port": 0})
        with local_cluster(config, interrupts) as serving:
            _converse(serving.addresses[0])
            done = True
    if not done:
        raise typer.Exit(130)
    _check_nothing_left()
    terminal.out.print(f"done in {time.monotonic() - began:.0f} s; every process has ended")


def _converse(address: str) -> None:
    from cluster.cli.stream import Answer, print_events, print_usage
    from router.client import Client

    messages: list[dict[str, str]] = []

    def ask(client: Client, question: str) -> Answer:
        terminal.out.print(f"\n> {question}", style="bold", markup=False)
        messages.append({"role": "user", "content": question})
        answer = print_events(client.chat(messages, session_id="demo", temperature=0.0, max_tokens=64, timeout_s=120.0))
        print_usage(answer)
        messages.append({"role": "assistant", "content": answer.text})
        return answer

    with Client(address) as client:
        if EXPECTED not in ask(client, QUESTION).text:
            raise QuireError(f"the answer does not name {EXPECTED}")
        cached = ask(client, FOLLOW_UP).cached_tokens
        terminal.out.print(f"cached tokens: {cached}", markup=False)
        if cached == 0:
            raise QuireError("the follow-up found none of the conversation's pages")


def _check_nothing_left() -> None:
    left = psutil.Process().children(recursive=True)
    if left:
        raise QuireError(f"processes are left: {', '.join(f'{one.pid} {one.name()}' for one in left)}")
