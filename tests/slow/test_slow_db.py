"""The reliability tests of the database that take minutes: the functions of the quick ones, with larger numbers."""

from __future__ import annotations

import pytest
from test_db_tools import memory_directory
from test_reliability_forged import forged_in_a_child
from test_reliability_generation import kill_cycles
from test_reliability_readers import readers_beside_a_builder
from test_reliability_rot import flip_every, tiny

pytestmark = pytest.mark.slow


def test_a_builder_killed_five_hundred_times_never_loses_what_it_acknowledged() -> None:
    kill_cycles(500, seed=523)


@pytest.mark.parametrize("backend", ["faiss", "hnswlib", "flat"])
def test_a_database_forged_for_minutes_never_ends_the_process(backend: str) -> None:
    """Ten minutes in all."""
    if backend == "hnswlib":
        pytest.importorskip("hnswlib", reason="hnswlib is an extra")
    for part in range(4):
        forged_in_a_child(backend, seed=3100 + part, trials=1 << 30, seconds=50.0)


def test_readers_beside_a_builder_for_a_minute_never_read_a_torn_slot() -> None:
    readers_beside_a_builder(4, 60.0)


def test_every_single_flipped_bit_is_found() -> None:
    """Every bit of the arenas and the manifest of a tiny database."""
    with memory_directory() as folder:
        assert flip_every(tiny(folder / "db"), lambda at: list(range(8))) > 130_000
