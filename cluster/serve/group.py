"""One replica = one worker group: a supervisor without torch, and the group's ranks as actors beside it.

The ranks are actors in the replica's own placement group, so that Ray places all of a group or nothing of it, and that
the death of the supervisor takes the ranks along. The supervisor polls them all: a rank that is gone, silent or stuck
makes it kill what remains and exit at once, and Serve puts a new group in its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from dataclasses import dataclass
from typing import Any

import psutil
import ray
from ray import serve
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.config import ClusterConfig
from cluster.serve.failures import StartFailed, as_quire_error
from cluster.telemetry import get_logger, setup_logging

_log = get_logger("serve.group")

START_TIMEOUT_S = 600.0
"""A leader that has not loaded its model by then has failed; large models on slow disks take minutes."""

STOP_GRACE_S = 5.0
"""On top of the drain, for closing ports and leaving the membership."""


@dataclass(frozen=True, slots=True)
class LeaderFacts:
    """What the supervisor knows of a started leader."""

    address: str  # host:port of the worker protocol
    incarnation: str
    rank_pids: tuple[int, ...]  # leader first


class LeaderProcess:
    """Rank 0, as an actor: a thin shell around ``workers.leader``, which it imports only in its own process."""

    def __init__(self) -> None:
        # Of workers.leader; not imported here, so that the supervisor stays free of torch.
        self._leader: Any = None
        self._ranks: Any = None

    def pid(self) -> int:
        """Known before the model loads, so that a hung start can be killed too."""
        return os.getpid()

    def open_ranks(self, config: ClusterConfig) -> str:
        """Listen for the other ranks; returns where. Raises ConfigError."""
        from workers.leader import open_ranks

        self._ranks = open_ranks(config)
        return str(self._ranks.address)

    async def start(self, config: ClusterConfig, group_id: str) -> LeaderFacts:
        """Load, listen, announce. Raises QuireError."""
        from workers.leader import start_leader

        setup_logging(group_id)
        self._leader = await start_leader(config, group_id, self._ranks)
        return LeaderFacts(self._leader.address, self._leader.incarnation, tuple(self._leader.rank_pids))

    async def heartbeat(self) -> Any:
        """What the leader says of its step loop."""
        return self._leader.heartbeat()

    async def drain(self, timeout_s: float) -> None:
        """Take nothing new; return when what runs has finished, or at the timeout."""
        await self._leader.drain(timeout_s)

    async def stop(self) -> None:
        """Leave the membership and close the port."""
        await self._leader.stop()


class RankProcess:
    """Another rank, as an actor: a shell around ``workers.rank``, whose work is done on a thread of its own."""

    def pid(self) -> int:
        """As LeaderProcess."""
        return os.getpid()

    def join(self, config: ClusterConfig, group_id: str, rank: int, address: str) -> None:
        """Begin; what becomes of it is told to the leader."""
        setup_logging(f"{group_id} rank {rank}")
        threading.Thread(target=self._run, args=(config, rank, address), name=f"rank {rank}", daemon=True).start()

    def heartbeat(self) -> None:
        """Answers while the process runs: whether it gets on, the leader knows."""

    def _run(self, config: ClusterConfig, rank: int, address: str) -> None:
        from workers.rank import join_leader

        try:
            join_leader(config, rank, address)
        except Exception as error:  # noqa: BLE001 - whatever it is, the supervisor ends the group that this was a part of
            _log.error("rank %d has ended: %s: %s", rank, type(error).__name__, error)


class Group:
    """The Serve replica. It serves no Serve requests: tokens go from leader to router over gRPC."""

    async def __init__(self, config: ClusterConfig) -> None:  # type: ignore[misc]  # Serve awaits it
        self._config = config
        self._stopping = False
        self.group_id = f"group-{serve.get_replica_context().replica_id.unique_id}"
        setup_logging(self.group_id)
        self._leader = _spawn(LeaderProcess, config, rank=0)
        self._others = [_spawn(RankProcess, config, rank) for rank in range(1, config.tp)]
        self._pids: dict[int, float] = {}
        try:
            self._remember(*await self._all_within("pid", START_TIMEOUT_S))
            if self._others:
                address = await _within(self._leader.open_ranks.remote(config), START_TIMEOUT_S)
                for rank, other in enumerate(self._others, 1):
                    await _within(other.join.remote(config, self.group_id, rank, address), START_TIMEOUT_S)
            self._facts = await _within(self._leader.start.remote(config, self.group_id), START_TIMEOUT_S)
        except Exception as error:  # Ray wraps whatever the actor raised; it is told apart right here
            await self._kill_ranks()
            raise StartFailed(as_quire_error(error)) from error
        self._remember(*self._facts.rank_pids)
        self._last_beat = time.monotonic()
        self._watcher = asyncio.create_task(self._watch())

    def check_health(self) -> None:
        """Asked by Serve. The watcher exits by itself when the leader is lost; this notices a watcher that hangs."""
        silence = time.monotonic() - self._last_beat
        if silence > 2 * self._config.worker.step_timeout_s or self._watcher.done():
            raise RuntimeError(f"{self.group_id}: no heartbeat of its ranks for {silence:.1f} s")

    async def facts(self) -> dict[str, Any]:
        """For `quire serve` and tests: who runs here."""
        return {"group_id": self.group_id, "pid": os.getpid(), "rank_pids": list(self._pids)}

    async def _watch(self) -> None:
        """Poll until a rank is lost, then end the whole group. Progress counts, not only that they answer."""
        period_s, step_timeout_s = self._config.worker.heartbeat_ms / 1000, self._config.worker.step_timeout_s
        while not self._stopping:
            try:
                beat, *_ = await self._all_within("heartbeat", step_timeout_s)
                problem = _problem(beat, step_timeout_s)
            except TimeoutError:
                problem = f"a rank did not answer for {step_timeout_s:g} s"
            except Exception as error:  # noqa: BLE001 - dead actor, broken leader: all end the group
                problem = str(as_quire_error(error))
            if problem is not None and not self._stopping:
                await self._die(problem)
            self._last_beat = time.monotonic()
            await asyncio.sleep(period_s)

    async def _die(self, problem: str) -> None:
        """Kill what is left of the group and exit, so that Serve starts a new one. A group never limps."""
        _log.error("%s is lost (%s): ending it, Serve will start another", self.group_id, problem)
        await self._kill_ranks()
        os._exit(1)  # not sys.exit: nothing of this process is worth a clean shutdown, and it must not hang in one

    async def _kill_ranks(self) -> None:
        """Through Ray, then by process id, for a process that Ray has lost sight of. Returns when they are gone."""
        for rank in (self._leader, *self._others):
            with contextlib.suppress(Exception):  # already dead is what we want
                ray.kill(rank)
        doomed = [process for pid, born in self._pids.items() if (process := _same_process(pid, born))]
        for process in doomed:
            with contextlib.suppress(psutil.Error):
                process.kill()
        await asyncio.to_thread(psutil.wait_procs, doomed, 5.0)

    async def _all_within(self, method: str, timeout_s: float) -> list[Any]:
        """What each rank answers, the leader first. Raises TimeoutError, or what one of them raised."""
        answers = [getattr(rank, method).remote() for rank in (self._leader, *self._others)]
        return await asyncio.wait_for(asyncio.gather(*(_value(answer) for answer in answers)), timeout_s)

    def _remember(self, *pids: int) -> None:
        for pid in pids:
            with contextlib.suppress(psutil.Error):
                self._pids.setdefault(pid, psutil.Process(pid).create_time())

    async def __del__(self) -> None:
        """Serve calls this before it stops the replica: streams finish, the port closes, the ranks go."""
        if self._stopping or not hasattr(self, "_facts"):
            return
        self._stopping = True
        self._watcher.cancel()
        drain_s = self._config.worker.drain_s
        try:
            await _within(self._leader.drain.remote(drain_s), drain_s + STOP_GRACE_S)
            await _within(self._leader.stop.remote(), STOP_GRACE_S)
        except Exception as error:  # noqa: BLE001 - a leader that cannot drain is killed like one that can
            _log.warning("%s: did not drain: %s", self.group_id, as_quire_error(error))
        await self._kill_ranks()


def _problem(beat: Any, step_timeout_s: float) -> str | None:
    """Why a heartbeat is no proof of life, or None. A long step is healthy while it gets from layer to layer."""
    if beat.failure:
        return f"its engine failed: {beat.failure}"
    if beat.busy and beat.step_age_s > step_timeout_s:
        return f"a step has not got on for {beat.step_age_s:.0f} s, the limit is {step_timeout_s:g} s"
    return None


def _spawn(process: type, config: ClusterConfig, rank: int) -> Any:
    """A rank in a bundle of its own in this replica's placement group (bundle 0 is the replica's)."""
    bundle = rank_bundle(config)
    options: dict[str, Any] = {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0)}
    here = ray.util.get_current_placement_group()
    if here is None:  # Serve always makes one from placement_group_bundles
        raise RuntimeError("the group's replica has no placement group")
    place = PlacementGroupSchedulingStrategy(placement_group=here, placement_group_bundle_index=1 + rank)
    actor: Any = ray.remote(process)
    return actor.options(**options, max_restarts=0, scheduling_strategy=place).remote()


def rank_bundle(config: ClusterConfig) -> dict[str, float]:
    """What one rank reserves. On a CPU a token amount: Ray's count is bookkeeping, threads are set by the engine."""
    return {"CPU": 1.0, "GPU": 1.0} if config.engine.device == "cuda" else {"CPU": 0.1}


async def _within(reference: Any, timeout_s: float) -> Any:
    """The value of a Ray object reference. Raises TimeoutError, or what the actor raised."""
    return await asyncio.wait_for(asyncio.ensure_future(_value(reference)), timeout_s)


async def _value(reference: Any) -> Any:
    return await reference


def _same_process(pid: int, born: float) -> psutil.Process | None:
    """The process, unless its id has gone to another one since."""
    try:
        process = psutil.Process(pid)
        return process if process.create_time() == born else None
    except psutil.Error:
        return None
