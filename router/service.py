"""The calls of the public API, one method each, from metadata to the last event.

Every call runs inside ``_call``: it authenticates, and it alone turns errors into statuses.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import grpc.aio

from cluster.config import RouterConfig
from cluster.errors import (
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    MethodNotSupported,
    NoGroup,
    PromptEmpty,
    QuireError,
    abort,
)
from cluster.pb import inference_pb2, inference_pb2_grpc
from cluster.telemetry import get_logger
from router import validation
from router.accounting import Accounting, Meter
from router.admission import Admission
from router.answer import Answer
from router.auth import Authenticator
from router.interrupt import Interrupt
from router.links import GroupLink, State
from router.relay import Relay, Routing
from router.served import ServedModel
from router.session_store import SessionStore, StoredSession, Turn
from router.validation import Conversation, Limits, Parsed, SessionRef, ValidRequest

if TYPE_CHECKING:
    Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]

Result = TypeVar("Result")

_log = get_logger("service")

_STATES = {
    State.CONNECTING: inference_pb2.Group.CONNECTING,
    State.SERVING: inference_pb2.Group.SERVING,
    State.DRAINING: inference_pb2.Group.DRAINING,
    State.LOST: inference_pb2.Group.LOST,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """When a call came in, and when it must be over (None: never), by the event loop's clock."""

    at: float
    deadline: float | None


