from cluster.pb import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RouterFrame(_message.Message):
    __slots__ = ("hello", "submit", "cancel", "snapshot")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    hello: RouterHello
    submit: Submit
    cancel: Cancel
    snapshot: SnapshotRequest
    def __init__(self, hello: _Optional[_Union[RouterHello, _Mapping]] = ..., submit: _Optional[_Union[Submit, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., snapshot: _Optional[_Union[SnapshotRequest, _Mapping]] = ...) -> None: ...

class RouterHello(_message.Message):
    __slots__ = ("router_id", "protocol_version")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    protocol_version: int
    def __init__(self, router_id: _Optional[str] = ..., protocol_version: _Optional[int] = ...) -> None: ...

class SnapshotRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Submit(_message.Message):
    __slots__ = ("request_id", "attempt", "sequence", "model", "prompt_token_ids", "output_token_ids", "sampling", "remaining_ms", "tenant", "priority", "root", "adapter", "constraint", "draft", "traceparent")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    REMAINING_MS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    sequence: int
    model: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    output_token_ids: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenSequence]
    sampling: _common_pb2.SamplingParams
    remaining_ms: int
    tenant: str
    priority: int
    root: bytes
    adapter: str
    constraint: _common_pb2.Constraint
    draft: _common_pb2.DraftSettings
    traceparent: str
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., sequence: _Optional[int] = ..., model: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., output_token_ids: _Optional[_Iterable[_Union[_common_pb2.TokenSequence, _Mapping]]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., remaining_ms: _Optional[int] = ..., tenant: _Optional[str] = ..., priority: _Optional[int] = ..., root: _Optional[bytes] = ..., adapter: _Optional[str] = ..., constraint: _Optional[_Union[_common_pb2.Constraint, _Mapping]] = ..., draft: _Optional[_Union[_common_pb2.DraftSettings, _Mapping]] = ..., traceparent: _Optional[str] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("request_id", "attempt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class GroupFrame(_message.Message):
    __slots__ = ("hello", "step", "load", "cache")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    hello: GroupHello
    step: Step
    load: _common_pb2.GroupLoad
    cache: CacheEvents
    def __init__(self, hello: _Optional[_Union[GroupHello, _Mapping]] = ..., step: _Optional[_Union[Step, _Mapping]] = ..., load: _Optional[_Union[_common_pb2.GroupLoad, _Mapping]] = ..., cache: _Optional[_Union[CacheEvents, _Mapping]] = ...) -> None: ...

class GroupHello(_message.Message):
    __slots__ = ("protocol_version", "group_id", "incarnation", "model", "namespace", "block_tokens", "total_blocks", "max_context_tokens", "vocab_size", "max_running", "max_batch_tokens", "tp", "device", "dtype", "heartbeat_ms", "rank_pids", "max_waiting")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TP_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_MS_FIELD_NUMBER: _ClassVar[int]
    RANK_PIDS_FIELD_NUMBER: _ClassVar[int]
    MAX_WAITING_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    group_id: str
    incarnation: str
    model: str
    namespace: str
    block_tokens: int
    total_blocks: int
    max_context_tokens: int
    vocab_size: int
    max_running: int
    max_batch_tokens: int
    tp: int
    device: str
    dtype: str
    heartbeat_ms: int
    rank_pids: _containers.RepeatedScalarFieldContainer[int]
    max_waiting: int
    def __init__(self, protocol_version: _Optional[int] = ..., group_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., model: _Optional[str] = ..., namespace: _Optional[str] = ..., block_tokens: _Optional[int] = ..., total_blocks: _Optional[int] = ..., max_context_tokens: _Optional[int] = ..., vocab_size: _Optional[int] = ..., max_running: _Optional[int] = ..., max_batch_tokens: _Optional[int] = ..., tp: _Optional[int] = ..., device: _Optional[str] = ..., dtype: _Optional[str] = ..., heartbeat_ms: _Optional[int] = ..., rank_pids: _Optional[_Iterable[int]] = ..., max_waiting: _Optional[int] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("step", "deltas")
    STEP_FIELD_NUMBER: _ClassVar[int]
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    step: int
    deltas: _containers.RepeatedCompositeFieldContainer[SequenceDelta]
    def __init__(self, step: _Optional[int] = ..., deltas: _Optional[_Iterable[_Union[SequenceDelta, _Mapping]]] = ...) -> None: ...

class SequenceDelta(_message.Message):
    __slots__ = ("request_id", "attempt", "index", "token_ids", "logprobs", "admitted", "finished", "failed")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.PositionLogprobs]
    admitted: Admitted
    finished: SampleEnd
    failed: RequestFailed
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.PositionLogprobs, _Mapping]]] = ..., admitted: _Optional[_Union[Admitted, _Mapping]] = ..., finished: _Optional[_Union[SampleEnd, _Mapping]] = ..., failed: _Optional[_Union[RequestFailed, _Mapping]] = ...) -> None: ...

class Admitted(_message.Message):
    __slots__ = ("cached_tokens", "queue_ms", "prompt_logprobs", "prefix")
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    cached_tokens: _common_pb2.CachedTokens
    queue_ms: float
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.PositionLogprobs]
    prefix: _common_pb2.PrefixUse
    def __init__(self, cached_tokens: _Optional[_Union[_common_pb2.CachedTokens, _Mapping]] = ..., queue_ms: _Optional[float] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_common_pb2.PositionLogprobs, _Mapping]]] = ..., prefix: _Optional[_Union[_common_pb2.PrefixUse, _Mapping]] = ...) -> None: ...

class SampleEnd(_message.Message):
    __slots__ = ("reason", "stop_token_id", "usage")
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    reason: _common_pb2.FinishReason
    stop_token_id: int
    usage: _common_pb2.Usage
    def __init__(self, reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., stop_token_id: _Optional[int] = ..., usage: _Optional[_Union[_common_pb2.Usage, _Mapping]] = ...) -> None: ...

class RequestFailed(_message.Message):
    __slots__ = ("reason", "message", "metadata", "retry_after_ms")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    reason: str
    message: str
    metadata: _containers.ScalarMap[str, str]
    retry_after_ms: int
    def __init__(self, reason: _Optional[str] = ..., message: _Optional[str] = ..., metadata: _Optional[_Mapping[str, str]] = ..., retry_after_ms: _Optional[int] = ...) -> None: ...

class CacheEvents(_message.Message):
    __slots__ = ("sequence", "snapshot", "more", "stored", "dropped")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    snapshot: bool
    more: bool
    stored: _containers.RepeatedScalarFieldContainer[bytes]
    dropped: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, sequence: _Optional[int] = ..., snapshot: _Optional[bool] = ..., more: _Optional[bool] = ..., stored: _Optional[_Iterable[bytes]] = ..., dropped: _Optional[_Iterable[bytes]] = ...) -> None: ...
