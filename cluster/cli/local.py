"""A whole cluster on this machine for the time of a block: Redis, Ray, groups, routers; and none of it afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.cli import preflight
from cluster.cli.interrupts import Interrupts
from cluster.cli.terminal import Steps
from cluster.config import ClusterConfig
from cluster.rpc import join_host_port
from cluster.serve import environment

if TYPE_CHECKING:
    from cluster.serve.runtime import Progress


@dataclass(frozen=True, slots=True)
class Serving:
    """A cluster that answers."""

    config: ClusterConfig
    addresses: tuple[str, ...]  # host:port of each router


@contextlib.contextmanager
def local_cluster(config: ClusterConfig, interrupts: Interrupts) -> Iterator[Serving]:
    """Start everything, yield when a client can be answered, end everything. Raises QuireError."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(interrupts.held())  # until all has ended
        with Steps() as steps:
            config = preflight.check(config, steps, interrupts)
            interrupts.check()
            if config.redis is None:
                config = _with_redis(config, stack, steps)
            if config.prefix.enabled and config.prefix.redis is None:
                config = _with_kv_redis(config, stack, steps)
            serving = _start(config, interrupts, stack, steps)
        with interrupts.let_through():
            yield serving


def _with_redis(config: ClusterConfig, stack: contextlib.ExitStack, steps: Steps) -> ClusterConfig:
    from cluster.lifecycle import EmbeddedRedis

    steps.begin("redis, embedded")
    return config.model_copy(update={"redis": stack.enter_context(EmbeddedRedis()).url})


def _with_kv_redis(config: ClusterConfig, stack: contextlib.ExitStack, steps: Steps) -> ClusterConfig:
    """A server of its own: this one evicts, which would be the end of leases and sessions in the other."""
    from cluster.lifecycle import EmbeddedRedis

    steps.begin("redis for the prefix cache, embedded")
    server = EmbeddedRedis("prefix", maxmemory_bytes=config.prefix.memory_bytes, policy="allkeys-lru")
    prefix = config.prefix.model_copy(update={"redis": stack.enter_context(server).url})
    return config.model_copy(update={"prefix": prefix})


def _start(config: ClusterConfig, interrupts: Interrupts, stack: contextlib.ExitStack, steps: Steps) -> Serving:
    steps.begin("ray")
    environment.prepare()
    from cluster.serve import runtime

    stack.enter_context(runtime.ray_cluster(config))
    interrupts.check()
    steps.begin(f"{_count(config.groups, 'group')} and {_count(config.routers, 'router')}")

    phases = _Phases(config)

    def on_progress(progress: Progress) -> None:
        interrupts.check()
        steps.detail(describe(progress) + phases.text())

    routers = stack.enter_context(runtime.deployed(config, on_progress, interrupts.check_again))
    return Serving(config, tuple(join_host_port(router["host"], router["port"]) for router in routers))


class _Phases:
    """What the groups that are not up yet are doing, as they say it in Redis."""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self._asked_at = float("-inf")
        self._text = ""

    def text(self) -> str:
        """ " · 2 × loading weights", or nothing. Asks once a second."""
        from cluster.membership import phases

        if self._config.redis is not None and time.monotonic() - self._asked_at >= 1.0:
            self._asked_at = time.monotonic()
            found = Counter(asyncio.run(phases(self._config.redis, self._config.cluster)).values())
            self._text = "".join(f" · {count} × {phase}" for phase, count in sorted(found.items()))
        return self._text


def describe(progress: Progress) -> str:
    """For a status line."""
    groups = f"groups {progress.groups}/{progress.groups_wanted}"
    return f"{groups}, routers {progress.routers}/{progress.routers_wanted}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
