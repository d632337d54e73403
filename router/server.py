"""The public gRPC port: builds a router from its configuration, serves it, and takes it down without cutting streams.

``python -m router.server --config FILE`` runs one router by hand, without Ray.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from pydantic import SecretStr

from cluster.config import ClusterConfig, RouterConfig, load
from cluster.errors import ConfigError, Draining, QuireError
from cluster.pb import inference_pb2, inference_pb2_grpc
from cluster.rpc import bind, join_host_port
from cluster.telemetry import get_logger, setup_logging
from router.auth import Authenticator
from router.groups import Groups
from router.relay import Routing
from router.served import ServedModel
from router.service import AdminServicer, InferenceServicer, Service
from router.session_store import SessionStore
from router.sessions import Affinity
from router.tenants import Tenants

INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
SERVICES = tuple(service.full_name for service in inference_pb2.DESCRIPTOR.services_by_name.values())
MAX_EVENT_BYTES = 64 << 20
"""Of one event: the logprobs of a long prompt are megabytes. What clients send is bounded by the configuration."""

DRAIN_POLL_S = 0.02
END_TIMEOUT_S = 2.0
CLOSE_TIMEOUT_S = 1.0

_log = get_logger("server")


class RouterServer:
    """A running router. Made by ``start_router``; lives on one event loop."""

    def __init__(self, config: ClusterConfig, model: ServedModel) -> None:
        router = config.router
        self.port = 0
        self._config = config
        self._model = model
        self._draining = False
        self._stopped = False
        self._groups = Groups(
            _required(config.redis, "redis"),
            config.cluster,
            _secret(config.worker_token, "worker_token"),
            router,
            on_change=self._on_groups_changed,
        )
        tenants = Tenants(config.tenants)
        self._sessions = SessionStore(_required(config.redis, "redis"), config.cluster, config.sessions, tenants)
        routing = Routing(
            groups=self._groups,
            affinity=Affinity(),
            config=router,
            cluster_secret=_secret(config.cluster_secret, "cluster_secret").encode(),
            rng=random.Random(),
            tenants=tenants,
        )
        self._service = Service(router, model, routing, Authenticator(router.api_keys_file), self._sessions)
        self._health = health.aio.HealthServicer()
        self._health_news = asyncio.Event()
        self._health_task: asyncio.Task[None] | None = None
        self._server: grpc.aio.Server = grpc.aio.server(options=_server_options(router))

    @property
    def active_requests(self) -> int:
        """Streams and tokenizations in flight."""
        return self._service.admission.active

    async def start(self) -> None:
        """Listen, and connect to the groups. Raises PortInUse, ConfigError."""
        inference_pb2_grpc.add_InferenceServicer_to_server(  # type: ignore[no-untyped-call]
            InferenceServicer(self._service), self._server
        )
        inference_pb2_grpc.add_AdminServicer_to_server(  # type: ignore[no-untyped-call]
            AdminServicer(self._service), self._server
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)
        # First: a port that is taken must not cost a connection to every group.
        self.port = bind(self._server, self._config.router.host, self._config.router.port)
        await self._groups.start()
        await self._set_health()
        self._health_task = asyncio.create_task(self._follow_health(), name="router health")
        await self._server.start()
        _log.info("serving %s on %s", self._model.name, join_host_port(self._config.router.host, self.port))

    async def drain(self, timeout_s: float) -> None:
        """Take nothing new, let streams finish for ``timeout_s``, end the rest as UNAVAILABLE (reason DRAINING)."""
        self._draining = True
        self._service.refuse_new()
        await self._set_health()
        if not await self._idle_within(timeout_s):
            _log.info("%d streams are still open after %.1f s and are ended", self.active_requests, timeout_s)
            await self._end_streams()

    async def stop(self) -> None:
        """End what is open as UNAVAILABLE, close the port, leave the groups. Idempotent."""
        if self._stopped:
            return
        self._stopped = self._draining = True
        self._service.refuse_new()
        await self._end_streams()
        if self._health_task is not None:
            self._health_task.cancel()
            await asyncio.gather(self._health_task, return_exceptions=True)
        await self._server.stop(CLOSE_TIMEOUT_S)
        await self._sessions.close()
        await self._groups.close()
        self._model.close()

    async def _end_streams(self) -> None:
        self._service.end_all(Draining("this router is going down", retry_after_ms=200))
        await self._idle_within(END_TIMEOUT_S)

    async def _idle_within(self, timeout_s: float) -> bool:
        end = asyncio.get_running_loop().time() + timeout_s
        while self.active_requests:
            if asyncio.get_running_loop().time() >= end:
                return False
            await asyncio.sleep(DRAIN_POLL_S)
        return True

    # -- health ------------------------------------------------------------------------------------------------------

    def _on_groups_changed(self) -> None:
        self._health_news.set()

    async def _follow_health(self) -> None:
        while True:
            await self._health_news.wait()
            self._health_news.clear()
            await self._set_health()

    async def _set_health(self) -> None:
        """Inference is green while a request could be answered: a long prefill changes nothing, lost streams do.

        The process ("") and Admin are until it drains: a restart because the groups are gone would help nobody.
        """
        kind = health_pb2.HealthCheckResponse
        for name in ("", *SERVICES):
            serving = not self._draining
            if name == INFERENCE:
                serving = serving and bool(self._groups.usable(self._model.name))
            await self._health.set(name, kind.SERVING if serving else kind.NOT_SERVING)


async def start_router(config: ClusterConfig) -> RouterServer:
    """Read the tokenizer, listen, and follow the groups of ``config.redis``.

    Groups may come later: until then streams wait a while, and health is red. Raises PortInUse, ConfigError,
    ModelLoadError.
    """
    for value, field in ((config.worker_token, "worker_token"), (config.cluster_secret, "cluster_secret")):
        _secret(value, field)
    _required(config.redis, "redis")  # what is wrong here should not cost the time of loading first
    model = await ServedModel.load(config)
    server: RouterServer | None = None
    try:
        server = RouterServer(config, model)
        await server.start()
    except BaseException:
        if server is not None:
            await server.stop()
        model.close()
        raise
    return server


def _server_options(config: RouterConfig) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_send_message_length", MAX_EVENT_BYTES),
        # gRPC's default lets a second server bind the same port without a word.
        ("grpc.so_reuseport", 0),
        # A client that was unplugged sends no end: without pings its pages would be busy until its answer is complete.
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.ping_timeout_ms", 10_000),
        # A client's own pings during a long prefill, when no data flows, are no abuse (GOAWAY too_many_pings).
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
        ("grpc.http2.max_ping_strikes", 0),
    ]


def _required(value: str | None, field: str) -> str:
    if not value:
        raise ConfigError(f"{field}: must be set for a router", field=field)
    return value


def _secret(value: SecretStr | None, field: str) -> str:
    return _required(value.get_secret_value() if value is not None else None, field)


# -- by hand ---------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one router until SIGTERM or Ctrl-C; 1 when it cannot start."""
    parser = argparse.ArgumentParser(prog="router.server", description="Run one router, without Ray.")
    parser.add_argument("--config", type=Path, required=True, help="YAML file with a ClusterConfig")
    chosen = parser.parse_args(arguments)
    setup_logging("router")
    try:
        return asyncio.run(_run(load(chosen.config)))
    except QuireError as error:
        sys.stderr.write(f"error: {error.message}\n")
        return 1


async def _run(config: ClusterConfig) -> int:
    asked = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, asked.set)
    server = await start_router(config)
    try:
        sys.stdout.write(f"router {join_host_port(config.router.host, server.port)}\n")
        sys.stdout.flush()
        await asked.wait()
        await server.drain(config.router.drain_s)
    finally:
        await server.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
