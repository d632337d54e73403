"""All groups that this router knows: a link for each record in Redis, and for each stream that outlived its record."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable

from cluster.config import RouterConfig
from cluster.membership import GroupRecord, Watcher
from cluster.telemetry import get_logger
from router.links import GroupLink, key_of

_log = get_logger("groups")


class Groups:
    """Follows the membership. Lives on one event loop. ``on_change`` is called after a group came, went or changed."""

    def __init__(
        self,
        redis_url: str,
        cluster: str,
        token: str,
        config: RouterConfig,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.router_id = secrets.token_hex(16)
        self._watcher = Watcher(redis_url, cluster, on_change=self._follow)
        self._token = token
        self._config = config
        self._on_change = on_change
        self._links: dict[str, GroupLink] = {}
        self._changed = asyncio.Event()
        self._closing = False

    async def start(self) -> None:
        """Look once, and connect to what is there; Redis being away raises nothing."""
        await self._watcher.start()

    async def close(self) -> None:
        """Give up every stream; what runs on them ends as GroupLost."""
        self._closing = True
        await self._watcher.close()
        await asyncio.gather(*(link.close() for link in list(self._links.values())))

    @property
    def membership_live(self) -> bool:
        """Whether Redis answers; False: membership is frozen."""
        return self._watcher.live

    def links(self) -> list[GroupLink]:
        """All, by group id."""
        return sorted(self._links.values(), key=lambda link: link.key)

    def usable(self, model: str) -> list[GroupLink]:
        """Those that take new requests for ``model``."""
        return [link for link in self.links() if link.usable and link.record.model == model]

    async def wait_usable(self, model: str, fits: Callable[[GroupLink], bool], timeout_s: float) -> list[GroupLink]:
        """The usable links that fit, as soon as there is one; empty after ``timeout_s``."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    found = [link for link in self.usable(model) if fits(link)]
                    if found:
                        return found
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return []

    def _follow(self) -> None:
        """Membership changed: links for new records; links without a record live as long as their stream."""
        if self._closing:
            return
        records = self._watcher.groups()
        current = {key_of(record): record for record in records.values()}
        for key, record in current.items():
            if key not in self._links:
                self._connect(record)
        for key, link in self._links.items():
            link.retire(retired=key not in current)
            link.superseded = key not in current and link.record.group_id in records
        self._tell()

    def _connect(self, record: GroupRecord) -> None:
        link = GroupLink(record, self._token, self.router_id, self._config, self._tell)
        self._links[link.key] = link
        link.start(on_end=self._forget)

    def _forget(self, link: GroupLink) -> None:
        self._links.pop(link.key, None)
        _log.info("%s is gone", link.key)
        self._tell()
        if not self._closing and link.record in self._watcher.groups().values():
            self._connect(link.record)  # its record came back at the very moment the link ended

    def _tell(self) -> None:
        self._changed.set()
        self._on_change()
