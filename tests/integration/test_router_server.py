"""The public port over loopback: a real router, real group servers around scripted engines, a real Redis and tokenizer.

A scripted engine puts out seed, seed + 1, seed + 2, ...: every token and every text of an answer is known.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from cluster.errors import (
    ContextExceeded,
    FieldNotSupported,
    InvalidRequest,
    MessageTooLarge,
    MethodNotSupported,
    ModelNotFound,
    PromptEmpty,
    QuireError,
    Unauthenticated,
    from_rpc_error,
)
from cluster.pb import inference_pb2, inference_pb2_grpc
from cluster.pb.common_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP, Constraint
from cluster.pb.inference_pb2 import GenerateRequest, RequestOptions
from router.auth import make_key
from router.client import AsyncClient, RetryPolicy
from tests.support.redis import RedisServer, running_redis
from tests.support.routers import SEED, VOCAB_SIZE, Answer, ask, health, tokenizer, world
from tests.support.scripted_group import eventually

ONCE = RetryPolicy(attempts=1)
FOREVER = 1_000_000
_NAMES = itertools.count()


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


@pytest.fixture
def here(redis_server: RedisServer) -> tuple[str, str]:
    """Redis, and a cluster name of the test's own."""
    return redis_server.url, f"s{next(_NAMES)}"


# -- what a good request gets ----------------------------------------------------------------------------------------


async def test_an_answer_begins_flows_and_ends_once(here: tuple[str, str]) -> None:
    async with world(*here) as running:
        answer = await ask(running, request_id="mine")
        assert answer.kinds == ["started", *["delta"] * 20, "finished"]
        assert answer.tokens() == list(range(SEED, SEED + 20))
        assert answer.text() == running.text(range(SEED, SEED + 20))
        started, [finished] = answer.started, answer.finished
        assert started is not None
        assert (started.request_id, started.seed, started.group_id) == ("mine", SEED, "g0")
        assert started.incarnation == running.groups[0].hello.incarnation
        assert started.routing.decision == "only_group"
        assert started.prompt_tokens == finished.usage.prompt_tokens == len(tokenizer().encode("Hello"))
        assert finished.reason == FINISH_REASON_LENGTH
        assert finished.WhichOneof("matched") is None
        assert finished.usage.completion_tokens == 20
        assert 0 < finished.timings.ttft_ms <= finished.timings.total_ms


async def test_ids_are_used_as_they_are_and_a_chat_goes_through_the_template(here: tuple[str, str]) -> None:
    async with world(*here) as running:
        await ask(running, [7, 8, 9])
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
        stream = running.client.chat(messages, max_tokens=2, timeout_s=60.0)
        assert [event async for event in stream]
        ids, chat = running.groups[0].requests
        assert list(ids.prompt) == [7, 8, 9]
        assert list(chat.prompt) == tokenizer().apply_chat_template(messages, add_generation_prompt=True)
        assert tokenizer().decode(list(chat.prompt), skip_special_tokens=False).count("<|im_start|>") == 3


async def test_a_seed_is_drawn_told_and_different_each_time(here: tuple[str, str]) -> None:
    async with world(*here) as running:
        seeds = set()
        for _ in range(3):
            stream = running.client.generate("Hi", max_tokens=1, timeout_s=60.0)
            answer = Answer([event async for event in stream])
            assert answer.started is not None
            seeds.add(answer.started.seed)
            assert running.groups[0].requests[-1].sampling.seed == answer.started.seed
        assert len(seeds) == 3


