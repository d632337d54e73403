"""A group of several ranks, as its leader sees it: who joins, what each is told, and how one that is lost is noticed.

Rank 0 is the leader's own runner. The others are processes that connect to a port of the leader's, load their part, and
follow: for each step the leader sends them the plan, and all compute it together. A rank that is gone or has failed
ends the group: what the others have in their pages then belongs to no step. Nothing is repaired; the group is replaced.
"""

from __future__ import annotations

import contextlib
import hmac
import math
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from cluster.errors import ConfigError, GroupLost, ProtocolError, QuireError, from_reason
from cluster.rpc import join_host_port
from cluster.telemetry import get_logger
from workers.collective import Collective, RanksParted
from workers.plan import RankPlan, StepPlan, StepResult
from workers.plan_wire import encode
from workers.rank_wire import RANK_PROTOCOL_VERSION, Connection, Kind, number_of, proof
from workers.tier import FetchOrder, Report, StoreOrder
from workers.tier_wire import decode_report, encode_fetch, encode_store

_log = get_logger("ranks")

JOIN_TIMEOUT_S = 600.0
"""For all ranks to start, and for all to load: large models on slow disks take minutes."""

_GREETING_TIMEOUT_S = 10.0
_CAUSE_TIMEOUT_S = 2.0
_STOP_TIMEOUT_S = 5.0
_ANSWER_TIMEOUT_S = 600.0
"""Who watches over the group sees much sooner that nothing gets on."""

START_SILENCE_S = 60.0
"""A rank that is compiling or loading still sends a beat now and then."""

_WATCH_S = 0.5

TRIAL_STEP = -1
_NOTHING = -2
"""Less than any step."""


@dataclass(frozen=True, slots=True)
class RankFacts:
    """One rank, for people who look at the group."""

    rank: int
    pid: int
    weight_bytes: int
    kv_bytes: int
    heartbeat_age_s: float


@dataclass(slots=True, eq=False)
class RankLink:
    """The leader's end of one rank. A thread of its own listens; everything else is the engine's thread."""

    rank: int
    pid: int
    host: str
    connection: Connection
    weight_bytes: int = 0
    kv_bytes: int = 0
    heard_at: float = field(default_factory=time.monotonic)
    progress: int = 0
    done: int = _NOTHING
    lost: str | None = None
    lost_at: float = math.inf
    said: str = ""
    """Why it has failed, in its own words."""
    on_report: Report = lambda report: None

    def listen(self, news: threading.Condition, on_lost: Callable[[], None]) -> None:
        """Take in what the rank says until it is lost."""
        try:
            while self.lost is None:
                kind, body = self.connection.receive(None)
                with news:
                    self._take(kind, body)
                    news.notify_all()
        except (EOFError, OSError, ProtocolError) as error:
            with news:
                self.lose(f"rank {self.rank} is gone: {error}")
                news.notify_all()
        on_lost()

    def _take(self, kind: Kind, body: bytes) -> None:
        self.heard_at = time.monotonic()
        if kind == Kind.BEAT:
            self.progress = number_of(body)
        elif kind == Kind.DONE:
            self.done = number_of(body)
        elif kind == Kind.TRANSFERRED:
            self.on_report(decode_report(body))
        elif kind == Kind.FAILED:
            self.said = body.decode(errors="replace")
            self.lose(f"rank {self.rank} failed: {self.said}")
        else:
            raise ProtocolError(f"rank {self.rank} sent {kind.name}")

    def lose(self, why: str) -> None:
        """Note the first cause. Under the lock of ``listen``'s news."""
        if self.lost is None:
            self.lost, self.lost_at = why, time.monotonic()


class RemoteTransfers:
    """Another rank's part in the tier, as the leader has it. Raises OSError where the rank is lost."""

    def __init__(self, link: RankLink, report: Report) -> None:
        self._connection = link.connection
        link.on_report = report

    def fetch(self, order: FetchOrder) -> None:
        """See Transfers."""
        self._connection.send(Kind.FETCH, encode_fetch(order))

    def stage(self, order: StoreOrder) -> None:
        """See Transfers: the rank takes it between the two steps that it is sent between."""
        self._connection.send(Kind.STORE, encode_store(order))

    def close(self) -> None:
        """The rank closes its own."""


