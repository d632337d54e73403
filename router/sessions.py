"""Which group served a conversation last. A hint, never state: losing it costs time, not meaning."""

from __future__ import annotations

from collections import OrderedDict

MAX_SESSIONS = 20_000


class Affinity:
    """The last ``max_sessions`` conversations. A session belongs to its tenant: equal names of two are two sessions."""

    def __init__(self, max_sessions: int = MAX_SESSIONS) -> None:
        self._max_sessions = max_sessions
        self._last: OrderedDict[tuple[str, str], str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._last)

    def get(self, tenant: str, session_id: str) -> str | None:
        """The key of the group that served it last; None for a new one, or without a session."""
        return self._last.get((tenant, session_id)) if session_id else None

    def put(self, tenant: str, session_id: str, group: str) -> None:
        """Note who serves it now."""
        if not session_id:
            return
        self._last[tenant, session_id] = group
        self._last.move_to_end((tenant, session_id))
        if len(self._last) > self._max_sessions:
            self._last.popitem(last=False)
