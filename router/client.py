"""A Python client of a Quire cluster, sync and async. Imports neither torch nor ray, nor anything of the servers.

    with Client("127.0.0.1:50051") as client:
        for event in client.chat("What is the capital of France?", max_tokens=64):
            print(event.delta.text, end="", flush=True)

Options are the fields of RequestOptions and SamplingParams, by name (see proto/inference.proto); None leaves one unset.
Errors are the classes of cluster.errors.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeAlias, TypeVar

import grpc
import grpc.aio

from cluster.errors import Draining, InvalidRequest, NoGroup, Overloaded, QuireError, from_rpc_error
from cluster.pb import common_pb2, inference_pb2, inference_pb2_grpc
from cluster.pb.inference_pb2 import GenerateEvent
from cluster.rpc import bearer

DEFAULT_ADDRESS = "127.0.0.1:50051"
MAX_MESSAGE_BYTES = 64 << 20
"""Of an answer. What may be sent is the router's to decide."""

Messages: TypeAlias = str | Sequence[Mapping[str, str] | tuple[str, str]]
"""A question; or the whole conversation, oldest first, each message a mapping with role and content, or such a pair."""

Prompt: TypeAlias = str | Sequence[int]
Result = TypeVar("Result")

_CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_retries", 0),  # they would know nothing of tokens that were received already
    # A router that was unplugged sends no end: without pings a stream would wait for it for ever.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    # A router that comes back should be found in seconds, not minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.use_local_subchannel_pool", 1),
]

_RETRYABLE = (NoGroup, Draining, Overloaded)
"""Not GroupLost: the router has tried other groups itself, and the request may be what kills them."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often, and how long apart, a call is made again when nothing of its answer was received yet."""

    attempts: int = 4
    first_delay_s: float = 0.2
    max_delay_s: float = 5.0

    def delay_s(self, error: QuireError, attempt: int, left_s: float | None, *, changes: bool = False) -> float | None:
        """Seconds until the next try after the ``attempt``-th failed; None: no more. ``left_s`` to the deadline.

        ``changes``: the call stores something. Then only a router's own refusal is worth a try: where a connection
        broke, the first one may have been stored.
        """
        if attempt >= self.attempts or not isinstance(error, _RETRYABLE):
            return None
        if changes and "grpc_code" in error.metadata:
            return None
        backoff_s = min(self.max_delay_s, self.first_delay_s * 2.0 ** (attempt - 1))
        # The server's hint is a floor; jitter above it keeps refused clients from coming back all at once.
        delay_s = max(error.retry_after_ms / 1000, backoff_s / 2) + random.uniform(0, backoff_s / 2)
        return delay_s if left_s is None or delay_s < left_s else None


class _Deadline:
    """One for a call with all its tries."""

    def __init__(self, timeout_s: float | None) -> None:
        self._end = None if timeout_s is None else time.monotonic() + timeout_s

    def left_s(self) -> float | None:
        return None if self._end is None else max(0.0, self._end - time.monotonic())


# -- sync ------------------------------------------------------------------------------------------------------------


class Stream:
    """The events of one call. Iterate; ``cancel`` from any thread, or leave a ``with`` block, to give it up."""

    def __init__(
        self,
        start: Callable[[float | None], Any],
        timeout_s: float | None,
        retry: RetryPolicy,
        *,
        changes: bool = False,
    ) -> None:
        self._changes = changes
        self._start = start
        self._deadline = _Deadline(timeout_s)
        self._retry = retry
        self._cancelled = threading.Event()
        self._lock = threading.Lock()  # a call is not replaced while it is cancelled
        self._events = self._iterate()
        self._call: Any = start(self._deadline.left_s())

    def __iter__(self) -> Iterator[GenerateEvent]:
        return self

    def __next__(self) -> GenerateEvent:
        return next(self._events)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.cancel()

    def cancel(self) -> None:
        """Stop the generation; the iteration then ends. Idempotent, harmless after the end."""
        with self._lock:
            self._cancelled.set()
            self._call.cancel()

    def text(self) -> str:
        """Read to the end; the whole text of the first sample."""
        return "".join(event.delta.text for event in self if event.HasField("delta") and event.delta.index == 0)

    def _iterate(self) -> Iterator[GenerateEvent]:
        attempt = 1
        while True:
            received = False
            try:
                for event in self._call:
                    received = True
                    yield event
                return
            except grpc.RpcError as rpc_error:
                if self._cancelled.is_set():
                    return
                error = from_rpc_error(rpc_error)
                left_s = self._deadline.left_s()
                delay_s = None if received else self._retry.delay_s(error, attempt, left_s, changes=self._changes)
                if delay_s is None:
                    raise error from rpc_error
            except GeneratorExit:
                self.cancel()  # the iterator was dropped half-way: nobody wants the rest
                raise
            self._cancelled.wait(delay_s)
            attempt += 1
            with self._lock:
                if self._cancelled.is_set():
                    return
                self._call = self._start(self._deadline.left_s())