@pytest.mark.parametrize("include", [False, True])
async def test_a_stop_string_over_several_tokens_ends_it_and_leaks_nothing(
    here: tuple[str, str], include: bool
) -> None:
    async with world(*here) as running:
        whole = running.text(range(SEED, SEED + 20))
        stop = whole[20:32]
        at = whole.index(stop)
        answer = await ask(running, max_tokens=FOREVER, stop=["never in it", stop], include_stop=include)
        assert answer.text() == (whole[: at + len(stop)] if include else whole[:at])
        [finished] = answer.finished
        assert (finished.reason, finished.stop) == (FINISH_REASON_STOP, stop)
        assert finished.usage.completion_tokens == len(answer.tokens())
        assert running.text(answer.tokens()).startswith(whole[:at])
        assert stop in running.text(answer.tokens())
        assert stop not in running.text(answer.tokens()[:-1])
        await eventually(lambda: running.groups[0].server.open_requests == 0, "the group was told")


async def test_a_stop_string_inside_a_step_of_many_tokens_sends_no_token_behind_it(here: tuple[str, str]) -> None:
    async with world(*here) as running:
        running.groups[0].engine.wide = 8
        one = running.text([SEED])
        answer = await ask(running, max_tokens=FOREVER, stop=[one * 3])
        assert answer.text() == ""
        assert answer.tokens() == [SEED] * 3


async def test_a_stream_interval_bundles_and_sends_first_and_last(here: tuple[str, str]) -> None:
    async with world(*here) as running:
        answer = await ask(running, max_tokens=12, stream_interval_tokens=5)
        assert [len(delta.token_ids) for delta in answer.deltas] == [1, 5, 5, 1]
        assert answer.text() == running.text(range(SEED, SEED + 12))


async def test_echo_begins_with_the_prompt(here: tuple[str, str]) -> None:
    async with world(*here) as running:
        answer = await ask(running, "Once upon a time", echo=True, max_tokens=3)
        assert answer.kinds[:2] == ["started", "delta"]
        assert answer.text() == "Once upon a time" + running.text(range(SEED, SEED + 3))
        assert answer.finished[0].usage.completion_tokens == 3


async def test_several_samples_each_end_once(here: tuple[str, str]) -> None:
    async with world(*here) as running:
        answer = await ask(running, n=3, max_tokens=4)
        assert [finished.index for finished in answer.finished] == [0, 1, 2]
        assert all(answer.tokens(index) == list(range(SEED, SEED + 4)) for index in range(3))
        assert answer.finished[-1].usage.completion_tokens == 12


async def test_what_the_engine_needs_arrives(here: tuple[str, str]) -> None:
    async with world(*here) as running:
        await ask(
            running,
            list(range(100, 200)),
            truncate_prompt_tokens=5,
            priority=-7,
            bad_words=["Paris"],
            min_tokens=2,
            temperature=0.0,
            logit_bias={5: 1.5},
            ignore_eos=True,
        )
        [request] = running.groups[0].requests
        assert list(request.prompt) == [195, 196, 197, 198, 199]
        assert request.priority == -7
        sampling = request.sampling
        assert (sampling.temperature, sampling.min_tokens, sampling.ignore_eos) == (0.0, 2, True)
        assert sampling.logit_bias == {5: 1.5}
        spelled = {tokenizer().decode(list(bad), skip_special_tokens=True) for bad in sampling.bad_token_sequences}
        assert spelled == {"Paris", " Paris"}


async def test_single_answers(here: tuple[str, str]) -> None:
    async with world(*here, hello={"max_context_tokens": 777}) as running:
        client = running.client
        tokenized = await client.tokenize("Hello world", with_text=True)
        assert list(tokenized.token_ids) == tokenizer().encode("Hello world")
        assert "".join(tokenized.token_texts) == "Hello world"
        assert tokenized.max_context_tokens == 777
        assert await client.detokenize(tokenized.token_ids) == "Hello world"
        chat = await client.tokenize(messages="Hi")
        assert list(chat.token_ids) == tokenizer().apply_chat_template([{"role": "user", "content": "Hi"}])
        [model] = await client.models()
        assert model == await client.model("m") == await client.model()
        assert (model.name, model.vocab_size, model.max_context_tokens, model.groups) == ("m", VOCAB_SIZE, 777, 1)
        assert (model.block_tokens, model.namespace, model.has_chat_template) == (16, "n" * 64, True)
        assert list(model.eos_token_ids) == list(tokenizer().eos_token_ids)


