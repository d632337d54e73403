"""Settings of tenants, their buckets of tokens, and what is counted for them."""

from __future__ import annotations

import pytest

from cluster import blocks
from cluster.config import TenantConfig, parse
from cluster.errors import ConfigError, Overloaded, QuotaExceeded
from cluster.pb.common_pb2 import CachedTokens
from router import admission
from router.accounting import Accounting
from router.admission import MAX_RETRY_MS, MIN_RETRY_MS, Admission, TokenBucket
from router.tenants import Tenants


def tenants(**sections: dict[str, object]) -> Tenants:
    """``everybody`` stands for '*'."""
    return Tenants(
        parse({"tenants": {name.replace("everybody", "*"): value for name, value in sections.items()}}).tenants
    )


# -- settings --------------------------------------------------------------------------------------------------------


def test_a_section_leaves_to_everybody_what_it_does_not_set() -> None:
    found = tenants(
        everybody={"tokens_per_minute": 100, "max_sessions": 5},
        alice={"max_sessions": 7, "session_bytes": 9},
        bob={"tokens_per_minute": None},
    )
    assert found["alice"] == TenantConfig(tokens_per_minute=100, max_sessions=7, session_bytes=9)
    assert found["bob"] == TenantConfig(max_sessions=5)
    assert found["carol"] == TenantConfig(tokens_per_minute=100, max_sessions=5)
    assert Tenants()["anybody"] == TenantConfig()


@pytest.mark.parametrize("name", ["", "a b", "a:b", "**", "a" * 65, "shared:x"])
def test_a_section_must_have_a_tenants_name(name: str) -> None:
    with pytest.raises(ConfigError):
        parse({"tenants": {name: {}}})


@pytest.mark.parametrize(
    "field",
    [{"tokens_per_minute": 0}, {"cache_domain": ""}, {"cache_domain": "a:b"}, {"pinned_bytes": -1}, {"quota": 1}],
)
def test_a_wrong_setting_is_named(field: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse({"tenants": {"alice": field}})
    assert f"tenants.alice.{next(iter(field))}" in caught.value.message


def test_a_shared_domain_is_nobodys_own() -> None:
    """Not even when it has the name of a tenant that keeps its prefixes to itself."""
    found = tenants(alice={"cache_domain": "carol"}, bob={"cache_domain": "carol"})
    domains = {tenant: found.cache_domain(tenant) for tenant in ("alice", "bob", "carol", "dave")}
    roots = {tenant: blocks.root(b"secret", domain, "namespace") for tenant, domain in domains.items()}
    assert roots["alice"] == roots["bob"]
    assert len(set(roots.values())) == 3
    with pytest.raises(ConfigError):
        tenants(**{domains["alice"]: {}})  # what its domain is called can be no tenant


# -- tokens ----------------------------------------------------------------------------------------------------------


def test_a_bucket_gives_a_minute_at_once_and_then_its_rate() -> None:
    bucket = TokenBucket(600, now=0.0)
    assert bucket.left(0.0) == 600
    bucket.take(599, 0.0)
    assert bucket.wait_s(0.0) == 0
    bucket.take(1, 0.0)
    assert bucket.wait_s(0.0) == pytest.approx(0.1)
    assert bucket.left(30.0) == pytest.approx(300)
    assert bucket.left(10_000.0) == 600, "it holds no more than a minute's worth"


def test_an_overdrawn_bucket_is_filled_first() -> None:
    bucket = TokenBucket(60, now=0.0)
    bucket.take(180, 0.0)
    assert bucket.left(0.0) == -120
    assert bucket.wait_s(0.0) == pytest.approx(121)
    assert bucket.wait_s(120.5) == pytest.approx(0.5)
    assert bucket.wait_s(121.0) == 0
    bucket.take(-1000, 121.0)
    assert bucket.left(121.0) == 60, "giving back fills it to the brim at most"


def test_whatever_is_asked_no_more_comes_out_than_flows_in() -> None:
    """Whole minutes of a client that asks as soon as it may, for as much as it likes."""
    now, taken = 0.0, 0
    bucket = TokenBucket(600, now)
    for size in (10, 1, 700, 3, 2000, 50) * 20:
        now += bucket.wait_s(now) + 1e-6
        bucket.take(size, now)
        taken += size
    now += bucket.wait_s(now)
    assert taken <= 600 + 10 * now
    assert taken >= 10 * now


def test_a_tenant_without_tokens_is_refused_and_told_when_there_are_some() -> None:
    now = 0.0
    gate = Admission(8, tenants=tenants(everybody={"tokens_per_minute": 60}), clock=lambda: now)
    gate.charge("alice", 69)
    with pytest.raises(QuotaExceeded) as caught:
        gate.check_tokens("alice")
    assert caught.value.retry_after_ms == 10_000
    assert caught.value.metadata == {"quota": "tokens_per_minute", "limit": "60"}
    assert gate.tokens_left("alice") == -9
    gate.check_tokens("bob")
    now = 10.0
    gate.check_tokens("alice")


def test_without_a_quota_nothing_is_counted() -> None:
    gate = Admission(8)
    gate.charge("alice", 1_000_000_000)
    gate.check_tokens("alice")
    assert gate.tokens_left("alice") is None


def test_buckets_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_BUCKETS", 3)
    gate = Admission(8, tenants=tenants(everybody={"tokens_per_minute": 60}), clock=lambda: 0.0)
    for name in ("a", "b", "c", "a", "d"):
        gate.charge(name, 1)
    assert [gate.tokens_left(name) for name in ("a", "c", "d")] == [58, 59, 59]
    assert len(gate._buckets) == 3


# -- requests in flight ----------------------------------------------------------------------------------------------


def test_a_tenant_has_so_many_requests_in_flight() -> None:
    gate = Admission(8, tenants=tenants(alice={"max_active_requests": 1}))
    with gate.slot("alice"):
        assert gate.active_of("alice") == 1
        with pytest.raises(QuotaExceeded) as caught, gate.slot("alice"):
            pytest.fail("a second got in")
        assert caught.value.metadata == {"quota": "max_active_requests", "limit": "1"}
        assert MIN_RETRY_MS <= caught.value.retry_after_ms <= MAX_RETRY_MS
        with gate.slot("bob"), gate.slot("bob"):
            assert gate.active == 3
    assert gate.active_of("alice") == 0
    with gate.slot("alice"):
        pass


# -- totals ----------------------------------------------------------------------------------------------------------


def test_totals_are_kept_apart() -> None:
    book = Accounting()
    book.prompt("alice", 100, CachedTokens(group=10, redis=20))
    book.prompt("alice", 50, CachedTokens())
    for error in (Overloaded("full"), QuotaExceeded("over")):
        with pytest.raises(type(error)), book.refusals("alice"):
            raise error
    with pytest.raises(KeyError), book.refusals("alice"):
        raise KeyError
    alice = book.of("alice")
    assert (alice.prompt_tokens, alice.cached_group_tokens, alice.cached_redis_tokens) == (150, 10, 20)
    assert alice.refusals == 2
    assert book.of("bob").prompt_tokens == book.of("bob").refusals == 0


def test_the_tenant_that_was_quiet_for_longest_is_forgotten() -> None:
    book = Accounting(max_tenants=2)
    for name in ("a", "b", "a", "c"):
        book.of(name).requests += 1
    assert len(book) == 2
    assert book.of("a").requests == 2
    assert book.of("b").requests == 0
