"""Everything about a local start that can be checked before a process is started: then a mistake costs a second."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import socket
from typing import TYPE_CHECKING

import psutil

from cluster.cli.interrupts import Interrupts
from cluster.cli.terminal import Steps
from cluster.config import ClusterConfig
from cluster.errors import ConfigError, OutOfMemory, PortInUse
from cluster.lifecycle import free_port
from cluster.rpc import join_host_port
from router.auth import Authenticator

if TYPE_CHECKING:
    from workers.model.config import ModelConfig


def check(config: ClusterConfig, steps: Steps, interrupts: Interrupts) -> ClusterConfig:
    """Raise the QuireError that this start would end in; return the configuration with a port chosen.

    With one router, port 0 becomes a number here, so that a router that is replaced comes back where its clients look
    for it.
    """
    config = _with_port(config)
    _check_device(config)
    Authenticator(config.router.api_keys_file)  # reads the file as a router would, and refuses what it would refuse
    if config.redis is not None:
        from cluster.membership import mask_url, ping

        steps.begin(f"redis {mask_url(config.redis)}")
        asyncio.run(ping(config.redis))
    weights_bytes = _check_model(config, steps, interrupts)
    _check_memory(config, weights_bytes)
    return config


def _check_device(config: ClusterConfig) -> None:
    """A group on a card waits for one as long as Ray has none to give; on this host that would be for ever."""
    if config.engine.device == "cuda" and "RAY_ADDRESS" not in os.environ and not _cards():
        raise ConfigError(
            "engine.device: cuda is asked for, and there is no CUDA device here; use --device cpu or auto",
            field="engine.device",
        )


def _cards() -> int:
    """CUDA devices, by the driver itself: torch would take seconds to import."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


def _with_port(config: ClusterConfig) -> ClusterConfig:
    host, port = config.router.host, config.router.port
    if port == 0 and config.routers == 1:
        port = free_port(host)
    elif port != 0:
        check_port(host, port)
    return config.model_copy(update={"router": config.router.model_copy(update={"port": port})})


def check_port(host: str, port: int) -> None:
    """Raise PortInUse when somebody listens there, ConfigError when the address is not this host's."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            # As a server does: connections of an earlier one that are still closing do not count as "in use".
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        where = join_host_port(host, port)
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(
                f"port {port} on {host} is in use; choose another with --port", field="router.port", value=port
            ) from error
        raise ConfigError(f"cannot listen on {where}: {error.strerror or error}", field="router.host") from error


def _check_model(config: ClusterConfig, steps: Steps, interrupts: Interrupts) -> int:
    """Fetch the model where needed, read all but its weights; returns the bytes of its weights' files."""
    from cluster import models
    from router.tokenizer import Tokenizer
    from workers.model.config import parse_config
    from workers.model.partition import part_of

    def on_progress(done: int, total: int) -> None:
        steps.detail(f"model {config.model}: fetched {done / 1e6:.0f} of {total / 1e6:.0f} MB")

    steps.begin(f"model {config.model}")
    with interrupts.let_through():  # a download may take long; the rest is quick
        files = models.resolve(config.model, name=config.model_name, progress=on_progress)
    model = parse_config(models.hf_config(files))
    part_of(model, 0, config.tp)  # refuses ranks that would have nothing to do
    _check_page(config, model)
    Tokenizer(files)  # a damaged one is found in a second here; a replica would take a dozen to say so
    paths = [files.path] if files.path.is_file() else sorted(files.path.glob("*.safetensors"))
    return sum(os.path.getsize(path) for path in paths)


def _check_page(config: ClusterConfig, model: ModelConfig) -> None:
    """Refuse a pool without a page. With more ranks than KV heads each of them holds a copy of one."""
    from workers.sizing import check_page_fits

    if config.engine.kv_memory_bytes is not None:
        kv_heads = max(model.kv_heads, config.tp)
        numbers = 2 * model.layers * kv_heads * config.engine.block_tokens * model.head_dim
        check_page_fits(config.engine.kv_memory_bytes, numbers * _least_kv_itemsize(config))


def _least_kv_itemsize(config: ClusterConfig) -> int:
    """Bytes of a number in a page; the smaller one where it is open what the groups will run on."""
    engine = config.engine
    maybe_card = engine.device == "cuda" or (engine.device == "auto" and ("RAY_ADDRESS" in os.environ or _cards()))
    on_cpu = engine.dtype == "auto" and not maybe_card
    return 4 if on_cpu or engine.dtype == "float32" else 2


def _check_memory(config: ClusterConfig, weights_bytes: int) -> None:
    """Refuse pools that cannot fit this host. Each group looks again, more exactly, when it has loaded its model."""
    if config.engine.kv_memory_bytes is None or config.engine.device == "cuda":
        return
    wanted = config.groups * (config.engine.kv_memory_bytes + weights_bytes)
    free = psutil.virtual_memory().available
    if wanted > free:
        raise OutOfMemory(
            f"engine.kv_memory_bytes: {config.groups} groups of {config.engine.kv_memory_bytes:,} bytes for KV pages "
            f"and {weights_bytes:,} for weights do not fit into the {free:,} bytes that are free",
            field="engine.kv_memory_bytes",
        )
