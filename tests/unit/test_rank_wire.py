"""Plans as bytes, and who may join a group."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import GroupLost, ProtocolError
from workers.plan import RankPlan
from workers.plan_wire import decode, encode
from workers.rank_group import RankLink, RankListener
from workers.rank_wire import RANK_PROTOCOL_VERSION, Connection, Kind, host_identity, number_of, proof

int32s = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20)


@st.composite
def plans(draw: st.DrawFn) -> RankPlan:
    rows = draw(st.integers(0, 8))

    def numbers(count: int | None = None) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
        wanted = int32s if count is None else st.lists(st.integers(0, 2**31 - 1), min_size=count, max_size=count)
        return np.array(draw(wanted), np.int32)

    return RankPlan(
        step=draw(st.integers(-1, 2**62)),
        token_ids=numbers(),
        row_starts=numbers(rows + 1),
        num_computed=numbers(rows),
        block_starts=numbers(rows + 1),
        blocks=numbers(),
        copies=numbers(2 * draw(st.integers(0, 3))).reshape(-1, 2),
        draw_rows=numbers(),
        scored=numbers(3 * draw(st.integers(0, 3))).reshape(-1, 3),
    )


FIELDS = ("token_ids", "row_starts", "num_computed", "block_starts", "blocks", "copies", "draw_rows", "scored")


@given(plans())
def test_a_plan_arrives_as_it_was(plan: RankPlan) -> None:
    found = decode(encode(plan))
    assert found.step == plan.step
    for name in FIELDS:
        mine, theirs = getattr(plan, name), getattr(found, name)
        assert mine.shape == theirs.shape
        assert (mine == theirs).all()
        assert theirs.dtype == np.int32


@given(plans(), st.data())
def test_a_damaged_plan_is_refused(plan: RankPlan, data: st.DataObject) -> None:
    whole = encode(plan)
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(ProtocolError):
        decode(whole[:cut])
    with pytest.raises(ProtocolError, match="version"):
        decode(b"\xff\xff" + whole[2:])


@pytest.fixture
def listener() -> Iterator[RankListener]:
    found = RankListener("127.0.0.1", "token")
    yield found
    found.close()


def greet(listener: RankListener, rank: int, token: str = "token", version: int = RANK_PROTOCOL_VERSION) -> Connection:
    connection = Connection(socket.create_connection((listener.host, listener.port), 5))
    challenge = connection.expect(Kind.CHALLENGE, 5)
    hello = {"version": version, "rank": rank, "pid": 1, "host": host_identity()}
    connection.send_json(Kind.HELLO, {**hello, "proof": proof(token, challenge, rank)})
    return connection


def test_only_who_knows_the_token_joins_and_nobody_twice(listener: RankListener) -> None:
    found: list[RankLink] = []
    joining = threading.Thread(target=lambda: found.extend(listener.accept(3, 30)))
    joining.start()
    strangers = [greet(listener, 1, token="other"), greet(listener, 1, version=99), greet(listener, 0)]
    friends = [greet(listener, 2), greet(listener, 1)]
    joining.join(30)
    assert [link.rank for link in found] == [1, 2], "in order of rank, whoever came first"
    for stranger in strangers:
        with pytest.raises((EOFError, OSError)):
            stranger.receive(5)
    for one in (*strangers, *friends, *(link.connection for link in found)):
        one.close()


def test_a_rank_that_does_not_come_is_named(listener: RankListener) -> None:
    with pytest.raises(GroupLost, match=r"ranks \[1, 2\] did not come"):
        listener.accept(3, 0.05)


def test_frames_that_are_none_are_refused() -> None:
    ours, theirs = socket.socketpair()
    connection = Connection.__new__(Connection)
    connection._socket, connection._sending = ours, threading.Lock()
    theirs.sendall(b"\xff\xff\xff\xff\x06")
    with pytest.raises(ProtocolError, match="no frame is longer"):
        connection.receive(5)
    theirs.sendall(b"\x00\x00\x00\x00\x63")
    with pytest.raises(ProtocolError, match="unknown kind 99"):
        connection.receive(5)
    with pytest.raises(ProtocolError):
        number_of(b"123")
    theirs.close()
    with pytest.raises(EOFError):
        connection.receive(5)
    ours.close()
