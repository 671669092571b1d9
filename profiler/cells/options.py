"""What a table of cells is made of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class CellOptions:
    """What is measured, and on how much.

    Parameters
    ----------
    batch : tuple of int
        Texts that come at once; each gives a cell for every path.
    lines : int
        Texts that are read.
    sample : int
        Texts of the stream that every path answers. They lie in windows spread over the stream.
    paths : tuple of str or None
        Names of `attmemo.profiler.cells.paths.PATHS`; None: all. The stock model is always one of them.
    dtype : {"float32", "bfloat16"}
        Of the model.
    max_length : int or None
        Tokens of a text at most.
    budget : float
        Share of the answers that rows may change.
    database : path or None
        A trained and tuned database of maps; None: maps are left out.
    calibration : int
        Texts of the first part that 8-bit forms see.
    text_column : str or None
    """

    batch: tuple[int, ...] = (1, 8, 32)
    lines: int = 2000
    sample: int = 384
    paths: tuple[str, ...] | None = None
    dtype: str = "float32"
    max_length: int | None = None
    budget: float = 0.01
    database: Path | None = None
    calibration: int = 128
    text_column: str | None = None
