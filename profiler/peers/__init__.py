"""A table of cells: each path to the answers of one model, at each batch size, over one stream of texts."""

from attmemo.profiler.peers.measure import CellOptions, measure
from attmemo.profiler.peers.verdict import sentences, title_of, verdicts

__all__ = ["CellOptions", "measure", "sentences", "title_of", "verdicts"]
