"""The parts of the prefix tier that need no Redis: the value's format, the breaker, the cost model, the wire."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.blocks import BlockHash
from cluster.errors import ConfigError, ProtocolError
from cluster.tiers import chunks
from cluster.tiers.breaker import LONGEST_S, Breaker
from cluster.tiers.chunks import HEADER_BYTES, ChunkShape, CorruptChunk
from cluster.tiers.connection import connect
from cluster.tiers.cost import CostModel
from workers import tier_wire
from workers.tier import PROBLEMS, Chunk, FetchOrder, StoreOrder, TransferReport

SHAPE = ChunkShape(bytes(range(32)), tokens=16, layers=3, kv_heads=5, head_dim=8, dtype="float32")
NAME = BlockHash(bytes(range(100, 132)))

# -- format ----------------------------------------------------------------------------------------------------------


def test_a_value_is_a_header_and_its_heads_and_ranks_have_runs_of_it() -> None:
    assert SHAPE.head_bytes == 3 * 2 * 16 * 8 * 4
    assert SHAPE.value_bytes == HEADER_BYTES + 5 * (16 + SHAPE.head_bytes)
    assert SHAPE.span(range(5)) == range(HEADER_BYTES, SHAPE.value_bytes)
    assert SHAPE.span(range(2)).stop == SHAPE.span(range(2, 5)).start
    assert dataclasses.replace(SHAPE, dtype="int8").head_bytes == 3 * 2 * 16 * (8 + 4)


@pytest.mark.parametrize("place", range(HEADER_BYTES))
def test_any_byte_of_the_header_counts(place: int) -> None:
    good = chunks.header(SHAPE, NAME)
    chunks.check_header(SHAPE, NAME, good)
    assert chunks.parse_header(good) == (SHAPE, NAME)
    bad = bytearray(good)
    bad[place] ^= 1
    with pytest.raises(CorruptChunk):
        chunks.check_header(SHAPE, NAME, bytes(bad))
    with pytest.raises(CorruptChunk):
        chunks.parse_header(bytes(bad))


@pytest.mark.parametrize(
    "change",
    [{"namespace": bytes(32)}, {"tokens": 32}, {"layers": 4}, {"kv_heads": 4}, {"head_dim": 16}, {"dtype": "int8"}],
)
def test_another_model_dtype_or_size_is_another_header(change: dict[str, object]) -> None:
    other = dataclasses.replace(SHAPE, **change)  # type: ignore[arg-type]
    with pytest.raises(CorruptChunk):
        chunks.check_header(other, NAME, chunks.header(SHAPE, NAME))


def test_right_bytes_in_a_wrong_place_are_wrong() -> None:
    payload = bytes(1000)
    sums = {chunks.checksum(name, head, payload) for name in (NAME, BlockHash(bytes(32))) for head in range(3)}
    assert len(sums) == 6


@pytest.mark.parametrize(
    ("per_token", "block", "tokens"), [(46_080, 16, 32), (46_080, 64, 64), (1 << 20, 8, 8), (1, 16, 1 << 20)]
)
def test_chunks_are_powers_of_two_of_a_mebibyte(per_token: int, block: int, tokens: int) -> None:
    assert chunks.chunk_tokens_for(per_token, block) == tokens


def test_all_keys_of_a_chunk_share_a_hash_tag() -> None:
    tag = b"{" + NAME.hex().encode() + b"}"
    assert tag in chunks.chunk_key("c", NAME)
    assert tag in chunks.claim_key("c", NAME)
    assert chunks.chunk_key("c", NAME) != chunks.chunk_key("d", NAME)


# -- breaker ---------------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_breaker_opens_after_failures_in_a_row_and_closes_after_one_good_try() -> None:
    clock = Clock()
    breaker = Breaker(3, 1.0, clock)
    for _ in range(2):
        breaker.failed()
    breaker.succeeded()
    for _ in range(2):
        breaker.failed()
    assert breaker.state == "closed"
    assert breaker.allows()
    breaker.failed()
    assert breaker.state == "open"
    assert not breaker.allows()
    clock.now += 1.0
    assert breaker.allows()
    assert breaker.state == "half_open"
    assert not breaker.allows(), "one try at a time"
    breaker.succeeded()
    assert breaker.state == "closed"


def test_tries_become_rarer() -> None:
    clock = Clock()
    breaker = Breaker(1, 1.0, clock)
    breaker.failed()
    waits = []
    for _ in range(8):
        begun = clock.now
        while not breaker.allows():
            clock.now += 0.5
        waits.append(clock.now - begun)
        breaker.failed()
    assert waits == [1, 2, 4, 8, 16, LONGEST_S, LONGEST_S, LONGEST_S]


def test_a_try_that_never_tells_does_not_end_the_trying() -> None:
    clock = Clock()
    breaker = Breaker(1, 1.0, clock)
    breaker.failed()
    clock.now += 1.0
    assert breaker.allows()
    clock.now += 1.0
    assert breaker.allows()


# -- cost ------------------------------------------------------------------------------------------------------------

SIZE = {"chunk_tokens": 32, "bytes_per_chunk": 1 << 20}


def decided(
    model: CostModel, stored: int, tokens: int = 1000, first: int = 0, budget_s: float = 10.0
) -> tuple[int, str]:
    found = model.decide(stored_chunks=stored, first_token=first, prompt_tokens=tokens, budget_s=budget_s, **SIZE)
    return found.chunks, found.reason


def measured(bytes_per_s: float, tokens_per_s: float, round_trip_s: float = 0.001) -> CostModel:
    model = CostModel()
    model.observe_round_trip(round_trip_s)
    model.observe_fetch(10 << 20, round_trip_s + (10 << 20) / bytes_per_s)
    for depth in (0, 100, 200):
        model.observe_prefill(100, depth, 100 / tokens_per_s)
    return model


def test_what_is_faster_is_done() -> None:
    assert decided(measured(1e9, 600), 30) == (30, "fetch")
    assert decided(measured(1e6, 600), 30) == (0, "compute_is_faster")
    assert decided(measured(1e9, 600), 0) == (0, "nothing_stored")


def test_before_anything_is_measured_what_is_stored_is_tried() -> None:
    assert decided(CostModel(), 7) == (7, "fetch")


def test_no_more_is_fetched_than_the_budget_lets_through() -> None:
    model = measured(100 << 20, 60)
    assert decided(model, 30, budget_s=0.101)[0] == 10
    assert decided(model, 30, budget_s=0.0005) == (0, "deadline")


def test_deep_tokens_cost_more() -> None:
    model = CostModel()
    for _ in range(50):
        for depth in (0, 500, 1000, 2000):
            model.observe_prefill(100, depth, 100 * (1e-3 + 1e-6 * depth))
    assert model.compute_s(0, 100) == pytest.approx(100 * 1.05e-3, rel=0.1)
    assert model.compute_s(2000, 2100) == pytest.approx(100 * 3.05e-3, rel=0.1)


def test_one_hiccup_of_the_link_does_not_decide_and_a_slower_link_does() -> None:
    model = measured(1e9, 600)
    for _ in range(5):
        model.observe_round_trip(0.001)
        model.observe_fetch(10 << 20, 0.001 + (10 << 20) / 1e9)
    model.observe_fetch(1 << 20, 0.5)
    model.observe_round_trip(0.5)
    assert decided(model, 30, budget_s=0.5) == (30, "fetch")
    assert model.fetch_bytes_per_s == pytest.approx(1e9)
    for _ in range(2):
        model.observe_fetch(1 << 20, 2.0)
    assert decided(model, 30) == (0, "compute_is_faster")
    for _ in range(3):
        model.observe_fetch(1 << 20, 0.002)
    assert decided(model, 30) == (30, "fetch"), "it may become fast again"


def test_one_step_that_was_held_up_does_not_decide_and_a_slower_machine_does() -> None:
    model = measured(100e6, 5000)
    assert decided(model, 30) == (0, "compute_is_faster")
    model.observe_prefill(100, 100, 10.0)
    assert decided(model, 30) == (0, "compute_is_faster")
    for _ in range(60):
        model.observe_prefill(100, 100, 0.2)
    assert decided(model, 30) == (30, "fetch")


def test_measurements_of_nothing_change_nothing() -> None:
    model = CostModel()
    model.observe_fetch(0, 1.0)
    assert decided(model, 3) == (3, "fetch")


@given(
    seconds=st.lists(st.floats(0, 100), min_size=1, max_size=60), depths=st.lists(st.integers(0, 8192), min_size=1),
    first=st.integers(0, 8192), more=st.integers(1, 4096),
)  # fmt: skip
def test_whatever_was_measured_predictions_are_sane(
    seconds: list[float], depths: list[int], first: int, more: int
) -> None:
    model = CostModel()
    for place, second in enumerate(seconds):
        model.observe_prefill(100, depths[place % len(depths)], second)
        model.observe_round_trip(second)
        model.observe_fetch(1 << 20, second)
    whole = model.compute_s(first, first + more)
    assert 0 <= whole < float("inf")
    assert model.compute_s(first, first + more // 2) <= whole * (1 + 1e-9)
    assert model.compute_s(first + more, first + 2 * more) >= whole * (1 - 1e-9), "deeper is never cheaper"
    assert 0 <= model.fetch_s(1 << 20) <= model.fetch_s(2 << 20) < float("inf")


@given(
    rate=st.floats(1e5, 1e11), speed=st.floats(10, 1e5), trip=st.floats(1e-5, 0.5), stored=st.integers(0, 40),
    tokens=st.integers(1, 4000), budget=st.floats(0, 5),
)  # fmt: skip
def test_the_choice_is_the_best_of_all_that_fit(
    rate: float, speed: float, trip: float, stored: int, tokens: int, budget: float
) -> None:
    model = measured(rate, speed, trip)
    found = model.decide(stored_chunks=stored, first_token=0, prompt_tokens=tokens, budget_s=budget, **SIZE)
    assert 0 <= found.chunks <= stored

    def total(chunks: int) -> float:
        return model.fetch_s(chunks << 20) + model.compute_s(min(tokens, chunks * 32), tokens)

    fitting = [n for n in range(stored + 1) if n == 0 or (model.fetch_s(n << 20) <= budget and 32 * n < tokens)]
    assert total(found.chunks) <= min(map(total, fitting)) * (1 + 1e-6) + 1e-9


# -- the wire between ranks ------------------------------------------------------------------------------------------

some_chunks = st.integers(0, 4).flatmap(
    lambda pages: st.lists(
        st.builds(
            Chunk,
            st.binary(min_size=32, max_size=32).map(BlockHash),
            st.integers(0, 2**20),
            st.lists(st.integers(0, 2**20), min_size=pages, max_size=pages).map(tuple),
        ),
        max_size=5,
    ).map(tuple)
)


@given(some_chunks, st.integers(-(2**40), 2**40), st.floats(0, 100))
def test_orders_arrive_as_they_were_sent(found: tuple[Chunk, ...], ticket: int, seconds: float) -> None:
    fetch = FetchOrder(ticket, found, seconds)
    assert tier_wire.decode_fetch(tier_wire.encode_fetch(fetch)) == fetch
    store = StoreOrder(ticket, found, tuple(range(len(found))), b"suffix")
    assert tier_wire.decode_store(tier_wire.encode_store(store)) == store


@given(st.integers(0, 2**40), st.lists(st.integers(0, 1000), max_size=3), st.sampled_from(["", *PROBLEMS]))
def test_reports_arrive_as_they_were_sent(size: int, corrupt: list[int], problem: str) -> None:
    report = TransferReport(-5, 3, size, 0.25, tuple(corrupt), problem)
    assert tier_wire.decode_report(tier_wire.encode_report(report)) == report


@given(st.binary(max_size=200))
def test_nonsense_is_no_order(data: bytes) -> None:
    for decode in (tier_wire.decode_fetch, tier_wire.decode_store, tier_wire.decode_report):
        try:
            decode(data)
        except ProtocolError:
            continue


# -- connections -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["http://host", "host:6379", "", "redis+sentinel://host:1", "redis://host:port"])
def test_a_wrong_url_is_named(url: str) -> None:
    with pytest.raises(ConfigError, match=r"prefix\.redis"):
        connect(url, 1.0)


def test_credentials_tls_and_sentinels_are_understood() -> None:
    plain = connect("rediss://user:secret@kv:7000/2?ssl_ca_certs=/ca.pem", 0.25).connection_pool.connection_kwargs
    assert (plain["host"], plain["port"], plain["db"]) == ("kv", 7000, 2)
    assert (plain["username"], plain["password"], plain["ssl_ca_certs"]) == ("user", "secret", "/ca.pem")
    assert plain["socket_timeout"] == plain["socket_connect_timeout"] == 0.25
    assert plain["retry"].get_retries() == 0
    watched = connect("redis+sentinel://:secret@one:26379,two:26380/quire/3", 0.25).connection_pool
    assert watched.service_name == "quire"  # type: ignore[attr-defined]
    assert watched.connection_kwargs["password"] == "secret"
    assert watched.connection_kwargs["db"] == 3
