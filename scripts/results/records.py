"""Bytes of records, from the layout in which they are stored."""

from __future__ import annotations

from typing import Final

from marked import table

from attmemo.db.encodings import row_types
from attmemo.rows.layout import RowLayout

MODELS: Final = {"MiniLM-L6": (6, 384, 12), "BERT-base": (12, 768, 12)}
"""Layers, hidden size and heads."""
LENGTHS: Final = (30, 128, 512)  # tokens


def sizes() -> list[str]:
    """What a record takes, by model, storage and tokens."""
    rows = []
    for title, (layers, hidden, heads) in MODELS.items():
        for storage in ("int8", "bfloat16"):
            layout = RowLayout(layers, hidden, heads, row_types(storage))
            rows.append((title, storage, *(_amount(layout.nbytes(length)) for length in LENGTHS)))
    return table(f"model | stored as | {' | '.join(f'{length} tokens' for length in LENGTHS)}", rows)


def _amount(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB" if nbytes >= 1e6 else f"{nbytes / 1e3:.0f} kB"
