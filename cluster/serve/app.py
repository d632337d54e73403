"""The Serve application: what `quire serve`, `serve run` and `serve deploy` all build.

    serve run cluster.serve.app:build redis=redis://host:6379 groups=2 router.port=50051

or, in a Serve config file, ``import_path: cluster.serve.app:build`` with ``args:`` holding a ClusterConfig.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any, cast

import ray
from pydantic import SecretStr
from ray import serve
from ray.serve import Application, Deployment

from cluster.config import ClusterConfig, load
from cluster.errors import ConfigError
from cluster.serve.group import STOP_GRACE_S, Group, rank_bundle
from cluster.serve.router import Router

APP_NAME = "quire"

SUPERVISOR_CPUS = 0.1
"""What a supervisor or router reserves: little, so that a laptop holds several groups."""

HEALTH: dict[str, Any] = {
    # A killed replica is noticed at the next check; Serve's default of 10 s would leave a hole that clients see.
    "health_check_period_s": 1.0,
    "health_check_timeout_s": 10.0,
    # Our streams are drained in __del__; this loop only waits for requests that came through Serve: there are none.
    "graceful_shutdown_wait_loop_s": 0.1,
    # A first start that fails three times will not get better. (Once it has run, Serve tries for ever.)
    "max_constructor_retry_count": 3,
}


def build(args: dict[str, Any]) -> Application:
    """Make the application from a ClusterConfig given as a mapping; dotted keys ("router.port") are understood.

    ``redis`` is required. Secrets that are not given are drawn anew in each build: set ``worker_token`` and
    ``cluster_secret`` where an update must not part old routers from new groups. Raises ConfigError.
    """
    return application(load(None, args))


def application(config: ClusterConfig) -> Application:
    """As ``build``, from a validated configuration."""
    if config.redis is None:
        raise ConfigError("redis: required here; only `quire serve` starts a Redis by itself", field="redis")
    config = with_secrets(resolve_device(config))
    groups = _deployment(Group).options(**_group_options(config)).bind(config)
    return _deployment(Router).options(**_router_options(config)).bind(config, groups)


def _deployment(replica: type) -> Deployment:
    return cast(Deployment, serve.deployment(replica))  # its annotation covers only the decorator with arguments


def with_secrets(config: ClusterConfig) -> ClusterConfig:
    """Fill in the secrets that are unset."""
    drawn = {
        name: SecretStr(secrets.token_urlsafe(32))
        for name in ("worker_token", "cluster_secret")
        if getattr(config, name) is None
    }
    return config.model_copy(update=drawn)


def resolve_device(config: ClusterConfig) -> ClusterConfig:
    """Turn device "auto" into "cuda" where Ray has a card for every rank, else "cpu": Ray must know what to reserve."""
    if config.engine.device != "auto":
        return config
    resources: Mapping[str, float] = ray.cluster_resources() if ray.is_initialized() else {}  # type: ignore[no-untyped-call]
    device = "cuda" if resources.get("GPU", 0) >= config.groups * config.tp else "cpu"
    return config.model_copy(update={"engine": config.engine.model_copy(update={"device": device})})


def _group_options(config: ClusterConfig) -> dict[str, Any]:
    """One bundle for the supervisor, one per rank; all on one node, unless told otherwise."""
    return {
        **HEALTH,
        "num_replicas": config.groups,
        "ray_actor_options": {"num_cpus": SUPERVISOR_CPUS, "resources": config.group_resources},
        "placement_group_bundles": [
            {"CPU": SUPERVISOR_CPUS, **config.group_resources},
            *[rank_bundle(config)] * config.tp,
        ],
        "placement_group_strategy": "PACK" if config.ranks_across_nodes else "STRICT_PACK",
        "graceful_shutdown_timeout_s": config.worker.drain_s + 3 * STOP_GRACE_S,
    }


def _router_options(config: ClusterConfig) -> dict[str, Any]:
    return {
        **HEALTH,
        "num_replicas": config.routers,
        "ray_actor_options": {"num_cpus": SUPERVISOR_CPUS, "resources": config.router_resources},
        "graceful_shutdown_timeout_s": config.router.drain_s + 2 * STOP_GRACE_S,
    }
