"""A user's view of `quire serve`: the real model, two groups, Redis, Ray, gRPC; from clients and the command line."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from cluster.errors import (
    ContextExceeded,
    DeadlineExceeded,
    FieldNotSupported,
    InvalidRequest,
    ModelNotFound,
    PromptEmpty,
    QuireError,
    Unauthenticated,
)
from cluster.pb.inference_pb2 import GenerateEvent
from router.client import AsyncClient, Client
from tests.support.served import Served, all_serve, idle, run_quire, serving, until

GREEDY: dict[str, Any] = {"temperature": 0.0, "timeout_s": 240.0}
TIE = 1e-4


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("keys") / "keys.txt"
    made = run_quire("key", "alice", "--file", str(file))
    assert made.returncode == 0, made.stderr
    return f"{file}\n{made.stdout.strip()}"


@pytest.fixture(scope="module")
def served(key: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("served"), "--groups", "2", "--api-keys", key.splitlines()[0]) as running:
        yield running


@pytest.fixture
def client(served: Served, key: str) -> Iterator[Client]:
    with served.client(key.splitlines()[1]) as made:
        until(made, lambda found: all_serve(2)(found) and idle(found), "two idle groups")
        yield made


@dataclass
class Heard:
    events: list[GenerateEvent] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)  # between the two most likely tokens
    text: str = ""


def hear(events: Iterator[GenerateEvent]) -> Heard:
    heard = Heard()
    for event in events:
        heard.events.append(event)
        heard.tokens += event.delta.token_ids
        heard.text += event.delta.text
        heard.gaps += [one.top[0].logprob - one.top[1].logprob for one in event.delta.logprobs]
    return heard


def assert_same(solo: Heard, other: Heard) -> None:
    """Equal tokens; where they part, only because two were as likely as kernels round."""
    for position, (ours, theirs) in enumerate(zip(solo.tokens, other.tokens, strict=False)):
        if ours != theirs:
            assert solo.gaps[position] < TIE, f"they part at {position}: {solo.text!r} {other.text!r}"
            return
    assert len(solo.tokens) == len(other.tokens)


# -- the main job ----------------------------------------------------------------------------------------------------


def test_a_chat_streams_and_a_follow_up_reuses_its_pages(client: Client) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    first = hear(client.chat(messages, session_id="trip", max_tokens=32, **GREEDY))
    assert "Paris" in first.text
    assert [event.WhichOneof("event") for event in first.events[:2]] == ["started", "delta"]
    assert sum(event.HasField("delta") for event in first.events) > 3, "it came at once, not as a stream"
    assert first.events[-1].finished.stop_token_id == client.model().eos_token_ids[0]
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "And of Italy?"}]
    second = hear(client.chat(messages, session_id="trip", max_tokens=32, **GREEDY))
    started = second.events[0].started
    assert started.group_id == first.events[0].started.group_id
    assert started.cached_tokens.group > 0
    usage = second.events[-1].finished.usage
    assert usage.prompt_tokens == started.prompt_tokens
    assert usage.completion_tokens == len(second.tokens)


def test_prompt_logprobs_and_samples_of_one_prompt(client: Client) -> None:
    """Asked for twice, the second time where the prompt's pages are there; with samples that share them."""
    text = "The capital of France is Paris, the capital of Italy is Rome, and the capital of Spain is Madrid."
    asked: dict[str, Any] = {"max_tokens": 3, "n": 3, "seed": 5, "prompt_logprobs": 2, "echo": True, "timeout_s": 240.0}
    runs = [hear(client.generate(text, **asked)) for _ in range(2)]
    for run in runs:
        started, echoes = run.events[0].started, run.events[1:4]
        assert [(event.delta.index, event.delta.text) for event in echoes] == [(i, text) for i in range(3)]
        assert "".join(entry.token.text for entry in started.prompt_logprobs) == text.removeprefix("The")
        assert len(started.prompt_logprobs) == started.prompt_tokens - 1
        assert all(len(entry.top) == 2 for entry in started.prompt_logprobs)
        named = [entry.token for entry in started.prompt_logprobs if entry.token.text in (" Rome", " Madrid")]
        assert all(token.rank == 1 and math.exp(token.logprob) > 0.5 for token in named), "it knows its capitals"
        assert len({event.finished.index for event in run.events if event.HasField("finished")}) == 3
    values = [[entry.token.logprob for entry in run.events[0].started.prompt_logprobs] for run in runs]
    assert values[0] == pytest.approx(values[1], abs=1e-4)
    assert runs[0].tokens == runs[1].tokens


def test_32_chats_at_once_equal_their_solo_runs(client: Client) -> None:
    questions = [f"{number}. Say something about the number {number * 7}." for number in range(32)]

    def ask(number: int) -> Heard:
        drawn = {"temperature": 0.7, "seed": number} if number % 4 == 3 else {"temperature": 0.0}
        return hear(client.chat(questions[number], max_tokens=10, logprobs=2, timeout_s=240.0, **drawn))

    solo = [ask(number) for number in range(32)]
    with ThreadPoolExecutor(32) as threads:
        together = list(threads.map(ask, range(32)))
    for alone, among in zip(solo, together, strict=True):
        assert alone.tokens
        assert_same(alone, among)
    groups = {heard.events[0].started.group_id for heard in together}
    assert len(groups) == 2, "one group had them all"
    until(client, idle, "all pages are free")


