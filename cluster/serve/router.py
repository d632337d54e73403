"""One replica = one router. Clients reach its gRPC port directly; Serve only keeps it alive."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

from cluster.config import ClusterConfig
from cluster.errors import PortInUse, QuireError
from cluster.serve.failures import StartFailed
from cluster.telemetry import get_logger, setup_logging

_log = get_logger("serve.router")

REBIND_S = 10.0
"""A replacement waits this long for the port of its killed predecessor, whose socket the kernel still has to close."""

STOP_GRACE_S = 5.0


class Router:
    """The Serve replica. The application's ingress in name only: Serve's HTTP proxy is off."""

    async def __init__(self, config: ClusterConfig, groups: object) -> None:  # type: ignore[misc]  # awaited
        # ``groups`` is Serve's handle to the groups. It is not used: it makes both deployments one application.
        del groups
        setup_logging("router")
        self._config = config
        self._server: Any = None
        try:
            self._server = await _start(config)
        except QuireError as error:
            raise StartFailed(error) from error

    async def check_health(self) -> None:
        """Asked by Serve: answers as long as the event loop turns, which is what the gRPC server runs on."""

    async def facts(self) -> dict[str, Any]:
        """For `quire serve` and tests: where it listens."""
        return {"host": self._config.router.host, "port": self._server.port, "pid": os.getpid()}

    async def __del__(self) -> None:
        """Serve calls this before it stops the replica: streams finish, then the port closes."""
        server, self._server = self._server, None
        if server is None:
            return
        try:
            await asyncio.wait_for(
                server.drain(self._config.router.drain_s), self._config.router.drain_s + STOP_GRACE_S
            )
        except TimeoutError:
            _log.warning("router: did not drain in time")
        await server.stop()


async def _start(config: ClusterConfig) -> Any:
    """Listen, trying again for a while when the port is still held by a router that was just killed."""
    from router.server import start_router

    give_up = time.monotonic() + REBIND_S
    while True:
        try:
            return await start_router(config)
        except PortInUse:
            if time.monotonic() > give_up:
                raise
            await asyncio.sleep(0.2)