class Client:
    """A connection to one router. Thread-safe. Use it as a context manager, or ``close`` it."""

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        api_key: str | None = None,
        *,
        timeout_s: float | None = None,
        retry: RetryPolicy | None = None,
    ) -> None:
        """``timeout_s``: of each call that gives none itself; unset: none. Connects with the first call."""
        self._channel = grpc.insecure_channel(address, options=_CHANNEL_OPTIONS)
        self._inference: Any = inference_pb2_grpc.InferenceStub(self._channel)  # type: ignore[no-untyped-call]
        self._admin: Any = inference_pb2_grpc.AdminStub(self._channel)  # type: ignore[no-untyped-call]
        self._metadata = bearer(api_key) if api_key else ()
        self._timeout_s = timeout_s
        self._retry = retry or RetryPolicy()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Disconnect; calls in flight are cancelled."""
        self._channel.close()

    def chat(
        self,
        messages: Messages,
        *,
        session: str | None = None,
        session_version: int | None = None,
        model: str = "",
        template_variables_json: str = "",
        timeout_s: float | None = None,
        **options: Any,
    ) -> Stream:
        """Answer a conversation. Raises InvalidRequest for an unknown option; the stream raises QuireError.

        ``session``: the cluster keeps the conversation under this name, and ``messages`` are only what is new. The last
        event, ``stored``, tells the version that is stored then; give it as ``session_version`` with the next turn to
        be sure that nothing came between (0: the session must be new). A turn runs at most once: see SessionTurn in
        the proto for what is refused, and when an answer was delivered and is not stored.
        """
        request = chat_request(messages, model, template_variables_json, options, session, session_version)
        return self._stream(self._inference.Chat, request, timeout_s, changes=session is not None)

    def chat_text(self, messages: Messages, **options: Any) -> str:
        """The whole answer at once; options as in ``chat``."""
        return self.chat(messages, **options).text()

    def generate(self, prompt: Prompt, *, model: str = "", timeout_s: float | None = None, **options: Any) -> Stream:
        """Continue a text or token ids. Raises as ``chat``."""
        return self._stream(self._inference.Generate, generate_request(prompt, model, options), timeout_s)

    def generate_text(self, prompt: Prompt, **options: Any) -> str:
        """The whole continuation at once; options as in ``generate``."""
        return self.generate(prompt, **options).text()

    def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Messages | None = None,
        model: str = "",
        add_special_tokens: bool | None = None,
        with_text: bool = False,
        timeout_s: float | None = None,
    ) -> inference_pb2.TokenizeResponse:
        """Token ids of a text, or of a conversation in the chat template."""
        request = tokenize_request(text, messages, model, add_special_tokens, with_text)
        response: inference_pb2.TokenizeResponse = self._ask(self._inference.Tokenize, request, timeout_s)
        return response

    def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str = "",
        skip_special_tokens: bool | None = None,
        timeout_s: float | None = None,
    ) -> str:
        """The text of token ids."""
        request = inference_pb2.DetokenizeRequest(
            model=model, token_ids=token_ids, skip_special_tokens=skip_special_tokens
        )
        return str(self._ask(self._inference.Detokenize, request, timeout_s).text)

    def models(self, *, timeout_s: float | None = None) -> list[inference_pb2.Model]:
        """What is served."""
        return list(self._ask(self._inference.ListModels, inference_pb2.ListModelsRequest(), timeout_s).models)

    def model(self, name: str = "", *, timeout_s: float | None = None) -> inference_pb2.Model:
        """One model; without a name, the only one. Raises ModelNotFound."""
        found: inference_pb2.Model = self._ask(
            self._inference.GetModel, inference_pb2.GetModelRequest(model=name), timeout_s
        )
        return found

    def get_session(self, session: str, *, timeout_s: float | None = None) -> inference_pb2.Session:
        """What is stored. Raises SessionNotFound; so do the next three."""
        request = inference_pb2.GetSessionRequest(session_id=session)
        found: inference_pb2.Session = self._ask(self._inference.GetSession, request, timeout_s)
        return found

    def delete_session(self, session: str, *, timeout_s: float | None = None) -> None:
        """Drop it; a turn that runs on it is ended."""
        request = inference_pb2.DeleteSessionRequest(session_id=session)
        self._ask(self._inference.DeleteSession, request, timeout_s, changes=True)

    def fork_session(self, session: str, new_session: str, *, timeout_s: float | None = None) -> inference_pb2.Session:
        """Copy it under a new name. Raises SessionExists, SessionLimit."""
        request = inference_pb2.ForkSessionRequest(session_id=session, new_session_id=new_session)
        copy: inference_pb2.Session = self._ask(self._inference.ForkSession, request, timeout_s, changes=True)
        return copy

    def pin_session(
        self, session: str, *, pinned: bool = True, timeout_s: float | None = None
    ) -> inference_pb2.Session:
        """Keep it for ever, or (``pinned=False``) no longer. Raises PinBudget."""
        request = inference_pb2.PinSessionRequest(session_id=session, pinned=pinned)
        found: inference_pb2.Session = self._ask(self._inference.PinSession, request, timeout_s)
        return found

    def cluster(self, *, timeout_s: float | None = None) -> inference_pb2.Cluster:
        """The groups as this router sees them now, and what the caller's tenant has used of it."""
        found: inference_pb2.Cluster = self._ask(self._admin.GetCluster, inference_pb2.GetClusterRequest(), timeout_s)
        return found

    def _stream(self, method: Any, request: Any, timeout_s: float | None, *, changes: bool = False) -> Stream:
        def start(left_s: float | None) -> Any:
            return method(request, timeout=left_s, metadata=self._metadata)

        return Stream(start, self._timeout_s if timeout_s is None else timeout_s, self._retry, changes=changes)

    def _ask(self, method: Any, request: Any, timeout_s: float | None, *, changes: bool = False) -> Any:
        deadline = _Deadline(self._timeout_s if timeout_s is None else timeout_s)
        attempt = 1
        while True:
            try:
                return method(request, timeout=deadline.left_s(), metadata=self._metadata)
            except grpc.RpcError as rpc_error:
                error = from_rpc_error(rpc_error)
                delay_s = self._retry.delay_s(error, attempt, deadline.left_s(), changes=changes)
                if delay_s is None:
                    raise error from rpc_error
            time.sleep(delay_s)
            attempt += 1


