"""A stored session on the real model, through `quire serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from router.client import Client
from tests.support.served import all_serve, idle, run_quire, serving, until

GREEDY: dict[str, Any] = {"temperature": 0.0, "timeout_s": 240.0}
QUESTIONS = ["What is the capital of France?", "Name one famous museum there.", "And what river flows through it?"]


def tokens_of(client: Client, messages: Any, **options: Any) -> tuple[list[int], str, Any]:
    """Of one answer: ids, text, usage."""
    ids: list[int] = []
    text, usage = "", None
    for event in client.chat(messages, **GREEDY, **options):
        ids += event.delta.token_ids
        text += event.delta.text
        if event.HasField("finished"):
            usage = event.finished.usage
    return ids, text, usage


def test_turns_equal_the_whole_conversation_and_compute_only_what_is_new(tmp_path: Path) -> None:
    with serving(tmp_path, "--groups", "1") as served, served.client() as client:
        until(client, lambda found: all_serve(1)(found) and idle(found), "one idle group")
        block_tokens = client.model().block_tokens
        whole: list[dict[str, str]] = []
        for number, question in enumerate(QUESTIONS):
            before = client.get_session("trip").tokens if number else 0
            ids, text, usage = tokens_of(client, question, session="trip", session_version=number, max_tokens=24)
            whole.append({"role": "user", "content": question})
            # All full blocks of the history but its last answer's end are there; the rest is computed.
            assert usage.cached_tokens.group + usage.cached_tokens.redis >= before - 2 * block_tokens
            # Another salt: nothing of the first is reused, so these are computed from the beginning.
            plain = tokens_of(client, whole, max_tokens=24, cache_salt=f"cold {number}")
            assert plain[0] == ids
            assert plain[2].prompt_tokens == usage.prompt_tokens
            assert plain[2].cached_tokens.group == 0
            whole.append({"role": "assistant", "content": text})
        shown = run_quire("session", "get", "trip", "--address", served.address)
        assert shown.returncode == 0, shown.stderr
        assert [line for line in QUESTIONS if line in shown.stdout] == QUESTIONS
        dropped = run_quire("session", "delete", "trip", "--address", served.address)
        assert dropped.returncode == 0, dropped.stderr