class Service:
    """What the servicers share. Lives on one event loop."""

    def __init__(
        self,
        config: RouterConfig,
        model: ServedModel,
        routing: Routing,
        authenticator: Authenticator,
        sessions: SessionStore,
    ) -> None:
        self.admission = Admission(
            config.max_active_requests, shared=lambda: authenticator.shared, tenants=routing.tenants
        )
        self._accounting = Accounting()
        self._sessions = sessions
        self._config = config
        self._model = model
        self._routing = routing
        self._authenticator = authenticator
        self._draining = False
        self._interrupts: set[Interrupt] = set()

    # -- going down --------------------------------------------------------------------------------------------------

    def refuse_new(self) -> None:
        """From now on new calls end as DRAINING."""
        self._draining = True

    def end_all(self, error: QuireError) -> None:
        """End every running stream with ``error``."""
        for interrupt in list(self._interrupts):
            interrupt(error)

    # -- around every call -------------------------------------------------------------------------------------------

    async def call(self, context: Context, body: Callable[[str], Awaitable[Result]]) -> Result:
        """Authenticate, run ``body(tenant)``, and give the client the status that its error stands for."""
        try:
            return await body(self._tenant(context))
        except QuireError as error:
            await abort(context, error)
        except Exception:  # noqa: BLE001 - reported, whatever it is
            # One request's fault as far as anybody knows: its client hears of it, and nobody else.
            incident = secrets.token_hex(8)
            _log.exception("incident %s: a call failed unexpectedly", incident)
            await abort(context, QuireError(f"internal error; the router's log has it as incident {incident}"))

    def _tenant(self, context: Context) -> str:
        metadata = dict(context.invocation_metadata() or ())
        return self._authenticator.tenant(metadata.get("authorization"))

    # -- streams -----------------------------------------------------------------------------------------------------

    async def generate(self, context: Context, tenant: str, message: inference_pb2.GenerateRequest) -> None:
        """The Generate call."""
        parsed = validation.parse_generate(message, self._model.check_name(message.model), self._model.vocab_size)
        with self._let_in(tenant):
            await self._stream(context, tenant, parsed, _accepted(context))

    async def chat(self, context: Context, tenant: str, message: inference_pb2.ChatRequest) -> None:
        """The Chat call."""
        parsed = validation.parse_chat(message, self._model.check_name(message.model), self._model.vocab_size)
        accepted = _accepted(context)
        with self._let_in(tenant):
            if parsed.session is None:
                await self._stream(context, tenant, parsed, accepted)
            else:
                await self._session_turn(context, tenant, parsed, parsed.session, accepted)

    async def _session_turn(
        self, context: Context, tenant: str, parsed: Parsed, session: SessionRef, accepted: Accepted
    ) -> None:
        assert isinstance(parsed.prompt, Conversation)
        new = parsed.prompt.messages
        async with self._sessions.turn(tenant, session.session_id, session.version, new) as turn:
            whole = validation.with_history(parsed, turn.messages)
            # What ends a stream from outside, a deadline or the router's end, must not part an answer that is complete
            # from being stored: the commit has a limit of its own.
            answer = await self._stream(context, tenant, whole, accepted, turn)
            stored = await turn.commit(answer.text, parsed.model)
        event = inference_pb2.Stored(
            session_id=session.session_id,
            version=stored.version,
            bytes=stored.bytes,
            expires_in_s=stored.expires_in_s or 0.0,
        )
        await context.write(inference_pb2.GenerateEvent(stored=event))

    async def _stream(
        self, context: Context, tenant: str, parsed: Parsed, accepted: Accepted, turn: Turn | None = None
    ) -> Answer:
        """Send every event; the answer, which is complete then."""
        now = asyncio.get_running_loop().time
        with Interrupt() as interrupt, self._interruptible(interrupt, accepted.deadline):
            if turn is not None:
                turn.on_lost = interrupt
            request = await self._complete(parsed, tenant)
            relay = Relay(request, self._routing, interrupt, accepted.deadline)
            answer = Answer(request, relay, self._model.tokenizer, accepted.at)
            meter = Meter(request, answer, self.admission, self._accounting)
            with _logged(answer, relay, now, accepted.at), meter.running():
                async with contextlib.aclosing(relay.deltas()) as deltas:
                    async for delta in deltas:
                        for event in answer.events(delta, now()):
                            await context.write(event)
                        meter.update()
                        if answer.done:
                            break
        return answer

    @contextlib.contextmanager
    def _let_in(self, tenant: str) -> Iterator[None]:
        """Hold a place for a stream. Raises Draining, Overloaded, QuotaExceeded."""
        with self._accounting.refusals(tenant):
            self.admission.check_tokens(tenant)
        with self._slot(tenant):
            self._accounting.of(tenant).requests += 1
            yield

    @contextlib.contextmanager
    def _slot(self, tenant: str) -> Iterator[None]:
        """Hold a place in this router. Raises Draining, Overloaded, QuotaExceeded."""
        if self._draining:
            raise Draining("this router is going down", retry_after_ms=200)
        with contextlib.ExitStack() as stack:
            with self._accounting.refusals(tenant):
                stack.enter_context(self.admission.slot(tenant))
            yield

    @contextlib.contextmanager
    def _interruptible(self, interrupt: Interrupt, deadline: float | None) -> Iterator[None]:
        """Let the router's end and the client's deadline end the call, wherever it is."""
        timer = None
        if deadline is not None:
            late = DeadlineExceeded("the client's deadline passed")
            timer = asyncio.get_running_loop().call_at(deadline, interrupt, late)
        self._interrupts.add(interrupt)
        try:
            yield
        finally:
            self._interrupts.discard(interrupt)
            if timer is not None:
                timer.cancel()

    async def _complete(self, parsed: Parsed, tenant: str) -> ValidRequest:
        """Tokenize, and check what depends on the tokens."""
        prompt: list[int] | tuple[int, ...]
        if isinstance(parsed.prompt, str):
            prompt = await self._model.encode(parsed.prompt)
        elif isinstance(parsed.prompt, Conversation):
            prompt = await self._model.render(parsed.prompt)
        else:
            prompt = parsed.prompt
        bad_sequences = await self._model.tokenizations(parsed.options.bad_words)
        return validation.complete(parsed, prompt, bad_sequences, await self._limits(), tenant)

    async def _limits(self) -> Limits:
        """Of the groups that serve now; waits for one where there is none."""
        wait_s = self._config.group_wait_s
        links = await self._routing.groups.wait_usable(self._model.name, lambda link: True, wait_s)
        if not links:
            raise NoGroup(f"no group serves {self._model.name} now; waited {wait_s:g} s", retry_after_ms=1000)
        return Limits(
            max_tokens=tuple(link.hello.max_context_tokens for link in links if link.hello is not None),
            default_max_tokens=self._config.default_max_tokens,
        )

    # -- single answers ----------------------------------------------------------------------------------------------

    async def tokenize(self, tenant: str, message: inference_pb2.TokenizeRequest) -> inference_pb2.TokenizeResponse:
        """The Tokenize call."""
        self._model.check_name(message.model)
        with self._slot(tenant):
            return await self._tokenize(message)

    async def _tokenize(self, message: inference_pb2.TokenizeRequest) -> inference_pb2.TokenizeResponse:
        kind = message.WhichOneof("input")
        if kind == "text":
            special = message.add_special_tokens if message.HasField("add_special_tokens") else True
            ids = await self._model.encode(message.text, add_special_tokens=special)
        elif kind == "conversation":
            ids = await self._tokenize_conversation(message.conversation)
        else:
            raise PromptEmpty("input: text or conversation must be set", field="input")
        texts = await self._model.token_texts(ids) if message.with_text else []
        return inference_pb2.TokenizeResponse(token_ids=ids, token_texts=texts, max_context_tokens=self._max_context())

    async def _tokenize_conversation(self, message: inference_pb2.Conversation) -> list[int]:
        messages = validation.parse_messages(message.messages, "conversation.messages")
        prompted = message.add_generation_prompt if message.HasField("add_generation_prompt") else True
        conversation = Conversation(messages=messages, variables={})
        return await self._model.render(conversation, add_generation_prompt=prompted)

    async def detokenize(
        self, tenant: str, message: inference_pb2.DetokenizeRequest
    ) -> inference_pb2.DetokenizeResponse:
        """The Detokenize call."""
        self._model.check_name(message.model)
        validation.check_ids("token_ids", message.token_ids, self._model.vocab_size)
        skip = message.skip_special_tokens if message.HasField("skip_special_tokens") else True
        with self._slot(tenant):
            text = await self._model.decode(list(message.token_ids), skip_special_tokens=skip)
        return inference_pb2.DetokenizeResponse(text=text)

    # -- sessions ----------------------------------------------------------------------------------------------------

    async def get_session(self, tenant: str, message: inference_pb2.GetSessionRequest) -> inference_pb2.Session:
        """The GetSession call."""
        name = validation.session_name("session_id", message.session_id)
        with self._slot(tenant):
            return await self._session(name, await self._sessions.get(tenant, name))

    async def delete_session(
        self, tenant: str, message: inference_pb2.DeleteSessionRequest
    ) -> inference_pb2.DeleteSessionResponse:
        """The DeleteSession call."""
        name = validation.session_name("session_id", message.session_id)
        with self._slot(tenant):
            await self._sessions.delete(tenant, name)
        return inference_pb2.DeleteSessionResponse()

    async def fork_session(self, tenant: str, message: inference_pb2.ForkSessionRequest) -> inference_pb2.Session:
        """The ForkSession call."""
        name = validation.session_name("session_id", message.session_id)
        new_name = validation.session_name("new_session_id", message.new_session_id)
        with self._slot(tenant):
            return await self._session(new_name, await self._sessions.fork(tenant, name, new_name))

    async def pin_session(self, tenant: str, message: inference_pb2.PinSessionRequest) -> inference_pb2.Session:
        """The PinSession call."""
        name = validation.session_name("session_id", message.session_id)
        pinned = message.pinned if message.HasField("pinned") else True
        with self._slot(tenant):
            return await self._session(name, await self._sessions.pin(tenant, name, pinned=pinned))

    async def _session(self, name: str, stored: StoredSession) -> inference_pb2.Session:
        conversation = Conversation(messages=stored.messages, variables={})
        tokens: list[int] = []
        with contextlib.suppress(InvalidRequest):  # a template may take no conversation that ends with an answer
            tokens = await self._model.render(conversation, add_generation_prompt=False)
        return inference_pb2.Session(
            session_id=name,
            messages=[inference_pb2.ChatMessage(**message) for message in stored.messages],
            tokens=len(tokens),
            expires_in_s=stored.expires_in_s or 0.0,
            version=stored.version,
            bytes=stored.bytes,
            model=stored.model,
            pinned=stored.expires_in_s is None,
            created_at_s=stored.created_at_s,
            used_at_s=stored.used_at_s,
            busy=stored.busy,
        )

    # -- what there is -----------------------------------------------------------------------------------------------

    def model(self, name: str) -> inference_pb2.Model:
        """The GetModel call."""
        self._model.check_name(name)
        links = self._routing.groups.usable(self._model.name)
        hello = next((link.hello for link in links if link.hello is not None), None)
        tokenizer = self._model.tokenizer
        return inference_pb2.Model(
            name=self._model.name,
            vocab_size=self._model.vocab_size,
            max_context_tokens=self._max_context(),
            eos_token_ids=tokenizer.eos_token_ids,
            bos_token_id=tokenizer.bos_token_id,
            has_chat_template=tokenizer.has_chat_template,
            block_tokens=hello.block_tokens if hello is not None else 0,
            namespace=hello.namespace if hello is not None else "",
            groups=len(links),
        )

    def cluster(self, tenant: str) -> inference_pb2.Cluster:
        """The GetCluster call. Of usage it shows the caller's alone."""
        now = asyncio.get_running_loop().time()
        groups = self._routing.groups
        return inference_pb2.Cluster(
            router_id=groups.router_id,
            groups=[_group(link, now) for link in groups.links()],
            membership_live=groups.membership_live,
            active_requests=self.admission.active,
            usage=self._usage(tenant),
        )

    def _usage(self, tenant: str) -> inference_pb2.TenantUsage:
        totals = self._accounting.of(tenant)
        return inference_pb2.TenantUsage(
            tenant=tenant,
            **asdict(totals),
            active_requests=self.admission.active_of(tenant),
            tokens_left=self.admission.tokens_left(tenant),
        )

    def _max_context(self) -> int:
        links = self._routing.groups.usable(self._model.name)
        served = [link.hello.max_context_tokens for link in links if link.hello is not None]
        return max(served, default=self._model.trained_context)


