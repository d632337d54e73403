"""The prefix tier as users meet it: through a router, with the real model, over groups of every size."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.pb.inference_pb2 import GenerateEvent
from router.client import Client
from tests.support.processes import groups, router
from tests.support.redis import RedisServer, running_redis
from tests.support.served import all_serve, until

PROMPT_TOKENS = 1000
CALL_S = 240.0


@pytest.fixture(scope="module")
def control() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


@pytest.fixture(scope="module")
def kv() -> Iterator[RedisServer]:
    with running_redis("--maxmemory", "800mb", "--maxmemory-policy", "allkeys-lru") as server:
        yield server


def configured(control: RedisServer, kv: RedisServer | None, tp: int = 1) -> dict[str, Any]:
    return {
        "cluster": "e2e",
        "redis": control.url,
        "worker_token": "token",
        "cluster_secret": "secret",
        "tp": tp,
        "engine": {"device": "cpu", "kv_memory_bytes": 256 << 20, "threads": 2 if tp == 1 else 1},
        "worker": {"lease_s": 2.0},
        "router": {"port": 0, "group_silence_s": 2.0},
        "prefix": {"redis": kv.url if kv is not None else None, "deadline_ms": 2000},
    }


def ask(client: Client, prompt: list[int], **options: Any) -> tuple[list[int], float, GenerateEvent]:
    """Tokens, seconds to the first one, and the first event."""
    begun, first_s, tokens, started = time.monotonic(), 0.0, [], None
    for event in client.generate(prompt, max_tokens=8, temperature=0.0, ignore_eos=True, timeout_s=CALL_S, **options):
        if event.HasField("started"):
            started = event
        elif event.HasField("delta") and event.delta.token_ids:
            first_s = first_s or time.monotonic() - begun
            tokens += event.delta.token_ids
    assert started is not None
    return tokens, first_s, started


def a_prompt(seed: int) -> list[int]:
    return [(seed + 7919 * i + i * i) % 40_000 + 100 for i in range(PROMPT_TOKENS)]


@pytest.mark.parametrize(
    ("before", "after"),
    [(1, 2), pytest.param(2, 3, marks=pytest.mark.slow), pytest.param(3, 1, marks=pytest.mark.slow)],
)
def test_a_killed_groups_prompt_is_read_by_a_group_of_another_size(
    control: RedisServer, kv: RedisServer, tmp_path: Path, before: int, after: int
) -> None:
    prompt = a_prompt(secrets.randbelow(30_000))
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir(), other.mkdir()
    with router(configured(control, kv), tmp_path) as front, Client(front.address) as client:
        with groups(configured(control, kv, before), one, "first"):
            until(client, all_serve(1), "a group")
            tokens, cold_s, started = ask(client, prompt)
            assert started.started.cached_tokens.redis == 0

            def has_stored(cluster: Any) -> bool:
                return bool(cluster.groups[0].load.tier.stored_chunks >= (PROMPT_TOKENS - 1) // 32)

            until(client, has_stored, "the prompt is stored")
        with groups(configured(control, kv, after), other, "second"):
            until(client, lambda found: all_serve(1)(found) and found.groups[0].group_id == "second", "another group")
            _, fresh_s, fresh = ask(client, a_prompt(secrets.randbelow(30_000)))
            assert fresh.started.cached_tokens.redis == 0
            again, warm_s, started = ask(client, prompt)
        assert again == tokens
        assert started.started.cached_tokens.redis >= 900
        assert started.started.prefix.decision == "fetch"
        print(
            f"tp {before} to {after}: first token after {1000 * cold_s:.0f} ms cold, {1000 * fresh_s:.0f} ms for a new "
            f"prompt in the second group, {1000 * warm_s:.0f} ms from Redis: {fresh_s / warm_s:.1f} times shorter"
        )
