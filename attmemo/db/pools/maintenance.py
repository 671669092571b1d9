"""Upkeep of databases of rows: what they hold, whether it is whole, and how records are taken out."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from attmemo.db.database import Finding
from attmemo.db.pools.shared_pool import SharedPool
from attmemo.db.records import Entry
from attmemo.errors import DatabaseCorruptError, DatabaseError

AGES: Final = (("a minute", 60.0), ("an hour", 3600.0), ("a day", 86400.0), ("a week", 604800.0), ("longer", np.inf))

Tokens = npt.NDArray[np.int32]


def summarize(pool: SharedPool) -> dict[str, Any]:
    """What `attmemo inspect` shows, JSON-able."""
    records = list(pool.records.values())
    now = time.time()
    ages = []
    for number, (name, most) in enumerate(AGES):
        least = AGES[number - 1][1] if number else -np.inf
        these = [kept for kept in records if least < now - kept.made <= most]
        if these:
            hits = sum(kept.hits for kept in these)
            ages.append({
                "age": name, "records": len(these), "hits": hits, "never_used": sum(not kept.hits for kept in these),
            })  # fmt: skip
    lengths = Counter(len(kept.tokens) for kept in records)
    filling, model = pool.filling, pool.filling.model
    return {
        "path": str(pool.path), "uuid": filling.uuid, "storage": filling.storage, "made": filling.made,
        "model": {
            "name": model.name, "family": model.family, "layers": model.layers, "heads": model.heads,
            "hidden": model.hidden, "dtype": model.dtype, "fingerprint": model.fingerprint,
        },
        "reuse": "rows", "prepared": filling.sealed, "records": len(records), "bytes": pool.nbytes,
        "record_bytes": sum(kept.nbytes for kept in records), "segments": pool.segments,
        "lengths": {str(n): count for n, count in sorted(lengths.items())},
        "hits": sum(kept.hits for kept in records), "ages": ages, "counts": pool.counts,
        "history": [
            {"begin": period.begin, "seconds": period.seconds, **period.work._asdict()}
            for period in ([] if pool.filling.sealed else pool.history().periods)
        ],
    }  # fmt: skip


def check(pool: SharedPool, progress: Callable[[int, int], None] | None = None) -> list[Finding]:
    """Compare every record with its checksum."""
    found = []
    records = sorted(pool.records.values(), key=lambda kept: (kept.segment.number, kept.offset))
    for done, kept in enumerate(records, 1):
        if not kept.is_sound:
            where = f"segments/{kept.segment.number:010d}, record {kept.number}"
            found.append(Finding(where, "the bytes do not match their checksum"))
        if progress is not None and done % 100 == 0:
            progress(done, len(records))
    return found


def forget(pool: SharedPool, numbers: Sequence[int]) -> None:
    """Take records out, so that none of their bytes is left in the folder; also of an earlier call that was killed."""
    if numbers:
        pool.remove(numbers)
    if pool.needs_scrub:
        pool.scrub()


def holds(tokens: Tokens, run: Tokens) -> bool:
    """Whether tokens have these, one behind the other."""
    if not len(run) or len(run) > len(tokens):
        return False
    windows = np.lib.stride_tricks.sliding_window_view(tokens, len(run))
    return bool((windows == run).all(1).any())


def merge(into: SharedPool, others: Sequence[SharedPool]) -> int:
    """Add the records of others, the most used last, so that they stay longest; how many were added.

    DatabaseError: another model, or another storage. Damaged records are left out; DatabaseCorruptError if `into` is
    prepared. After an interruption the same call goes on.
    """
    for other in others:
        mine, theirs = into.filling, other.filling
        if (mine.model.fingerprint, mine.storage) != (theirs.model.fingerprint, theirs.storage):
            raise DatabaseError(
                f"{other.path} keeps rows of model {theirs.model.fingerprint[:12]}… in {theirs.storage}, "
                f"{into.path} of {mine.model.fingerprint[:12]}… in {mine.storage}.",
                "merge databases of one model and one storage",
            )
    known = {kept.tokens.tobytes() for kept in into.records.values()}
    waiting = []
    for other in others:
        for _, kept in sorted(other.records.items()):
            if kept.tokens.tobytes() in known:
                continue
            if kept.is_sound:
                known.add(kept.tokens.tobytes())
                waiting.append(kept)
            elif into.filling.sealed:
                what = f"{other.path}, record {kept.number}: not as it was written."
                raise DatabaseCorruptError(what, f"attmemo check {other.path}, and build it again")
    waiting.sort(key=lambda kept: kept.hits)
    before = set(into.records)
    into.add([Entry(kept.tokens, kept.body, kept.note, kept.made, kept.hits) for kept in waiting])
    return len(into.records.keys() - before)
