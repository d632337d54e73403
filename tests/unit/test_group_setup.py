"""Small parts of a group's start: pool size, addresses, log lines."""

from __future__ import annotations

import json
import logging

import pytest

from cluster.errors import OutOfMemory
from cluster.rpc import bearer, join_host_port
from cluster.telemetry import get_logger, setup_logging
from workers.sizing import pool_blocks


def blocks(**settings: int | None) -> int:
    base: dict[str, int | None] = {
        "bytes_per_block": 1000,
        "block_tokens": 16,
        "max_context_tokens": 100,
        "max_running": 4,
        "free_bytes": 10**9,
        "wanted_bytes": None,
        "groups_on_host": 1,
    }
    return pool_blocks(**{**base, **settings})  # type: ignore[arg-type]


def test_without_a_setting_there_is_room_for_whole_contexts_or_a_share_of_what_is_free() -> None:
    assert blocks() == 4 * 7
    assert blocks(free_bytes=40_000) == 10
    assert blocks(free_bytes=40_000, groups_on_host=2) == 5


def test_a_setting_is_taken_by_its_word() -> None:
    assert blocks(wanted_bytes=999_999) == 999
    assert blocks(wanted_bytes=1000) == 1


@pytest.mark.parametrize(
    "settings", [{"wanted_bytes": 999}, {"wanted_bytes": 2000, "free_bytes": 1999}, {"free_bytes": 3999}]
)
def test_no_memory_for_the_pool_is_one_clear_error(settings: dict[str, int]) -> None:
    with pytest.raises(OutOfMemory) as caught:
        blocks(**settings)
    assert caught.value.metadata["field"] == "engine.kv_memory_bytes"
    assert "\n" not in caught.value.message


def test_addresses_and_credentials() -> None:
    assert join_host_port("127.0.0.1", 5) == "127.0.0.1:5"
    assert join_host_port("::1", 5) == "[::1]:5"
    assert bearer("t") == (("authorization", "Bearer t"),)


@pytest.fixture
def _logger_restored() -> object:
    root = logging.getLogger("quire")
    saved = (root.handlers[:], root.propagate, root.level)
    yield
    root.handlers[:], root.propagate = saved[0], saved[1]
    root.setLevel(saved[2])


@pytest.mark.usefixtures("_logger_restored")
def test_a_record_is_one_line_with_its_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("QUIRE_LOG_FORMAT", raising=False)
    setup_logging("group-0")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        get_logger("server").exception("it failed")
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert "group-0 quire.server: it failed" in line
    assert "ValueError" in line


@pytest.mark.usefixtures("_logger_restored")
def test_json_lines_and_levels(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_LOG_FORMAT", "json")
    monkeypatch.setenv("QUIRE_LOG", "warning")
    setup_logging("router")
    get_logger("x").info("not shown")
    get_logger("x").warning('with "quotes" and\nlines')
    record = json.loads(capsys.readouterr().err)
    assert (record["process"], record["logger"], record["level"]) == ("router", "quire.x", "WARNING")
    assert record["message"] == 'with "quotes" and\nlines'
