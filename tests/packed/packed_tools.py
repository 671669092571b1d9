"""Models of every family, bare and with packed blocks, and what is asked of both."""

from __future__ import annotations

from typing import Any

import pytest
from packed_models import pair

KINDS = ["BERT", "ModernBERT"]
"""A model whose encoder calls the blocks, and one that calls them itself."""


@pytest.fixture(params=KINDS, name="both")
def _both(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """Bare model and packed model; to be changed as one likes."""
    return pair(request.param)


def ran_packed(model: Any) -> bool:
    """Whether all sequences since the last reset ran packed; resets the counters."""
    stats = model.attmemo.stats()
    model.attmemo.reset_stats()
    return stats["sequences"] > 0 and not stats["ineligible"] and not stats["failures"]


def left_alone(model: Any) -> dict[str, int]:
    """Why the original code computed everything since the last reset; resets the counters."""
    stats = model.attmemo.stats()
    model.attmemo.reset_stats()
    assert stats["sequences"] == stats["tokens"] == 0
    return dict(stats["ineligible"])