def start_error(rank: int, said: str) -> QuireError:
    """What a rank could not start with, from its own words."""
    reason, _, message = said.partition(": ")
    if reason.isupper():
        return from_reason(reason, f"rank {rank}: {message}")
    return GroupLost(f"rank {rank} was lost while it started: {said}")


class RankListener:
    """Where a group's other ranks come to. Made before they are started, since they are told its address."""

    def __init__(self, host: str, token: str) -> None:
        """Listens at a free port of ``host``. Raises ConfigError for a foreign address."""
        self._token = token
        try:
            self._socket = socket.create_server((host, 0))
        except OSError as error:
            raise ConfigError(f"worker.host: cannot listen on {host}: {error}", field="worker.host") from error
        self.host = host
        self.port: int = self._socket.getsockname()[1]

    @property
    def address(self) -> str:
        """host:port for the ranks."""
        return join_host_port(self.host, self.port)

    def accept(self, ranks: int, timeout_s: float = JOIN_TIMEOUT_S) -> list[RankLink]:
        """Ranks 1 to ``ranks`` - 1, in order. Who cannot prove that it belongs here is sent away.

        Raises GroupLost when they do not all come.
        """
        found: dict[int, RankLink] = {}
        give_up = time.monotonic() + timeout_s
        while len(found) < ranks - 1:
            missing = [rank for rank in range(1, ranks) if rank not in found]
            self._socket.settimeout(max(0.001, give_up - time.monotonic()))
            try:
                sock, peer = self._socket.accept()
            except TimeoutError as error:
                for link in found.values():
                    link.connection.close()
                raise GroupLost(f"ranks {missing} did not come within {timeout_s:.0f} s") from error
            connection = Connection(sock)
            try:
                link = self._greeted(connection, missing)
                found[link.rank] = link
            except (EOFError, OSError, ProtocolError) as error:
                _log.warning("%s may not join: %s", peer, error)
                connection.close()
        return [found[rank] for rank in sorted(found)]

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()

    def _greeted(self, connection: Connection, missing: Sequence[int]) -> RankLink:
        challenge = secrets.token_bytes(32)
        connection.send(Kind.CHALLENGE, challenge)
        hello = connection.expect_json(Kind.HELLO, _GREETING_TIMEOUT_S)
        rank, version = hello.get("rank"), hello.get("version")
        if version != RANK_PROTOCOL_VERSION:
            raise ProtocolError(f"it speaks version {version}; this leader speaks {RANK_PROTOCOL_VERSION}")
        if not isinstance(rank, int) or rank not in missing:
            raise ProtocolError(f"rank {rank} is not awaited; missing are {list(missing)}")
        if not hmac.compare_digest(str(hello.get("proof")), proof(self._token, challenge, rank)):
            raise ProtocolError("its worker_token is another one")
        return RankLink(rank, int(hello.get("pid", 0)), str(hello.get("host", "")), connection)


class LeadingRunner(Protocol):
    """What a RankedGroup needs of workers/runner.py."""

    @property
    def num_blocks(self) -> int:
        """Pages of every rank's pool."""
        ...

    def resolve(self, plan: StepPlan) -> RankPlan:
        """What all ranks are told."""
        ...

    def lead(self, plan: StepPlan, told: RankPlan) -> StepResult:
        """Rank 0's part."""
        ...

    def progress(self) -> int:
        """Grows while a step gets on."""
        ...


