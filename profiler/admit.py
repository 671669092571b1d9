"""Deduplication at build: a sequence whose maps are all in the database already, nearly, is not stored again.

Comparing with every record would read the whole database for each sequence. Candidates are the records of the same
length whose first hidden states lie nearest, in a random projection. An overlooked record costs bytes, never answers.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from attmemo.db import DatabaseWriter
from attmemo.similarity import similarity_score

CANDIDATES = 4  # records compared in full
_DIMENSIONS = 64
_CHANNELS = 8
_SEED = 20240229
LEFT_OUT = "left-out.json"  # what a builder notes beside the database; no reader asks for it


class Admission:
    """Remembers what was stored and what was left out, and says whether something is new.

    A record stands for a sequence if every layer's map reaches the threshold (similarity score, Eq. 1). The rows left
    out are noted beside the database, so that a resumed build need not ask the model again. Where the note is missing,
    torn or another database's, the rows are asked anew. It is saved after a publication, since before it the record
    that stands for a row may yet be lost.
    """

    def __init__(self, threshold: float, writer: DatabaseWriter) -> None:
        self._threshold, self._writer = threshold, writer
        size = writer.manifest.model.hidden
        self._narrow = torch.randn(size, _CHANNELS, generator=torch.Generator().manual_seed(_SEED))  # [H, p]
        self._mix: dict[int, Tensor] = {}  # length -> [d, n p]
        self._vectors: dict[int, Tensor] = {}  # length -> [room, d]
        self._records: dict[int, list[int]] = defaultdict(list)
        for record in range(writer.records):
            self.remember(record, writer.first_input(record))
        self._note = writer.path / LEFT_OUT
        self._left_out: dict[tuple[str, float], set[int]] = defaultdict(set)  # (digest of the file, threshold) -> rows
        with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
            found = json.loads(self._note.read_text(encoding="utf-8"))
            if found["database"] == writer.manifest.uuid:
                self._left_out |= {
                    (str(e["source"]), float(e["admit"])): {int(row) for row in e["rows"]} for e in found["left_out"]
                }

    def admits(self, maps: Sequence[Tensor], first_input: Tensor) -> bool:
        """Whether no stored record has nearly these maps: ``[h, n, n]`` by layer, hidden states ``[n, H]``."""
        records = self._records[len(first_input)]
        if not records:
            return True
        distances = (self._vectors[len(first_input)][: len(records)] - self._project(first_input)).norm(dim=1)
        for place in distances.topk(min(CANDIDATES, len(records)), largest=False).indices.tolist():
            pairs = zip(maps, self._writer.maps(records[place]), strict=True)
            if all(float(similarity_score(new, old)) >= self._threshold for new, old in pairs):
                return False
        return True

    def remember(self, record: int, first_input: Tensor) -> None:
        """A record was stored under this number."""
        length = len(first_input)
        records = self._records[length]
        vectors = self._vectors.get(length, torch.empty(0, _DIMENSIONS))
        if len(vectors) == len(records):
            vectors = self._vectors[length] = torch.cat([vectors, torch.empty(max(64, len(records)), _DIMENSIONS)])
        vectors[len(records)] = self._project(first_input)
        records.append(record)

    def left_out(self, source: str, row: int) -> bool:
        """Whether a row of the file with this digest was left out before, at this score or a higher one."""
        noted = self._left_out.items()
        return any(row in rows for (of, admit), rows in noted if of == source and admit >= self._threshold)

    def leave_out(self, source: str, row: int) -> None:
        """A row of the file with this digest was not stored."""
        self._left_out[source, self._threshold].add(row)

    def save(self) -> None:
        """Write the note; an error of the disk only costs the next build some time."""
        if not self._left_out:
            return
        noted = self._left_out.items()
        entries = [{"source": source, "admit": admit, "rows": sorted(rows)} for (source, admit), rows in noted]
        fresh = self._note.with_suffix(".tmp")
        with suppress(OSError):
            fresh.write_text(json.dumps({"database": self._writer.manifest.uuid, "left_out": entries}), "utf-8")
            os.replace(fresh, self._note)

    def _project(self, hidden: Tensor) -> Tensor:
        """Hidden states ``[n, H]`` in ``[d]`` numbers that keep distances, roughly: first channels, then positions."""
        # One matrix for both would have n times H times d numbers.
        length = len(hidden)
        if length not in self._mix:
            generator = torch.Generator().manual_seed(_SEED + length)
            self._mix[length] = torch.randn(_DIMENSIONS, length * _CHANNELS, generator=generator)
        return self._mix[length] @ (hidden.float() @ self._narrow).flatten()
