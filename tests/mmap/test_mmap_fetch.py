"""The three twins: identical results, and no tensor that silently shows another record.

The failure unique to this design is plausible wrong numbers: half a batch of old records, or a tensor that changes
under its reader. Most tests here look for those two.
"""

from __future__ import annotations

import gc
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from children import in_child
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mmap_tools import make_arena

from attmemo.errors import WindowBusyError, WindowError
from attmemo.mmap import (
    HUGE_PAGE,
    Arena,
    CopyFetcher,
    Fetcher,
    MapFetcher,
    SlotLayout,
    ViewFetcher,
    Window,
    choose_fetcher,
    map_count,
    max_map_count,
    page_size,
)

PAGE = page_size()
SLOTS = 9
TWINS: list[Callable[[], Fetcher]] = [CopyFetcher, ViewFetcher, lambda: MapFetcher(strict=True)]


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    """Slots of exactly two pages: dense."""
    layout = SlotLayout.paged((2, 32, PAGE // 128), torch.float32, slots=SLOTS, header=1)
    assert layout.dense
    with make_arena(tmp_path / "arena.bin", layout) as opened:
        yield opened


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    heads=st.integers(1, 12),
    n=st.integers(1, 80),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.uint8]),
    header=st.sampled_from([0, 1]),
    batch=st.lists(st.integers(0, SLOTS - 1), max_size=12),
    page=st.sampled_from([PAGE, 1 << 16]),
)
def test_twins_give_identical_results_and_never_show_padding(
    heads: int, n: int, dtype: torch.dtype, header: int, batch: list[int], page: int
) -> None:
    layout = SlotLayout.paged((heads, n, n), dtype, slots=SLOTS, header=header, page=page)
    with tempfile.TemporaryDirectory() as folder, make_arena(Path(folder) / "arena.bin", layout) as arena:
        raw = Path(folder, "arena.bin").read_bytes()
        expected = [raw[layout.offset(i) : layout.offset(i) + layout.nbytes] for i in batch]
        for make in TWINS:
            fetcher = make()
            with fetcher.fetch(arena, batch) as got:
                assert len(got) == len(batch)
                assert [record.view(torch.uint8).numpy().tobytes() for record in got] == expected
                assert all(record.shape == layout.shape and record.is_contiguous() for record in got)
                if fetcher.name == "view":
                    assert got.stacked is None
                else:
                    assert got.stacked is not None
                    assert got.stacked.shape == (len(batch), *layout.shape)
                    assert got.stacked.clone().view(torch.uint8).numpy().tobytes() == b"".join(expected)
                    # Honest: a padded batch is not contiguous, and says so.
                    honest = fetcher.name == "copy" or layout.dense or len(batch) < 2
                    assert got.stacked.is_contiguous() == honest
            assert getattr(fetcher, "fallbacks", 0) == 0
            fetcher.close()


@pytest.mark.parametrize("make", TWINS)
@pytest.mark.parametrize(
    "slots", [np.array([3, 1], np.int32), np.array([3, 1], np.uint64), torch.tensor([3, 1]), (3, 1)]
)
def test_slot_numbers_come_in_any_integer_sequence(arena: Arena, make: Callable[[], Fetcher], slots: object) -> None:
    with make().fetch(arena, slots) as batch:  # type: ignore[arg-type]
        assert torch.equal(batch[0], arena.slot(3))
        assert torch.equal(batch[1], arena.slot(1))


@pytest.mark.parametrize("make", TWINS)
def test_slots_that_do_not_exist_are_refused_alike(arena: Arena, make: Callable[[], Fetcher]) -> None:
    fetcher = make()
    for slots in ([-1], [0, SLOTS], [1 << 62], [0, -(1 << 62)]):
        with pytest.raises(IndexError, match="does not exist"):
            fetcher.fetch(arena, slots)
    for wrong in ([1.0], [[1, 2]], ["1"], [True], [1 << 80]):
        with pytest.raises(ValueError, match="flat sequence of integers"):
            fetcher.fetch(arena, wrong)  # type: ignore[arg-type]
    assert getattr(fetcher, "fallbacks", 0) == 0


@pytest.mark.parametrize("make", TWINS)
def test_records_outside_the_batch_and_batches_after_their_block_are_refused_alike(
    arena: Arena, make: Callable[[], Fetcher]
) -> None:
    with make().fetch(arena, [1, 2]) as batch:
        for index in (-1, 2):
            with pytest.raises(IndexError):
                batch[index]
    assert len(batch) == 2
    with pytest.raises(WindowError, match="after its with block"):
        batch[0]
    with pytest.raises(WindowError, match="after its with block"):
        _ = batch.stacked


