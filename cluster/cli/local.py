"""A whole cluster on this machine for the time of a block: Redis, Ray, groups, routers; and none of it afterwards."""

from __future__ import annotations

import contextlib
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
        with Steps() as steps:
            serving = _start(config, interrupts, stack, steps)
        yield serving


def _start(config: ClusterConfig, interrupts: Interrupts, stack: contextlib.ExitStack, steps: Steps) -> Serving:
    config = preflight.check(config, steps.begin)
    if config.redis is None:
        from cluster.lifecycle import EmbeddedRedis

        steps.begin("redis, embedded")
        config = config.model_copy(update={"redis": stack.enter_context(EmbeddedRedis()).url})
    steps.begin("ray")
    environment.prepare()
    from cluster.serve import runtime

    stack.enter_context(runtime.ray_cluster(config))
    interrupts.install()
    steps.begin(f"{_count(config.groups, 'group')} and {_count(config.routers, 'router')}")
    routers = stack.enter_context(runtime.deployed(config, lambda progress: steps.detail(describe(progress))))
    return Serving(config, tuple(join_host_port(router["host"], router["port"]) for router in routers))


def describe(progress: Progress) -> str:
    """For a status line."""
    groups = f"groups {progress.groups}/{progress.groups_wanted}"
    return f"{groups}, routers {progress.routers}/{progress.routers_wanted}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
