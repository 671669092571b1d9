"""Numbers in the sentences of the page about decisions: set in code, counted from sizes, or of JSON files."""

from __future__ import annotations

import inspect
from itertools import groupby

import torch
from docs_tools import RowsCase, measured, page, says, set_in

from attmemo.db.forms import STORAGE, TOPS
from attmemo.db.index import EXACT_BELOW
from attmemo.db.kinds import KIND_INPUT, KIND_MAP, KIND_ROWS, KIND_SCALES, kinds_of_maps, kinds_of_rows
from attmemo.db.manifest import ModelInfo
from attmemo.db.slots import TIGHT
from attmemo.embed.components import WIDTH
from attmemo.embed.tokens import TokenIndex
from attmemo.guarded import BOTH_WAYS
from attmemo.kernels.linear import grid_rows
from attmemo.kernels.panels import PANEL
from attmemo.mmap.arena import LOOKED_AT
from attmemo.profiler.build import BuildOptions, _split
from attmemo.reuse import filler, growing, pace

TEXT = page("decisions.md")
KIB, MIB = 1 << 10, 1 << 20


def model(heads: int, hidden: int) -> ModelInfo:
    """An encoder, as a database knows it."""
    return ModelInfo("", "bert", "padding", 12, heads, hidden, "float32", 512, "", {}, None)


def input_share(storage: str, heads: int, tokens: int, hidden: int) -> float:
    """Bytes of the hidden states of a layer, in bytes of its map, as a database stores both."""
    kinds = {kind.name: kind.nbytes(tokens) for kind in kinds_of_maps(model(heads, hidden), storage, {})}
    return kinds[KIND_INPUT] / kinds[KIND_MAP]


def test_how_records_are_found_is_that_of_the_code() -> None:
    says(TEXT, "**Exact search below # records of a length.**", EXACT_BELOW)
    says(TEXT, "the difference of a pair, in # principal components", WIDTH)
    tried = inspect.signature(TokenIndex.candidates).parameters["tried"].default
    says(TEXT, "aligned token by token afterwards and the best of # wins", tried)


def test_what_is_held_out_is_that_of_the_code() -> None:
    splits = [_split(0, row, BuildOptions().held_out) for row in range(10_000)]
    trained, held_out, *_ = [len(list(stretch)) for _, stretch in groupby(splits)]
    says(TEXT, "Every seventh stretch of # sequences trains nothing", held_out)
    assert trained / held_out == 7 - 1


def test_what_hidden_states_take_is_counted() -> None:
    template = (
        "they cost # % of the bytes of a map of # heads at # tokens and # hidden, and # % of the bytes of a map of "
        "# heads at # tokens and # hidden"
    )
    large, small = (12, 512, 768), (4, 128, 256)
    for storage in STORAGE:
        says(TEXT, template, 100 * input_share(storage, *large), *large, 100 * input_share(storage, *small), *small)


def test_how_maps_are_stored_is_that_of_the_code() -> None:
    assert torch.finfo(torch.bfloat16).eps == 8 * torch.finfo(torch.float16).eps, "eight times finer"
    says(TEXT, "The writer tries # scales for each row", len(TOPS))
    says(TEXT, "8-bit slots of less than # KiB begin at multiples of a cache line", TIGHT / KIB)
    says(TEXT, "attmemo looks at # slots to see which pages", LOOKED_AT)


