"""One error tree, and the one table that maps it to gRPC and back.

Raise the class whose meaning fits; ``reason`` is stable and clients may branch on it. Boundaries translate once:
``to_status`` where a call leaves a process, ``from_rpc_error`` where one comes back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

if TYPE_CHECKING:
    import grpc
    from google.rpc.status_pb2 import Status

DOMAIN = "quire"


class QuireError(Exception):
    """The root. ``code``: a gRPC status code's name. ``reason``: a stable label. ``metadata``: field, value, limit."""

    code: ClassVar[str] = "INTERNAL"
    reason: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str, *, retry_after_ms: int = 0, **metadata: object) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_ms = retry_after_ms
        self.metadata: Mapping[str, str] = {key: str(value) for key, value in metadata.items()}


# -- what the caller can mend ----------------------------------------------------------------------------------------


class InvalidRequest(QuireError):
    """A field has a value that it can never have."""

    code = "INVALID_ARGUMENT"
    reason = "INVALID_FIELD"

    @classmethod
    def of(cls, field: str, value: object, rule: str, **metadata: str) -> InvalidRequest:
        """Say which field, its value (shortened), and what it must be."""
        shown = repr(value)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        return cls(f"{field}: {rule}; got {shown}", field=field, value=shown, **metadata)  # type: ignore[arg-type]


class PromptEmpty(InvalidRequest):
    """No token to begin with."""

    reason = "PROMPT_EMPTY"


class ContextExceeded(InvalidRequest):
    """Prompt plus max_tokens is more than the context, or than the group's pages can ever hold."""

    reason = "CONTEXT_EXCEEDED"


class MaskEmpty(InvalidRequest):
    """The masks of a request left no token that could be drawn."""

    reason = "MASK_EMPTY"


class MessageTooLarge(QuireError):
    """A gRPC message above the limit."""

    code = "RESOURCE_EXHAUSTED"
    reason = "MESSAGE_TOO_LARGE"


class FieldNotSupported(QuireError):
    """A field that the protocol reserves and this version does not serve. Refused, never ignored."""

    code = "UNIMPLEMENTED"
    reason = "FIELD_NOT_SUPPORTED"


class MethodNotSupported(QuireError):
    """A method that the protocol reserves and this version does not serve."""

    code = "UNIMPLEMENTED"
    reason = "METHOD_NOT_SUPPORTED"


class ModelNotFound(QuireError):
    """No group serves a model of this name."""

    code = "NOT_FOUND"
    reason = "MODEL_NOT_FOUND"


class SessionNotFound(QuireError):
    """The tenant has no stored session of this name: it ran out, was deleted, or never was."""

    code = "NOT_FOUND"
    reason = "SESSION_NOT_FOUND"


class SessionExists(QuireError):
    """A session is to be made under a name that is taken."""

    code = "ALREADY_EXISTS"
    reason = "SESSION_EXISTS"


class SessionConflict(QuireError):
    """Another turn runs on the session, or it is not what the turn began with. Nothing was stored."""

    code = "ABORTED"
    reason = "SESSION_CONFLICT"


class SessionNotStored(QuireError):
    """The answer was delivered, and the control Redis did not confirm that the turn is stored."""

    # Not UNAVAILABLE, which proxies retry by themselves: the call has had its answer.
    code = "ABORTED"
    reason = "SESSION_NOT_STORED"


class SessionTooLarge(QuireError):
    """A session would be larger than its tenant's sessions may be."""

    code = "RESOURCE_EXHAUSTED"
    reason = "SESSION_TOO_LARGE"


class SessionLimit(QuireError):
    """The tenant has as many sessions as it may."""

    code = "RESOURCE_EXHAUSTED"
    reason = "SESSION_LIMIT"


class PinBudget(QuireError):
    """The tenant's pinned sessions would be larger, together, than they may be."""

    code = "RESOURCE_EXHAUSTED"
    reason = "PIN_BUDGET"


class Unauthenticated(QuireError):
    """No credential, or one that is not known."""

    code = "UNAUTHENTICATED"
    reason = "BAD_CREDENTIAL"


class DeadlineExceeded(QuireError):
    """The client's deadline passed, in the queue or while running."""

    code = "DEADLINE_EXCEEDED"
    reason = "DEADLINE_EXCEEDED"


class Cancelled(QuireError):
    """The client went away."""

    code = "CANCELLED"
    reason = "CANCELLED"


# -- what time can mend ----------------------------------------------------------------------------------------------


class Overloaded(QuireError):
    """A bounded queue is full. Try again after ``retry_after_ms``."""

    code = "RESOURCE_EXHAUSTED"
    reason = "OVERLOADED"


class QuotaExceeded(QuireError):
    """The tenant has used up what it may, now; ``quota`` in the metadata says of what."""

    code = "RESOURCE_EXHAUSTED"
    reason = "QUOTA_EXCEEDED"


class SessionStoreUnavailable(QuireError):
    """The control Redis, which keeps the sessions, does not answer."""

    code = "UNAVAILABLE"
    reason = "SESSION_STORE_UNAVAILABLE"


