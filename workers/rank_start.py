"""How the ranks of a group come together: each side's steps from the first greeting to the trial step.

All meet before anything is loaded, so that a rank that does not come is noticed at once; then each loads its part; then
the leader knows the number of pages that all have room for, and all compile and try their kernels in one common step.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from cluster.config import ClusterConfig
from cluster.errors import ConfigError, ProtocolError, QuireError
from cluster.models import ModelFiles, hf_config, resolve, weights_digest
from cluster.telemetry import get_logger
from workers import assembly, tier_start
from workers.collective import Alone, Collective
from workers.group import LocalGroup
from workers.plan_wire import decode
from workers.rank_group import (
    JOIN_TIMEOUT_S,
    TRIAL_STEP,
    RankedGroup,
    RankLink,
    RankListener,
    RemoteTransfers,
    start_error,
)
from workers.rank_wire import RANK_PROTOCOL_VERSION, Connection, Kind, host_identity, proof
from workers.sizing import pool_blocks
from workers.tier import TransferReport, Transfers
from workers.tier_wire import decode_fetch, decode_store, encode_report

if TYPE_CHECKING:
    import torch

    from workers.group import Group
    from workers.model.llama import Model
    from workers.prefix_tier import PrefixTier
    from workers.runner import Runner
    from workers.shared_memory import Region

_log = get_logger("ranks")


LOADING = "loading weights"
COMPILING = "preparing kernels (compiled at a machine's first start)"


@dataclass(frozen=True, slots=True)
class Started:
    """A group whose ranks are ready, as its leader has it."""

    group: Group
    runner: Runner
    model: Model
    threads: int
    """Of the leader's own rank."""
    tier: PrefixTier | None = None
    """Behind the group's pages."""
    transfers: Transfers | None = None
    """The leader's own end of it."""

    def close(self) -> None:
        """End the ranks and all threads. Nothing is executed any more. Idempotent."""
        for part in (self.tier, self.transfers, self.group):
            if part is not None:
                part.close()


@dataclass(frozen=True, slots=True)
class _Place:
    """Where and how this rank computes."""

    files: ModelFiles
    device: torch.device
    dtype: torch.dtype
    threads: int


def lead(
    config: ClusterConfig,
    listener: RankListener | None,
    default_blocks: int | None = None,
    say: Callable[[str], None] = lambda phase: None,
) -> Started:
    """Load rank 0's part, and bring the others together. ``listener``: None for a group of one.

    ``default_blocks``: pages where the configuration names no memory for them; None: what ``pool_blocks`` says.
    ``say`` is told what is being done.
    Raises ModelLoadError, ConfigError, OutOfMemory, GroupLost.
    """
    place = _place(config)
    if listener is None:
        say(LOADING)
        model = _load(config, place, Alone())
        say(COMPILING)
        runner = assembly.make_runner(model, config.engine, _blocks(config, place, model, default_blocks))
        return _with_tier(config, place, Started(LocalGroup(runner), runner, model, place.threads), ())
    links: list[RankLink] = []
    try:
        say("waiting for its ranks")
        links = listener.accept(config.tp)
        return _lead_others(config, place, links, listener.host, default_blocks, say)
    except BaseException:
        for link in links:
            link.connection.close()
        raise
    finally:
        listener.close()


def _lead_others(
    config: ClusterConfig,
    place: _Place,
    links: Sequence[RankLink],
    host: str,
    default_blocks: int | None,
    say: Callable[[str], None],
) -> Started:
    collective, region = _meeting_place(config, place, links, host)
    try:
        say(LOADING)
        model = _load(config, place, collective)
        blocks, threads = [_blocks(config, place, model, default_blocks)], [_threads_that_meet(place)]
        for link in links:
            ready = _heard(link, Kind.READY)
            if ready["identity"] != _identity(config, place):
                raise ConfigError(f"rank {link.rank} has other weights or settings than its leader", rank=link.rank)
            blocks.append(ready["blocks"])
            threads.append(ready["threads"])
            link.weight_bytes = ready["weight_bytes"]
            link.kv_bytes = ready["page_bytes"]  # of one, so far
        _tell_threads(collective, sum(threads))
        for link in links:
            link.kv_bytes *= min(blocks)
            link.connection.send_json(Kind.START, {"blocks": min(blocks), "threads": sum(threads)})
        group = RankedGroup(links, collective, min(blocks))
        runners: list[Runner] = []

        def make_runner() -> Runner:
            runners.append(assembly.make_runner(model, config.engine, min(blocks)))
            return runners[0]

        say(COMPILING)
        group.begin(make_runner)
    except BaseException:
        collective.abort()
        collective.close()
        raise
    finally:
        if region is not None:
            region.close()
    return _with_tier(config, place, Started(group, runners[0], model, place.threads), links)


