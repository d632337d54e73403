"""Rank 0 of a group: loads the model, builds the engine, serves it, and tells the cluster where.

``python -m workers.leader --config FILE --group-id ID`` runs one group by hand, without Ray.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import secrets
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.config import ClusterConfig, load
from cluster.errors import ConfigError, QuireError
from cluster.membership import GroupRecord, Registry
from cluster.models import resolve
from cluster.pb import worker_pb2
from cluster.rpc import WORKER_PROTOCOL_VERSION, join_host_port
from cluster.telemetry import get_logger, setup_logging
from workers.engine_thread import Heartbeat
from workers.rank import spawned
from workers.rank_group import RankedGroup, RankFacts, RankListener
from workers.rank_start import use_threads
from workers.server import GroupServer

if TYPE_CHECKING:
    from workers.engine import Engine
    from workers.group import Group

_log = get_logger("leader")


@dataclass(frozen=True, slots=True)
class _Built:
    """What loading made."""

    group: Group
    engine: Engine
    close: Callable[[], None]
    model: str
    namespace: str
    device: str
    dtype: str
    vocab_size: int
    threads: int
    rank: RankFacts


class Leader:
    """A running group. Made by ``start_leader``; lives on one event loop."""

    def __init__(self, config: ClusterConfig, group_id: str, built: _Built, registry: Registry | None) -> None:
        self.group_id = group_id
        self.incarnation = secrets.token_hex(16)
        self.address = ""
        self.rank_pids = tuple(one.pid for one in self._ranks(built))
        self.broken = asyncio.Event()
        self._config = config
        self._built = built
        self._registry = registry
        self._server = GroupServer(
            built.engine,
            self._hello(),
            _token(config),
            config.worker,
            on_broken=lambda error: self.broken.set(),
            set_up_thread=lambda: use_threads(built.threads),
            ranks=lambda: self._ranks(built),
        )

    def heartbeat(self) -> Heartbeat:
        """The state of the step loop now, for the supervisor."""
        return self._server.heartbeat()

    @staticmethod
    def _ranks(built: _Built) -> list[RankFacts]:
        others = built.group.ranks() if isinstance(built.group, RankedGroup) else []
        return [built.rank, *others]

    @property
    def open_requests(self) -> int:
        """Requests that have not ended."""
        return self._server.open_requests

    @property
    def announced(self) -> bool:
        """Whether routers can find this group in Redis."""
        return self._registry is not None and self._registry.announced

    async def start(self) -> None:
        """Listen and announce. Raises PortInUse, ConfigError."""
        worker = self._config.worker
        port = await self._server.start(worker.host)
        self.address = join_host_port(worker.host, port)
        if self._registry is not None:
            await self._registry.announce(self._record(), worker.lease_s)
        _log.info("%s serves %s at %s", self.group_id, self._built.model, self.address)

    async def drain(self, timeout_s: float) -> None:
        """Take nothing new; return when what runs has ended, after ``timeout_s`` as GROUP_LOST."""
        await self._server.drain(timeout_s)

    async def stop(self) -> None:
        """Leave the membership, close the port, end the engine. Idempotent; what still runs ends as GROUP_LOST."""
        if self._registry is not None:
            await self._registry.close()
        await self._server.stop()
        await asyncio.to_thread(self._built.close)

    def _hello(self) -> worker_pb2.GroupHello:
        engine, built = self._config.engine, self._built
        return worker_pb2.GroupHello(
            protocol_version=WORKER_PROTOCOL_VERSION,
            group_id=self.group_id,
            incarnation=self.incarnation,
            model=built.model,
            namespace=built.namespace,
            block_tokens=engine.block_tokens,
            total_blocks=built.group.num_blocks,
            max_context_tokens=built.engine.max_request_tokens,
            vocab_size=built.vocab_size,
            max_running=engine.max_running,
            max_batch_tokens=engine.max_batch_tokens,
            tp=self._config.tp,
            device=built.device,
            dtype=built.dtype,
            heartbeat_ms=self._config.worker.heartbeat_ms,
            rank_pids=self.rank_pids,
            max_waiting=engine.max_waiting,
        )

    def _record(self) -> GroupRecord:
        return GroupRecord(
            group_id=self.group_id,
            incarnation=self.incarnation,
            model=self._built.model,
            namespace=self._built.namespace,
            address=self.address,
            tp=self._config.tp,
            device=self._built.device,
            dtype=self._built.dtype,
        )


async def start_leader(config: ClusterConfig, group_id: str, listener: RankListener | None = None) -> Leader:
    """Load the model, serve it at a free port of ``config.worker.host``, and announce it when ``config.redis`` is set.

    ``listener``: where the group's other ranks come to, with ``config.tp`` above 1. Loading runs on a thread: the event
    loop stays live. Redis being away is no error: the group serves, and is announced as soon as Redis is back.

    Raises ModelLoadError, OutOfMemory, PortInUse, ConfigError, GroupLost.
    """
    _token(config)
    registry = Registry(config.redis, config.cluster) if config.redis is not None else None
    leader: Leader | None = None
    try:
        built = await asyncio.to_thread(_build, config, listener, _speaker(registry, group_id))
        leader = Leader(config, group_id, built, registry)
        await leader.start()
        if registry is not None:
            await registry.note_phase(group_id, "")
    except BaseException:
        if leader is not None:
            await leader.stop()
        elif registry is not None:
            await registry.close()
        raise
    return leader


def _speaker(registry: Registry | None, group_id: str) -> Callable[[str], None]:
    """For the thread that loads: note what it does, without waiting for Redis."""
    loop = asyncio.get_running_loop()

    def say(phase: str) -> None:
        _log.info("%s: %s", group_id, phase)
        if registry is not None:
            asyncio.run_coroutine_threadsafe(registry.note_phase(group_id, phase), loop)

    return say


def open_ranks(config: ClusterConfig) -> RankListener | None:
    """Where the other ranks of a group come to; None for a group of one. Raises ConfigError."""
    return RankListener(config.worker.host, _token(config)) if config.tp > 1 else None


def _token(config: ClusterConfig) -> str:
    if config.worker_token is None or not config.worker_token.get_secret_value():
        raise ConfigError(
            "worker_token: must be set: a group's port is for the cluster's routers", field="worker_token"
        )
    return config.worker_token.get_secret_value()


# -- loading: on a thread of its own, slow, and the only part that knows torch ---------------------------------------


def _build(config: ClusterConfig, listener: RankListener | None, say: Callable[[str], None]) -> _Built:
    from workers import assembly
    from workers.engine import Engine
    from workers.identity import dtype_name, namespace
    from workers.rank_start import lead

    started = lead(config, listener, say=say)
    model = started.model
    files = resolve(config.model, name=config.model_name)
    return _Built(
        group=started.group,
        close=started.close,
        engine=Engine(started.group, assembly.make_settings(config, model.config), started.tier),
        model=files.name,
        namespace=namespace(config, files, model.whole, model.dtype),
        device=str(model.device),
        dtype=dtype_name(model.dtype),
        vocab_size=model.config.vocab_size,
        threads=started.threads,
        rank=RankFacts(0, os.getpid(), model.weight_bytes, started.runner.pages.nbytes, 0.0),
    )


# -- by hand ---------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one group until SIGTERM or Ctrl-C; 1 when it cannot start or its engine breaks."""
    parser = argparse.ArgumentParser(prog="workers.leader", description="Run one worker group, without Ray.")
    parser.add_argument("--config", type=Path, required=True, help="YAML file with a ClusterConfig")
    parser.add_argument("--group-id", default="group-0", help="its name in the cluster")
    chosen = parser.parse_args(arguments)
    setup_logging(chosen.group_id)
    try:
        return asyncio.run(_run(load(chosen.config), chosen.group_id))
    except QuireError as error:
        sys.stderr.write(f"error: {error.message}\n")
        return 1


async def _run(config: ClusterConfig, group_id: str) -> int:
    asked = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, asked.set)
    listener = open_ranks(config)
    with spawned(config, listener.address) if listener else contextlib.nullcontext():
        leader = await start_leader(config, group_id, listener)
        try:
            sys.stdout.write(f"{group_id} {leader.address}\n")
            sys.stdout.flush()
            ends = [asyncio.create_task(event.wait()) for event in (asked, leader.broken)]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for end in ends:
                end.cancel()
            if asked.is_set():
                await leader.drain(config.worker.drain_s)
            return int(leader.broken.is_set())
        finally:
            await leader.stop()


if __name__ == "__main__":
    sys.exit(main())
