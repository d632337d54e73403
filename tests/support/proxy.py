"""A TCP proxy whose far side is as slow as a test wants it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_PIECE = 64 << 10


class SlowProxy:
    """Passes bytes on. ``bytes_per_s``: of each connection toward the client; ``delay_s``: before each piece of it.
    Both may be changed at any time."""

    def __init__(self, port: int) -> None:
        self.bytes_per_s = float("inf")
        self.delay_s = 0.0
        self.port = 0
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
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()
        server.close()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
            back = asyncio.create_task(self._pass(far_reader, writer, slow=True))
            await self._pass(reader, far_writer, slow=False)
            await back
        writer.close()

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
def slow_proxy(port: int) -> Iterator[SlowProxy]:
    """In front of a port of this host, for the time of the block."""
    proxy = SlowProxy(port)
    try:
        yield proxy
    finally:
        proxy.close()
