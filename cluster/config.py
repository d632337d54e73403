"""Configuration: frozen, documented values. Unknown keys are refused; secrets are masked; units are in the names.

One YAML file (``quire serve --config``, ``serve run cluster.serve.app:build``) holds a ``ClusterConfig``; flags
override single fields. Every field's meaning is in its ``description``; `quire config` prints it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, SecretStr, StringConstraints, ValidationError, model_validator

from cluster.errors import ConfigError

Device = Literal["auto", "cpu", "cuda"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
AttentionName = Literal["auto", "reference", "cpu"]
WeightFormat = Literal["auto", "int8"]
CollectiveName = Literal["auto", "memory", "torch"]
Positive = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
TenantName = Annotated[str, StringConstraints(pattern=r"^(\*|[A-Za-z0-9._-]{1,64})$")]


class Frozen(BaseModel):
    """Base of every configuration value."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class EngineConfig(Frozen):
    """One worker group's engine."""

    device: Device = Field("auto", description="Where the model runs; auto takes CUDA when there is a card.")
    dtype: DType = Field("auto", description="Weights and KV; auto is float32 on a CPU and bfloat16 on a card.")
    weights: WeightFormat = Field(
        "auto",
        description="What linear layers compute with: auto is dtype; int8 rounds weights to 8 bits, scaled by "
        "channel, and activations, scaled by token and 64 numbers of it, on an x86 CPU: faster, a little less exact.",
    )
    attention: AttentionName = Field(
        "auto", description="Kernels: auto is cpu on a CPU in float32, else reference, which is plain torch."
    )
    collective: CollectiveName = Field(
        "auto",
        description="How the ranks of a group add up their parts: memory is shared memory between CPUs of one host, "
        "torch is NCCL between cards and gloo between CPUs; auto takes memory where it can.",
    )
    block_tokens: Literal[8, 16, 32, 64, 128] = Field(16, description="Tokens in a KV block (a page).")
    kv_memory_bytes: Positive | None = Field(
        None,
        description="Memory for KV pages. Unset: max_running whole contexts, at most a quarter of free memory.",
    )
    max_batch_tokens: Positive = Field(512, description="Token budget of one step, over prefill and decode.")
    step_target_ms: Positive | None = Field(
        200,
        description="A step in which sequences decode takes about this long at most: prompts get smaller chunks. "
        "null: only max_batch_tokens bounds it.",
    )
    max_running: Positive = Field(32, description="Sequences that run at once.")
    max_waiting: Positive = Field(256, description="Requests that wait in a group before it refuses.")
    max_context_tokens: Positive | None = Field(
        None, description="Prompt plus output; unset: what the model was trained for."
    )
    prefix_cache: bool = Field(True, description="Reuse pages of equal prefixes inside the group.")
    threads: Positive | None = Field(
        None, description="CPU threads of one rank; unset: the cores, divided among groups on the host."
    )


class WorkerConfig(Frozen):
    """One group's process and its port."""

    host: str = Field("127.0.0.1", description="Address to listen on and to announce; a pod sets its own IP.")
    heartbeat_ms: Positive = Field(500, description="A load frame is sent at least this often.")
    step_timeout_s: PositiveFloat = Field(
        10.0,
        description="A step that gets no layer further for this long, or a rank that is silent for it, means that the "
        "group is stuck: it is replaced.",
    )
    lease_s: PositiveFloat = Field(
        10.0, description="The group's entry in Redis lives this long after its last renewal."
    )
    drain_s: PositiveFloat = Field(30.0, description="Streams may finish for this long before a group stops.")
    max_outbound_bytes: Positive = Field(
        16 << 20, description="Unsent bytes for one router before its stream is closed."
    )


