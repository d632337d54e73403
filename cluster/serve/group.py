"""One replica = one worker group: a supervisor without torch, and the group's ranks as actors beside it.

Rank 0 is an actor in the replica's own placement group, so that Ray places all of a group on one node or not at all,
and that the death of the supervisor takes the ranks along. The supervisor polls the leader's heartbeat: a leader that
is gone, silent or stuck makes it kill what remains and exit at once, and Serve puts a new group in its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
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

HEARTBEAT_TIMEOUT_S = 15.0
"""An answer later than this means a frozen process: an idle one answers in milliseconds, a busy one in tens of them."""

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
        self._leader: Any = None  # workers.leader.Leader; not imported here, so that the supervisor stays free of torch

    def pid(self) -> int:
        """Known before the model loads, so that a hung start can be killed too."""
        return os.getpid()

    async def start(self, config: ClusterConfig, group_id: str) -> LeaderFacts:
        """Load, listen, announce. Raises QuireError."""
        from workers.leader import start_leader

        setup_logging(group_id)
        self._leader = await start_leader(config, group_id)
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


class Group:
    """The Serve replica. It serves no Serve requests: tokens go from leader to router over gRPC."""

    async def __init__(self, config: ClusterConfig) -> None:  # type: ignore[misc]  # Serve awaits it
        self._config = config
        self._stopping = False
        self.group_id = f"group-{serve.get_replica_context().replica_id.unique_id}"
        setup_logging(self.group_id)
        self._leader = _spawn_leader(config)
        self._pids: dict[int, float] = {}
        try:
            self._remember(await _within(self._leader.pid.remote(), START_TIMEOUT_S))
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
        if silence > 2 * HEARTBEAT_TIMEOUT_S or self._watcher.done():
            raise RuntimeError(f"{self.group_id}: no heartbeat of its leader for {silence:.1f} s")

    async def facts(self) -> dict[str, Any]:
        """For `quire serve` and tests: who runs here."""
        return {"group_id": self.group_id, "pid": os.getpid(), "rank_pids": list(self._pids)}

    async def _watch(self) -> None:
        """Poll until the leader is lost, then end the whole group. Progress counts, not only that it answers."""
        period_s = self._config.worker.heartbeat_ms / 1000
        while not self._stopping:
            try:
                beat = await _within(self._leader.heartbeat.remote(), HEARTBEAT_TIMEOUT_S)
                problem = _problem(beat, self._config.worker.step_timeout_s)
            except Exception as error:  # noqa: BLE001 - dead actor, late answer, broken leader: all end the group
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
        with contextlib.suppress(Exception):  # already dead is what we want
            ray.kill(self._leader)
        doomed = [process for pid, born in self._pids.items() if (process := _same_process(pid, born))]
        for process in doomed:
            with contextlib.suppress(psutil.Error):
                process.kill()
        await asyncio.to_thread(psutil.wait_procs, doomed, 5.0)

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
    """Why a heartbeat is no proof of life, or None. A long step is healthy up to ``step_timeout_s``."""
    if beat.failure:
        return f"its engine failed: {beat.failure}"
    if beat.busy and beat.step_age_s > step_timeout_s:
        return f"a step has run for {beat.step_age_s:.0f} s, the limit is {step_timeout_s:.0f} s"
    return None


def _spawn_leader(config: ClusterConfig) -> Any:
    """Rank 0 in bundle 1 of this replica's placement group (bundle 0 is the replica's own)."""
    bundle = rank_bundle(config)
    options: dict[str, Any] = {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0)}
    here = ray.util.get_current_placement_group()
    if here is None:  # Serve always makes one from placement_group_bundles
        raise RuntimeError("the group's replica has no placement group")
    place = PlacementGroupSchedulingStrategy(placement_group=here, placement_group_bundle_index=1)
    actor = ray.remote(LeaderProcess)
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