async def test_the_cluster_as_the_router_sees_it(here: tuple[str, str]) -> None:
    async with world(*here, groups=2) as running:
        stream = running.client.generate("Hi", max_tokens=FOREVER)
        await anext(stream)
        found = await running.client.cluster()
        assert found.membership_live
        assert found.active_requests == 1
        assert [group.group_id for group in found.groups] == ["g0", "g1"]
        assert {group.state for group in found.groups} == {inference_pb2.Group.SERVING}
        assert {group.address for group in found.groups} == {group.address for group in running.groups}
        assert sum(group.load.running_requests for group in found.groups) <= 1
        assert all(0 <= group.last_frame_age_ms < 60_000 for group in found.groups)
        await running.groups[0].kill()
        await eventually(lambda: len(running.router._groups.usable("m")) == 1, "the loss is seen")
        found = await running.client.cluster()
        assert found.groups[0].state == inference_pb2.Group.LOST
        stream.cancel()


async def test_many_at_once_get_what_they_would_get_alone(here: tuple[str, str]) -> None:
    async with world(*here, groups=2) as running:
        answers = await asyncio.gather(*(ask(running, f"prompt {i}", seed=SEED + 40 * i) for i in range(32)))
        for i, answer in enumerate(answers):
            assert answer.tokens() == list(range(SEED + 40 * i, SEED + 40 * i + 20))
            assert answer.text() == running.text(range(SEED + 40 * i, SEED + 40 * i + 20))
        served = {answer.started.group_id for answer in answers if answer.started is not None}
        assert served == {"g0", "g1"}


async def test_long_texts_do_not_hold_up_other_streams(here: tuple[str, str]) -> None:
    async with world(*here) as running:
        long = "the quick brown fox jumps over the lazy dog " * 20_000
        big, small = await asyncio.gather(ask(running, long, max_tokens=2), ask(running, "short"))
        assert big.started is not None
        assert big.started.prompt_tokens > 100_000
        assert len(small.tokens()) == 20


# -- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "field"),
    [
        (lambda c: c.generate(""), PromptEmpty, "text"),
        (lambda c: c.generate([]), PromptEmpty, "token_ids"),
        (lambda c: c.generate([VOCAB_SIZE]), InvalidRequest, "token_ids"),
        (lambda c: c.chat([]), PromptEmpty, "messages"),
        (lambda c: c.chat([("", "x")]), InvalidRequest, "messages[0].role"),
        (lambda c: c.generate("x", temperature=float("nan")), InvalidRequest, "options.sampling.temperature"),
        (lambda c: c.chat("x", top_p=1.5), InvalidRequest, "options.sampling.top_p"),
        (lambda c: c.generate("x", max_tokens=5000), ContextExceeded, "options.sampling.max_tokens"),
        (lambda c: c.generate([5] * 1000, max_tokens=1), ContextExceeded, "prompt"),
        (lambda c: c.generate("x", model="gpt-2"), ModelNotFound, "model"),
        (lambda c: c.chat("x", model="gpt-2"), ModelNotFound, "model"),
        (lambda c: c.generate("x", adapter="lora"), FieldNotSupported, "options.adapter"),
        (lambda c: c.chat("x", constraint=Constraint(regex="a")), FieldNotSupported, "options.constraint"),
    ],
)
async def test_bad_input_is_the_clients_alone(
    here: tuple[str, str], call: Any, error: type[QuireError], field: str
) -> None:
    async with world(*here, hello={"max_context_tokens": 1000}) as running:
        with pytest.raises(error) as caught:
            await call(running.client).text()
        assert caught.value.metadata["field"] == field
        assert type(caught.value) is error
        assert len((await ask(running)).tokens()) == 20


