from cluster.pb import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GenerateRequest(_message.Message):
    __slots__ = ("model", "text", "token_ids", "options")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    token_ids: _common_pb2.TokenSequence
    options: RequestOptions
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[_common_pb2.TokenSequence, _Mapping]] = ..., options: _Optional[_Union[RequestOptions, _Mapping]] = ...) -> None: ...

class ChatRequest(_message.Message):
    __slots__ = ("model", "messages", "options", "template_variables_json", "session")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_VARIABLES_JSON_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    model: str
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    options: RequestOptions
    template_variables_json: str
    session: SessionTurn
    def __init__(self, model: _Optional[str] = ..., messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., options: _Optional[_Union[RequestOptions, _Mapping]] = ..., template_variables_json: _Optional[str] = ..., session: _Optional[_Union[SessionTurn, _Mapping]] = ...) -> None: ...

class SessionTurn(_message.Message):
    __slots__ = ("session_id", "version")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    version: int
    def __init__(self, session_id: _Optional[str] = ..., version: _Optional[int] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "name")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    name: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class RequestOptions(_message.Message):
    __slots__ = ("sampling", "stop", "include_stop", "skip_special_tokens", "echo", "bad_words", "truncate_prompt_tokens", "stream_interval_tokens", "priority", "session_id", "adapter", "constraint", "draft", "cache_salt", "request_id", "resume_token", "output_token_ids")
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ECHO_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STREAM_INTERVAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    sampling: _common_pb2.SamplingParams
    stop: _containers.RepeatedScalarFieldContainer[str]
    include_stop: bool
    skip_special_tokens: bool
    echo: bool
    bad_words: _containers.RepeatedScalarFieldContainer[str]
    truncate_prompt_tokens: int
    stream_interval_tokens: int
    priority: int
    session_id: str
    adapter: str
    constraint: _common_pb2.Constraint
    draft: _common_pb2.DraftSettings
    cache_salt: str
    request_id: str
    resume_token: str
    output_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., stop: _Optional[_Iterable[str]] = ..., include_stop: _Optional[bool] = ..., skip_special_tokens: _Optional[bool] = ..., echo: _Optional[bool] = ..., bad_words: _Optional[_Iterable[str]] = ..., truncate_prompt_tokens: _Optional[int] = ..., stream_interval_tokens: _Optional[int] = ..., priority: _Optional[int] = ..., session_id: _Optional[str] = ..., adapter: _Optional[str] = ..., constraint: _Optional[_Union[_common_pb2.Constraint, _Mapping]] = ..., draft: _Optional[_Union[_common_pb2.DraftSettings, _Mapping]] = ..., cache_salt: _Optional[str] = ..., request_id: _Optional[str] = ..., resume_token: _Optional[str] = ..., output_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class GenerateEvent(_message.Message):
    __slots__ = ("started", "delta", "finished", "stored")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    started: Started
    delta: Delta
    finished: Finished
    stored: Stored
    def __init__(self, started: _Optional[_Union[Started, _Mapping]] = ..., delta: _Optional[_Union[Delta, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., stored: _Optional[_Union[Stored, _Mapping]] = ...) -> None: ...

class Stored(_message.Message):
    __slots__ = ("session_id", "version", "bytes", "expires_in_s")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_IN_S_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    version: int
    bytes: int
    expires_in_s: float
    def __init__(self, session_id: _Optional[str] = ..., version: _Optional[int] = ..., bytes: _Optional[int] = ..., expires_in_s: _Optional[float] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("request_id", "group_id", "incarnation", "prompt_tokens", "cached_tokens", "queue_ms", "seed", "routing", "prompt_logprobs", "prefix")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    ROUTING_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    group_id: str
    incarnation: str
    prompt_tokens: int
    cached_tokens: _common_pb2.CachedTokens
    queue_ms: float
    seed: int
    routing: RoutingReason
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.PositionLogprobs]
    prefix: _common_pb2.PrefixUse
    def __init__(self, request_id: _Optional[str] = ..., group_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[_Union[_common_pb2.CachedTokens, _Mapping]] = ..., queue_ms: _Optional[float] = ..., seed: _Optional[int] = ..., routing: _Optional[_Union[RoutingReason, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_common_pb2.PositionLogprobs, _Mapping]]] = ..., prefix: _Optional[_Union[_common_pb2.PrefixUse, _Mapping]] = ...) -> None: ...

class RoutingReason(_message.Message):
    __slots__ = ("predicted_ttft_ms", "expected_cached_tokens", "candidates", "decision")
    PREDICTED_TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    predicted_ttft_ms: float
    expected_cached_tokens: int
    candidates: int
    decision: str
    def __init__(self, predicted_ttft_ms: _Optional[float] = ..., expected_cached_tokens: _Optional[int] = ..., candidates: _Optional[int] = ..., decision: _Optional[str] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("index", "text", "token_ids", "logprobs", "resume_token")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_FIELD_NUMBER: _ClassVar[int]
    index: int
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.PositionLogprobs]
    resume_token: str
    def __init__(self, index: _Optional[int] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.PositionLogprobs, _Mapping]]] = ..., resume_token: _Optional[str] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("index", "reason", "stop", "stop_token_id", "usage", "timings")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    index: int
    reason: _common_pb2.FinishReason
    stop: str
    stop_token_id: int
    usage: _common_pb2.Usage
    timings: Timings
    def __init__(self, index: _Optional[int] = ..., reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., stop: _Optional[str] = ..., stop_token_id: _Optional[int] = ..., usage: _Optional[_Union[_common_pb2.Usage, _Mapping]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("ttft_ms", "queue_ms", "total_ms")
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_MS_FIELD_NUMBER: _ClassVar[int]
    ttft_ms: float
    queue_ms: float
    total_ms: float
    def __init__(self, ttft_ms: _Optional[float] = ..., queue_ms: _Optional[float] = ..., total_ms: _Optional[float] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("model", "text", "conversation", "add_special_tokens", "with_text")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CONVERSATION_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WITH_TEXT_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    conversation: Conversation
    add_special_tokens: bool
    with_text: bool
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., conversation: _Optional[_Union[Conversation, _Mapping]] = ..., add_special_tokens: _Optional[bool] = ..., with_text: _Optional[bool] = ...) -> None: ...

class Conversation(_message.Message):
    __slots__ = ("messages", "add_generation_prompt")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    ADD_GENERATION_PROMPT_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    add_generation_prompt: bool
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., add_generation_prompt: _Optional[bool] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("token_ids", "token_texts", "max_context_tokens")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_TEXTS_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    token_texts: _containers.RepeatedScalarFieldContainer[str]
    max_context_tokens: int
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., token_texts: _Optional[_Iterable[str]] = ..., max_context_tokens: _Optional[int] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("model", "token_ids", "skip_special_tokens")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    skip_special_tokens: bool
    def __init__(self, model: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., skip_special_tokens: _Optional[bool] = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[Model]
    def __init__(self, models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ...) -> None: ...

class GetModelRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("name", "vocab_size", "max_context_tokens", "eos_token_ids", "bos_token_id", "has_chat_template", "block_tokens", "namespace", "groups")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BOS_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    HAS_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    name: str
    vocab_size: int
    max_context_tokens: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bos_token_id: int
    has_chat_template: bool
    block_tokens: int
    namespace: str
    groups: int
    def __init__(self, name: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_context_tokens: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., bos_token_id: _Optional[int] = ..., has_chat_template: _Optional[bool] = ..., block_tokens: _Optional[int] = ..., namespace: _Optional[str] = ..., groups: _Optional[int] = ...) -> None: ...

class GetClusterRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Cluster(_message.Message):
    __slots__ = ("router_id", "groups", "membership_live", "active_requests", "usage")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    MEMBERSHIP_LIVE_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    groups: _containers.RepeatedCompositeFieldContainer[Group]
    membership_live: bool
    active_requests: int
    usage: TenantUsage
    def __init__(self, router_id: _Optional[str] = ..., groups: _Optional[_Iterable[_Union[Group, _Mapping]]] = ..., membership_live: _Optional[bool] = ..., active_requests: _Optional[int] = ..., usage: _Optional[_Union[TenantUsage, _Mapping]] = ...) -> None: ...

class TenantUsage(_message.Message):
    __slots__ = ("tenant", "requests", "refusals", "prompt_tokens", "cached_group_tokens", "cached_redis_tokens", "output_tokens", "active_requests", "tokens_left")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_GROUP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_REDIS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_LEFT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    requests: int
    refusals: int
    prompt_tokens: int
    cached_group_tokens: int
    cached_redis_tokens: int
    output_tokens: int
    active_requests: int
    tokens_left: int
    def __init__(self, tenant: _Optional[str] = ..., requests: _Optional[int] = ..., refusals: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., cached_group_tokens: _Optional[int] = ..., cached_redis_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., active_requests: _Optional[int] = ..., tokens_left: _Optional[int] = ...) -> None: ...

class Group(_message.Message):
    __slots__ = ("group_id", "incarnation", "model", "namespace", "address", "state", "tp", "device", "dtype", "load", "last_frame_age_ms", "indexed_blocks", "rank_pids")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[Group.State]
        CONNECTING: _ClassVar[Group.State]
        SERVING: _ClassVar[Group.State]
        DRAINING: _ClassVar[Group.State]
        LOST: _ClassVar[Group.State]
    STATE_UNSPECIFIED: Group.State
    CONNECTING: Group.State
    SERVING: Group.State
    DRAINING: Group.State
    LOST: Group.State
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TP_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    LAST_FRAME_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    INDEXED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RANK_PIDS_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    incarnation: str
    model: str
    namespace: str
    address: str
    state: Group.State
    tp: int
    device: str
    dtype: str
    load: _common_pb2.GroupLoad
    last_frame_age_ms: float
    indexed_blocks: int
    rank_pids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, group_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., model: _Optional[str] = ..., namespace: _Optional[str] = ..., address: _Optional[str] = ..., state: _Optional[_Union[Group.State, str]] = ..., tp: _Optional[int] = ..., device: _Optional[str] = ..., dtype: _Optional[str] = ..., load: _Optional[_Union[_common_pb2.GroupLoad, _Mapping]] = ..., last_frame_age_ms: _Optional[float] = ..., indexed_blocks: _Optional[int] = ..., rank_pids: _Optional[_Iterable[int]] = ...) -> None: ...

class DrainGroupRequest(_message.Message):
    __slots__ = ("group_id", "timeout_s")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    timeout_s: float
    def __init__(self, group_id: _Optional[str] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class DrainGroupResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetSessionRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class DeleteSessionRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class DeleteSessionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ForkSessionRequest(_message.Message):
    __slots__ = ("session_id", "new_session_id")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NEW_SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    new_session_id: str
    def __init__(self, session_id: _Optional[str] = ..., new_session_id: _Optional[str] = ...) -> None: ...

class PinSessionRequest(_message.Message):
    __slots__ = ("session_id", "pinned")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    pinned: bool
    def __init__(self, session_id: _Optional[str] = ..., pinned: _Optional[bool] = ...) -> None: ...

class Session(_message.Message):
    __slots__ = ("session_id", "messages", "tokens", "expires_in_s", "version", "bytes", "model", "pinned", "created_at_s", "used_at_s", "busy")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_IN_S_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_S_FIELD_NUMBER: _ClassVar[int]
    USED_AT_S_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    tokens: int
    expires_in_s: float
    version: int
    bytes: int
    model: str
    pinned: bool
    created_at_s: float
    used_at_s: float
    busy: bool
    def __init__(self, session_id: _Optional[str] = ..., messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., tokens: _Optional[int] = ..., expires_in_s: _Optional[float] = ..., version: _Optional[int] = ..., bytes: _Optional[int] = ..., model: _Optional[str] = ..., pinned: _Optional[bool] = ..., created_at_s: _Optional[float] = ..., used_at_s: _Optional[float] = ..., busy: _Optional[bool] = ...) -> None: ...
