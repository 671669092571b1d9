"""A table of cells: each path to the answers of one model, at each batch size, over one stream of texts."""

from attmemo.profiler.cells.measure import measure
from attmemo.profiler.cells.options import CellOptions
from attmemo.profiler.cells.verdict import sentences, title_of, verdicts

__all__ = ["CellOptions", "measure", "sentences", "title_of", "verdicts"]
