"""Fixtures of the tests of the service. Tools are imported late: they skip where the service is not installed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from services import Live


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Directory of a tiny model that embeds."""
    from services import tiny

    return tiny(tmp_path_factory.mktemp("model"), None)


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Live]]:
    """A server for each task."""
    from services import living, tiny

    make = tmp_path_factory.mktemp
    with (
        living(tiny(make("e"), None)) as embeds, living(tiny(make("c"), 3)) as classifies,
        living(tiny(make("r"), 1)) as ranks, living(tiny(make("t"), None, ("O", "B-A", "I-A"))) as tags,
    ):  # fmt: skip
        yield {"embeds": embeds, "classifies": classifies, "ranks": ranks, "tags": tags}


@pytest.fixture
def live(model: str) -> Iterator[Live]:
    """A server of its own, with the usual settings."""
    from services import living

    with living(model) as found:
        yield found


@pytest.fixture
def hasty(model: str) -> Iterator[Live]:
    """Clients have a second: a busy machine may take tenths of one to read what has come."""
    from services import living

    with living(model, client_seconds=1.0) as found:
        yield found