def test_cancelled_disconnected_and_late_requests_free_their_pages(served: Served, client: Client, key: str) -> None:
    endless: dict[str, Any] = {"max_tokens": 4000, "ignore_eos": True}
    gone = served.client(key.splitlines()[1])
    streams = [client.chat("Count.", **endless), gone.chat("Sing.", **endless)]
    for stream in streams:
        next(stream)
    until(client, lambda found: sum(group.load.used_blocks for group in found.groups) >= 2, "pages are in use")
    streams[0].cancel()
    assert list(streams[0]) == []
    gone.close()
    with pytest.raises(DeadlineExceeded) as late:
        client.chat("Tell me a long story.", **endless, timeout_s=0.2).text()
    assert late.value.code == "DEADLINE_EXCEEDED"
    found = until(client, idle, "all pages are free")
    assert found.active_requests == 0


async def test_the_async_client(served: Served, client: Client, key: str) -> None:
    async with AsyncClient(served.address, key.splitlines()[1]) as asynchronous:
        text = await asynchronous.chat_text("What is the capital of France?", max_tokens=32, **GREEDY)
    assert "Paris" in text


def test_seeded_answers_repeat_and_the_drawn_seed_is_told(client: Client) -> None:
    first = hear(client.chat("Invent a word.", max_tokens=8, temperature=1.0, timeout_s=120.0))
    again = hear(client.chat("Invent a word.", max_tokens=8, seed=first.events[0].started.seed, timeout_s=120.0))
    assert again.text == first.text
    other = hear(client.chat("Invent a word.", max_tokens=8, timeout_s=120.0))
    assert other.events[0].started.seed != first.events[0].started.seed


def test_a_stop_string_over_several_tokens_is_never_seen(client: Client) -> None:
    whole = client.generate_text("1, 2, 3, 4, 5,", max_tokens=16, **GREEDY)
    stop = whole[5:9]
    heard = hear(client.generate("1, 2, 3, 4, 5,", max_tokens=16, stop=[stop], **GREEDY))
    assert heard.text == whole[: whole.index(stop)]
    assert heard.events[-1].finished.stop == stop


def test_tokens_there_and_back(client: Client) -> None:
    text = "naïve café 日本 🙂"
    ids = list(client.tokenize(text).token_ids)
    assert client.detokenize(ids) == text
    chat = client.tokenize(messages="hi")
    heard = hear(client.chat("hi", max_tokens=1, **GREEDY))
    assert heard.events[0].started.prompt_tokens == len(chat.token_ids)


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "field"),
    [
        ({"temperature": math.nan}, InvalidRequest, "temperature"),
        ({"temperature": -0.5}, InvalidRequest, "temperature"),
        ({"top_p": 0.0}, InvalidRequest, "top_p"),
        ({"max_tokens": 0}, InvalidRequest, "max_tokens"),
        ({"max_tokens": 100_000}, ContextExceeded, "max_tokens"),
        ({"stop": [""]}, InvalidRequest, "stop"),
        ({"logit_bias": {10**6: 1.0}}, InvalidRequest, "logit_bias"),
        ({"model": "gpt-17"}, ModelNotFound, "model"),
        ({"adapter": "mine"}, FieldNotSupported, "adapter"),
    ],
)
def test_a_bad_option_is_named(client: Client, options: dict[str, Any], error: type[QuireError], field: str) -> None:
    with pytest.raises(error) as caught:
        client.chat_text("hi", **options)
    assert field in caught.value.metadata["field"]
    assert field in caught.value.message


def test_empty_and_impossible_prompts_are_named(client: Client) -> None:
    for prompt in ("", []):
        with pytest.raises(PromptEmpty):
            client.generate_text(prompt)
    with pytest.raises(InvalidRequest, match="49152"):
        client.generate_text([1, 49_152])
    with pytest.raises(QuireError) as caught:
        client.chat_text([])
    assert caught.value.code == "INVALID_ARGUMENT"
    with pytest.raises(QuireError) as caught:
        client.generate_text("x" * (5 << 20))
    assert caught.value.code == "RESOURCE_EXHAUSTED"


def test_only_a_key_of_the_file_is_let_in(served: Served, client: Client) -> None:
    for wrong in (None, "quire_wrong"):
        with served.client(wrong) as stranger, pytest.raises(Unauthenticated):
            stranger.chat_text("hi")
    assert client.cluster().groups


# -- from the shell ----------------------------------------------------------------------------------------------------


def test_the_command_line_chats_generates_and_shows(served: Served, client: Client, key: str) -> None:
    access = ["--address", served.address, "--api-key", key.splitlines()[1]]
    once = run_quire("chat", "--once", "What is the capital of France?", "--temperature", "0", *access)
    assert once.returncode == 0, once.stderr
    assert "Paris" in once.stdout
    piped = run_quire(
        "chat", "--temperature", "0", "--max-tokens", "24", *access, stdin="Capital of France?\nThanks!\n"
    )
    assert piped.returncode == 0, piped.stderr
    assert piped.stdout.count("\n") >= 2
    more = run_quire("generate", "-", "--max-tokens", "8", "--temperature", "0", *access, stdin="1, 2, 3, 4,")
    assert more.returncode == 0, more.stderr
    assert " 5" in more.stdout
    table = run_quire("status", "--once", *access)
    assert table.returncode == 0
    assert "serving" in table.stdout
    assert max(map(len, table.stdout.splitlines())) <= 80
    shown = json.loads(run_quire("status", "--json", *access).stdout)
    assert [group["state"] for group in shown["groups"]] == ["SERVING"] * 2
    refused = run_quire("chat", "--once", "hi", "--address", served.address)
    assert refused.returncode == 1
    assert refused.stderr.startswith("error: ")
    assert refused.stderr.count("\n") == 1


def test_reflection_and_health(served: Served, client: Client) -> None:
    with grpc.insecure_channel(served.address) as channel:
        services = ProtoReflectionDescriptorDatabase(channel).get_services()
        assert {"quire.v1.Inference", "quire.v1.Admin", "grpc.health.v1.Health"} <= set(services)
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", "quire.v1.Inference"):
            answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