@pytest.mark.parametrize("make", TWINS)
def test_a_closed_fetcher_refuses_alike_and_tensors_held_stay_right(arena: Arena, make: Callable[[], Fetcher]) -> None:
    fetcher = make()
    batch = fetcher.fetch(arena, [4])
    with batch:
        held = batch[0]
        fetcher.close()
        fetcher.close()
        assert torch.equal(held, arena.slot(4))
        with pytest.raises(WindowError, match="closed"):
            fetcher.fetch(arena, [1])
        del held


def test_consecutive_slots_are_one_mapping(arena: Arena) -> None:
    with MapFetcher().fetch(arena, range(SLOTS)) as batch:
        assert batch.stacked is not None
        assert batch.stacked.is_contiguous()
        expected = torch.stack([arena.slot(i) for i in range(SLOTS)])
        assert torch.equal(batch.stacked, expected)


def test_a_tensor_kept_from_an_earlier_batch_never_changes(arena: Arena) -> None:
    """Hooks, output_attentions and autograd keep tensors. They must see what they were given, or an error."""
    fetcher = MapFetcher()
    kept = []
    for slot in range(SLOTS):
        with fetcher.fetch(arena, [slot, (slot + 1) % SLOTS]) as batch:
            assert batch.stacked is not None
            kept.append(batch.stacked[1:].mT)  # any view will do
            assert torch.equal(batch[0], arena.slot(slot))
    assert all(torch.equal(kept[i][0].mT, arena.slot((i + 1) % SLOTS)) for i in range(SLOTS))
    assert fetcher.fallbacks == SLOTS - 1
    assert fetcher.fallback_reason is not None
    assert "leased" in fetcher.fallback_reason
    kept.clear()
    with fetcher.fetch(arena, [2]):
        pass
    assert fetcher.fallbacks == SLOTS - 1  # and with the tensors gone the window serves again


def test_a_tensor_saved_for_the_backward_pass_never_changes(arena: Arena) -> None:
    fetcher = MapFetcher()
    weight = torch.ones(arena.layout.shape[1:], requires_grad=True)
    with fetcher.fetch(arena, [3]) as batch:
        loss = (batch[0] * weight).sum()
    with fetcher.fetch(arena, [5]):
        loss.backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, arena.slot(3).sum(0))


def test_a_batch_inside_a_batch_is_copied_whole(arena: Arena) -> None:
    fetcher = MapFetcher(strict=True)
    with fetcher.fetch(arena, [1, 2, 3]) as outer:
        with fetcher.fetch(arena, [4, 5, 6]) as inner:
            assert all(torch.equal(inner[i], arena.slot(4 + i)) for i in range(3))
            assert all(torch.equal(outer[i], arena.slot(1 + i)) for i in range(3))
        assert all(torch.equal(outer[i], arena.slot(1 + i)) for i in range(3))
    assert fetcher.fallbacks == 1


def test_a_batch_that_is_never_entered_does_not_lock_the_window(arena: Arena) -> None:
    fetcher = MapFetcher()
    fetcher.fetch(arena, [1])
    gc.collect()
    with fetcher.fetch(arena, [2]) as batch:
        assert torch.equal(batch[0], arena.slot(2))
    assert fetcher.fallbacks == 0


def test_strict_reports_a_tensor_that_outlives_its_batch(arena: Arena) -> None:
    fetcher = MapFetcher(strict=True)
    batch = fetcher.fetch(arena, [1])
    kept = batch[0]
    with pytest.raises(WindowBusyError, match="leased"):
        batch.close()
    assert torch.equal(kept, arena.slot(1))
    del kept
    with fetcher.fetch(arena, [2]) as batch:
        assert torch.equal(batch[0], arena.slot(2))
    assert fetcher.fallbacks == 0


def test_strict_does_not_hide_the_error_that_ended_the_block(arena: Arena) -> None:
    def block() -> None:
        with MapFetcher(strict=True).fetch(arena, [1]) as batch:
            kept = batch[0]
            raise KeyError(kept.shape)

    with pytest.raises(KeyError):
        block()


def test_batches_of_growing_and_shrinking_size_and_of_other_arenas_do_not_mix(tmp_path: Path, arena: Arena) -> None:
    other = make_arena(tmp_path / "other", SlotLayout.paged((3, 20, 20), torch.bfloat16, slots=SLOTS))
    same_stride = make_arena(tmp_path / "same", SlotLayout((1, 7), torch.float16, arena.layout.stride, 0, SLOTS))
    fetcher, rng = MapFetcher(strict=True), random.Random(3)
    for count in [1, 2, 3, 9, 1, 17, 4, 40, 2]:
        for source in (arena, other, same_stride):
            slots = [rng.randrange(SLOTS) for _ in range(count)]
            with fetcher.fetch(source, slots) as batch:
                assert all(torch.equal(batch[i], source.slot(slot)) for i, slot in enumerate(slots))
    assert fetcher.fallbacks == 0


