"""``quire session``: look at stored sessions, copy, pin and drop them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from cluster.cli import sampling, terminal

if TYPE_CHECKING:
    from cluster.pb.inference_pb2 import Session

Name = Annotated[str, typer.Argument(help="Name of the session.")]
Json = Annotated[bool, typer.Option("--json", help="Print it as JSON.")]

app = typer.Typer(no_args_is_help=True, help="Stored sessions: look, copy, keep, drop.")


def register(parent: typer.Typer) -> None:
    """Add the commands."""
    parent.add_typer(app, name="session")


@app.command()
def get(
    name: Name,
    address: sampling.Address = sampling.DEFAULT_ADDRESS,
    api_key: sampling.ApiKey = None,
    json: Json = False,
) -> None:
    """Print what is stored of a session.

    [bold]Examples[/]

      quire session get trip

      quire session get trip --json | jq -r '.messages[-1].content'
    """
    from router.client import Client

    with Client(address, api_key=api_key) as client:
        found = client.get_session(name)
    if json:
        _print_json(found)
        return
    for message in found.messages:
        terminal.out.print(message.role, style="bold", markup=False)
        terminal.out.print(message.content, markup=False)
    terminal.err.print(summary(found), style="dim", markup=False)


@app.command()
def delete(name: Name, address: sampling.Address = sampling.DEFAULT_ADDRESS, api_key: sampling.ApiKey = None) -> None:
    """Drop a session. A turn that runs on it is ended.

    [bold]Example[/]

      quire session delete trip
    """
    from router.client import Client

    with Client(address, api_key=api_key) as client:
        client.delete_session(name)


@app.command()
def fork(
    name: Name,
    new_name: Annotated[str, typer.Argument(help="Name of the copy; it must not exist.")],
    address: sampling.Address = sampling.DEFAULT_ADDRESS,
    api_key: sampling.ApiKey = None,
    json: Json = False,
) -> None:
    """Copy a session, as its last turn left it: the two go their own ways from there.

    [bold]Example[/]

      quire session fork trip trip-by-train
    """
    from router.client import Client

    with Client(address, api_key=api_key) as client:
        _show(client.fork_session(name, new_name), json)


@app.command()
def pin(
    name: Name,
    off: Annotated[bool, typer.Option("--off", help="Let it run out again.")] = False,
    address: sampling.Address = sampling.DEFAULT_ADDRESS,
    api_key: sampling.ApiKey = None,
    json: Json = False,
) -> None:
    """Keep a session for ever, within the tenant's budget of bytes.

    [bold]Examples[/]

      quire session pin trip

      quire session pin trip --off
    """
    from router.client import Client

    with Client(address, api_key=api_key) as client:
        _show(client.pin_session(name, pinned=not off), json)


def summary(session: Session) -> str:
    """One line."""
    kept = "pinned" if session.pinned else f"expires in {session.expires_in_s / 3600:.1f} h"
    busy = ", a turn runs now" if session.busy else ""
    return (
        f"{session.session_id}: {len(session.messages)} messages, {session.tokens:,} tokens, {session.bytes:,} bytes, "
        f"version {session.version}, {kept}{busy}"
    )


def _show(session: Session, json: bool) -> None:
    if json:
        _print_json(session)
    else:
        terminal.out.print(summary(session), markup=False)


def _print_json(session: Session) -> None:
    from cluster.cli.status import as_json

    terminal.out.print(as_json(session), markup=False)
