"""``quire status``: the groups as a router sees them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.cli import sampling, terminal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from google.protobuf.message import Message
    from rich.console import RenderableType
    from rich.table import Table

    from cluster.pb.inference_pb2 import Cluster, Group, TenantUsage


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(status)


def status(
    address: sampling.Address = sampling.DEFAULT_ADDRESS,
    api_key: sampling.ApiKey = None,
    once: Annotated[bool, typer.Option("--once", help="Print the table once and leave.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print it once, as JSON.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between looks.")] = 1.0,
) -> None:
    """Show each group: state, requests, pages, speed; its ranks, where it has several; and what you have used.

    Live until Ctrl-C, or once. Usage is of your tenant, since this router started.

    [bold]Examples[/]

      quire status

      quire status --json | jq '.groups[].load'
    """
    from rich.live import Live

    from router.client import Client

    with Client(address, api_key=api_key) as client:
        if json:
            terminal.out.print(as_json(client.cluster()), markup=False)
        elif once or not terminal.out.is_terminal:
            terminal.out.print(overview(client.cluster()))
        else:
            with Live(overview(client.cluster()), console=terminal.out) as live:
                while True:
                    time.sleep(interval)
                    live.update(overview(client.cluster()))


def as_json(message: Message) -> str:
    """Every field, also those that are zero: a script should not have to guess which were left out."""
    from google.protobuf.json_format import MessageToJson

    return MessageToJson(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


def overview(cluster: Cluster) -> RenderableType:
    """The groups, below them the ranks of those that have several, then what the caller's tenant has used."""
    from rich.console import Group as Stacked

    several = [group for group in cluster.groups if group.tp > 1]
    tiered = [group for group in cluster.groups if group.load.HasField("tier")]
    return Stacked(
        table(cluster),
        *([rank_table(several)] if several else []),
        *([tier_table(tiered)] if tiered else []),
        usage_line(cluster.usage),
    )


def tier_table(groups: Sequence[Group]) -> Table:
    """One row per group: its tier in Redis. Tokens fetched, bytes stored, chunks not stored and corrupt; the link."""
    from rich.table import Table

    from cluster.kv_arithmetic import format_size

    grid = Table(box=None, padding=(0, 2, 0, 0))
    grid.add_column("prefix tier", no_wrap=True)
    for heading in ("reads", "writes", "fetched", "stored", "lost", "bad", "MB/s", "ms"):
        grid.add_column(heading, justify="right", no_wrap=True)
    for group in sorted(groups, key=lambda group: group.group_id):
        tier = group.load.tier
        grid.add_row(
            group.group_id,
            tier.reads,
            tier.writes,
            str(tier.fetched_tokens),
            format_size(tier.stored_bytes),
            str(tier.dropped_chunks),
            str(tier.corrupt_chunks),
            f"{tier.fetch_bytes_per_s / 1e6:.0f}",
            f"{tier.round_trip_ms:.1f}",
        )
    return grid


def usage_line(usage: TenantUsage) -> str:
    """What one tenant has used of this router, in lines of 80 columns."""
    cached = usage.cached_group_tokens + usage.cached_redis_tokens
    left = f", {usage.tokens_left:,} tokens left now" if usage.HasField("tokens_left") else ""
    return (
        f"{usage.tenant}: {usage.requests:,} requests ({usage.refusals:,} refused)\n"
        f"tokens: {usage.prompt_tokens:,} of prompts ({cached:,} cached), {usage.output_tokens:,} generated{left}"
    )


def rank_table(groups: Sequence[Group]) -> Table:
    """One row per rank."""
    from rich.table import Table

    from cluster.kv_arithmetic import format_size

    grid = Table(box=None, padding=(0, 2, 0, 0))
    grid.add_column("group", no_wrap=True)
    for heading in ("rank", "pid", "weights", "KV pages", "heard of, s ago"):
        grid.add_column(heading, justify="right", no_wrap=True)
    for group in sorted(groups, key=lambda group: group.group_id):
        for one in group.load.ranks:
            sizes = (format_size(one.weight_bytes), format_size(one.kv_bytes))
            age = f"{one.heartbeat_age_ms / 1000:.1f}"
            grid.add_row(group.group_id, str(one.rank), str(one.pid), *sizes, age)
    return grid


def table(cluster: Cluster) -> Table:
    """One row per group, narrow enough for 80 columns."""
    from rich.table import Table

    live = "" if cluster.membership_live else " · Redis is away: membership frozen"
    title = f"{len(cluster.groups)} groups · {cluster.active_requests} requests in flight{live}"
    grid = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for heading in ("group", "state"):
        grid.add_column(heading, no_wrap=True)
    for heading in ("run", "wait", "pages", "cached", "of", "hit", "tok/s"):
        grid.add_column(heading, justify="right", no_wrap=True)
    for group in sorted(cluster.groups, key=lambda group: group.group_id):
        grid.add_row(*_cells(group))
    served = {f"{group.model} ({group.device}, {group.dtype}, tp {group.tp})" for group in cluster.groups}
    grid.caption = ", ".join(sorted(served)) or "no group is up"
    grid.caption_justify = "left"
    return grid


def _cells(group: Group) -> list[str]:
    from cluster.pb.inference_pb2 import Group as GroupMessage

    load = group.load
    hit = load.cached_prompt_tokens / load.prompt_tokens if load.prompt_tokens else 0.0
    return [
        group.group_id,
        GroupMessage.State.Name(group.state).lower(),
        str(load.running_requests),
        str(load.waiting_requests),
        str(load.used_blocks),
        str(load.cached_blocks),
        str(load.total_blocks),
        f"{hit:.0%}",
        f"{load.decode_tokens_per_s:.0f}",
    ]