def test_threads_share_a_fetcher_without_sharing_a_window(arena: Arena) -> None:
    fetcher, wrong = MapFetcher(strict=True), []
    expected = [arena.slot(i).clone() for i in range(SLOTS)]

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(150):
            slots = [rng.randrange(SLOTS) for _ in range(rng.randrange(1, 6))]
            with fetcher.fetch(arena, slots) as batch:
                wrong.extend(slot for i, slot in enumerate(slots) if not torch.equal(batch[i], expected[slot]))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert fetcher.fallbacks == 0


def test_a_reader_in_another_thread_never_sees_the_next_batch(arena: Arena) -> None:
    fetcher, begun, stop, wrong = MapFetcher(), threading.Event(), threading.Event(), []
    batch = fetcher.fetch(arena, [6])
    held = batch[0]
    expected = arena.slot(6).clone()

    def read() -> None:
        while not stop.is_set():
            if not torch.equal(held, expected):
                wrong.append(1)
            begun.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(600)
    for slot in list(range(SLOTS)) * 20:
        with fetcher.fetch(arena, [slot]) as other:
            assert torch.equal(other[0], arena.slot(slot))
    stop.set()
    reader.join()
    assert not wrong


def test_closing_the_arena_while_threads_fetch_is_safe(tmp_path: Path) -> None:
    layout = SlotLayout.paged((2, 32, 32), torch.float32, slots=SLOTS)
    arena = make_arena(tmp_path / "arena.bin", layout)
    arena.close()
    errors: list[BaseException] = []
    for _ in range(10):
        arena = Arena(tmp_path / "arena.bin", layout)
        expected = arena.slot(1).clone()

        def work(arena: Arena = arena, expected: torch.Tensor = expected) -> None:
            fetcher = MapFetcher()
            try:
                for _ in range(50):
                    with fetcher.fetch(arena, [1, 0]) as batch:
                        assert torch.equal(batch[0], expected)
            except Exception as error:
                if "was closed" not in str(error):
                    errors.append(error)

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        time.sleep(0.001)
        arena.close()
        for thread in threads:
            thread.join()
    assert not errors


def test_mappings_and_descriptors_end_where_they_began(arena: Arena) -> None:
    count = lambda: (map_count(), len(os.listdir("/proc/self/fd")))  # noqa: E731
    rng = random.Random(4)
    gc.collect()
    before = count()
    fetcher = MapFetcher()
    for _ in range(2000):
        with fetcher.fetch(arena, [rng.randrange(SLOTS) for _ in range(rng.randrange(1, 20))]) as batch:
            batch[0]
    fetcher.close()
    del fetcher
    gc.collect()
    after = count()
    assert after[0] <= before[0] + 3  # malloc's own
    assert after[1] == before[1]


def test_an_idle_window_is_dark_after_a_strict_batch_and_gone_after_close(arena: Arena) -> None:
    fetcher = MapFetcher(strict=True)
    with fetcher.fetch(arena, [1, 2, 3]):
        pass
    (window,) = fetcher._all
    with pytest.raises(ValueError, match="no slots"):
        window._native.show((1,), PAGE, 1, 8)
    fetcher.close()
    assert window.capacity == 0


