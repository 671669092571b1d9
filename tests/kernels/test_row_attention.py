"""Attention of packed sequences: each instruction set gives what float64 gives, wherever queries and keys are."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from children import run_child
from kernel_tools import read_only
from torch import Tensor
from transformers import DebertaV2Config
from transformers.models.deberta_v2.modeling_deberta_v2 import DisentangledSelfAttention, make_log_bucket_position
from walls import before_walls

from attmemo.kernels.row_attention import Disentangled, Layout, Stored, Turn, attend, attend_plain, instruction_sets

SETS = instruction_sets()
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2.5e-2}  # times (1 + abs(expected))
RECORDS = [torch.bfloat16, torch.float16, torch.float32, torch.int8]
LENGTHS = [1, 2, 15, 16, 17, 40, 64, 65, 100, 130]
SPAN = 1200


@dataclass
class Batch:
    """Sequences of these lengths; of each a share of the rows is fresh, the others lie in records."""

    lengths: list[int]
    heads: int = 2
    width: int = 32
    dtype: torch.dtype = torch.float32
    fresh: float = 1.0
    record: torch.dtype = torch.float32
    moved: int = 4  # positions that a stored row moves at most
    kept: list[Tensor] = field(default_factory=list)  # records, which the kernel gets by their addresses

    def make(self) -> dict[str, Any]:
        """Arguments of `attend`, but for what is added to the scores."""
        torch.manual_seed(len(self.lengths))
        rng = np.random.default_rng(len(self.lengths))
        starts, key_starts, positions, sources = [0], [0], [], []
        for length in self.lengths:
            count = max(1, round(length * self.fresh))
            own = np.sort(rng.choice(length, count, replace=False))
            source = -1 - np.clip(np.arange(length) + rng.integers(-self.moved, self.moved + 1, length), 0, length + 2)
            source[own] = starts[-1] + np.arange(count)
            positions.append(own)
            sources.append(source)
            starts.append(starts[-1] + count)
            key_starts.append(key_starts[-1] + length)
        layout = Layout(np.array(starts), np.array(key_starts))
        if self.fresh < 1:
            layout = replace(
                layout,
                positions=np.concatenate(positions).astype(np.int32),
                sources=np.concatenate(sources).astype(np.int32),
            )
        rows = torch.randn(starts[-1], 3 * self.heads * self.width).to(self.dtype)
        queries, keys, values = rows.split(self.heads * self.width, 1)
        return {
            "queries": queries,
            "keys": keys,
            "values": values,
            "heads": self.heads,
            "layout": layout,
            "scale": 0.8 / self.width**0.5,
            "stored": self.store() if self.fresh < 1 else None,
        }

    def store(self) -> Stored:
        columns = self.heads * self.width
        codes = self.record == torch.int8
        planes: list[list[int]] = [[], [], [], []]
        for length in self.lengths:
            for plane in range(2):
                if codes:
                    rows = torch.randint(-127, 128, (length + 3, columns), dtype=torch.int8)
                    self.kept.append(torch.rand(length + 3, self.heads) / 60)
                    planes[2 + plane].append(self.kept[-1].data_ptr())
                else:
                    rows = torch.randn(length + 3, columns).to(self.record)
                self.kept.append(rows)
                planes[plane].append(rows.data_ptr())
        at = [np.array(addresses, np.uint64) for addresses in planes]
        counts = np.array(self.lengths, np.int64) + 3
        scales = (at[2], at[3], 4 * self.heads) if codes else (None, None, 0)
        return Stored(at[0], at[1], counts, self.record, columns * self.record.itemsize, *scales)


def angles(half: int) -> Turn:
    distance = torch.arange(1 - SPAN, SPAN)[:, None] * 0.5 ** torch.arange(half)
    return Turn(distance.cos(), distance.sin())


def buckets(size: int, limit: int) -> Any:
    """What DeBERTa reads for each distance: [2 * SPAN - 1]."""
    distance = make_log_bucket_position(torch.arange(1 - SPAN, SPAN), size, limit).long()
    return (distance + size).clamp(0, 2 * size - 1).numpy().astype(np.int32)


def extras(name: str, batch: Batch) -> dict[str, Any]:
    """What is added to the scores."""
    torch.manual_seed(1)
    columns = batch.heads * batch.width
    key, query = (torch.randn(32, columns).to(batch.dtype) for _ in range(2))
    bucket = buckets(16, 512)
    table = torch.randn(batch.heads, 2 * SPAN - 1)
    return {
        "none": {},
        "table": {"table": table},
        "one table": {"table": table[:1]},
        "window": {"window": 20},
        "table in a window": {"table": table, "window": 7},
        "turn": {"turn": angles(batch.width // 2)},
        "turn of some": {"turn": angles(5)},
        "c2p": {"disentangled": Disentangled(key, None, bucket)},
        "p2c": {"disentangled": Disentangled(None, query, bucket)},
        "both": {"disentangled": Disentangled(key, query, bucket)},
        "both and a window": {"disentangled": Disentangled(key, query, bucket), "window": 33, "table": table},
    }[name]


EXTRAS = [
    "none",
    "table",
    "one table",
    "window",
    "table in a window",
    "turn",
    "turn of some",
    "c2p",
    "p2c",
    "both",
    "both and a window",
]
BIASED = [name for name in EXTRAS if "turn" not in name]


def error(output: Tensor, expected: Tensor) -> float:
    return float(((output.double() - expected).abs() / (1 + expected.abs())).max())


def expect(call: dict[str, Any]) -> Tensor:
    return attend_plain(**call, dtype=torch.float64)


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("extra", BIASED)
def test_fresh_rows_agree_with_float64(isa: str, dtype: torch.dtype, extra: str) -> None:
    for heads, width in ((3, 32), (2, 64), (1, 20)):
        batch = Batch(LENGTHS, heads, width, dtype)
        call = batch.make() | extras(extra, batch)
        assert error(attend(**call, isa=isa), expect(call)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("record", RECORDS)
@pytest.mark.parametrize("extra", EXTRAS)
def test_stored_rows_agree_with_float64(isa: str, dtype: torch.dtype, record: torch.dtype, extra: str) -> None:
    """Queries stand at scattered positions: few, so that vectors do it, and many."""
    for fresh in (0.1, 0.6):
        batch = Batch(LENGTHS, 2, 32, dtype, fresh, record)
        call = batch.make() | extras(extra, batch)
        assert error(attend(**call, isa=isa), expect(call)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shares", [1, 2, 4])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("fresh", [1.0, 0.6])
def test_shared_heads_and_queries_that_see_none_behind_agree_with_float64(
    isa: str, dtype: torch.dtype, shares: int, causal: bool, fresh: float
) -> None:
    for width, extra in ((32, "none"), (20, "window"), (32, "table in a window")):
        # Keys, values and records of fewer heads, and queries of more.
        batch, many = Batch([*LENGTHS, 300], 4 // shares, width, dtype, fresh), Batch([], 4, width)
        call = batch.make() | extras(extra, many) | {"heads": 4, "causal": causal}
        call["queries"] = torch.randn(len(call["keys"]), 4 * width).to(dtype)
        assert error(attend(**call, isa=isa), expect(call)) <= TOLERANCE[dtype]
        some = np.arange(0, len(call["keys"]), 3)
        asked = call | {"layout": call["layout"].asking(some), "queries": call["queries"][some]}
        assert error(attend(**asked, isa=isa), expect(call)[some]) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 20])
def test_a_causal_row_has_the_same_bits_alone_and_in_any_batch(dtype: torch.dtype, window: int | None) -> None:
    batch = Batch([33, 70, 200, 5], 2, 64, dtype)
    call = batch.make() | {"causal": True, "window": window}
    every, starts = attend(**call, threads=1), call["layout"].starts
    assert torch.equal(attend(**call, threads=2), every)
    for first, stop in pairwise(starts.tolist()):
        own = {name: call[name][first:stop] for name in ("queries", "keys", "values")}
        alone = attend(**call | own | {"layout": Layout(*[np.array([0, stop - first])] * 2)}, threads=1)
        assert torch.equal(alone, every[first:stop])


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 20, 150])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_causal_sequence_that_reads_first_rows_elsewhere_has_the_bits_of_a_whole_one(
    isa: str, dtype: torch.dtype, window: int | None, threads: int
) -> None:
    """Sequences of 300, 200, 90 and 49 rows: they begin as the first one does, for 0, 160, 64 and 48 rows. Of the
    second 32 rows are those of a record, of the last 16.
    """
    lengths, alike, kept, heads = [300, 200, 90, 49], [0, 160, 64, 48], [0, 32, 0, 16], 2
    call = Batch(lengths, heads, 64, dtype).make() | {"causal": True, "window": window, "isa": isa}
    call["queries"] = torch.randn(sum(lengths), 2 * heads * 64).to(dtype)
    call |= {"heads": 2 * heads}
    for plane in ("queries", "keys", "values"):
        first, *others = call[plane].split(lengths)
        for other, count in zip(others, alike[1:], strict=True):
            other[:count] = first[:count]
    expected = attend(**call, threads=1).split(lengths)
    own = [np.arange(begin, n) for begin, n in zip(alike, lengths, strict=True)]
    starts = np.concatenate([[0], np.cumsum([len(rows) for rows in own])])
    sources = np.concatenate([
        np.concatenate([-1 - np.arange(stored), np.arange(stored, begin), start + rows - begin])
        for stored, begin, start, rows in zip(kept, alike, starts.tolist(), own, strict=False)
    ]).astype(np.int32)
    layout = Layout(
        starts, np.concatenate([[0], np.cumsum(lengths)]), np.concatenate(own).astype(np.int32), sources
    )
    record = torch.stack([call["keys"][:40], call["values"][:40]])
    keys, values = (np.full(4, plane.data_ptr(), np.uint64) for plane in record)
    stored = Stored(keys, values, np.full(4, 40), dtype, record.stride(1) * record.itemsize)
    fresh = {
        plane: torch.cat([part[begin:] for part, begin in zip(call[plane].split(lengths), alike, strict=True)])
        for plane in ("queries", "keys", "values")
    }
    seen = attend(**call | fresh | {"layout": layout, "stored": stored}, threads=threads)
    for one, part, begin in zip(expected, seen.split([len(rows) for rows in own]), alike, strict=True):
        assert torch.equal(one[begin:], part)
    beyond = replace(layout, sources=np.where(np.arange(len(sources)) == 301, starts[-1], sources).astype(np.int32))
    with pytest.raises(ValueError, match="fresh row"):
        attend(**call | fresh | {"layout": beyond, "stored": stored})
    with pytest.raises(ValueError, match="fresh row"):
        attend(**call | fresh | {"layout": layout, "stored": stored, "causal": False})


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("fresh", [1.0, 0.1, 0.6])
@pytest.mark.parametrize("extra", ["none", "window", "table in a window"])
def test_sinks_take_their_share_and_agree_with_float64(isa: str, dtype: torch.dtype, fresh: float, extra: str) -> None:
    """Scores that no key has, far below the others, near them, and above."""
    for heads, shares in ((4, 1), (4, 4)):
        batch, many = Batch([*LENGTHS, 300], heads // shares, 32, dtype, fresh), Batch([], heads, 32)
        call = batch.make() | extras(extra, many) | {"heads": heads, "sinks": torch.tensor([-30.0, 0.0, 2.0, 60.0])}
        call["queries"] = torch.randn(len(call["keys"]), heads * 32).to(dtype)
        expected = expect(call)
        assert error(attend(**call, isa=isa), expected) <= TOLERANCE[dtype]
        without = expect(call | {"sinks": None})
        assert error(expected[:, :32], without[:, :32]) < 1e-9 < error(expected[:, 32:], without[:, 32:])


def test_sinks_of_another_number_or_type_are_refused() -> None:
    call = Batch([5], 2, 8).make()
    for sinks in (torch.zeros(3), torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2, 1)):
        with pytest.raises(ValueError, match="sinks are float32"):
            attend(**call | {"sinks": sinks})


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [20, 129, 400])
@pytest.mark.parametrize("shares", [1, 7])
def test_with_a_window_rows_have_the_same_bits_if_others_lie_in_records(
    isa: str, dtype: torch.dtype, window: int, shares: int
) -> None:
    """Runs of 16 rows are missing, in the middle and at both ends; and a text that is a record as a whole."""
    lengths, width, rng = [1100, 300, 90, 64, 5], 32, np.random.default_rng(window)
    call = Batch(lengths, 1, width, dtype).make() | {"window": window, "isa": isa}
    call |= {"queries": torch.randn(sum(lengths), shares * width).to(dtype), "heads": shares}
    call |= {"sinks": torch.randn(shares)} if shares > 1 else {}
    expected = attend(**call, threads=1)
    kept = np.concatenate([
        np.pad(np.repeat(rng.random(n // 16) < 0.6 if n != 64 else np.ones(4, bool), 16), (0, n % 16)) for n in lengths
    ])
    whole = call["layout"].starts
    places = np.arange(len(kept)) - np.repeat(whole[:-1], lengths)
    fresh = np.flatnonzero(~kept)
    starts = np.searchsorted(fresh, whole).astype(np.int64)
    sources = np.where(kept, -1 - np.arange(len(kept)), np.cumsum(~kept) - 1).astype(np.int32)
    layout = Layout(starts, whole, places[fresh].astype(np.int32), sources)
    record = torch.stack([call["keys"], call["values"]])
    keys, values = (np.full(len(lengths), plane.data_ptr(), np.uint64) for plane in record)
    counts = np.full(len(lengths), len(kept))
    stored = Stored(keys, values, counts, dtype, record.stride(1) * record.itemsize, still=True)
    some = {plane: call[plane][fresh] for plane in ("queries", "keys", "values")}
    for threads in (1, 2):
        seen = attend(**call | some | {"layout": layout, "stored": stored}, threads=threads)
        assert torch.equal(seen, expected[fresh])


def test_heads_that_cannot_be_shared_are_refused() -> None:
    call = Batch([5], 4, 8).make()
    for keys in (call["keys"][:, :24], call["keys"][:, :12], call["keys"][:, :0]):
        with pytest.raises(ValueError, match="do not fit the queries"):
            attend(**call | {"keys": keys, "values": keys})


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("extra", EXTRAS)
def test_long_sequences_agree_with_float64(isa: str, dtype: torch.dtype, extra: str) -> None:
    """Several tiles, spans and rounds of the ring of rows that were converted; no sheet."""
    distant = extra.startswith(("c2p", "p2c", "both"))
    batch = Batch([512 if distant else 1100, 3], 1, 32, dtype, 0.5, torch.int8)
    call = batch.make() | extras(extra, batch)
    assert error(attend(**call, isa=isa), expect(call)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("width", [16, 24, 48, 64, 80, 96, 128])
@pytest.mark.parametrize("extra", ["none", "both"])
def test_any_number_of_queries_of_any_width_agrees_with_float64_in_bfloat16(isa: str, width: int, extra: str) -> None:
    batch = Batch([5, 6, 8, 9, 16, 17, 33, 70], 2, width, torch.bfloat16)
    call = batch.make() | extras(extra, batch)
    assert error(attend(**call, isa=isa), expect(call)) <= TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_nothing_is_written_behind_the_output(isa: str, dtype: torch.dtype) -> None:
    for width in (16, 20, 48, 64):
        batch = Batch([3, 40, 9], 1, width, dtype)
        call = batch.make()
        expected = attend(**call, isa=isa, threads=1)

        def run(call: dict[str, Any] = call, expected: Tensor = expected) -> bool:
            out = before_walls(torch.zeros_like(expected))
            return torch.equal(attend(**call, isa=isa, threads=1, out=out), expected)

        assert run_child(run).result


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("terms", [["c2p", "p2c"], ["c2p"], ["p2c"]], ids=str)
@pytest.mark.parametrize(("shared", "size"), [(True, 8), (False, 8), (True, -1)])
def test_disentangled_terms_are_those_of_transformers(isa: str, terms: list[str], shared: bool, size: int) -> None:
    """Its own module in float64, for distances that have a bucket of their own, share one, or are too far."""
    torch.manual_seed(0)
    config = DebertaV2Config(
        hidden_size=64,
        num_attention_heads=2,
        relative_attention=True,
        pos_att_type=terms,
        share_att_key=shared,
        position_buckets=size,
        max_relative_positions=40,
    )
    module = DisentangledSelfAttention(config).double().eval()
    span, length = 8 if size > 0 else 40, 70
    hidden, relative = torch.randn(1, length, 64).double(), torch.randn(2 * span, 64).double()
    with torch.inference_mode():
        expected = module(hidden, torch.ones(1, 1, length, length), rel_embeddings=relative)[0][0]
        key_of, query_of = (
            (module.key_proj, module.query_proj)
            if shared
            else (getattr(module, "pos_key_proj", None), getattr(module, "pos_query_proj", None))
        )
        key = key_of(relative).float() if "c2p" in terms else None
        query = query_of(relative).float() if "p2c" in terms else None
        rows = [p(hidden)[0].float() for p in (module.query_proj, module.key_proj, module.value_proj)]
    distance = torch.arange(1 - length, length)
    bucket = make_log_bucket_position(distance, size, 40).long() if size > 0 else distance
    bucket = (bucket + span).clamp(0, 2 * span - 1)
    output = attend(
        *rows,
        2,
        Layout(np.array([0, length]), np.array([0, length])),
        scale=1 / (32 * (1 + len(terms))) ** 0.5,
        disentangled=Disentangled(key, query, bucket.numpy().astype(np.int32)),
        isa=isa,
    )
    assert error(output, expected) <= 1e-5


def rotate(rows: Tensor, positions: Tensor) -> Tensor:
    """Rows ``[n, 32]`` of one head at these positions."""
    turn = positions[:, None].double() * 0.5 ** torch.arange(16).double()
    low, high = rows.double().chunk(2, 1)
    return torch.cat((low * turn.cos() - high * turn.sin(), high * turn.cos() + low * turn.sin()), 1)


@pytest.mark.parametrize("isa", SETS)
def test_a_turned_key_is_one_rotated_at_its_new_position(isa: str) -> None:
    torch.manual_seed(0)
    length = 90
    queries, keys, values = torch.randn(3, length, 32)
    old = (torch.arange(length) + 7).clamp(max=length - 1) // 2 * 2  # two tokens may share a row
    sources = (-1 - old).to(torch.int32)
    own = torch.arange(0, length, 3)
    sources[own] = torch.arange(len(own), dtype=torch.int32)
    moved = torch.where(sources < 0, old, torch.arange(length))
    keys, values = keys[moved], values[moved]
    place = torch.arange(length)
    expected = attend_plain(
        rotate(queries, place),
        rotate(keys, place),
        values.double(),
        1,
        Layout(np.array([0, length]), np.array([0, length])),
        scale=0.2,
        dtype=torch.float64,
    )[own]
    record = torch.zeros(length, 32)
    record[old] = rotate(keys, old).float()
    of_values = torch.zeros(length, 32)
    of_values[old] = torch.where((sources < 0)[:, None], values, of_values[old])
    taken = sources < 0
    record[old[taken]] = rotate(keys[taken], old[taken]).float()
    of_values[old[taken]] = values[taken]
    output = attend(
        rotate(queries, place).float()[own],
        rotate(keys, place).float()[own],
        values[own],
        1,
        Layout(np.array([0, len(own)]), np.array([0, length]), own.numpy().astype(np.int32), sources.numpy()),
        scale=0.2,
        stored=Stored(
            np.array([record.data_ptr()], np.uint64),
            np.array([of_values.data_ptr()], np.uint64),
            np.array([length]),
            torch.float32,
            128,
        ),
        turn=angles(16),
        isa=isa,
    )
    assert error(output, expected) <= 1e-5


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("extra", EXTRAS)
def test_batch_and_threads_change_rounding_only(isa: str, extra: str) -> None:
    batch = Batch([130, 9, 64], 4, 32, fresh=0.7)
    call = batch.make() | extras(extra, batch)
    expected = attend(**call, isa=isa, threads=1)
    for threads in (2, 3, 16):
        torch.testing.assert_close(attend(**call, isa=isa, threads=threads), expected, rtol=3e-6, atol=3e-6)
    whole, alone = call["layout"], dict(call)
    first, keys = int(whole.starts[1]), int(whole.key_starts[1])
    alone["layout"] = Layout(whole.starts[:2], whole.key_starts[:2], whole.positions[:first], whole.sources[:keys])
    alone |= {name: call[name][:first] for name in ("queries", "keys", "values")}
    stored = call["stored"]
    alone["stored"] = replace(stored, keys=stored.keys[:1], values=stored.values[:1], rows=stored.rows[:1])
    torch.testing.assert_close(attend(**alone, isa=isa), expected[:first], rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("extra", ["none", "table", "window", "wide window", "both", "both and a window"])
def test_a_sequence_with_all_rows_has_the_same_bits_beside_any_others(
    isa: str, dtype: torch.dtype, extra: str
) -> None:
    """However its queries are cut into tasks; its first query also if it is asked alone."""
    for length in (5, 6, 15, 40, 65, 97, 130, 200):
        seen: dict[int, set[bytes]] = {place: set() for place in range(length)}
        for others in ([], [30] * 6, [300, 2]):
            batch = Batch([length, *others], 2, 32, dtype)
            call = batch.make()
            call |= {"window": 90} if extra == "wide window" else extras(extra, batch)
            torch.manual_seed(length)
            own = torch.randn(length, 3 * 64).to(dtype).split(64, 1)
            for name, part in zip(("queries", "keys", "values"), own, strict=True):
                call[name] = torch.cat([part, call[name][length:]])
            for threads in (1, 3):
                for place, row in enumerate(attend(**call, isa=isa, threads=threads)[:length]):
                    seen[place].add(row.view(torch.uint8).numpy().tobytes())
                asked = np.array([0, *range(length, sum(batch.lengths), 7)])
                some = call | {"queries": call["queries"][asked], "layout": call["layout"].asking(asked)}
                seen[0].add(attend(**some, isa=isa, threads=threads)[0].view(torch.uint8).numpy().tobytes())
        assert {len(one) for one in seen.values()} == {1}, length


def test_rows_may_lie_apart_and_the_output_where_the_caller_wants_it() -> None:
    batch = Batch([30, 5])
    call = batch.make()
    expected = attend(**call)
    room = torch.full((35, 200), 7.0)
    assert attend(**call, out=room[:, 64:128]) is not None
    assert torch.equal(room[:, 64:128], expected)
    assert bool((room[:, :64] == 7).all() and (room[:, 128:] == 7).all())


def test_a_sequence_may_have_no_fresh_row_and_a_batch_no_sequence() -> None:
    record = torch.randn(4, 32)
    address = np.array([0, record.data_ptr(), record.data_ptr()], np.uint64)
    rows = torch.randn(2, 96)
    sources = np.array([0, 1, -1, -2, -3, -4], np.int32)
    layout = Layout(np.array([0, 2, 2, 2]), np.array([0, 2, 4, 6]), np.array([0, 1], np.int32), sources)
    stored = Stored(address, address, np.array([0, 4, 4]), torch.float32, 128)
    call = {"heads": 1, "scale": 1.0, "stored": stored}
    queries, keys, values = rows.split(32, 1)
    output = attend(queries, keys, values, layout=layout, **call)
    assert error(output, attend_plain(queries, keys, values, layout=layout, dtype=torch.float64, **call)) <= 1e-5
    nothing = Layout(np.array([0]), np.array([0]))
    assert attend(rows[:0], rows[:0], rows[:0], 3, nothing, scale=1.0).shape == (0, 96)


SHORT = [1, 15, 16, 17, 31, 32, 33, 46, 48, 63, 64, 65, 96, 127, 200, 255, 256]  # keys; up to 1,024 are one sheet


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("extra", ["none", "table", "window", "turn", "turn of some", "both"])
def test_sheets_of_any_size_agree_with_float64(isa: str, dtype: torch.dtype, extra: str) -> None:
    """One query to all of them, several bands; rows that fill vectors and tiles, and rows that do not."""
    for fresh, record in ((0.03, dtype), (0.2, torch.int8), (0.7, torch.float32), (1.0, dtype)):
        for heads, width in ((3, 32), (2, 64), (2, 40)):
            batch = Batch(SHORT, heads, width, dtype, fresh, record)
            call = batch.make() | (extras(extra, batch) if "turn" not in extra or fresh < 1 else {})
            assert error(attend(**call, isa=isa), expect(call)) <= TOLERANCE[dtype], (fresh, width)


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_sequences_around_the_longest_sheet_agree_with_float64(isa: str, dtype: torch.dtype) -> None:
    """Sheets and others in one batch, each with a scratch of its own form."""
    for record, extra in ((dtype, "table"), (torch.int8, "table"), (dtype, "both")):
        batch = Batch([1024, 1025, 3, 1100, 40], 2, 64, dtype, 0.05, record)
        call = batch.make() | extras(extra, batch)
        assert error(attend(**call, isa=isa), expect(call)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("record", RECORDS)
@pytest.mark.parametrize("extra", ["none", "table", "table in a window", "wide window", "turn", "both and a window"])
def test_a_query_of_a_short_sequence_has_the_same_bits_whatever_is_asked_beside_it(
    isa: str, dtype: torch.dtype, record: torch.dtype, extra: str
) -> None:
    """Its rows of records too: with all fresh rows, with a few, alone; in any batch; with any number of threads."""
    if isa == "amx" and extra == "both and a window":
        pytest.skip("sheets of a matrix unit know no terms by distance")
    batch = Batch([330, 46, 9, 64], 4, 32, dtype, 0.5, record)
    call = batch.make()
    call |= {"window": 90} if extra == "wide window" else extras(extra, batch)
    expected = attend(**call, isa=isa, threads=1)
    layout, stored = call["layout"], call["stored"]
    for rows in (np.arange(0, len(expected), 3), np.array([0, 5, 160]), np.arange(140, 180), np.array([170])):
        some = call | {"queries": call["queries"][rows], "layout": layout.asking(rows)}
        for threads in (1, 2, 16):
            assert torch.equal(attend(**some, isa=isa, threads=threads), expected[rows])
    begin, end = (int(layout.starts[place]) for place in (1, 2))
    keys = slice(int(layout.key_starts[1]), int(layout.key_starts[2]))
    sources = layout.sources[keys] - np.where(layout.sources[keys] < 0, 0, begin).astype(np.int32)
    alone = call | {name: call[name][begin:end] for name in ("queries", "keys", "values")}
    alone["layout"] = Layout(
        np.array([0, end - begin]), np.array([0, keys.stop - keys.start]), layout.positions[begin:end], sources
    )
    own = {name: None if (given := getattr(stored, name)) is None else given[1:2]
           for name in ("keys", "values", "rows", "key_scales", "value_scales")}  # fmt: skip
    alone["stored"] = replace(stored, **own)
    assert torch.equal(attend(**alone, isa=isa), expected[begin:end])


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_short_sequence_bears_odd_scales_and_hidden_keys(isa: str, dtype: torch.dtype) -> None:
    """Scores times a negative number, times 0, far apart; keys that are hidden, all of them for the first query."""
    batch = Batch([46, 20], 2, 32, dtype)
    call = batch.make()
    for scale in (-0.3, 0.0, 2.0):
        odd = call | {"scale": scale}
        assert error(attend(**odd, isa=isa), expect(odd)) <= TOLERANCE[dtype]
    table = torch.zeros(1, 2 * 46 - 1)
    table[0, 45:] = -torch.inf  # a query sees keys before it
    hidden = call | {"table": table}
    output, expected = attend(**hidden, isa=isa), expect(hidden)
    firsts = call["layout"].starts[:-1]
    assert bool((output[firsts] == 0).all())
    expected[firsts] = 0
    assert error(output, expected) <= TOLERANCE[dtype]


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("record", RECORDS)
@pytest.mark.parametrize("extra", ["turn", "both and a window"])
def test_records_are_only_read_and_nothing_behind_an_end_is_touched(
    isa: str, dtype: torch.dtype, record: torch.dtype, extra: str
) -> None:
    """The last rows and scales are used; a vector too far is a crash where memory ends, and goes unseen elsewhere."""
    for width in (32, 20):
        batch = Batch([70, 33], 2, width, dtype, 0.4, record)
        call = batch.make() | extras(extra, batch)
        layout = call["layout"]
        for b, length in enumerate(batch.lengths):
            sources = layout.sources[layout.key_starts[b] : layout.key_starts[b + 1]]
            sources[np.flatnonzero(sources < 0)[-1]] = -1 - (length + 2)  # the last row of the record
        expected = attend(**call, isa=isa, threads=1)

        def run(call: dict[str, Any] = call, batch: Batch = batch, expected: Tensor = expected) -> bool:
            walled = dict(call)
            for name in ("queries", "keys", "values"):
                walled[name] = read_only(call[name].contiguous())
            copies = {tensor.data_ptr(): read_only(tensor) for tensor in batch.kept}
            at = {address: copy.data_ptr() for address, copy in copies.items()}
            stored = call["stored"]
            moved = {
                name: np.array([at[int(address)] for address in getattr(stored, name)], np.uint64)
                for name in ("keys", "values", "key_scales", "value_scales")
                if getattr(stored, name) is not None
            }
            walled["stored"] = replace(stored, **moved)
            if "disentangled" in call:
                given = call["disentangled"]
                assert given.key is not None
                assert given.query is not None
                walled["disentangled"] = replace(given, key=read_only(given.key), query=read_only(given.query))
            return torch.equal(attend(**walled, isa=isa, threads=1), expected)

        assert run_child(run).result


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("fresh", [0.5, 1.0])
def test_some_queries_get_what_all_queries_get(isa: str, dtype: torch.dtype, extra: str, fresh: float) -> None:
    """Of a sequence its first fresh row is asked for, some in the middle, all, or none."""
    if fresh == 1 and extra not in BIASED:
        pytest.skip("nothing is turned without a record")
    batch = Batch(LENGTHS, 2, 32, dtype, fresh, torch.float32)
    call = batch.make() | extras(extra, batch)
    starts = call["layout"].starts
    spans = [(0, 1), (0, 0), (1, 4), (0, 1), (0, 1), (0, 40), (5, 20), (0, 1), (0, 1), (0, 7)]
    parts = zip(spans, starts[:-1], starts[1:], strict=True)
    rows = np.concatenate([np.arange(start, end)[first:stop] for (first, stop), start, end in parts])
    some = call | {"queries": call["queries"][rows], "layout": call["layout"].asking(rows)}
    assert error(attend(**some, isa=isa), expect(call)[rows]) <= TOLERANCE[dtype]
    torch.testing.assert_close(expect(some), expect(call)[rows], rtol=1e-9, atol=1e-9)


def change(call: dict[str, Any], **parts: Any) -> dict[str, Any]:
    """The call with fields of its layout or records replaced."""
    changed = dict(call)
    for name, value in parts.items():
        whole, _, part = name.partition("_of_")
        changed[part] = replace(changed[part], **{whole: value})
    return changed


def swapped(call: dict[str, Any]) -> dict[str, Any]:
    """Two fresh rows have changed places, and a few are asked for."""
    layout = call["layout"].asking(np.array([0, 12], np.int64))
    sources, places = layout.sources.copy(), call["layout"].positions[:2]
    sources[places] = sources[places[::-1]]
    return call | {"queries": call["queries"][:2], "layout": replace(layout, sources=sources)}


def test_wrong_arguments_are_refused_before_anything_is_written() -> None:
    batch = Batch([20, 30], 2, 32, torch.float32, 0.5, torch.int8)
    call = batch.make() | extras("turn", batch)
    layout, stored = call["layout"], call["stored"]

    def put(array: Any, place: int, number: int) -> Any:
        other = array.copy()
        other[place] = number
        return other

    record = int(np.flatnonzero(layout.sources < 0)[0])
    short = Turn(call["turn"].cos[:1], call["turn"].sin[:1])
    key = torch.randn(4, 64)
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("begin with 0", change(call, starts_of_layout=put(layout.starts, 0, 1))),
        ("decrease", change(call, starts_of_layout=put(layout.starts, 1, -1))),
        ("end with the number of rows", change(call, starts_of_layout=put(layout.starts, 2, 24))),
        ("int64", change(call, starts_of_layout=layout.starts[:2])),
        ("int64", change(call, key_starts_of_layout=layout.key_starts.astype(np.int32))),
        ("int64", change(call, key_starts_of_layout=layout.key_starts[:0])),
        ("larger", change(call, key_starts_of_layout=put(layout.key_starts, 1, 51))),
        ("increase", change(call, positions_of_layout=put(layout.positions, 1, int(layout.positions[0])))),
        ("increase", change(call, positions_of_layout=put(layout.positions, 9, 20))),
        ("positions", change(call, positions_of_layout=layout.positions[:5])),
        ("every key", change(call, positions_of_layout=None)),
        ("every key", change(call, sources_of_layout=None)),
        ("sources", change(call, sources_of_layout=layout.sources[:-1])),
        ("fresh row", change(call, sources_of_layout=put(layout.sources, int(layout.positions[0]), -1))),
        ("fresh row", change(call, sources_of_layout=put(layout.sources, record, 3))),
        ("fresh row", change(call, sources_of_layout=put(layout.sources, record, 1000))),
        ("beyond", change(call, sources_of_layout=put(layout.sources, record, -24))),
        ("beyond", change(call, sources_of_layout=put(layout.sources, record, -(2**31)))),
        ("rows", change(call, asked_of_layout=np.array([0, 10, 24]))),
        ("larger", change(call, asked_of_layout=np.array([0, 26, 25]))),
        ("begin with 0", change(call, asked_of_layout=np.array([1, 10, 25]))),
        ("decrease", change(call, asked_of_layout=np.array([0, -1, 25]))),
        ("asked is int64", change(call, asked_of_layout=np.array([0, 25]))),
        ("int64", change(call, asked_of_layout=layout.starts.astype(np.int32))),
        ("has none", change(call, keys_of_stored=put(stored.keys, 0, 0))),
        ("has none", change(call, values_of_stored=put(stored.values, 0, 0))),
        ("has none", call | {"stored": None}),
        ("one entry", change(call, rows_of_stored=stored.rows[:1])),
        ("no scales", change(call, key_scales_of_stored=put(stored.keys, 0, 0))),
        ("scales", change(call, value_scales_of_stored=None)),
        ("row_bytes", change(call, row_bytes_of_stored=63)),
        ("row_bytes", change(call, scale_row_bytes_of_stored=4)),
        ("stored rows are", change(call, dtype_of_stored=torch.int16)),
        ("moved farther", call | {"turn": short}),
        ("cos and sin", call | {"turn": Turn(call["turn"].cos, call["turn"].sin[:-1])}),
        ("out of range", call | {"turn": angles(17)}),
        ("does not span", call | {"table": torch.zeros(2, 57)}),
        ("the table", call | {"table": torch.zeros(3, 59)}),
        ("the table", call | {"table": torch.zeros(2, 60)}),
        ("the table", call | {"table": torch.zeros(2, 59).double()}),
        ("window", call | {"window": 0}),
        ("do not span", call | {"disentangled": Disentangled(key, key, np.zeros(57, np.int32))}),
        ("not a row", call | {"disentangled": Disentangled(key, key, np.full(59, 4, np.int32))}),
        ("not a row", call | {"disentangled": Disentangled(key, key, np.full(59, -1, np.int32))}),
        ("differ in rows", call | {"disentangled": Disentangled(key, key[:3], np.zeros(59, np.int32))}),
        ("do not fit", call | {"disentangled": Disentangled(key.half(), None, np.zeros(59, np.int32))}),
        ("span - 1", call | {"disentangled": Disentangled(key, key, np.zeros(60, np.int32))}),
        ("float64", call | {"queries": call["queries"].double()}),
        ("do not fit", call | {"keys": call["keys"][1:]}),
        ("do not fit", call | {"values": call["values"].bfloat16()}),
        ("heads", call | {"heads": 3}),
        ("neighbouring", call | {"queries": call["queries"].t().contiguous().t()}),
        ("out of range", call | {"threads": 0}),
        ("instruction set", call | {"isa": "avx1024"}),
    ]
    with pytest.raises(ValueError, match="fresh row"):
        attend(**swapped(call))
    out = torch.full(call["queries"].shape, 7.0)
    for text, arguments in wrong:
        with pytest.raises(ValueError, match=text):
            attend(**arguments, out=out)
        assert bool((out == 7).all())
    attend(**call, out=out)
    assert error(out, expect(call)) <= 1e-5
