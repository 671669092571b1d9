"""Pages of prefixes: what is found, what goes, and that no more than the bound is kept."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from prefix_models import Ids, batch_of, random_ids

from attmemo.packed.prefixes import CUT, Embedded, Folded, Prefixes
from attmemo.prefix.pages import ONCE, Lease
from attmemo.prefix.store import PrefixStore

BLOCKS, SIZE, HIDDEN = 2, 8, 12
TABLE = torch.randn(600, HIDDEN, generator=torch.Generator().manual_seed(0))


def store_of(pages: int) -> PrefixStore:
    page = PrefixStore(BLOCKS, SIZE, HIDDEN, torch.float32, 0).page_bytes
    return PrefixStore(BLOCKS, SIZE, HIDDEN, torch.float32, pages * page + page - 1)


def embedded_of(texts: Sequence[Ids], table: torch.Tensor = TABLE) -> Embedded:
    return Embedded(table[batch_of(texts)["input_ids"]], [len(text) for text in texts], False)


def begin(store: PrefixStore, texts: Sequence[Ids], table: torch.Tensor = TABLE) -> tuple[Lease, int]:
    """A forward up to its work: what it reads and writes, and how many rows are stored. Its rows are written."""
    embedded, own = embedded_of(texts, table), np.arange(len(texts))
    lease = store.find(embedded, own)
    stored = np.array([len(lease.slots.get(b, ())) for b in own])
    prefixes = Prefixes.of(embedded, own, stored)
    store.reserve(lease, embedded, prefixes)
    folded = Folded.of(prefixes, embedded, lease.slots)
    copies = store.copies(lease, embedded, prefixes, dict(enumerate(folded.layout.starts.tolist())))
    numbers = rows_of(texts, prefixes)
    for block in range(BLOCKS):
        copies(block, numbers[:, None].expand(-1, SIZE) + block, numbers[:, None].expand(-1, SIZE) - block)
    copies.end(numbers[:, None].expand(-1, HIDDEN))
    return lease, int(stored.sum())


def rows_of(texts: Sequence[Ids], prefixes: Prefixes) -> torch.Tensor:
    """A row's number, in place of what a model computes: that of its token."""
    return torch.from_numpy(np.concatenate([t[int(prefixes.begins[b]) :] for b, t in enumerate(texts)])).float()


def end(store: PrefixStore, lease: Lease) -> None:
    store.publish(lease)
    store.give_back(lease)


def run(store: PrefixStore, *texts: Ids) -> int:
    """One forward; rows that were stored."""
    lease, stored = begin(store, texts)
    for b, slots in lease.slots.items():
        ids = torch.from_numpy(texts[b][: len(slots)]).float()
        rows = store._rows[:, :, torch.from_numpy(slots.astype(np.int64)), 0]
        assert torch.equal(rows, torch.stack([torch.stack([ids + block, ids - block]) for block in range(BLOCKS)]))
        assert torch.equal(store.last(slots.astype(np.int64))[:, 0], ids)
    end(store, lease)
    assert store.nbytes <= store.max_bytes
    return stored


def test_a_prefix_is_found_up_to_the_last_whole_page() -> None:
    rng, store = np.random.default_rng(1), store_of(64)
    text = random_ids(rng, 100)
    assert run(store, text) == 0
    for kept, found in ((100, 96), (80, 80), (79, 64), (16, 16), (15, 0)):
        assert run(store, np.concatenate([text[:kept], [4], random_ids(rng, 20)])) == found
    assert run(store, text[5:]) == 0


def test_sequences_of_a_batch_store_what_they_share_once() -> None:
    rng, store = np.random.default_rng(2), store_of(64)
    common = random_ids(rng, 48)
    assert run(store, *[np.concatenate([common, random_ids(rng, 17)]) for _ in range(4)]) == 0
    assert len(store) == 48 + 4 * CUT
    assert store.common == 48
    assert run(store, np.concatenate([common, random_ids(rng, 30)])) == 48


