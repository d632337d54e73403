"""A TCP proxy whose far side is as slow as a test wants it."""

from __future__ import annotations

import asyncio
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_PIECE = 64 << 10


class SlowProxy:
    """Passes bytes on. ``bytes_per_s``: of each connection toward the client; ``delay_s``: before each piece of it.
    Both may be changed at any time. ``tls``: what clients speak to it."""

    def __init__(self, port: int, tls: ssl.SSLContext | None = None) -> None:
        self.bytes_per_s = float("inf")
        self.delay_s = 0.0
        self.port = 0
        self._tls = tls
        self._target = port
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="slow proxy", daemon=True)
        self._thread.start()
        assert self._ready.wait(10)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls))
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()
        server.close()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.run_until_complete(asyncio.sleep(0.01))  # sockets close a turn of the loop later
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.close()
            return
        back = asyncio.create_task(self._pass(far_reader, writer, slow=True))
        try:
            await self._pass(reader, far_writer, slow=False)
            await back
        except asyncio.CancelledError:
            back.cancel()  # the proxy ends; asyncio would log a cancelled server task as an error
        finally:
            for end in (writer, far_writer):
                end.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, slow: bool) -> None:
        with suppress(OSError):
            ready_at = time.monotonic()
            while piece := await reader.read(_PIECE):
                if slow:
                    ready_at = max(ready_at, time.monotonic()) + self.delay_s + len(piece) / self.bytes_per_s
                    await asyncio.sleep(max(0.0, ready_at - time.monotonic()))
                writer.write(piece)
                await writer.drain()
        with suppress(OSError):
            writer.close()


@contextmanager
def slow_proxy(port: int, tls: ssl.SSLContext | None = None) -> Iterator[SlowProxy]:
    """In front of a port of this host, for the time of the block."""
    proxy = SlowProxy(port, tls)
    try:
        yield proxy
    finally:
        proxy.close()
