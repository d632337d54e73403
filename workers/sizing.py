"""How many pages a group's pool gets. Pure arithmetic; what is free comes in as numbers."""

from __future__ import annotations

from cluster.errors import OutOfMemory

SHARE = 4
"""Without a setting the groups of a host together take at most one part in this many of the free memory."""


def pool_blocks(
    *,
    bytes_per_block: int,
    block_tokens: int,
    max_context_tokens: int,
    max_running: int,
    free_bytes: int,
    wanted_bytes: int | None,
    groups_on_host: int,
) -> int:
    """Pages that fit ``wanted_bytes``; unset: room for ``max_running`` whole contexts, at most this group's share.

    Raises OutOfMemory where the memory is not there, or holds not a single page.
    """
    whole_contexts = max_running * -(-max_context_tokens // block_tokens)
    if wanted_bytes is None:
        budget = free_bytes // SHARE // groups_on_host
        blocks = min(whole_contexts, budget // bytes_per_block)
    else:
        if wanted_bytes > free_bytes:
            raise OutOfMemory(
                f"engine.kv_memory_bytes: {wanted_bytes} bytes for KV pages, but only {free_bytes} are free",
                field="engine.kv_memory_bytes",
                value=wanted_bytes,
                limit=free_bytes,
            )
        budget = wanted_bytes
        blocks = wanted_bytes // bytes_per_block
    check_page_fits(budget, bytes_per_block)
    return blocks


def check_page_fits(budget_bytes: int, bytes_per_block: int) -> None:
    """Raises OutOfMemory where a pool would hold not a single page."""
    if budget_bytes < bytes_per_block:
        raise OutOfMemory(
            f"engine.kv_memory_bytes: {budget_bytes} bytes hold no KV page of {bytes_per_block} bytes",
            field="engine.kv_memory_bytes",
            value=budget_bytes,
            limit=bytes_per_block,
        )