def test_texts_that_never_return_do_not_drive_out_what_does() -> None:
    rng, store = np.random.default_rng(3), store_of(40)
    common = random_ids(rng, 64)
    for _ in range(2):
        run(store, np.concatenate([common, random_ids(rng, 20)]))
    for _ in range(300):
        assert run(store, random_ids(rng, int(rng.integers(1, 300)))) == 0
    assert run(store, common) == 64


def test_of_common_prefixes_the_one_goes_that_was_used_least_recently() -> None:
    rng, store = np.random.default_rng(4), store_of(16)
    texts = [random_ids(rng, 4 * CUT) for _ in range(5)]
    for text in texts[:4]:
        run(store, text)
        run(store, text)
    assert store.common == 16 * CUT
    assert run(store, texts[0]) == 4 * CUT
    run(store, texts[4])
    kept = [len(store.find(embedded_of([text]), np.array([0])).slots.get(0, ())) for text in texts]
    assert kept == [4 * CUT, 0, 4 * CUT, 4 * CUT, int(ONCE * 16) * CUT]


def test_the_end_of_a_prefix_goes_before_its_begin() -> None:
    rng, store = np.random.default_rng(5), store_of(8)
    text = random_ids(rng, 8 * CUT)
    run(store, text)
    run(store, random_ids(rng, 3 * CUT))
    assert run(store, text) == 5 * CUT


def test_what_a_forward_reads_stays_until_it_is_given_back() -> None:
    rng, store = np.random.default_rng(6), store_of(8)
    text = random_ids(rng, 6 * CUT)
    run(store, text)
    lease, stored = begin(store, [text])
    assert stored == 6 * CUT
    run(store, random_ids(rng, 8 * CUT))
    assert len(begin(store, [text])[0].slots[0]) == 6 * CUT
    store.give_back(lease)


def test_what_followed_a_page_that_went_is_not_found_behind_another_one() -> None:
    """Pages are used again; a page is known by a number that is not."""
    rng, store = np.random.default_rng(7), store_of(2)
    behind = random_ids(rng, CUT)
    for _ in range(20):
        first = random_ids(rng, CUT)
        run(store, np.concatenate([first, behind]))
        run(store, first)
        assert run(store, np.concatenate([random_ids(rng, CUT), behind])) == 0


def test_words_that_only_begin_alike_are_told_apart() -> None:
    rng, store = np.random.default_rng(8), store_of(16)
    text = random_ids(rng, 64)
    lease, _ = begin(store, [text])
    end(store, lease)
    other = TABLE.clone()
    other[text[40], -1] += 1
    lease, stored = begin(store, [text], other)
    assert stored == 32
    end(store, lease)
    assert run(store, text) == 64


def test_what_was_not_published_is_free_again() -> None:
    rng, store = np.random.default_rng(9), store_of(8)
    text = random_ids(rng, 8 * CUT)
    for _ in range(3):
        lease, stored = begin(store, [text])
        assert stored == 0
        store.give_back(lease)
    assert len(store) == 0
    run(store, text)
    assert len(store) == 8 * CUT


def test_two_forwards_that_compute_the_same_store_it_once() -> None:
    rng, store = np.random.default_rng(10), store_of(32)
    common = random_ids(rng, 64)
    texts = [np.concatenate([common, random_ids(rng, 32)]) for _ in range(2)]
    leases = [begin(store, [text])[0] for text in texts]
    for lease in leases:
        end(store, lease)
    assert len(store) == 64 + 2 * 32
    assert store.common == 64
    assert [run(store, text) for text in texts] == [96, 96]
    assert int(store._taken.sum()) == len(store) // CUT


def test_a_store_without_room_stores_nothing_and_a_closed_one_neither() -> None:
    text = random_ids(np.random.default_rng(11), 50)
    for store in (store_of(0), store_of(4)):
        store.close()
        assert [run(store, text), run(store, text), len(store), store.nbytes] == [0, 0, 0, 0]
