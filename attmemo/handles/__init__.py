"""Handles at ``model.attmemo``, one class for each way to serve, and what `memoize` checks before it makes one."""

from attmemo.handles.base import Memoization
from attmemo.handles.maps import MapMemoization, Threshold, prepare_maps
from attmemo.handles.rows import Guarding, prepare_rows
from attmemo.handles.stack import StackMemoization, prepare_stack

__all__ = [
    "Guarding", "MapMemoization", "Memoization", "StackMemoization", "Threshold", "prepare_maps", "prepare_rows",
    "prepare_stack",
]  # fmt: skip
