"""The application in the foreground: a Ray of our own (or one that runs), the deployment, its end, and no process left.

Call ``environment.prepare()`` before importing this module.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
from ray import serve
from ray.serve.schema import ApplicationStatus, DeploymentStatusOverview

from cluster.config import ClusterConfig
from cluster.errors import ConfigError, DependencyUnreachable, QuireError
from cluster.reaper import reaped
from cluster.serve import failures
from cluster.serve.app import APP_NAME, SUPERVISOR_CPUS, application
from cluster.serve.group import START_TIMEOUT_S, rank_bundle

OBJECT_STORE_BYTES = 100 << 20
"""Nothing of ours goes through Ray's object store; this is close to the least it accepts."""

_POLL_S = 0.2
_CALL_TIMEOUT_S = 30.0
_END_MARGIN_S = 30.0
_LONGEST_TEMP_DIR = 40
"""Ray puts Unix sockets below its folder, and their paths may have 107 bytes."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a deployment is: replicas that run, of those wanted."""

    groups: int
    groups_wanted: int
    routers: int
    routers_wanted: int
    detail: str  # Serve's own word on a delay or a replacement; may be empty
    failure: QuireError | None  # what a replica could not start with; once all have run, Serve tries again by itself

    @property
    def complete(self) -> bool:
        """Whether all that was asked for runs."""
        return self.groups >= self.groups_wanted and self.routers >= self.routers_wanted


@contextlib.contextmanager
def ray_cluster(config: ClusterConfig) -> Iterator[None]:
    """Ray for the time of the block: the one that RAY_ADDRESS names, else a private one that ends with the block.

    Raises DependencyUnreachable when the named one does not answer or a private one does not start.
    """
    address = os.environ.get("RAY_ADDRESS")
    if address:
        _connect(address=address)
        try:
            yield
        finally:
            ray.shutdown()
        return
    folder = Path(tempfile.mkdtemp(prefix="quire-", dir=_short_temp_dir()))
    with _removed_at_end(folder), reaped(folder), _Descendants() as descendants:
        # Not a token more of CPU than there is, except where the bookkeeping of many small groups would not fit.
        cpus = max(os.cpu_count() or 1, math.ceil(_cpus_needed(config)))
        _connect(
            address="local",
            num_cpus=cpus,
            resources=_resources_needed(config),
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            _temp_dir=str(folder),
        )
        try:
            yield
        finally:
            descendants.note()
            ray.shutdown()


@contextlib.contextmanager
def deployed(
    config: ClusterConfig, on_progress: Callable[[Progress], None], on_end: Callable[[], None]
) -> Iterator[list[dict[str, Any]]]:
    """The application for the time of the block; yields each router's facts (host, port, pid).

    Raises the QuireError that a replica could not start with, or one that says what Serve waits for at the timeout.
    At the end streams are drained and the application is removed. ``on_progress`` and ``on_end`` are called again and
    again while the start and the end are waited for; what they raise ends the wait.
    """
    if APP_NAME in serve.status().applications:
        raise ConfigError(f"an application named {APP_NAME!r} runs on this Ray already; `serve shutdown` ends it")
    # No proxies: clients talk gRPC to our router. route_prefix None, since there is no HTTP to route.
    serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
    serve._run(application(config), name=APP_NAME, route_prefix=None, _blocking=False)
    try:
        _wait_until_running(config, on_progress)
        yield router_facts()
    finally:
        serve.delete(APP_NAME, _blocking=False)  # blocking, it gives up after 60 s, however long a drain may take
        _wait_until_gone(config, on_end)


def progress(config: ClusterConfig) -> Progress:
    """Where the application stands now."""
    application_status = serve.status().applications.get(APP_NAME)
    deployments = application_status.deployments if application_status else {}
    running = {name: _running(one) for name, one in deployments.items()}
    messages = [one.message for one in deployments.values() if one.message]
    failure = next((found for message in messages if (found := failures.find(message))), None)
    detail = "; ".join(message.splitlines()[0] for message in messages)
    if failure is None and application_status and application_status.status == ApplicationStatus.DEPLOY_FAILED:
        failure = QuireError(f"Ray Serve could not start the application: {detail or application_status.message}")
    return Progress(
        groups=running.get("Group", 0),
        groups_wanted=config.groups,
        routers=running.get("Router", 0),
        routers_wanted=config.routers,
        detail=detail,
        failure=failure,
    )


def _running(deployment: DeploymentStatusOverview) -> int:
    return sum(count for state, count in deployment.replica_states.items() if state == "RUNNING")


def router_facts() -> list[dict[str, Any]]:
    """Host, port and process id of every router."""
    return _broadcast("Router")


def group_facts() -> list[dict[str, Any]]:
    """Group id, process id and rank process ids of every group."""
    return _broadcast("Group")


