"""A record's rows in one run of bytes: what was put in is found at the addresses that are told."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from rows_tools import HEADS, LAYERS, WIDTH, as_stored, fetched, layout, record

from attmemo.db.pools.pool import Entry, Pool
from attmemo.rows.layout import Placed
from attmemo.rows.store import Record

FORMS = {
    "float32": (torch.float32, torch.float32),
    "float16": (torch.float16, torch.float16),
    "bfloat16": (torch.bfloat16, torch.float16),
    "int8": (torch.int8, torch.float16),
}
LENGTHS = [5, 1, 17, 64, 3]


@pytest.mark.parametrize("form", FORMS)
class TestPlaced:
    def test_addresses_lead_to_the_rows_that_were_put_in(self, form: str) -> None:
        storage, pool = FORMS[form], Pool(1 << 20)
        own, added = layout(storage), [record(seed, n) for seed, n in enumerate(LENGTHS)]
        records = [Record.pack(*one, storage, HEADS) for one in added]
        kept = pool.add([Entry(one.tokens, own.body_of(one)) for one in records]).added
        order = [2, None, 0, 4, 3, 1, None, 2]
        of_pool = Placed(own, [None if number is None else kept[number] for number in order])
        copied = Placed.copied(own, [None if number is None else records[number] for number in order])
        for found, (place, number) in product((of_pool, copied), enumerate(order)):
            if number is None:
                assert found.layer(1).keys[place] == found.layer(1).rows[place] == found.last()[0][place] == 0
                continue
            rows, last = fetched(found, place)
            assert torch.equal(rows, as_stored(added[number][1], storage[0], HEADS))
            assert torch.equal(last, added[number][2].to(storage[1]).float())

    def test_parts_do_not_overlap_and_are_aligned(self, form: str) -> None:
        own = layout(FORMS[form])
        for n in range(1, 70):
            rows, scales, last = own.row_bytes * 2 * LAYERS * n, int(own.scales_at(n)), int(own.last_at(n))
            assert scales % 64 == last % 64 == 0
            assert rows <= scales <= last
            assert scales + (4 * HEADS * 2 * LAYERS * n if own.coded else 0) <= last
            assert own.nbytes(n) == last + n * WIDTH * own.storage[1].itemsize
        assert np.array_equal(own.last_at(np.arange(9)), [int(own.last_at(n)) for n in range(9)])


def test_a_body_has_no_bytes_of_its_own_between_the_parts() -> None:
    """Two bodies of the same record are the same: their checksum can be compared."""
    own, one = layout(FORMS["int8"]), Record.pack(*record(1, 7), FORMS["int8"], HEADS)
    bodies = [own.body_of(one) for _ in range(2)]
    assert np.array_equal(bodies[0], bodies[1])
    assert len(bodies[0]) == own.nbytes(7)
    assert not bodies[0][2 * LAYERS * 7 * WIDTH : int(own.scales_at(7))].any()