def _group(link: GroupLink, now: float) -> inference_pb2.Group:
    record, hello = link.record, link.hello
    return inference_pb2.Group(
        group_id=record.group_id,
        incarnation=record.incarnation,
        model=record.model,
        namespace=record.namespace,
        address=record.address,
        state=_STATES[link.state],
        tp=record.tp,
        device=record.device,
        dtype=record.dtype,
        load=link.load,
        last_frame_age_ms=1000 * (now - link.last_frame) if hello is not None else 0.0,
        indexed_blocks=len(link.index),
        rank_pids=hello.rank_pids if hello is not None else (),
    )


def _accepted(context: Context) -> Accepted:
    now, remaining_s = asyncio.get_running_loop().time(), context.time_remaining()
    return Accepted(at=now, deadline=None if remaining_s is None else now + remaining_s)


@contextlib.contextmanager
def _logged(answer: Answer, relay: Relay, now: Callable[[], float], accepted_at: float) -> Iterator[None]:
    """One line for each request that was let in, however it ends. Never a word of its text."""
    outcome = "OK"
    try:
        yield
    except QuireError as error:
        outcome = error.reason
        raise
    except asyncio.CancelledError:
        outcome = "CANCELLED"
        raise
    except Exception as error:
        outcome = "INTERNAL"
        error.add_note(f"request {relay.request.internal_id!a}")  # for the traceback in the log
        raise
    finally:
        request, link = relay.request, relay.link
        _log.info(
            "request=%s outcome=%s finish=%s tenant=%s group=%s attempts=%d prompt_tokens=%d cached_tokens=%d "
            "completion_tokens=%d ttft_ms=%.0f total_ms=%.0f",
            request.request_id.encode("unicode_escape").decode(),
            outcome,
            ",".join(answer.finish_reasons) or "-",
            request.tenant,
            link.record.group_id if link is not None else "-",
            relay.attempts,
            len(request.prompt),
            answer.cached_tokens.group + answer.cached_tokens.redis,
            answer.completion_tokens,
            answer.ttft_ms,
            1000 * (now() - accepted_at),
        )