def _broadcast(deployment: str) -> list[dict[str, Any]]:
    handle = serve.get_deployment_handle(deployment, APP_NAME)
    return list(handle.broadcast("facts").results(timeout_s=_CALL_TIMEOUT_S))


def _wait_until_running(config: ClusterConfig, on_progress: Callable[[Progress], None]) -> None:
    give_up = time.monotonic() + START_TIMEOUT_S
    while True:
        now = progress(config)
        if now.failure:
            raise now.failure  # the first one: trying again would only repeat it, and hide it for a minute
        on_progress(now)
        if now.complete:
            return
        if time.monotonic() > give_up:
            raise DependencyUnreachable(
                f"only {now.groups} of {now.groups_wanted} groups and {now.routers} of {now.routers_wanted} routers "
                f"started in {START_TIMEOUT_S:.0f} s: {now.detail or 'no reason given by Ray Serve'}"
            )
        time.sleep(_POLL_S)


def _wait_until_gone(config: ClusterConfig, on_end: Callable[[], None]) -> None:
    """Serve drains each replica in its __del__ and bounds that itself; this waits a little longer than it may take."""
    give_up = time.monotonic() + max(config.worker.drain_s, config.router.drain_s) + _END_MARGIN_S
    while APP_NAME in serve.status().applications and time.monotonic() < give_up:
        on_end()
        time.sleep(_POLL_S)


def _connect(**options: Any) -> None:
    """ray.init, quietly: an operator reads our lines; Ray's are in its session folder."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    try:
        with _sigterm_stays_ours():
            ray.init(log_to_driver=False, logging_level=logging.ERROR, namespace="serve", **options)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError, OSError) as error:
        raise DependencyUnreachable(f"ray: {str(error).strip().splitlines()[0]}", field="RAY_ADDRESS") from error
    logging.getLogger("ray.serve").setLevel(logging.ERROR)  # importing serve's parts sets it back
    _mute_death_notices()


@contextlib.contextmanager
def _sigterm_stays_ours() -> Iterator[None]:
    """For a ray.init on the main thread, which takes SIGTERM twice; either would cut our cleanup short.

    As it begins, it would have sys.exit called wherever we are. As it connects, a handler in native code prints where
    every thread is, hands the signal on to ours, and has the process aborted three seconds later. (Blocking the signal
    meanwhile does not help: another thread gets it.)
    """
    from ray._private import utils

    ours, take_sigterm = signal.getsignal(signal.SIGTERM), utils.set_sigterm_handler
    utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = take_sigterm
        signal.signal(signal.SIGTERM, ours)
        signal.alarm(0)


def _mute_death_notices() -> None:
    """Ray prints a paragraph on our terminal for each worker that dies, log_to_driver or not. We say it in one line."""
    from ray._private import worker

    worker._worker_logs_enabled = False


def _cpus_needed(config: ClusterConfig) -> float:
    per_group = SUPERVISOR_CPUS + config.tp * rank_bundle(config)["CPU"]
    # One more of each: a replacement may be placed before Ray has taken its predecessor's share back.
    return (config.groups + 1) * per_group + (config.routers + 1) * SUPERVISOR_CPUS


def _resources_needed(config: ClusterConfig) -> dict[str, float]:
    """As many of each as all replicas reserve, and one more of each kind of replica, as above."""
    needed: Counter[str] = Counter()
    for count, each in ((config.groups, config.group_resources), (config.routers, config.router_resources)):
        for name, amount in each.items():
            needed[name] += (count + 1) * amount  # type: ignore[assignment]  # a Counter adds any numbers
    return dict(needed)


def _short_temp_dir() -> str:
    usual = tempfile.gettempdir()
    return usual if len(usual) <= _LONGEST_TEMP_DIR else "/tmp"


@contextlib.contextmanager
def _removed_at_end(folder: Path) -> Iterator[None]:
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _is_redis(process: psutil.Process) -> bool:
    """A Redis that was started again within the block: its own supervisor ends it, after all that use it."""
    with contextlib.suppress(psutil.Error):
        return process.name().startswith("redis-server")
    return False


class _Descendants:
    """The processes below this one that a block started; those that still live at its end are killed.

    Ray ends its processes itself; this is for those that it lost sight of, or for an end that was interrupted. They
    must be noted while their parents live: an orphan belongs to init and cannot be told from a stranger.
    """

    _GRACE_S = 5.0

    def __init__(self) -> None:
        self._me = psutil.Process()
        self._earlier = set(self._me.children(recursive=True))
        self._noted: set[psutil.Process] = set()

    def note(self) -> None:
        """Remember those that live now."""
        started = set(self._me.children(recursive=True)) - self._earlier
        self._noted.update(process for process in started if not _is_redis(process))

    def __enter__(self) -> _Descendants:
        return self

    def __exit__(self, *exception: object) -> None:
        self.note()
        _, alive = psutil.wait_procs(list(self._noted), timeout=self._GRACE_S)
        for process in alive:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(alive, timeout=self._GRACE_S)
