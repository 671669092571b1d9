"""Records of a prepared database of rows, by number."""

from __future__ import annotations

from pathlib import Path

from attmemo.db.pools.prepared import in_order, open_prepared
from attmemo.rows.layout import RowLayout
from attmemo.rows.store import Record


class StoredRows:
    """The records of a database in their order; each must be sound."""

    def __init__(self, path: Path) -> None:
        self.pool = open_prepared(path)
        self.filling, self.kept = self.pool.filling, in_order(self.pool)
        self.layout = RowLayout.of(self.filling.model, self.filling.storage)
        assert all(kept.is_sound for kept in self.kept)

    def __len__(self) -> int:
        return len(self.kept)

    def record(self, number: int) -> Record:
        return self.layout.record_of(self.kept[number])

    def records(self) -> dict[bytes, Record]:
        """All records by their tokens; none is there twice."""
        found = {kept.tokens.tobytes(): self.record(number) for number, kept in enumerate(self.kept)}
        assert len(found) == len(self)
        return found
