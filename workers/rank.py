"""A rank of a group beside its leader, as a process: ``python -m workers.rank RANK LEADER_ADDRESS``.

The configuration comes as JSON on standard input, the group's token in QUIRE_WORKER_TOKEN: neither shows in a list of
processes. A rank ends with its leader.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

from pydantic import SecretStr

from cluster.config import ClusterConfig
from cluster.errors import QuireError
from cluster.lifecycle import dies_with_parent
from cluster.rpc import split_host_port
from cluster.telemetry import get_logger, setup_logging
from workers.collective import RanksParted
from workers.rank_start import follow
from workers.rank_wire import Connection

TOKEN_VARIABLE = "QUIRE_WORKER_TOKEN"

_CONNECT_TIMEOUT_S = 30.0
_END_TIMEOUT_S = 10.0

_log = get_logger("ranks")


def join_leader(config: ClusterConfig, rank: int, address: str) -> None:
    """Be this rank until the leader says that it is the end. Raises what ``follow`` raises."""
    connection = Connection(socket.create_connection(split_host_port(address), _CONNECT_TIMEOUT_S))
    try:
        follow(config, rank, connection)
    finally:
        connection.close()


@contextlib.contextmanager
def spawned(config: ClusterConfig, address: str) -> Iterator[list[int]]:
    """Ranks 1 and up of a group as children of this process; yields their process ids. None is left behind."""
    token = config.worker_token.get_secret_value() if config.worker_token else ""
    settings = config.model_dump_json(exclude={"worker_token", "cluster_secret"})
    children: list[subprocess.Popen[str]] = []
    try:
        for rank in range(1, config.tp):
            command = dies_with_parent([sys.executable, "-m", "workers.rank", str(rank), address])
            environment = {**os.environ, TOKEN_VARIABLE: token, **_card(config, rank)}
            child = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, text=True)
            children.append(child)
            assert child.stdin is not None
            with child.stdin as pipe:
                pipe.write(settings)
        yield [child.pid for child in children]
        for child in children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_END_TIMEOUT_S)
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
            child.wait()


def _card(config: ClusterConfig, rank: int) -> dict[str, str]:
    """Which card a child sees, as its only one: rank r has the r-th of ours. (Ray does this for its actors.)"""
    if config.engine.device == "cpu":
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    cards = [str(number) for number in range(config.tp)] if visible is None else visible.split(",")
    return {"CUDA_VISIBLE_DEVICES": cards[rank]} if rank < len(cards) else {}


def main() -> int:
    """1 when the rank could not start, or lost its leader."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all of a terminal; the leader ends its ranks
    rank, address = int(sys.argv[1]), sys.argv[2]
    setup_logging(f"rank {rank}")
    config = ClusterConfig.model_validate_json(sys.stdin.read())
    config = config.model_copy(update={"worker_token": SecretStr(os.environ.get(TOKEN_VARIABLE, ""))})
    try:
        join_leader(config, rank, address)
    except QuireError as error:
        _log.error("%s", error.message)
        return 1
    except (RanksParted, EOFError, OSError) as error:
        _log.error("the leader is gone: %s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
