"""One colour for one way to the answers, in all plots."""

from __future__ import annotations

from typing import Final

from attmemo.profiler.plots import BLUE, FAINT, GOLD, GREEN, GREY, INK, ORANGE, PURPLE
from attmemo.profiler.race import CACHE, MAPS, ONNX, OPENVINO, PACKED, ROWS, STOCK

COLORS: Final = {
    "stock": FAINT, "compile": INK, "openvino": ORANGE, "onnx": PURPLE, "none": GREEN, "rows": BLUE, "maps": GOLD,
    "cache": GREY,
}  # fmt: skip
_NAMES: Final = {
    STOCK: "stock", OPENVINO: "openvino", ONNX: "onnx", PACKED: "none", ROWS: "rows", MAPS: "maps", CACHE: "cache",
}  # fmt: skip


def color_of(way: str) -> str:
    """Return the colour of a way of `attmemo.profiler.race`, or of a path of `attmemo.profiler.peers`."""
    return COLORS[_NAMES.get(way, way.partition("-")[0])]
