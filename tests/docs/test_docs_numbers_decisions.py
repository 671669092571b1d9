"""The table of the page about decisions is counted from the slots that a database makes."""

from __future__ import annotations

import pytest
from docs_tools import agree, numbers, page, table_rows

from attmemo.db.slot_kinds import KIND_MAP, LENGTH, TRIANGLE, SlotKind
from attmemo.db.slots import SlotClass
from attmemo.mmap import layout

LAYERS, HEADS = 12, 12
TYPES = ("float32", "float16", "uint8")
SHAPES = {"whole maps": (HEADS, LENGTH, LENGTH), "lower triangles": (HEADS, TRIANGLE)}


def in_a_gib(tokens: int, shape: tuple[int | str, ...], dtype: str) -> float:
    """Sequences whose maps fill a GiB, with what pads a slot to the next one."""
    return (1 << 30) / (LAYERS * SlotClass.make(SlotKind(KIND_MAP, LAYERS, dtype, shape), tokens).stride)


def test_sequences_in_a_gib_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "page_size", lambda: 4096)
    text = page("decisions.md")
    assert f"Maps alone, {LAYERS} layers of {HEADS} heads:" in text
    rows = table_rows(page("decisions.md"), "| tokens | shape | float32 |")
    assert [row[:2] for row in rows] == [[tokens, shape] for tokens in ("512", "128") for shape in SHAPES]
    for tokens, shape, *cells in rows:
        counts = [in_a_gib(int(tokens), SHAPES[shape], dtype) for dtype in TYPES]
        whole = in_a_gib(int(tokens), SHAPES["whole maps"], "float32")
        times = [counts[-1] / whole] if "times" in cells[-1] else []
        agree([number for cell in cells for number in numbers(cell)], [*counts, *times])
