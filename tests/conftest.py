"""``QUIRE_TEST_ATTENTION=reference``: engines in the test's own process take plain torch where we have the choice."""

from __future__ import annotations

import os
from typing import Any

import pytest

from workers.model import backend


@pytest.fixture(autouse=True, scope="session")
def kernels_of_choice() -> Any:
    wanted = os.environ.get("QUIRE_TEST_ATTENTION")
    if not wanted:
        yield
        return
    usual = backend.choose
    patch = pytest.MonkeyPatch()
    patch.setattr(
        backend,
        "choose",
        lambda name, model, pages: usual(wanted if name == "auto" else name, model, pages),  # type: ignore[arg-type]
    )
    yield
    patch.undo()