class PrefixConfig(Frozen):
    """The prefix cache's tier in Redis: KV blocks of prompts that any group of the same namespace can reuse."""

    enabled: bool = Field(True, description="Whether groups use a tier in Redis behind their own pages.")
    redis: str | None = Field(
        None,
        description="URL of the KV Redis, which may evict: redis://, rediss://, unix://, "
        "redis+sentinel://HOST:PORT,HOST:PORT/SERVICE, redis+cluster://HOST:PORT. Unset: `quire serve` starts one; "
        "elsewhere there is no tier.",
    )
    memory_bytes: Positive = Field(1 << 30, description="Of the KV Redis that `quire serve` starts.")
    chunk_tokens: Literal[8, 16, 32, 64, 128, 256, 512, 1024] | None = Field(
        None, description="Tokens of one value; unset: the least, from a block on, that makes a value of 1 MiB."
    )
    dtype: Literal["auto", "int8"] = Field(
        "auto",
        description="At rest: auto is what pages hold; int8 is a quarter of float32, scaled by token and head, and a "
        "little less exact.",
    )
    deadline_ms: Positive = Field(500, description="A request waits for the tier at most this long, all in all.")
    claim_wait_ms: Positive = Field(
        10_000, description="It waits at most this long for a prefix that another group is computing."
    )
    ttl_s: Positive = Field(3600, description="A prefix's beginning is kept this long after its last use.")
    write_buffer_bytes: Positive = Field(
        64 << 20, description="Of each rank, copied and not yet written; what comes beyond is not stored."
    )
    failures_to_open: Positive = Field(3, description="Failures in a row after which the tier is left alone.")
    probe_ms: Positive = Field(1000, description="Then it is tried again after this long, twice as long each time.")


class RouterConfig(Frozen):
    """The public port and what stands before the groups."""

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(50051, ge=0, le=65535, description="Public gRPC port; 0 picks a free one.")
    api_keys_file: Path | None = Field(
        None, description="Lines 'tenant sha256-hex'; made by `quire key`. Unset: everybody is the tenant 'anonymous'."
    )
    max_message_bytes: Positive = Field(4 << 20, description="Largest message that a client may send.")
    max_active_requests: Positive = Field(1024, description="Requests in flight through one router before it refuses.")
    max_buffered_events: Positive = Field(
        4096, description="Unread events of one stream before it ends as SLOW_CONSUMER."
    )
    default_max_tokens: Positive | None = Field(
        None, description="When a request sets none; unset: what is left of the context."
    )
    group_silence_s: PositiveFloat = Field(3.0, description="A group that sends no frame for this long is given up.")
    group_wait_s: PositiveFloat = Field(
        5.0, description="A request waits this long for a group to appear before UNAVAILABLE."
    )
    max_attempts: Positive = Field(3, description="Groups that a request is tried on when groups die.")
    drain_s: PositiveFloat = Field(20.0, description="Streams may finish for this long after SIGTERM.")
    index_blocks: Positive = Field(
        1_000_000, description="Blocks of one group that the routing index remembers at most."
    )


class SessionsConfig(Frozen):
    """Stored sessions, in the control Redis. How many and how large: see ``tenants``."""

    ttl_s: Positive = Field(86_400, description="A session is dropped this long after its last turn.")
    lease_s: PositiveFloat = Field(
        10.0, description="A turn's hold on its session, renewed while it runs; a router that died keeps it this long."
    )
    timeout_ms: Positive = Field(
        1000, description="A session call waits this long for Redis, then is UNAVAILABLE; what needs none goes on."
    )


class TenantConfig(Frozen):
    """What a tenant may use. Requests and tokens are counted by each router for itself."""

    max_active_requests: Positive | None = Field(
        None, description="Requests in flight through one router; null: no limit of its own."
    )
    tokens_per_minute: Positive | None = Field(
        None,
        description="Prompt tokens computed plus output tokens through one router, over time; a minute's worth may be "
        "used at once. null: no limit.",
    )
    max_sessions: Positive = Field(1000, description="Stored sessions, pinned ones too.")
    session_bytes: Positive = Field(1 << 20, description="Of one session's messages.")
    pinned_bytes: int = Field(16 << 20, ge=0, description="Of all pinned sessions together, which never run out.")
    cache_domain: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9._-]{1,64}$",
        description="Tenants with the same name here share cached prefixes, and can find out by timing what the "
        "others' prompts begin with. null: the tenant shares with nobody.",
    )


