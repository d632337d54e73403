"""``quire serve``: a cluster on this machine until Ctrl-C."""

from __future__ import annotations

import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.cli import terminal
from cluster.errors import ConfigError

if TYPE_CHECKING:
    from cluster.cli.interrupts import Interrupts
    from cluster.cli.local import Serving

_WATCH_S = 1.0


class Device(StrEnum):
    """Where the model runs."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Weights(StrEnum):
    """What linear layers compute with."""

    AUTO = "auto"
    INT8 = "int8"


class PrefixDType(StrEnum):
    """Of KV blocks at rest in Redis."""

    AUTO = "auto"
    INT8 = "int8"


class DType(StrEnum):
    """Of weights and KV."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(serve)


def serve(
    config: Annotated[Path | None, typer.Option(help="YAML file with any setting of `quire config`.")] = None,
    model: Annotated[str | None, typer.Option(help="Built-in name, Hugging Face folder, GGUF file or hub id.")] = None,
    model_name: Annotated[str | None, typer.Option(help="The name that requests use.")] = None,
    groups: Annotated[int | None, typer.Option(help="Worker groups.")] = None,
    tp: Annotated[int | None, typer.Option(help="Ranks of a group (tensor parallelism).")] = None,
    device: Annotated[Device | None, typer.Option(help="auto takes CUDA when there is a card.")] = None,
    dtype: Annotated[DType | None, typer.Option(help="auto is float32 on a CPU, bfloat16 on a card.")] = None,
    weights: Annotated[
        Weights | None, typer.Option(help="int8: 8 bits a weight, on a CPU; faster, a little less exact.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Public gRPC port; 0 picks a free one.")] = None,
    redis: Annotated[str | None, typer.Option(help="redis:// URL; without it an embedded server is started.")] = None,
    prefix_redis: Annotated[
        str | None, typer.Option(help="URL of the KV Redis of the prefix cache; without it one is started, too.")
    ] = None,
    prefix_tier: Annotated[
        bool | None, typer.Option("--prefix-tier/--no-prefix-tier", help="Keep prefixes in Redis, for all groups.")
    ] = None,
    prefix_dtype: Annotated[
        PrefixDType | None, typer.Option(help="int8: a quarter of float32 at rest; a little less exact.")
    ] = None,
    api_keys: Annotated[Path | None, typer.Option(help="Key file made by `quire key`.")] = None,
    kv_memory: Annotated[str | None, typer.Option(help="Memory for KV pages of one group: 2GiB, 500MB, bytes.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Any setting: --set engine.max_running=16")] = None,
) -> None:
    """Start groups and a router on this machine, and keep them running. Ctrl-C drains and ends everything.

    Where RAY_ADDRESS is set, that Ray is used; otherwise a private one is started.

    [bold]Examples[/]

      quire serve --groups 2

      quire serve --model ./Llama-3.2-1B --port 7000 --dtype bfloat16

      quire serve --weights int8

      quire serve --tp 2 --groups 2

      quire serve --redis redis://control:6379 --prefix-redis redis://kv:6379

      quire serve --config cluster.yaml --set engine.max_running=64
    """
    from cluster.cli.interrupts import interruptible
    from cluster.cli.local import local_cluster
    from cluster.config import load

    overrides: dict[str, Any] = {
        "model": model,
        "model_name": model_name,
        "groups": groups,
        "tp": tp,
        "redis": redis,
        "prefix.redis": prefix_redis,
        "prefix.enabled": prefix_tier,
        "prefix.dtype": prefix_dtype.value if prefix_dtype else None,
        "engine.device": device.value if device else None,
        "engine.dtype": dtype.value if dtype else None,
        "engine.weights": weights.value if weights else None,
        "engine.kv_memory_bytes": parse_bytes(kv_memory) if kv_memory else None,
        "router.host": host,
        "router.port": port,
        "router.api_keys_file": api_keys,
        **parse_settings(set_ or []),
    }
    settings = load(config, overrides)
    with interruptible() as interrupts, local_cluster(settings, interrupts) as serving:
        _announce(serving)
        _watch(serving, interrupts)
    terminal.err.print("stopped")


def _announce(serving: Serving) -> None:
    """The address on stdout, alone on its line, for scripts; the rest is for people."""
    for address in serving.addresses:
        terminal.out.print(f"serving on {address}", markup=False)
    first = serving.addresses[0]
    terminal.err.print(f"chat with it: quire chat --address {first}    Ctrl-C ends it", markup=False)


def _watch(serving: Serving, interrupts: Interrupts) -> None:
    """Say when a replica is lost and when it is back, until a signal unwinds this."""
    from cluster.cli.local import describe
    from cluster.serve import runtime

    complete = True
    while True:
        time.sleep(_WATCH_S)
        with interrupts.held():
            now = runtime.progress(serving.config)
        interrupts.check()
        if now.complete != complete:
            complete = now.complete
            state = "all back" if complete else "something was lost and is being replaced"
            terminal.err.print(f"{state}: {describe(now)}", markup=False)


_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def parse_bytes(text: str) -> int:
    """ "2GiB" → 2147483648. Raises ConfigError."""
    number = text.strip().lower().rstrip("bikmgt")
    unit = text.strip().lower()[len(number) :]
    try:
        return int(float(number) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError) as error:
        raise ConfigError(f"--kv-memory: a size such as 2GiB or 500MB; got {text!r}", field="kv_memory") from error


def parse_settings(pairs: list[str]) -> dict[str, Any]:
    """["engine.max_running=16"] → {"engine.max_running": 16}; values are YAML. Raises ConfigError."""
    import yaml

    settings: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise ConfigError(f"--set: name=value; got {pair!r}", field="set")
        try:
            settings[name] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(f"--set {name}: not a YAML value: {value!r}", field=name) from error
    return settings
