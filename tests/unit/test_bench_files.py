"""The benches' own arithmetic, where no model is needed."""

from __future__ import annotations

import json

from tests.bench import paging
from tests.bench.common import WORKLOADS
from tests.bench.run import BENCHES, markdown


def test_every_bench_has_its_workload_in_a_file() -> None:
    assert {path.stem for path in WORKLOADS.glob("*.json")} == set(BENCHES)
    assert all(isinstance(json.loads(path.read_text()), dict) for path in WORKLOADS.glob("*.json"))


def test_paging_holds_more_sequences_than_any_reservation_and_wastes_little() -> None:
    """Counts, not times: exact and the same everywhere."""
    result = paging.measure()
    assert result.figures["ratio_to_full_context"] >= 1.67
    assert result.figures["ratio_to_longest_request"] >= 1.67
    assert result.figures["waste_percent"]["paged"] < 4
    assert "| paged |" in markdown("paging", result)
