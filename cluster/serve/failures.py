"""How a failed start travels from a replica to whoever deployed it.

Serve keeps of a replica's exception only the text of its traceback, in the deployment's status message. So the replica
puts its QuireError into that text as one marked line of JSON, and the reader takes it out again: the command line then
shows one clear line instead of forty of traceback.
"""

from __future__ import annotations

import json
import re

from cluster.errors import QuireError, from_reason

_MARK = "quire-start-failure:"
_MARKED = re.compile(re.escape(_MARK) + r"(\{.*\})")


class StartFailed(RuntimeError):
    """Raised by a replica's constructor. Its text carries the QuireError that is the cause."""

    def __init__(self, error: QuireError) -> None:
        super().__init__(_MARK + json.dumps({"reason": error.reason, "message": error.message}))


def as_quire_error(error: BaseException) -> QuireError:
    """The QuireError inside an exception of Ray, which wraps what an actor raised, else an INTERNAL one."""
    cause = getattr(error, "cause", None)
    for candidate in (error, cause, error.__cause__):
        if isinstance(candidate, QuireError) and hasattr(candidate, "message"):
            return candidate
    inner = cause if isinstance(cause, BaseException) else error
    text = str(inner).strip()
    last_line = text.splitlines()[-1] if text else "no message"
    return QuireError(f"{type(inner).__name__}: {last_line}")


def find(status_message: str) -> QuireError | None:
    """The error that a replica put into a deployment's status message; None where there is none."""
    found = _MARKED.findall(status_message)
    if not found:
        return None
    try:
        fields = json.loads(found[-1])
        return from_reason(fields["reason"], fields["message"])
    except (ValueError, KeyError):  # the text was cut, or is not ours after all
        return None