class RankedGroup:
    """See Group. It listens to its ranks from the beginning: one that is lost ends the trial step too, in which the
    leader's thread waits for the others inside compiled code. ``begin`` it with the leader's runner."""

    def __init__(self, links: Sequence[RankLink], collective: Collective, num_blocks: int) -> None:
        self._runner: LeadingRunner | None = None
        self._links = tuple(links)
        self._collective = collective
        self._news = threading.Condition()
        self._closing = False
        self.num_blocks = num_blocks
        for link in self._links:
            name = f"rank {link.rank}"
            link.heard_at = time.monotonic()
            threading.Thread(target=link.listen, args=(self._news, self._on_lost), name=name, daemon=True).start()

    def begin(self, make_runner: Callable[[], LeadingRunner], silence_s: float = START_SILENCE_S) -> None:
        """Make the leader's runner, whose trial step all ranks compute together. None may be silent for longer than
        ``silence_s`` meanwhile.

        Raises what the leader or a rank could not start with, or GroupLost.
        """
        begun = threading.Event()
        threading.Thread(target=self._watch_silence, args=(begun, silence_s), name="start watch", daemon=True).start()
        try:
            runner = make_runner()
        except RanksParted as error:
            self._wait(lambda: self.failure() is not None, _CAUSE_TIMEOUT_S)
            raise self._start_error() or GroupLost(str(error)) from error
        finally:
            begun.set()
        self._wait(lambda: all(link.done == TRIAL_STEP or link.lost for link in self._links), JOIN_TIMEOUT_S)
        if (lost := self._start_error()) is not None:
            raise lost
        if late := [link.rank for link in self._links if link.done != TRIAL_STEP]:
            raise GroupLost(f"ranks {late} did not end their trial step within {JOIN_TIMEOUT_S:.0f} s")
        self._runner = runner

    def _watch_silence(self, begun: threading.Event, silence_s: float) -> None:
        while not begun.wait(_WATCH_S):
            for link in self._links:
                silent_s = time.monotonic() - link.heard_at
                if link.lost is None and silent_s > silence_s:
                    with self._news:
                        link.lose(f"rank {link.rank} has been silent for {silent_s:.0f} s")
                        self._news.notify_all()
                    link.connection.close()

    def _start_error(self) -> QuireError | None:
        lost = [link for link in self._links if link.lost]
        if not lost:
            return None
        first = min(lost, key=lambda link: link.lost_at)
        return start_error(first.rank, first.said) if first.said else GroupLost(str(first.lost))

    def execute(self, plan: StepPlan) -> StepResult:
        """See Group. Raises GroupLost once a rank is lost, with what it said."""
        if self._runner is None:
            raise RuntimeError("the group is closed")
        told = self._runner.resolve(plan)
        self._raise_if_lost()
        message = encode(told)
        try:
            for link in self._links:
                link.done = _NOTHING
                link.connection.send(Kind.PLAN, message)
            result = self._runner.lead(plan, told)
        except (OSError, RanksParted) as error:
            self._wait(lambda: self.failure() is not None, _CAUSE_TIMEOUT_S)  # who is lost says more than that we are
            raise GroupLost(self.failure() or str(error)) from error
        self._wait(lambda: all(link.done == plan.step or link.lost for link in self._links), _ANSWER_TIMEOUT_S)
        self._raise_if_lost()
        if late := [link.rank for link in self._links if link.done != plan.step]:
            raise GroupLost(f"ranks {late} did not answer within {_ANSWER_TIMEOUT_S:.0f} s")
        return result

    def failure(self) -> str | None:
        """Why nothing can be computed any more; from any thread."""
        return min(self._links, key=lambda link: link.lost_at).lost  # the first: others fail because of it

    def progress(self) -> int:
        """See Group."""
        return self._runner.progress() if self._runner is not None else 0

    def ranks(self) -> list[RankFacts]:
        """The other ranks; from any thread."""
        now = time.monotonic()
        return [
            RankFacts(link.rank, link.pid, link.weight_bytes, link.kv_bytes, max(0.0, now - link.heard_at))
            for link in self._links
        ]

    def close(self) -> None:
        """Tell the ranks to end, and wait a little for it. Idempotent."""
        if self._closing:
            return
        self._runner, self._closing = None, True
        for link in self._links:
            with contextlib.suppress(OSError):
                link.connection.send(Kind.STOP)
        self._wait(lambda: all(link.lost for link in self._links), _STOP_TIMEOUT_S)
        self._collective.close()
        for link in self._links:
            link.connection.close()

    def _on_lost(self) -> None:
        if not self._closing:
            _log.error("%s", self.failure())
            self._collective.abort()

    def _raise_if_lost(self) -> None:
        if (failure := self.failure()) is not None:
            raise GroupLost(failure)

    def _wait(self, ready: Callable[[], Any], timeout_s: float) -> None:
        with self._news:
            self._news.wait_for(ready, timeout_s)
