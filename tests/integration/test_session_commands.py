"""``quire chat --session``, ``quire session`` and ``quire status``, as typed, against a real router."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
from collections.abc import Iterator

import pytest

from cluster.cli.program import run
from tests.support.redis import RedisServer, running_redis
from tests.support.routers import World, world

_NAMES = itertools.count()


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


@pytest.fixture
def here(redis_server: RedisServer) -> tuple[str, str]:
    """Redis, and a cluster name of the test's own."""
    return redis_server.url, f"c{next(_NAMES)}"


class Terminal:
    """Types commands; keeps what the last one printed."""

    def __init__(self, running: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("QUIRE_ADDRESS", running.address)
        self._capsys = capsys
        self._monkeypatch = monkeypatch
        self.out = self.err = ""

    async def quire(self, *arguments: str, stdin: str = "") -> int:
        self._monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        code = await asyncio.to_thread(run, arguments)
        self.out, self.err = self._capsys.readouterr()
        return code


async def test_a_conversation_goes_on_in_another_terminal(
    here: tuple[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(*here) as running:
        shell = Terminal(running, capsys, monkeypatch)
        chat = ("chat", "--session", "trip", "--max-tokens", "3", "--seed", "5000")
        assert await shell.quire(*chat, "--system", "Be brief.", "--once", "One") == 0
        first = shell.out.rstrip("\n")
        assert await shell.quire(*chat, stdin="Two\nThree\n") == 0
        assert "trip: 3 messages" in shell.err
        found = await running.client.get_session("trip")
        assert [message.role for message in found.messages] == ["system"] + ["user", "assistant"] * 3
        assert found.messages[2].content == first
        assert [message.content for message in found.messages[1::2]] == ["One", "Two", "Three"]
        assert await shell.quire(*chat, "--system", "Be long.", "--once", "Four") == 1
        assert "--system: session trip has begun already" in shell.err
        assert await shell.quire(*chat, stdin="/new\nAgain\n") == 0
        assert (await running.client.get_session("trip")).messages[0].content == "Again"


async def test_without_a_session_nothing_is_stored(
    here: tuple[str, str],
    redis_server: RedisServer,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with world(*here) as running:
        shell = Terminal(running, capsys, monkeypatch)
        assert await shell.quire("chat", "--max-tokens", "3", stdin="One\nTwo\n") == 0
        assert len(running.groups[0].requests[1].prompt) > len(running.groups[0].requests[0].prompt)
        with redis_server.client() as client:
            assert not list(client.scan_iter(f"{{{here[1]}:*"))


async def test_sessions_are_looked_at_copied_pinned_and_dropped(
    here: tuple[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(*here) as running:
        shell = Terminal(running, capsys, monkeypatch)
        assert await shell.quire("session", "get", "trip") == 1
        assert "there is none" in shell.err
        await shell.quire("chat", "--session", "trip", "--max-tokens", "3", "--once", "One [bold]")
        assert await shell.quire("session", "get", "trip") == 0
        assert shell.out.startswith("user\nOne [bold]\nassistant\n")
        assert "trip: 2 messages" in shell.err
        assert "version 1, expires in 24.0 h" in shell.err
        assert await shell.quire("session", "fork", "trip", "copy") == 0
        assert shell.out.startswith("copy: 2 messages")
        assert await shell.quire("session", "fork", "trip", "copy") == 1
        assert "exists already" in shell.err
        assert await shell.quire("session", "pin", "copy", "--json") == 0
        assert json.loads(shell.out)["pinned"] is True
        assert await shell.quire("session", "pin", "copy", "--off") == 0
        assert "expires in 24.0 h" in shell.out
        assert await shell.quire("session", "delete", "trip") == 0
        assert await shell.quire("session", "delete", "trip") == 1


async def test_status_shows_what_was_used(
    here: tuple[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(*here, tenants={"*": {"tokens_per_minute": 1000}}) as running:
        shell = Terminal(running, capsys, monkeypatch)
        await shell.quire("generate", "Hello", "--max-tokens", "3")
        assert await shell.quire("status", "--once") == 0
        assert "anonymous: 1 requests (0 refused)" in shell.out
        assert "tokens: 1 of prompts (0 cached), 3 generated, 99" in shell.out
        assert await shell.quire("status", "--json") == 0
        assert json.loads(shell.out)["usage"]["output_tokens"] == "3"