# -- async -----------------------------------------------------------------------------------------------------------


class AsyncStream:
    """As Stream, with ``async for`` and ``async with``."""

    def __init__(
        self,
        start: Callable[[float | None], Any],
        timeout_s: float | None,
        retry: RetryPolicy,
        *,
        changes: bool = False,
    ) -> None:
        self._changes = changes
        self._start = start
        self._deadline = _Deadline(timeout_s)
        self._retry = retry
        self._cancelled = asyncio.Event()
        self._events = self._iterate()
        self._call: Any = start(self._deadline.left_s())

    def __aiter__(self) -> AsyncIterator[GenerateEvent]:
        return self

    async def __anext__(self) -> GenerateEvent:
        return await anext(self._events)

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.cancel()

    def cancel(self) -> None:
        """Stop the generation; the iteration then ends. Idempotent, harmless after the end."""
        self._cancelled.set()
        self._call.cancel()

    async def text(self) -> str:
        """Read to the end; the whole text of the first sample."""
        pieces = [event.delta.text async for event in self if event.HasField("delta") and event.delta.index == 0]
        return "".join(pieces)

    async def _iterate(self) -> AsyncIterator[GenerateEvent]:
        attempt = 1
        while True:
            received = False
            try:
                # Not ``async for``: cancelling that would leave the call running.
                while (event := await self._call.read()) is not grpc.aio.EOF:
                    received = True
                    yield event
                return
            except grpc.RpcError as rpc_error:
                if self._cancelled.is_set():
                    return
                error = from_rpc_error(rpc_error)
                left_s = self._deadline.left_s()
                delay_s = None if received else self._retry.delay_s(error, attempt, left_s, changes=self._changes)
                if delay_s is None:
                    raise error from rpc_error
            except asyncio.CancelledError:
                if self._cancelled.is_set() and not _being_cancelled():
                    return  # grpc.aio's way to say that the call was cancelled
                self.cancel()
                raise
            except GeneratorExit:
                self.cancel()
                raise
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._cancelled.wait(), delay_s)
                return
            attempt += 1
            self._call = self._start(self._deadline.left_s())