def test_what_a_fetch_takes_was_measured() -> None:
    found = measured("paper/table6.json")
    cells = {(cell["batch"], cell["length"]): cell for cell in found["cells"]}
    assert found["dtype"] == "float32"
    assert all(cell["load"] > found["conditions"]["cores"] for cell in cells.values()), "other work ran beside it"
    large, small = (64, 512), (64, 256)
    alone, whole = (
        {place: {way: one[key] for way, one in cells[place]["ways"].items()} for place in (large, small)}
        for key in ("fetch_ms", "fetch_matmul_ms")
    )
    kernel = [whole[large][way] for way in ("direct", "copy", "contiguous")]
    template = (
        "Measured in float32, # maps of # tokens and # heads: the kernel takes # ms, a fresh copy and the product "
        "# ms, and the product of maps that are contiguous already # ms"
    )
    says(TEXT, template, *large, found["heads"], *kernel)
    says(TEXT, "with `attmemo bench gather`, maps of # heads in float32", found["heads"])
    template = (
        "to map and unmap # maps of # tokens in pages of # MiB takes # ms, a fresh copy # ms, # times as long. "
        "Map, A·V and unmap take # of the time of A·V on maps that are already there."
    )
    first, second = ((alone[place]["map"], alone[place]["copy"]) for place in (large, small))
    over = [whole[place]["map"] / whole[place]["contiguous"] for place in (large, small)]
    says(TEXT, template, *large, cells[large]["page_bytes"] / MIB, *first, first[1] / first[0], over[0])
    template = (
        "For # maps of # tokens in pages of # KiB a fresh copy takes # times as long as map and unmap; map, A·V and "
        "unmap take # of the time of A·V."
    )
    says(TEXT, template, *small, cells[small]["page_bytes"] / KIB, second[1] / second[0], over[1])


def test_the_filler_is_that_of_the_code() -> None:
    says(TEXT, "It rests within a record too, after each # milliseconds of work", filler.PIECE * 1e3)
    says(TEXT, "It takes # of a core while found records pay", pace.FAST_SHARE)
    says(TEXT, "A record pays only the first # times that it is found", growing.PAYS)


def test_kernels_are_what_the_page_says() -> None:
    says(TEXT, "Both lie in panels of # columns", PANEL)
    side, few = (set_in(f"../native/{file}", rf"\b{name} = (\d+)\b")
                 for file, name in (("tiles.h", "SIDE"), ("row_attention.c", "FEW")))  # fmt: skip
    says(TEXT, "what a matrix unit does with tiles: # rows of sums in registers", *side)
    says(TEXT, "It pays from # queries on", *few)


def test_the_grid_of_rows_is_that_of_the_code() -> None:
    steps = sorted({grid_rows(rows) for rows in range(1, 513)})
    assert steps == list(range(steps[0], steps[-1] + 1, steps[0]))
    powers = [len({grid_rows(rows) for rows in range(512 * power + 1, 1024 * power + 1)}) for power in (1, 2, 4, 8)]
    assert len(set(powers)) == 1
    says(TEXT, "multiples of # up to # rows, then # steps for each power of two", steps[0], steps[-1], powers[0])
    most = 1 / powers[0]
    assert 0.98 * most < max(grid_rows(rows) / rows - 1 for rows in range(256, 20_000)) <= most
    says(TEXT, "From # rows on at most # % more rows are computed", 256, 100 * most)


def test_what_packed_blocks_gain_was_measured() -> None:
    gain = RowsCase("bert-8x128").over("packed", "the best OpenVINO")
    says(TEXT, "packed blocks were slower than OpenVINO before, and are # times as fast now", gain)


def test_what_8_bits_keep_was_measured() -> None:
    codes, exact = (RowsCase("lines-OpenSSH", storage=storage) for storage in ("int8", "bfloat16"))
    share = 100 * codes.found["record_bytes"] / exact.found["record_bytes"]
    template = "are the same as with 16 bits, mean # and 1st percentile #, at # % of the bytes"
    for case in (codes, exact):
        says(TEXT, template, *case.cosines(), share)


def test_what_scales_of_rows_take_is_counted() -> None:
    widths, shares = (32, 64), list[float]()
    for width in widths:
        kinds = {kind.name: kind.nbytes(128) for kind in kinds_of_rows(model(12, 12 * width), "int8")}
        shares.append(100 * kinds[KIND_SCALES] / kinds[KIND_ROWS])
    template = "The scales are float32: # % of the codes' bytes at # numbers a head, # % at #."
    says(TEXT, template, shares[0], widths[0], shares[1], widths[1])


def test_pooled_answers_are_proved_as_often_as_the_page_says() -> None:
    says(TEXT, "by calling the model too, at first and then one time in #", BOTH_WAYS)