class NoGroup(QuireError):
    """No group that could serve the request is reachable now."""

    code = "UNAVAILABLE"
    reason = "NO_GROUP"


class GroupLost(QuireError):
    """The group that ran the request is gone, and it could not be moved."""

    code = "UNAVAILABLE"
    reason = "GROUP_LOST"


class Draining(QuireError):
    """The server is going down and takes nothing new."""

    code = "UNAVAILABLE"
    reason = "DRAINING"


class SlowConsumer(QuireError):
    """The client read so slowly that its bounded buffer overflowed."""

    code = "RESOURCE_EXHAUSTED"
    reason = "SLOW_CONSUMER"


# -- what an operator must mend: shown by the command line as one line, exit code 1 ----------------------------------


class ConfigError(QuireError):
    """A setting is wrong, or contradicts another."""

    code = "FAILED_PRECONDITION"
    reason = "CONFIG"


class ModelLoadError(QuireError):
    """A model's files are missing, damaged, or of a kind that is not served."""

    code = "FAILED_PRECONDITION"
    reason = "MODEL_LOAD"


class OutOfMemory(QuireError):
    """The pool of pages does not fit the memory."""

    code = "FAILED_PRECONDITION"
    reason = "OUT_OF_MEMORY"


class PortInUse(QuireError):
    """Something else listens there."""

    code = "FAILED_PRECONDITION"
    reason = "PORT_IN_USE"


class DependencyUnreachable(QuireError):
    """Redis, or another part that was named, does not answer."""

    code = "UNAVAILABLE"
    reason = "DEPENDENCY_UNREACHABLE"


class ProtocolError(QuireError):
    """The other side speaks another version, or broke a rule of the protocol."""

    code = "FAILED_PRECONDITION"
    reason = "PROTOCOL"


def _classes(root: type[QuireError]) -> dict[str, type[QuireError]]:
    found = {root.reason: root}
    for child in root.__subclasses__():
        found.update(_classes(child))
    return found


BY_REASON: Mapping[str, type[QuireError]] = _classes(QuireError)


def from_reason(
    reason: str, message: str, metadata: Mapping[str, str] | None = None, retry_after_ms: int = 0
) -> QuireError:
    """Rebuild an error that crossed a wire as its parts. An unknown reason becomes the root (INTERNAL)."""
    error = BY_REASON.get(reason, QuireError)(message, retry_after_ms=retry_after_ms)
    error.metadata = dict(metadata or {})
    return error


def to_status(error: QuireError) -> Status:
    """The google.rpc.Status of an error: code, message, ErrorInfo and, with a hint, RetryInfo."""
    import grpc
    from google.protobuf.any_pb2 import Any as AnyMessage
    from google.protobuf.duration_pb2 import Duration
    from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
    from google.rpc.status_pb2 import Status

    details = [AnyMessage(), AnyMessage()]
    details[0].Pack(ErrorInfo(domain=DOMAIN, reason=error.reason, metadata=dict(error.metadata)))
    if error.retry_after_ms:
        delay = Duration()
        delay.FromMilliseconds(error.retry_after_ms)
        details[1].Pack(RetryInfo(retry_delay=delay))
    return Status(
        code=grpc.StatusCode[error.code].value[0],
        message=error.message,
        details=details if error.retry_after_ms else details[:1],
    )


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: QuireError) -> NoReturn:
    """End a call with an error's status. Does not return."""
    from grpc_status import rpc_status

    # grpc.aio's contexts have no abort_with_status; its parts do the same.
    status = rpc_status.to_status(to_status(error))
    await context.abort(status.code, status.details or "", tuple(status.trailing_metadata or ()))
    raise error  # abort raises by itself; this tells so to whoever reads types


def from_rpc_error(error: grpc.RpcError) -> QuireError:
    """The error that a call ended with; one without our ErrorInfo keeps its code by the class that has it."""
    from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
    from google.rpc.status_pb2 import Status

    info, retry = ErrorInfo(), RetryInfo()
    trailers: Any = error.trailing_metadata() if hasattr(error, "trailing_metadata") else None
    for key, value in trailers or ():
        if key == "grpc-status-details-bin":
            for detail in Status.FromString(value).details:
                detail.Unpack(info)
                detail.Unpack(retry)
    code = error.code().name if hasattr(error, "code") else "UNKNOWN"
    message = (error.details() if hasattr(error, "details") else "") or code
    if info.domain == DOMAIN:
        return from_reason(info.reason, message, dict(info.metadata), retry.retry_delay.ToMilliseconds())
    return _BY_CODE.get(code, QuireError)(message, grpc_code=code)


_BY_CODE: Mapping[str, type[QuireError]] = {
    "INVALID_ARGUMENT": InvalidRequest,
    "UNAUTHENTICATED": Unauthenticated,
    "NOT_FOUND": ModelNotFound,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
    "CANCELLED": Cancelled,
    "RESOURCE_EXHAUSTED": MessageTooLarge,
    "UNAVAILABLE": NoGroup,
    "UNIMPLEMENTED": MethodNotSupported,
}