class AsyncClient:
    """As Client, on the running event loop."""

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        api_key: str | None = None,
        *,
        timeout_s: float | None = None,
        retry: RetryPolicy | None = None,
    ) -> None:
        """As Client's."""
        self._channel = grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
        self._inference: Any = inference_pb2_grpc.InferenceStub(self._channel)  # type: ignore[no-untyped-call]
        self._admin: Any = inference_pb2_grpc.AdminStub(self._channel)  # type: ignore[no-untyped-call]
        self._metadata = bearer(api_key) if api_key else ()
        self._timeout_s = timeout_s
        self._retry = retry or RetryPolicy()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Disconnect; calls in flight are cancelled."""
        await self._channel.close(None)

    def chat(
        self,
        messages: Messages,
        *,
        session: str | None = None,
        session_version: int | None = None,
        model: str = "",
        template_variables_json: str = "",
        timeout_s: float | None = None,
        **options: Any,
    ) -> AsyncStream:
        """As Client.chat."""
        request = chat_request(messages, model, template_variables_json, options, session, session_version)
        return self._stream(self._inference.Chat, request, timeout_s, changes=session is not None)

    async def chat_text(self, messages: Messages, **options: Any) -> str:
        """The whole answer at once; options as in ``chat``."""
        return await self.chat(messages, **options).text()

    def generate(
        self, prompt: Prompt, *, model: str = "", timeout_s: float | None = None, **options: Any
    ) -> AsyncStream:
        """As Client.generate."""
        return self._stream(self._inference.Generate, generate_request(prompt, model, options), timeout_s)

    async def generate_text(self, prompt: Prompt, **options: Any) -> str:
        """The whole continuation at once; options as in ``generate``."""
        return await self.generate(prompt, **options).text()

    async def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Messages | None = None,
        model: str = "",
        add_special_tokens: bool | None = None,
        with_text: bool = False,
        timeout_s: float | None = None,
    ) -> inference_pb2.TokenizeResponse:
        """As Client.tokenize."""
        request = tokenize_request(text, messages, model, add_special_tokens, with_text)
        response: inference_pb2.TokenizeResponse = await self._ask(self._inference.Tokenize, request, timeout_s)
        return response

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str = "",
        skip_special_tokens: bool | None = None,
        timeout_s: float | None = None,
    ) -> str:
        """The text of token ids."""
        request = inference_pb2.DetokenizeRequest(
            model=model, token_ids=token_ids, skip_special_tokens=skip_special_tokens
        )
        return str((await self._ask(self._inference.Detokenize, request, timeout_s)).text)

    async def models(self, *, timeout_s: float | None = None) -> list[inference_pb2.Model]:
        """What is served."""
        response = await self._ask(self._inference.ListModels, inference_pb2.ListModelsRequest(), timeout_s)
        return list(response.models)

    async def model(self, name: str = "", *, timeout_s: float | None = None) -> inference_pb2.Model:
        """One model; without a name, the only one. Raises ModelNotFound."""
        found: inference_pb2.Model = await self._ask(
            self._inference.GetModel, inference_pb2.GetModelRequest(model=name), timeout_s
        )
        return found

    async def get_session(self, session: str, *, timeout_s: float | None = None) -> inference_pb2.Session:
        """What is stored. Raises SessionNotFound; so do the next three."""
        request = inference_pb2.GetSessionRequest(session_id=session)
        found: inference_pb2.Session = await self._ask(self._inference.GetSession, request, timeout_s)
        return found

    async def delete_session(self, session: str, *, timeout_s: float | None = None) -> None:
        """Drop it; a turn that runs on it is ended."""
        request = inference_pb2.DeleteSessionRequest(session_id=session)
        await self._ask(self._inference.DeleteSession, request, timeout_s, changes=True)

    async def fork_session(
        self, session: str, new_session: str, *, timeout_s: float | None = None
    ) -> inference_pb2.Session:
        """Copy it under a new name. Raises SessionExists, SessionLimit."""
        request = inference_pb2.ForkSessionRequest(session_id=session, new_session_id=new_session)
        copy: inference_pb2.Session = await self._ask(self._inference.ForkSession, request, timeout_s, changes=True)
        return copy

    async def pin_session(
        self, session: str, *, pinned: bool = True, timeout_s: float | None = None
    ) -> inference_pb2.Session:
        """Keep it for ever, or (``pinned=False``) no longer. Raises PinBudget."""
        request = inference_pb2.PinSessionRequest(session_id=session, pinned=pinned)
        found: inference_pb2.Session = await self._ask(self._inference.PinSession, request, timeout_s)
        return found

    async def cluster(self, *, timeout_s: float | None = None) -> inference_pb2.Cluster:
        """The groups as this router sees them now, and what the caller's tenant has used of it."""
        found: inference_pb2.Cluster = await self._ask(
            self._admin.GetCluster, inference_pb2.GetClusterRequest(), timeout_s
        )
        return found

    def _stream(self, method: Any, request: Any, timeout_s: float | None, *, changes: bool = False) -> AsyncStream:
        def start(left_s: float | None) -> Any:
            return method(request, timeout=left_s, metadata=self._metadata)

        return AsyncStream(start, self._timeout_s if timeout_s is None else timeout_s, self._retry, changes=changes)

    async def _ask(self, method: Any, request: Any, timeout_s: float | None, *, changes: bool = False) -> Any:
        deadline = _Deadline(self._timeout_s if timeout_s is None else timeout_s)
        attempt = 1
        while True:
            try:
                return await method(request, timeout=deadline.left_s(), metadata=self._metadata)
            except grpc.RpcError as rpc_error:
                error = from_rpc_error(rpc_error)
                delay_s = self._retry.delay_s(error, attempt, deadline.left_s(), changes=changes)
                if delay_s is None:
                    raise error from rpc_error
            await asyncio.sleep(delay_s)
            attempt += 1


