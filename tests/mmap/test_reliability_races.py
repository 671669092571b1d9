"""Readers, closers and collectors while others fetch."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import re
import sys
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from children import run_child
from databases import fill
from mmap_tools import PAGE, SLOTS, in_threads, small_arena
from torch.utils.dlpack import from_dlpack
from window_tools import Pages, numbers

from attmemo.db import KIND_MAP, Database
from attmemo.errors import AttmemoError, WindowBusyError, WindowError
from attmemo.maps.source import multiply
from attmemo.mmap import Arena, CopyFetcher, MapFetcher, ViewFetcher, Window, _window

# -- readers while others fetch


def read_while_fetching(arena: Arena, seconds: float, readers: int = 2) -> tuple[int, int, int]:
    """One thread fetches, others check what it handed them. Returns (fetches, fallbacks, checksums compared)."""
    expected = [zlib.crc32(arena.slot(slot).numpy().tobytes()) for slot in range(len(arena))]
    fetcher, end = MapFetcher(), time.monotonic() + seconds
    handed: list[list[tuple[list[int], torch.Tensor]]] = [[] for _ in range(readers)]  # what each reader is to read
    stop, compared, fetches = threading.Event(), [0] * readers, 0

    def read(mine: int) -> None:
        rng = random.Random(mine)
        while not stop.is_set() or handed[mine]:
            if not handed[mine]:
                time.sleep(0)
                continue
            slots, tensor = handed[mine].pop(0)
            for _ in range(rng.randrange(1, 6)):
                seen = [zlib.crc32(record.numpy().tobytes()) for record in tensor]
                assert seen == [expected[slot] for slot in slots]
                compared[mine] += len(seen)
            del tensor

    def fetch() -> None:
        nonlocal fetches
        rng = random.Random(8)
        try:
            while time.monotonic() < end:
                slots = [rng.randrange(len(arena)) for _ in range(rng.randrange(1, 9))]
                with fetcher.fetch(arena, slots) as batch:
                    assert batch.stacked is not None
                    fetches += 1
                    queue = handed[rng.randrange(readers)]
                    if len(queue) < 3:
                        queue.append((slots, batch.stacked))  # read after the block, and during later ones
                    for i in range(0, len(slots), 3):
                        assert zlib.crc32(batch[i].numpy().tobytes()) == expected[slots[i]]
        finally:
            stop.set()

    in_threads(fetch, *(lambda mine=mine: read(mine) for mine in range(readers)))  # type: ignore[misc]
    return fetches, fetcher.fallbacks, sum(compared)


def test_a_reader_sees_the_records_it_was_given_while_others_are_fetched(arena: Arena) -> None:
    fetches, fallbacks, compared = run_child(lambda: read_while_fetching(arena, 2.0)).result
    assert compared > 100
    assert 0 < fallbacks < fetches, "both a free and a leased window must have been met"


# -- close, del and collection while others work


def drop(held: list[Any], number: int) -> None:
    """Let go of what is held: two times in three closed first, now and then collected at once."""
    thing = held[0]
    if number % 3:
        thing.close()
    held.clear()
    del thing
    if number % 20 == 0:
        gc.collect()


ROUNDS = int(os.environ.get("ATTMEMO_TEST_ROUNDS", "30"))  # `make test-slow` asks for more


def races(body: Callable[[int], None], rounds: int = ROUNDS) -> None:
    """Many rounds of a race in a child, where a crash is seen by its name, with threads that change often."""

    def run() -> None:
        sys.setswitchinterval(1e-6)
        for number in range(rounds):
            body(number)
        gc.collect()

    run_child(run, timeout=600)


def tried(said: str, call: Callable[..., Any], *arguments: Any) -> Any:
    """What a call returns, or None where it is refused in these words."""
    try:
        return call(*arguments)
    except (ValueError, BufferError, AttmemoError) as error:
        if not re.search(said, str(error)):
            raise
        return None


def test_a_window_of_the_extension_closed_and_dropped_in_a_race_gives_errors_only(pages: int) -> None:
    def body(number: int) -> None:
        held = [Pages(_window, SLOTS * PAGE)]
        rng = random.Random(number)
        said = "closed|leased|another thread|changing"

        def work(seed: int) -> None:
            mine = random.Random(seed)
            for _ in range(6):
                window = held[0] if held else None
                if window is None:
                    return
                some = [mine.randrange(SLOTS) for _ in range(mine.randrange(1, SLOTS))]
                tried(said, window.map, pages, numbers(*some))
                seen = tried(said + "|no slots", window.seen)
                assert seen is None or all(0 <= page < SLOTS for page in seen)

        def end() -> None:
            window = held[0]
            for _ in range(rng.randrange(4)):
                tried(said, window.darken)
            if number % 3:
                tried(said, window.close)
            held.clear()
            del window
            if number % 20 == 0:
                gc.collect()

        in_threads(lambda: work(number), lambda: work(number + 1000), end)

    races(body)


def test_a_tensor_of_a_window_remapped_in_a_race_is_as_long_as_what_is_mapped(arena: Arena) -> None:
    layout = arena.layout
    many, one = np.arange(0, SLOTS, 2), np.array([3])

    def body(number: int) -> None:
        window, done = Window(SLOTS * layout.stride), threading.Event()

        def remap() -> None:
            try:
                for turn in range(30):
                    with contextlib.suppress(WindowBusyError):
                        window.show(arena.fd, one if turn % 2 else many, layout, populate=True)
                if number % 2:
                    with contextlib.suppress(WindowBusyError):
                        window.close()
            finally:
                done.set()

        def read() -> None:
            while not done.is_set():
                shape, type_of = layout.shape, (2, 32)  # float32
                capsule = tried("no slots|closed|another thread", window._native.show, shape, layout.stride, *type_of)
                if capsule is not None:
                    tensor = from_dlpack(capsule)
                    assert len(tensor) in (1, SLOTS // 2)
                    assert torch.equal(tensor[-1], arena.slot(3 if len(tensor) == 1 else SLOTS - 2))
                    del tensor
                del capsule

        in_threads(remap, read)

    races(body)


def test_a_fetcher_closed_and_dropped_in_a_race_gives_whole_batches_or_errors(arena: Arena) -> None:
    expected = [arena.slot(slot).clone() for slot in range(SLOTS)]

    def body(number: int) -> None:
        held = [MapFetcher(strict=number % 2 == 0)]

        def work(seed: int) -> None:
            rng, kept = random.Random(seed), []
            for _ in range(6):
                fetcher = held[0] if held else None
                if fetcher is None:
                    break
                slots = [rng.randrange(SLOTS) for _ in range(rng.randrange(1, 7))]
                batch = tried("closed", fetcher.fetch, arena, slots)
                if batch is None:
                    break
                assert all(torch.equal(batch[i], expected[slot]) for i, slot in enumerate(slots))
                if not fetcher.strict:
                    kept.append((slots[-1], batch[len(slots) - 1]))
                with contextlib.suppress(WindowError):  # closed meanwhile by the other thread
                    batch.close()
            assert all(torch.equal(tensor, expected[slot]) for slot, tensor in kept)

        in_threads(lambda: work(number), lambda: work(number + 1000), lambda: drop(held, number))

    races(body)


def test_an_arena_closed_and_dropped_in_a_race_gives_its_bytes_or_an_error(tmp_path: Path, arena: Arena) -> None:
    path = tmp_path / "arena.bin"
    expected = [arena.slot(slot).clone() for slot in range(SLOTS)]
    products = [slot.sum(-1).T for slot in expected]

    def product(opened: Arena, slot: int) -> torch.Tensor:
        context, first = torch.empty(1, 27, 2), np.array([0])
        multiply(opened, [slot], torch.ones(27, 2), first, context, first)
        return context[0]

    def body(number: int) -> None:
        held = [Arena(path, arena.layout)]

        def work(seed: int) -> None:
            rng, fetcher, kept = random.Random(seed), (MapFetcher, ViewFetcher, CopyFetcher)[seed % 3](), []
            for _ in range(6):
                opened = held[0] if held else None
                if opened is None:
                    break
                slot = rng.randrange(SLOTS)
                batch = tried("closed", fetcher.fetch, opened, [slot])
                if batch is None:
                    break
                with batch:
                    kept.append((slot, batch[0]))
                context = tried("closed", product, opened, slot)
                if context is not None:
                    assert torch.allclose(context, products[slot], atol=1e-4)
            del opened
            assert all(torch.equal(tensor, expected[slot]) for slot, tensor in kept)

        readers = [lambda place=place: work(3 * number + place) for place in range(3)]
        in_threads(*readers, lambda: drop(held, number))

    races(body)


def test_a_database_closed_and_dropped_in_a_race_gives_its_records_or_an_error(tmp_path: Path) -> None:
    path = fill(tmp_path / "db")
    with Database(path) as database:
        expected = [database.slot(KIND_MAP, 1, record) for record in range(len(database))]

    def body(number: int) -> None:
        held = [Database(path)]

        def work(seed: int) -> None:
            rng, kept = random.Random(seed), []
            for _ in range(6):
                opened = held[0] if held else None
                if opened is None:
                    break
                record = rng.randrange(len(expected))
                view = tried("closed", opened.view, KIND_MAP, 1, record)
                if view is None:
                    break
                kept.append((record, view))
            del opened
            assert all(torch.equal(view, expected[record]) for record, view in kept)

        in_threads(lambda: work(number), lambda: work(number + 1000), lambda: drop(held, number))

    races(body)


@pytest.mark.slow
def test_readers_see_the_records_they_were_given_for_a_minute(tmp_path: Path) -> None:
    with small_arena(tmp_path) as arena:
        fetches, fallbacks, compared = run_child(lambda: read_while_fetching(arena, 60, readers=3), timeout=600).result
    assert compared > 10_000
    assert 0 < fallbacks < fetches