class ClusterConfig(Frozen):
    """The whole cluster."""

    cluster: str = Field("quire", pattern=r"^[a-z0-9-]{1,40}$", description="Prefix of the cluster's keys in Redis.")
    model: str = Field("smollm2-135m", description="Built-in name, folder in Hugging Face form, GGUF file, or hub id.")
    model_name: str | None = Field(None, description="The name that requests use; unset: derived from model.")
    groups: Positive = Field(1, description="Worker groups.")
    tp: Positive = Field(1, description="Ranks of a group (tensor parallelism).")
    ranks_across_nodes: bool = Field(
        False,
        description="Whether a group's ranks may lie on several nodes, which must then reach each other at "
        "worker.host; else all are placed on one.",
    )
    group_resources: dict[str, PositiveFloat] = Field(
        default_factory=dict,
        description="Ray resources, by name, that each group reserves beside CPUs and GPUs: nodes that offer some for "
        "one group keep groups apart. A Ray that `quire serve` starts offers what is asked for.",
    )
    router_resources: dict[str, PositiveFloat] = Field(
        default_factory=dict, description="The same for each router: where routers may run."
    )
    routers: Positive = Field(1, description="Routers; each needs a port of its own on one host.")
    redis: str | None = Field(None, description="redis:// URL of the control Redis; unset: `quire serve` starts one.")
    worker_token: SecretStr | None = Field(
        None, description="Shared by routers and groups; unset: `quire serve` makes one."
    )
    cluster_secret: SecretStr | None = Field(
        None,
        description="Keys the prefix cache's roots; unset: `quire serve` makes one. Must be equal in every router.",
    )
    engine: EngineConfig = Field(default_factory=EngineConfig, description="Engine settings.")
    worker: WorkerConfig = Field(default_factory=WorkerConfig, description="Group process settings.")
    prefix: PrefixConfig = Field(default_factory=PrefixConfig, description="The prefix cache's tier in Redis.")
    router: RouterConfig = Field(default_factory=RouterConfig, description="Router settings.")
    sessions: SessionsConfig = Field(default_factory=SessionsConfig, description="Stored sessions.")
    tenants: dict[TenantName, TenantConfig] = Field(
        default_factory=dict,
        description="Quotas by tenant; '*' is everybody without a section, and what a section leaves unset.",
    )

    @model_validator(mode="after")
    def _supported(self) -> ClusterConfig:
        if self.routers > 1 and self.router.port != 0:
            raise ValueError(
                f"routers: {self.routers} routers cannot share router.port {self.router.port}; set it to 0"
            )
        return self


def load(path: Path | None, overrides: dict[str, object] | None = None) -> ClusterConfig:
    """Read a YAML file (or none), lay dotted overrides over it, and validate.

    Raises ConfigError with one line that names each wrong field, its value and the rule.
    """
    raw: object = {}
    if path is not None:
        try:
            raw = yaml.safe_load(path.read_text()) or {}
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigError(f"config {path}: {str(error).splitlines()[0]}", field="config") from error
        if not isinstance(raw, dict):
            raise ConfigError(f"config {path}: must be a mapping of settings", field="config")
    return parse(_overlaid(raw, overrides or {}), source=str(path) if path else "flags")


def parse(raw: object, source: str = "config") -> ClusterConfig:
    """Validate a mapping. Raises ConfigError as ``load`` does."""
    try:
        return ClusterConfig.model_validate(raw)
    except ValidationError as error:
        first = [
            f"{'.'.join(map(str, item['loc'])) or 'config'}: {item['msg'].removeprefix('Value error, ')}"
            for item in error.errors()
        ]
        raise ConfigError(f"{source}: {'; '.join(first)}", field="config") from error


def _overlaid(raw: object, overrides: dict[str, object]) -> dict[str, object]:
    """A copy of ``raw`` in which each dotted key that is not None is set."""
    merged = dict(raw) if isinstance(raw, dict) else {}
    for dotted, value in overrides.items():
        if value is None:
            continue
        *parents, leaf = dotted.split(".")
        node = merged
        for key in parents:
            child = node.get(key)
            node[key] = dict(child) if isinstance(child, dict) else {}
            node = node[key]
        node[leaf] = value
    return merged