# -- the generated interfaces ----------------------------------------------------------------------------------------


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """quire.v1.Inference."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Context) -> None:
        await self._service.call(context, lambda tenant: self._service.generate(context, tenant, request))

    async def Chat(self, request: inference_pb2.ChatRequest, context: Context) -> None:
        await self._service.call(context, lambda tenant: self._service.chat(context, tenant, request))

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        return await self._service.call(context, lambda tenant: self._service.tokenize(tenant, request))

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: Context
    ) -> inference_pb2.DetokenizeResponse:
        return await self._service.call(context, lambda tenant: self._service.detokenize(tenant, request))

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: Context
    ) -> inference_pb2.ListModelsResponse:
        async def body(_: str) -> inference_pb2.ListModelsResponse:
            return inference_pb2.ListModelsResponse(models=[self._service.model("")])

        return await self._service.call(context, body)

    async def GetModel(self, request: inference_pb2.GetModelRequest, context: Context) -> inference_pb2.Model:
        async def body(_: str) -> inference_pb2.Model:
            return self._service.model(request.model)

        return await self._service.call(context, body)

    async def GetSession(self, request: inference_pb2.GetSessionRequest, context: Context) -> inference_pb2.Session:
        return await self._service.call(context, lambda tenant: self._service.get_session(tenant, request))

    async def DeleteSession(
        self, request: inference_pb2.DeleteSessionRequest, context: Context
    ) -> inference_pb2.DeleteSessionResponse:
        return await self._service.call(context, lambda tenant: self._service.delete_session(tenant, request))

    async def ForkSession(self, request: inference_pb2.ForkSessionRequest, context: Context) -> inference_pb2.Session:
        return await self._service.call(context, lambda tenant: self._service.fork_session(tenant, request))

    async def PinSession(self, request: inference_pb2.PinSessionRequest, context: Context) -> inference_pb2.Session:
        return await self._service.call(context, lambda tenant: self._service.pin_session(tenant, request))


class AdminServicer(inference_pb2_grpc.AdminServicer):
    """quire.v1.Admin."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def GetCluster(self, request: inference_pb2.GetClusterRequest, context: Context) -> inference_pb2.Cluster:
        async def body(tenant: str) -> inference_pb2.Cluster:
            return self._service.cluster(tenant)

        return await self._service.call(context, body)

    async def DrainGroup(self, request: inference_pb2.DrainGroupRequest, context: Context) -> Any:
        await self._service.call(context, _not_supported("DrainGroup"))


def _not_supported(method: str) -> Callable[[str], Awaitable[None]]:
    async def body(_: str) -> None:
        raise MethodNotSupported(f"{method}: this version does not serve it", method=method)

    return body
