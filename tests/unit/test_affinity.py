"""Which group served a conversation last: by tenant, bounded, the least recently used goes first."""

from __future__ import annotations

from router.sessions import Affinity


def test_a_session_belongs_to_its_tenant() -> None:
    affinity = Affinity()
    affinity.put("a", "talk", "g0")
    affinity.put("b", "talk", "g1")
    assert (affinity.get("a", "talk"), affinity.get("b", "talk"), affinity.get("c", "talk")) == ("g0", "g1", None)
    affinity.put("a", "talk", "g2")
    assert affinity.get("a", "talk") == "g2"


def test_without_a_session_nothing_is_kept() -> None:
    affinity = Affinity()
    affinity.put("a", "", "g0")
    assert affinity.get("a", "") is None
    assert len(affinity) == 0


def test_it_is_bounded() -> None:
    affinity = Affinity(max_sessions=3)
    for number in range(3):
        affinity.put("a", str(number), "g")
    affinity.put("a", "0", "g")
    affinity.put("a", "new", "g")
    assert len(affinity) == 3
    assert affinity.get("a", "1") is None
    assert affinity.get("a", "0") == "g"