def _with_tier(config: ClusterConfig, place: _Place, started: Started, links: Sequence[RankLink]) -> Started:
    """With the tier behind its pages, where there is one, at work."""
    if not tier_start.has_tier(config):
        return started
    try:
        tier = tier_start.make_tier(config, place.files, started.model)
        own = tier_start.make_transfers(config, place.files, started.model, started.runner, partial(tier.report, 0))
        tier.start([own, *(RemoteTransfers(link, partial(tier.report, link.rank)) for link in links)])
    except BaseException:
        started.close()
        raise
    return replace(started, tier=tier, transfers=own)


def _meeting_place(
    config: ClusterConfig, place: _Place, links: Sequence[RankLink], host: str
) -> tuple[Collective, Region | None]:
    """Tell all ranks how they exchange numbers, and be the first who does."""
    if _may_share_memory(config, place, links):
        from workers.shared_memory import Region, SharedMemory

        shape = _shape(config, place.files)
        region = Region(shape)
        try:
            for link in links:
                link.connection.send_json(Kind.WELCOME, {"by": "memory", "path": region.path, "shape": asdict(shape)})
            return SharedMemory(region.path, shape, 0), region
        except BaseException:
            region.close()
            raise
    from workers.torch_collective import BackendName, TorchCollective, open_store

    backend: BackendName = "nccl" if place.device.type == "cuda" else "gloo"
    store = open_store(host, config.tp, JOIN_TIMEOUT_S)
    for link in links:
        link.connection.send_json(Kind.WELCOME, {"by": backend, "host": host, "port": store.port})
    return TorchCollective(backend, store, 0, config.tp, JOIN_TIMEOUT_S), None


def _may_share_memory(config: ClusterConfig, place: _Place, links: Sequence[RankLink]) -> bool:
    one_host = all(link.host == host_identity() for link in links)
    wanted = config.engine.collective
    if wanted == "memory" and (place.device.type != "cpu" or not one_host):
        raise ConfigError(
            "engine.collective: 'memory' is for ranks on the CPUs of one host; leave it at auto",
            field="engine.collective",
        )
    return wanted != "torch" and place.device.type == "cpu" and one_host


def _heard(link: RankLink, kind: Kind) -> dict[str, Any]:
    """What a rank has to say next. Raises the error that it could not start with, or GroupLost."""
    try:
        return link.connection.expect_json(kind, JOIN_TIMEOUT_S)
    except (EOFError, OSError, ProtocolError) as error:
        raise start_error(link.rank, str(error)) from error


# -- the other ranks -------------------------------------------------------------------------------------------------


def follow(config: ClusterConfig, rank: int, connection: Connection) -> None:
    """Join a leader, then compute what it says until it says STOP. Raises QuireError, RanksParted, EOFError, OSError;
    the leader has been told then."""
    beating = threading.Event()
    try:
        connection.send_json(Kind.HELLO, _greeting(config, rank, connection.expect(Kind.CHALLENGE, JOIN_TIMEOUT_S)))
        life = _Life()
        beat = threading.Thread(
            target=_beat, args=(connection, life, beating, config.worker.heartbeat_ms / 1000), daemon=True
        )
        beat.start()
        try:
            _join(config, rank, connection, life)
            assert life.runner is not None
            life.transfers = _transfers(config, life.runner, connection)
            _compute(life.runner, connection, life.transfers)
        finally:
            beating.set()
            beat.join()
            for part in (life.collective, life.transfers):
                if part is not None:
                    part.close()
    except Exception as error:
        _tell_failure(connection, error)
        raise