def test_near_the_limit_of_mappings_batches_are_copied_and_the_process_lives(arena: Arena) -> None:
    """malloc, threads and dlopen share the limit and would fail first: the fetcher keeps away from it."""
    limit = max_map_count()
    if limit > 300_000:
        pytest.skip(f"vm.max_map_count is {limit}: filling it takes too long")

    def body() -> None:
        room = limit // 16  # exactly what is left to the others
        stride = arena.layout.stride
        filler = Window(limit * stride)
        slots = np.array([0, 2] * ((limit - map_count() - room) // 2 + 1))  # never neighbours: a mapping each
        filler.show(arena.fd, slots, arena.layout, populate=False)
        fetcher = MapFetcher()
        slots = [3, 1, 4, 1, 5]
        with fetcher.fetch(arena, slots) as batch:
            assert all(torch.equal(batch[i], arena.slot(slot)) for i, slot in enumerate(slots))
        assert fetcher.fallbacks == 1
        assert fetcher.fallback_reason is not None
        assert "vm.max_map_count" in fetcher.fallback_reason
        assert str(limit) in fetcher.fallback_reason
        thread = threading.Thread(target=lambda: None)
        thread.start()
        thread.join()
        filler.close()
        fresh = MapFetcher()
        with fresh.fetch(arena, slots):
            pass
        assert fresh.fallbacks == 0

    assert in_child(body) == 0


def test_a_window_that_the_kernel_refuses_half_way_is_never_read(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The budget is an estimate. If it is wrong, at whichever slot, the whole batch is copied."""
    limit = max_map_count()
    if limit > 300_000:
        pytest.skip(f"vm.max_map_count is {limit}: filling it takes too long")

    def body() -> None:
        stride = arena.layout.stride
        slots = [8, 6, 4, 2, 0, 7, 5, 3, 1] * 4
        refused = 0
        for room in (3, 5, 11, 30, 60):
            fetcher = MapFetcher()
            fetcher._limit = 1 << 30  # a budget that is wrong
            with fetcher.fetch(arena, range(SLOTS)):
                pass
            filler = Window(limit * stride)
            many = np.array([0, 2] * (limit // 2))[: limit - map_count() - room]
            filler.show(arena.fd, many, arena.layout, populate=False)
            with fetcher.fetch(arena, slots) as batch:
                assert all(torch.equal(batch[i], arena.slot(slot)) for i, slot in enumerate(slots)), room
            refused += fetcher.fallbacks
            if fetcher.fallbacks:
                assert "Cannot allocate memory" in str(fetcher.fallback_reason)
                assert f"of {limit} mappings" in str(fetcher.fallback_reason)
            filler.close()
            fetcher.close()
        assert 0 < refused < 5

    assert in_child(body) == 0


def test_a_forked_child_fetches_for_itself_and_the_parent_goes_on(arena: Arena) -> None:
    fetcher = MapFetcher(strict=True)
    batch = fetcher.fetch(arena, [1, 2])
    with batch:

        def body() -> None:
            with fetcher.fetch(arena, [7, 8]) as own:
                assert torch.equal(own[0], arena.slot(7))
            assert fetcher.fallbacks == 0
            assert torch.equal(batch[0], arena.slot(1))
            fetcher.close()
            assert torch.equal(batch[1], arena.slot(2))

        assert in_child(body) == 0
        assert torch.equal(batch[0], arena.slot(1))
        assert torch.equal(batch[1], arena.slot(2))
    with fetcher.fetch(arena, [3]) as again:
        assert torch.equal(again[0], arena.slot(3))
    assert fetcher.fallbacks == 0


def test_an_inherited_window_says_so_by_name(arena: Arena) -> None:
    window, one = Window(arena.layout.stride), np.array([1])
    show = lambda: window.show(arena.fd, one, arena.layout, populate=True)  # noqa: E731
    show()

    def body() -> None:
        for use in (window.darken, window.close, show):
            with pytest.raises(WindowError, match="fork"):
                use()

    assert in_child(body) == 0
    assert torch.equal(show()[0], arena.slot(1))


def test_the_library_speaks_its_own_errors(arena: Arena) -> None:
    with pytest.raises(WindowError):
        Window(0)
    with pytest.raises(WindowError, match=r"vm\.max_map_count"):
        Window(1 << 60)
    window = Window(arena.layout.stride)
    show = lambda *slots: window.show(arena.fd, np.array(slots, np.int64), arena.layout, populate=True)  # noqa: E731
    with pytest.raises(WindowError, match="no slots"):
        show()
    with pytest.raises(WindowError, match="capacity"):
        show(0, 1)
    tensor = show(0)
    for change in (window.darken, window.close, lambda: show(1)):
        with pytest.raises(WindowBusyError):
            change()
    assert torch.equal(tensor[0], arena.slot(0))
    del tensor
    window.close()
    with pytest.raises(WindowError, match="closed"):
        window.darken()


def test_tensors_made_in_inference_mode_serve_outside_it_and_the_other_way(tmp_path: Path) -> None:
    layout = SlotLayout.paged((2, 8, 8), torch.float32, slots=2)
    make_arena(tmp_path / "arena.bin", layout).close()
    with torch.inference_mode():
        arena = Arena(tmp_path / "arena.bin", layout)
        fetcher = MapFetcher(strict=True)
        with fetcher.fetch(arena, [1]) as batch:
            assert torch.equal(batch[0], arena.slot(1))
    weight = torch.ones(8, 8, requires_grad=True)
    (arena.slot(0) * weight).sum().backward()
    with fetcher.fetch(arena, [1]) as batch:
        assert torch.equal(batch[0], arena.slot(1))


def test_auto_maps_huge_pages_and_views_small_ones() -> None:
    assert choose_fetcher("auto", 4096).name == "view"
    assert choose_fetcher("auto", 1 << 16).name == "view"
    assert choose_fetcher("auto", HUGE_PAGE).name == "map"
    for name in ("map", "view", "copy"):
        assert choose_fetcher(name, 4096).name == name  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'view'"):
        choose_fetcher("mmap", 4096)  # type: ignore[arg-type]