async def test_bad_input_of_single_answers(here: tuple[str, str]) -> None:
    async with world(*here) as running:
        for call, error in (
            (running.client.tokenize(), PromptEmpty),
            (running.client.tokenize(messages=[]), PromptEmpty),
            (running.client.tokenize("x", model="y"), ModelNotFound),
            (running.client.detokenize([VOCAB_SIZE]), InvalidRequest),
            (running.client.detokenize([1], model="y"), ModelNotFound),
            (running.client.model("y"), ModelNotFound),
        ):
            with pytest.raises(error):
                await call


async def test_a_template_error_is_the_clients(here: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(*arguments: object, **variables: object) -> list[int]:
        raise ZeroDivisionError("in the template")

    async with world(*here) as running:
        monkeypatch.setattr(tokenizer(), "apply_chat_template", explode)
        with pytest.raises(InvalidRequest, match="chat template"):
            await running.client.chat("x").text()


async def test_an_unexpected_error_is_internal_logged_and_its_clients_alone(
    here: tuple[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with world(*here) as running:
        neighbour = running.client.generate("Hi", seed=SEED, max_tokens=300)
        await anext(neighbour)
        with monkeypatch.context() as patched, caplog.at_level(logging.INFO, "quire"):
            patched.setattr("router.relay.policy.choose", lambda *_: 1 / 0)
            with pytest.raises(QuireError) as caught:
                await ask(running, "SECRET PROMPT", request_id="unlucky")
        assert (caught.value.code, caught.value.reason) == ("INTERNAL", "INTERNAL")
        incident = caught.value.message.split()[-1]
        assert incident in caplog.text
        assert "ZeroDivisionError" in caplog.text
        assert "unlucky" in caplog.text
        assert "SECRET" not in caplog.text
        assert "ZeroDivisionError" not in caught.value.message
        assert len(await neighbour.text()) > 0


async def test_an_oversized_message_is_resource_exhausted(here: tuple[str, str]) -> None:
    async with world(*here, max_message_bytes=100_000) as running:
        with pytest.raises(MessageTooLarge):
            await running.client.generate("x" * 200_000).text()
        assert len((await ask(running, "y" * 50_000)).tokens()) == 20


async def test_reserved_methods_say_so(here: tuple[str, str]) -> None:
    async with world(*here) as running, running.channel() as channel:
        stub = inference_pb2_grpc.AdminStub(channel)  # type: ignore[no-untyped-call]
        with pytest.raises(grpc.RpcError) as caught:
            await stub.DrainGroup(inference_pb2.DrainGroupRequest())
        error = from_rpc_error(caught.value)
        assert isinstance(error, MethodNotSupported)
        assert "DrainGroup" in error.message


async def test_garbage_on_the_wire_harms_nobody(here: tuple[str, str]) -> None:
    async with world(*here) as running, running.channel() as channel:
        call = channel.unary_stream("/quire.v1.Inference/Generate")
        with pytest.raises(grpc.RpcError):
            async for _ in call(b"\xff\xff\xff garbage"):
                pass
        assert len((await ask(running)).tokens()) == 20


# -- who may call ----------------------------------------------------------------------------------------------------


async def test_keys(here: tuple[str, str], tmp_path: Path) -> None:
    key, line = make_key("alice")
    other, other_line = make_key("bob")
    file = tmp_path / "keys"
    file.write_text(f"{line}\n{other_line}\n")
    async with world(*here, api_keys_file=str(file)) as running:
        for bad in (None, "quire_wrong"):
            async with AsyncClient(running.address, bad, retry=ONCE) as client:
                for call in (client.generate_text("x"), client.tokenize("x"), client.models(), client.cluster()):
                    with pytest.raises(Unauthenticated):
                        await call
        for good, tenant in ((key, "alice"), (other, "bob")):
            async with AsyncClient(running.address, good) as client:
                await client.generate_text("Hello", max_tokens=1)
                assert running.groups[0].requests[-1].tenant == tenant
        alice, bob = running.groups[0].requests
        assert alice.root != bob.root
        async with running.channel() as channel:  # health and reflection need no key
            assert await health(channel) == "SERVING"
            assert "quire.v1.Inference" in await reflected(channel)


async def reflected(channel: grpc.aio.Channel) -> list[str]:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=10)
    async for response in call:
        return [service.name for service in response.list_services_response.service]
    return []


async def test_reflection_lists_every_service(here: tuple[str, str]) -> None:
    async with world(*here) as running, running.channel() as channel:
        services = await reflected(channel)
        assert {"quire.v1.Inference", "quire.v1.Admin", "grpc.health.v1.Health"} <= set(services)


async def test_health_follows_the_groups(here: tuple[str, str]) -> None:
    services = ("", "quire.v1.Inference", "quire.v1.Admin")
    async with world(*here) as running, running.channel() as channel:
        assert [await health(channel, service) for service in services] == ["SERVING"] * 3
        running.groups[0].engine.gate.clear()  # a long prefill: no step ends
        stream = running.client.generate("x", max_tokens=5, seed=SEED)
        await asyncio.sleep(1.5)
        assert await health(channel, services[1]) == "SERVING"
        running.groups[0].engine.gate.set()
        assert len(await stream.text()) > 0
        await running.groups[0].kill()
        await eventually(lambda: not running.router._groups.usable("m"), "the loss is seen")
        await asyncio.sleep(0.2)  # health is told right behind it
        found = [await health(channel, service) for service in services]
        assert found == ["SERVING", "NOT_SERVING", "SERVING"], "the process is well, whatever its groups are"


async def test_health_is_red_when_the_only_groups_step_loop_is_dead(here: tuple[str, str]) -> None:
    async with world(*here) as running, running.channel() as channel:
        stuck = running.client.generate("x", max_tokens=FOREVER)
        await anext(stuck)
        running.groups[0].freeze()  # a step that never ends; then no loads: so a leader says that its loop is stuck
        await eventually(lambda: not running.router._groups.usable("m"), "it is given up")
        for _ in range(5):  # and it stays so, though its port still answers
            await asyncio.sleep(0.2)
            assert await health(channel, "quire.v1.Inference") == "NOT_SERVING"
        [group] = (await running.client.cluster()).groups
        assert group.state in (inference_pb2.Group.LOST, inference_pb2.Group.CONNECTING)
        stuck.cancel()


async def test_a_group_is_not_given_up_between_its_own_slow_heartbeats(here: tuple[str, str]) -> None:
    async with world(*here, hello={"heartbeat_ms": 1500}, group_silence_s=0.4) as running:
        [link] = running.router._groups.usable("m")
        await asyncio.sleep(4)  # several of our own limits, and two beats
        assert running.router._groups.usable("m") == [link]
        running.groups[0].freeze()
        await eventually(lambda: not running.router._groups.usable("m"), "but it is when they stay away")


async def test_pings_during_a_long_prefill_are_no_abuse(here: tuple[str, str]) -> None:
    async with world(*here) as running:
        often = {"keepalive_time_ms": 200, "keepalive_permit_without_calls": 1, "http2.max_pings_without_data": 0}
        async with running.channel(**{f"grpc.{name}": value for name, value in often.items()}) as channel:
            stub: Any = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
            running.groups[0].engine.gate.clear()
            options = RequestOptions()
            options.sampling.max_tokens = 3
            call = stub.Generate(GenerateRequest(text="x", options=options))
            await asyncio.sleep(2.5)
            running.groups[0].engine.gate.set()
            assert [event.WhichOneof("event") async for event in call][-1] == "finished"


async def test_messages_above_grpcs_own_limit_pass(here: tuple[str, str]) -> None:
    async with world(*here, hello={"max_context_tokens": 1 << 22}, max_message_bytes=16 << 20) as running:
        ids = [30_000] * 1_600_000  # three bytes each, beyond 4 MiB in both hops
        answer = await ask(running, ids, max_tokens=2)
        assert answer.tokens() == [SEED, SEED + 1]
        assert len(running.groups[0].requests[0].prompt) == len(ids)