def _greeting(config: ClusterConfig, rank: int, challenge: bytes) -> dict[str, Any]:
    token = config.worker_token.get_secret_value() if config.worker_token else ""
    return {
        "version": RANK_PROTOCOL_VERSION,
        "rank": rank,
        "pid": os.getpid(),
        "host": host_identity(),
        "proof": proof(token, challenge, rank),
    }


@dataclass(slots=True)
class _Life:
    """What a rank has by now."""

    collective: Collective | None = None
    runner: Runner | None = None
    transfers: Transfers | None = None


def _join(config: ClusterConfig, rank: int, connection: Connection, life: _Life) -> None:
    place = _place(config)
    welcome = connection.expect_json(Kind.WELCOME, JOIN_TIMEOUT_S)
    collective: Collective
    if welcome["by"] == "memory":
        from workers.shared_memory import Shape, SharedMemory

        try:
            collective = SharedMemory(welcome["path"], Shape(**welcome["shape"]), rank)
        except OSError as error:
            raise ConfigError(
                f"engine.collective: rank {rank} cannot open its leader's memory ({error}); set it to 'torch'",
                field="engine.collective",
            ) from error
    else:
        from workers.torch_collective import TorchCollective, open_store

        store = open_store(welcome["host"], config.tp, JOIN_TIMEOUT_S, welcome["port"])
        collective = TorchCollective(welcome["by"], store, rank, config.tp, JOIN_TIMEOUT_S)
    life.collective = collective
    model = _load(config, place, collective)
    ready = {
        "blocks": _blocks(config, place, model, None),
        "threads": _threads_that_meet(place),
        "weight_bytes": model.weight_bytes,
        "page_bytes": _page_bytes(config, model),
        "identity": _identity(config, place),
    }
    connection.send_json(Kind.READY, ready)
    start = connection.expect_json(Kind.START, JOIN_TIMEOUT_S)
    _tell_threads(collective, start["threads"])
    try:
        life.runner = assembly.make_runner(model, config.engine, start["blocks"])
    except BaseException:
        collective.abort()  # the others wait for us in the trial step
        raise
    connection.send_number(Kind.DONE, TRIAL_STEP)


def _transfers(config: ClusterConfig, runner: Runner, connection: Connection) -> Transfers | None:
    """This rank's end of the tier."""
    if not tier_start.has_tier(config):
        return None

    def report(what: TransferReport) -> None:
        with contextlib.suppress(OSError):  # the leader is gone, which others notice
            connection.send(Kind.TRANSFERRED, encode_report(what))

    files = resolve(config.model, name=config.model_name)
    return tier_start.make_transfers(config, files, runner.model, runner, report)


def _compute(runner: Runner, connection: Connection, transfers: Transfers | None) -> None:
    """Do what the leader says, in the order of its saying; but what is to be read from the tier begins at once, also in
    the middle of a step."""
    orders: SimpleQueue[tuple[Kind, bytes] | Exception] = SimpleQueue()
    threading.Thread(target=_receive, args=(connection, orders, transfers), name="orders", daemon=True).start()
    while True:
        order = orders.get()
        if isinstance(order, Exception):
            raise order
        kind, body = order
        if kind == Kind.STOP:
            return
        if kind == Kind.STORE and transfers is not None:
            transfers.stage(decode_store(body))
        elif kind == Kind.PLAN:
            told = decode(body)
            runner.follow(told)
            connection.send_number(Kind.DONE, told.step)
        else:
            raise ProtocolError(f"{kind.name} came where a plan was expected")


def _receive(
    connection: Connection, orders: SimpleQueue[tuple[Kind, bytes] | Exception], transfers: Transfers | None
) -> None:
    try:
        while True:
            kind, body = connection.receive(None)
            if kind == Kind.FETCH and transfers is not None:
                transfers.fetch(decode_fetch(body))
                continue
            orders.put((kind, body))
            if kind == Kind.STOP:
                return
    except Exception as error:  # noqa: BLE001 - the thread that computes ends by it
        orders.put(error)


