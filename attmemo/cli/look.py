"""`attmemo inspect` and `attmemo check`: what is in a database, and whether it is whole."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attmemo.cli import filling
from attmemo.cli.build import show_layers
from attmemo.cli.console import Output, cell, output, size
from attmemo.cli.measure import show_tuning
from attmemo.cli.options import DatabasePath, Json, Quiet
from attmemo.system.extras import check_installed
from attmemo.wording import counted

if TYPE_CHECKING:
    from attmemo.db import Database
    from attmemo.db.database import Finding

_BINS, _BAR = 8, 32
UNSERVED = "nothing must be done, they are not used; remove the folder to begin anew"


Plot = Annotated[Path | None, typer.Option(
    "--plot", metavar="FILE", show_default=False,
    help="Write a plot of tokens recomputed over time, of a database that fills itself (PNG).",
)]  # fmt: skip


def inspect(db: DatabasePath, plot: Plot = None, json: Json = None, quiet: Quiet = False) -> None:
    """Show what a database holds.

    Model, kind of reuse, bytes, records by length; for maps embedder, profile and tuned threshold. Checks the
    structure but reads no record; `attmemo check` reads every one.
    """
    with output(json, quiet) as out:
        from attmemo.db import Database
        from attmemo.db.pools.filling import is_filling, is_pool

        if plot is not None and not is_filling(db):
            raise typer.BadParameter(f"--plot: {db} is a prepared database; nothing is known of its requests.")
        if is_pool(db):
            found = _summarize_rows(db)
            filling.show(out, found)
            if plot is not None:
                _plot(plot, found)
        else:
            with Database(db) as database:
                found = _summarize(database)
            _show(out, found)
        if found["lengths"]:
            out.table("Records by tokens", (), histogram({int(k): v for k, v in found["lengths"].items()}))
        out.result(found)


def _summarize_rows(db: Path) -> dict[str, Any]:
    """What `inspect` shows of a database of rows, JSON-able."""
    from attmemo.db.folder import ASIDE
    from attmemo.db.namespaces import bytes_in, named_in
    from attmemo.db.pools.maintenance import summarize

    aside = sum(file.stat().st_size for file in (db / ASIDE).rglob("*") if file.is_file())
    with closing(filling.opened(db, fills=False)) as pool:
        spaces = {name: bytes_in(folder) for name, folder in named_in(db).items()}
        return summarize(pool) | {"guards": _guards(db), "set_aside_bytes": aside, "namespaces": spaces}


def _plot(file: Path, found: dict[str, Any]) -> None:
    from attmemo.errors import DataError

    if not found["history"]:
        raise DataError(f"{found['path']}: no request was noted yet.", "ask the model, then inspect again")
    check_installed("report", "matplotlib")
    from attmemo.profiler.plots import plot_history

    file.write_bytes(plot_history(found["history"]))


def _summarize(database: Database) -> dict[str, Any]:
    """What `inspect` shows, JSON-able."""
    from attmemo.db import SPLIT_HELD_OUT

    manifest, records = database.manifest, database.records
    embedder, profile = manifest.embedder, manifest.profile
    indexed = 0 if embedder is None else embedder.next_id
    return {
        "path": str(database.path), "generation": manifest.generation,
        "model": {key: value for key, value in asdict(manifest.model).items() if key not in ("fields", "tokenizer")},
        "reuse": "maps", "kinds": _kinds(database),
        "storage": manifest.storage, "page_size": manifest.page_size, "records": len(database),
        "held_out": int((records.splits == SPLIT_HELD_OUT).sum()),
        "lengths": {str(length): count for length, count in sorted(database.lengths.items())},
        "bytes": database.bytes, "sources": [source.name for source in manifest.sources],
        "not_indexed": len(database) - indexed,
        "embedder": embedder and {"backend": embedder.backend, "records": indexed, **embedder.report},
        "profile": profile and {key: profile.get(key) for key in ("threads", "dtype", "costs")},
        "hit_rates": profile and _hit_rates(profile, manifest.tuning, manifest.model.layers),
        "tuning": manifest.tuning,
    }  # fmt: skip


def _kinds(database: Database) -> list[dict[str, Any]]:
    """What a record keeps: for each kind of slots its type and shape, and bytes with padding, in all and a record."""
    found = []
    for kind in database.manifest.kinds:
        classes = [c for c in database.manifest.classes if c.kind.name == kind.name]
        total = sum(c.file_bytes for c in classes)
        found.append({
            "kind": kind.name, "slots": kind.layers, "dtype": kind.dtype, "shape": list(kind.shape), "bytes": total,
            "bytes_per_record": total / len(database) if len(database) else None,
        })  # fmt: skip
    return found


def _guards(database: Path) -> list[dict[str, Any]]:
    """Where each guard of this database stands, and its settings."""
    from attmemo.db.folder import GUARDS
    from attmemo.guard.file import all_in
    from attmemo.guard.guard import Guard

    found = []
    for settings, learned in all_in(database / GUARDS):
        guard = Guard.of(settings["budget"], settings["confidence"], learned, vectors=bool(settings.get("vectors")))
        found.append(settings | guard.stats())
    return sorted(found, key=lambda guard: float(guard["since"]))  # of guards of one answer, the newest is shown


def _hit_rates(profile: dict[str, Any], tuning: dict[str, Any] | None, layers: int) -> dict[str, Any]:
    """Share of held-out texts that would be reused, by layer and token length, at the tuned thresholds or at 0.9."""
    from attmemo.perfmodel.profile import Profile

    found = Profile.from_dict(profile)
    lookup = "sequence" if tuning is None else tuning.get("lookup", "sequence")
    thresholds = [0.9] * layers if tuning is None else tuning["thresholds"]
    rates = found.rates_sequence if lookup == "sequence" else found.rates
    table = [
        {str(n): rates.alpha(threshold, layer, n) for n in rates.stored if rates.samples(layer, n)}
        for layer, threshold in enumerate(thresholds)
    ]
    weights = {str(n): rates.samples(0, n) for n in rates.stored if rates.samples(0, n)}
    total = sum(weights.values())
    by_layer = [sum(row.get(n, 0.0) * w for n, w in weights.items()) / total if total else 0.0 for row in table]
    found_rates = {"by_layer": by_layer, "by_layer_and_length": table}
    return {"lookup": lookup, "thresholds": thresholds, "held_out": total} | found_rates


def check(db: DatabasePath, json: Json = None, quiet: Quiet = False) -> None:
    """Compare every slot with its checksum.

    Reads the whole database. Ends with exit code 1 if anything is damaged.
    """
    with output(json, quiet) as out:
        from attmemo.db import Database
        from attmemo.db.files import RESTORE
        from attmemo.db.pools.filling import is_pool, is_sealed

        if is_pool(db):
            read, (total, found) = "record", _check_rows(out, db)
            following = RESTORE if is_sealed(db) else UNSERVED
        else:
            with Database(db) as database:
                read, total = "slot", len(database) * sum(kind.layers for kind in database.manifest.kinds)
                found = database.check(lambda done, total: out.stages("checking slots", done, total))
            following = (
                "restore the database from a copy, or build it again with attmemo build-database; if only an embedder "
                f"or index file is named, attmemo train-embedder {shlex.quote(str(db))} makes it anew"
            )
        for finding in found:
            out.say(f"{finding.where}: {finding.what}")
        findings = [asdict(finding) for finding in found]
        out.result({"path": str(db), f"{read}s": total, "ok": not found, "findings": findings})
        if found:
            seen = f"{counted(len(found), 'finding')} in {counted(total, read)}"
            typer.echo(f"error: {db}: {seen}\n  Next: {following}", err=True)
            raise typer.Exit(1)
        out.say(f"{db}: {counted(total, read)}, all checksums match")


def _check_rows(out: Output, db: Path) -> tuple[int, list[Finding]]:
    """How many records a database of rows has, and what is wrong with some; of namespaces too."""
    from attmemo.db.namespaces import all_of
    from attmemo.db.pools import maintenance as upkeep

    records = 0
    found: list[Finding] = []
    for folder in all_of(db):
        with closing(filling.opened(folder, fills=False)) as pool:
            records += len(pool)
            own = upkeep.check(pool, lambda done, total: out.stages("checking records", done, total))
        found += [replace(one, where=f"{folder.relative_to(db)}/{one.where}") for one in own] if folder != db else own
    return records, found


def histogram(lengths: Mapping[int, int]) -> list[tuple[str, str, str]]:
    """Records by token length in a few ranges: range, bar, count."""
    first, last = min(lengths), max(lengths)
    width = max(1, -(-(last - first + 1) // _BINS))
    counts: dict[int, int] = {}
    for length, count in lengths.items():
        start = first + (length - first) // width * width
        counts[start] = counts.get(start, 0) + count
    most = max(counts.values())
    names = {start: f"{start}–{min(start + width - 1, last)}" if width > 1 else str(start) for start in counts}
    return [(names[start], "█" * max(1, round(_BAR * n / most)), f"{n:,}") for start, n in sorted(counts.items())]


def _show(out: Output, found: dict[str, Any]) -> None:
    model, embedder, profile = found["model"], found["embedder"], found["profile"]
    place = shlex.quote(found["path"])
    following = f"attmemo tune {place} --data FILE" if embedder else f"attmemo train-embedder {place}"
    waiting = f"{found['not_indexed']:,} ({following})" if found["not_indexed"] else "0"
    costs = "not measured, so the gate always tries"
    if profile:
        costs = f"measured on {counted(profile['threads'], 'thread')} in {profile['dtype']}"
    rows = {
        "model": model["name"],
        "family": f"{model['family']}, {model['layers']} layers, {model['heads']} heads, {model['hidden']} wide",
        "computed in": f"{model['dtype']}, texts cut to {model['max_length']} tokens",
        "fingerprint": model["fingerprint"],
        "keeps": f"{found['reuse']}, stored as {found['storage']}, pages of {size(found['page_size'])}",
        "size": size(found["bytes"]),
        "records": f"{found['records']:,}, of which {found['held_out']:,} held out",
        "data": ", ".join(found["sources"]),
        "generation": cell(found["generation"]),
        "not yet indexed": waiting,
        "embedder": f"indexed with {embedder['backend']}" if embedder else "not trained",
        "costs": costs,
        "threshold": "tuned" if found["tuning"] else f"not tuned (attmemo tune {place} --data FILE)",
    }
    out.table(found["path"], (), list(rows.items()))
    kinds = [
        (kind["kind"], cell(kind["slots"]), kind["dtype"], " × ".join(map(str, kind["shape"])), size(kind["bytes"]),
         "" if kind["bytes_per_record"] is None else size(int(kind["bytes_per_record"])))
        for kind in found["kinds"]
    ]  # fmt: skip
    out.table("A record, with padding", ("kind", "slots", "type", "shape", "in all", "a record"), kinds)
    if embedder and embedder.get("layers"):
        show_layers(out, embedder["layers"])
    rates = found["hit_rates"]
    if rates and rates["held_out"]:
        title = f"Held-out texts that would be reused, of {rates['held_out']} (by length: --json)"
        layers = enumerate(zip(rates["thresholds"], rates["by_layer"], strict=True))
        lines = [(cell(n), f"{t:.3f}", f"{100 * served:.0f} %") for n, (t, served) in layers]
        out.table(title, ("layer", "threshold", "reused"), lines)
    if found["tuning"]:
        show_tuning(out, found["tuning"])