# -- messages --------------------------------------------------------------------------------------------------------


def generate_request(prompt: Prompt, model: str, options: Mapping[str, Any]) -> inference_pb2.GenerateRequest:
    """The message for a prompt. Raises InvalidRequest for an unknown option or a value of the wrong type."""
    request = inference_pb2.GenerateRequest(model=model, options=_options(options))
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.CopyFrom(_made("prompt", common_pb2.TokenSequence, {"token_ids": list(prompt)}))
    return request


def chat_request(
    messages: Messages,
    model: str,
    template_variables_json: str,
    options: Mapping[str, Any],
    session: str | None = None,
    session_version: int | None = None,
) -> inference_pb2.ChatRequest:
    """The message for a conversation, or for a session's next turn. Raises as ``generate_request``."""
    if session is None and session_version is not None:
        raise InvalidRequest.of("session_version", session_version, "needs a session")
    turn = {"session_id": session, "version": session_version}
    return inference_pb2.ChatRequest(
        model=model,
        messages=_messages(messages),
        options=_options(options),
        template_variables_json=template_variables_json,
        session=None if session is None else _made("session", inference_pb2.SessionTurn, turn),
    )


def tokenize_request(
    text: str | None,
    messages: Messages | None,
    model: str,
    add_special_tokens: bool | None,
    with_text: bool,
) -> inference_pb2.TokenizeRequest:
    """The message for a text or a conversation."""
    request = inference_pb2.TokenizeRequest(model=model, add_special_tokens=add_special_tokens, with_text=with_text)
    if text is not None:
        request.text = text
    if messages is not None:
        request.conversation.messages.extend(_messages(messages))
    return request


def _messages(messages: Messages) -> list[inference_pb2.ChatMessage]:
    if isinstance(messages, str):
        return [inference_pb2.ChatMessage(role="user", content=messages)]
    turns = [
        dict(zip(("role", "content"), turn, strict=True)) if isinstance(turn, tuple) else turn for turn in messages
    ]
    return [_made("messages", inference_pb2.ChatMessage, turn) for turn in turns]


_SAMPLING_FIELDS = frozenset(field.name for field in common_pb2.SamplingParams.DESCRIPTOR.fields)


def _options(options: Mapping[str, Any]) -> inference_pb2.RequestOptions:
    """Sampling fields and request fields may be given side by side: no name is in both."""
    given = {name: value for name, value in options.items() if value is not None}
    sampling = {name: given.pop(name) for name in list(given) if name in _SAMPLING_FIELDS}
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    message = _made("options", inference_pb2.RequestOptions, given)
    if sampling:
        message.sampling.MergeFrom(_made("options.sampling", common_pb2.SamplingParams, sampling))
    return message


def _made(what: str, kind: Callable[..., Result], fields: Mapping[str, Any]) -> Result:
    try:
        return kind(**fields)
    except (ValueError, TypeError, OverflowError) as error:
        field = f"{what}.{_culprit(kind, fields)}"
        raise InvalidRequest(f"{field}: {error}", field=field) from error


def _culprit(kind: Callable[..., object], fields: Mapping[str, Any]) -> str:
    """Which field a message could not be made with: protobuf does not always say."""
    for name, value in fields.items():
        try:
            kind(**{name: value})
        except (ValueError, TypeError, OverflowError):
            return name
    return "?"


def _being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