def _beat(connection: Connection, life: _Life, done: threading.Event, period_s: float) -> None:
    """Say how far we are; and when nobody listens any more, let go of whoever waits for the leader in a step."""
    while not done.wait(period_s):
        try:
            connection.send_number(Kind.BEAT, life.runner.progress() if life.runner is not None else 0)
        except OSError:
            if life.collective is not None:
                life.collective.abort()
            return


def _tell_failure(connection: Connection, error: Exception) -> None:
    known = isinstance(error, QuireError)
    text = f"{error.reason}: {error.message}" if known else f"{type(error).__name__}: {error}"  # type: ignore[attr-defined]
    try:
        connection.send(Kind.FAILED, text.encode())
    except OSError:
        _log.debug("the leader is gone")


# -- both ------------------------------------------------------------------------------------------------------------


def _place(config: ClusterConfig) -> _Place:
    engine = config.engine
    device = assembly.choose_device(engine)
    threads = engine.threads or max(1, len(os.sched_getaffinity(0)) // config.groups // config.tp)
    use_threads(threads)
    return _Place(resolve(config.model, name=config.model_name), device, assembly.choose_dtype(engine, device), threads)


def use_threads(count: int) -> None:
    """Per process in torch, per thread in numba: call it on each thread that computes."""
    from workers.threads import set_threads

    set_threads(count)


def _load(config: ClusterConfig, place: _Place, collective: Collective) -> Model:
    from workers.model import load

    begun = time.perf_counter()
    model = load(place.files, place.dtype, place.device, int8=config.engine.weights == "int8", ranks=collective)
    _log.info(
        "rank %d of %d: %d bytes of weights, after %.1f s",
        collective.rank, collective.ranks, model.weight_bytes, time.perf_counter() - begun,
    )  # fmt: skip
    return model


def _blocks(config: ClusterConfig, place: _Place, model: Model, default: int | None) -> int:
    engine = config.engine
    if default is not None and engine.kv_memory_bytes is None:
        return default
    on_cpu = place.device.type == "cpu"
    wanted = engine.kv_memory_bytes
    return pool_blocks(
        bytes_per_block=_page_bytes(config, model),
        block_tokens=engine.block_tokens,
        max_context_tokens=assembly.choose_context(engine, model.config.max_context),
        max_running=engine.max_running,
        free_bytes=assembly.free_bytes(place.device),
        # A group's memory is divided as its KV heads are: each rank holds its share of every page.
        wanted_bytes=None if wanted is None else wanted * model.config.kv_heads // _all_kv_heads(model),
        groups_on_host=config.groups * config.tp if on_cpu else 1,
    )


def _page_bytes(config: ClusterConfig, model: Model) -> int:
    from workers.runner import bytes_per_block

    return bytes_per_block(model.config, config.engine.block_tokens, model.dtype)


def _all_kv_heads(model: Model) -> int:
    """Of the group's ranks together: more than the model's where ranks hold copies."""
    return max(model.whole.kv_heads, model.ranks.ranks)


def _shape(config: ClusterConfig, files: ModelFiles) -> Any:
    from workers.model.config import parse_config
    from workers.model.partition import part_of
    from workers.shared_memory import Shape

    model = parse_config(hf_config(files))
    width = max(len(part_of(model, rank, config.tp).vocab) for rank in range(config.tp))
    return Shape(ranks=config.tp, tokens=max(3, config.engine.max_batch_tokens), hidden=model.hidden, width=width)


def _threads_that_meet(place: _Place) -> int:
    """A rank's threads, as many as can wait for each other; all ranks must know the sum."""
    if place.device.type != "cpu":
        return 1
    import numba

    from workers.team import can_meet

    count: int = numba.get_num_threads()
    return count if can_meet(count) else 1


def _tell_threads(collective: Collective, threads: int) -> None:
    if hasattr(collective, "threads"):
        collective.threads = threads


def _identity(config: ClusterConfig, place: _Place) -> str:
    """Equal in ranks that load the same and compute it alike."""
    facts = (weights_digest(place.files), str(place.dtype), place.device.type, config.engine.model_dump_json())
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()
