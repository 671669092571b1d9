"""Upkeep of databases of rows: `attmemo forget`, `compact`, `merge`; and what `inspect` shows of them."""

from __future__ import annotations

import datetime
import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attmemo.cli.console import Output, cell, output, size
from attmemo.cli.options import DatabasePath, Json, Quiet
from attmemo.wording import percent

if TYPE_CHECKING:
    from attmemo.db.pools.shared_pool import SharedPool

Text = Annotated[list[str] | None, typer.Option(
    "--text", metavar="TEXT", show_default=False,
    help="Forget records that hold these words, one behind the other. May be given several times. Needs --model.",
)]  # fmt: skip
Before = Annotated[str | None, typer.Option(
    "--before", metavar="DATE", show_default=False,
    help="Forget records made before this moment: 2026-11-22, or 2026-11-22T18:00. Local time.",
)]  # fmt: skip
ModelName = Annotated[str | None, typer.Option(
    "--model", metavar="NAME", show_default=False, help="The model whose tokenizer made the records."
)]
Any_ = Annotated[bool, typer.Option(
    "--any-tokenizer", help="Also if the tokenizer is not the very one that the records were made with.",
)]  # fmt: skip
Name = Annotated[str | None, typer.Option(
    "--namespace", metavar="NAME", show_default=False,
    help="Forget in this namespace alone; without --text and --before all of it. Stop processes that use it before.",
)]  # fmt: skip
_SHOWN = 8  # periods in a table
Others = Annotated[list[Path], typer.Argument(metavar="FROM…", help="Databases whose records are added.")]


def opened(db: Path, *, fills: bool) -> SharedPool:
    """The pool of a folder; it keeps all that it holds."""
    from attmemo.db.pools.filling import is_sealed
    from attmemo.db.pools.prepared import open_prepared
    from attmemo.db.pools.shared_pool import SharedPool

    if is_sealed(db) and not fills:
        return open_prepared(db)
    pool = SharedPool(db, None, fills=fills)
    pool.news()
    return pool


def check_prepared(db: Path, command: str, instead: str) -> None:
    """Refuse a database that fills itself where a prepared one is asked for. `instead`: what fits."""
    from attmemo.db.pools.filling import is_filling
    from attmemo.errors import DatabaseError

    if is_filling(db):
        raise DatabaseError(f"{db} fills itself with rows; {command}.", instead)


def forget(
    db: DatabasePath, text: Text = None, before: Before = None, model: ModelName = None, any_tokenizer: Any_ = False,
    namespace: Name = None, json: Json = None, quiet: Quiet = False,
) -> None:  # fmt: skip
    """Take records out of a database of rows, and of its namespaces.

    None of their bytes is left in the folder. The guards' evidence there is removed too, so it is collected again; and
    what was set aside as damaged, which may hold the same. If no record is meant, nothing is changed.
    """
    if not text and before is None and namespace is None:
        raise typer.BadParameter("say what to forget: --text TEXT --model NAME, --before DATE, or --namespace NAME.")
    if text and model is None:
        raise typer.BadParameter("--text needs --model NAME: its tokenizer says which tokens a text has.")
    until = None if before is None else _moment(before)
    with output(json, quiet) as out:
        from attmemo.db.folder import ASIDE, GUARDS
        from attmemo.db.namespaces import all_of, bytes_in, folder_of
        from attmemo.db.pools.maintenance import check, holds
        from attmemo.db.pools.maintenance import forget as take_out
        from attmemo.errors import DatabaseError
        from attmemo.guard.file import DAMAGED
        from attmemo.rows.planner import TYPES_FROM

        folders = all_of(db)
        if namespace is not None:
            folders = [folder_of(db, namespace)]
            if not folders[0].is_dir():
                raise DatabaseError(f"{db} has no namespace {namespace!r}.", f"attmemo inspect {db}")
        if namespace is not None and not (text or before):
            nbytes = bytes_in(folders[0])
            shutil.rmtree(folders[0])
            out.result({"path": str(db), "namespace": namespace, "bytes": nbytes, "ok": True})
            out.say(f"{db}: namespace {namespace} is forgotten, {size(nbytes)}")
            return
        forgotten = begun = 0
        findings: list[Any] = []
        aside = [folder / ASIDE for folder in folders if (folder / ASIDE).exists()]
        for folder in folders:
            pool = opened(folder, fills=True)
            try:
                runs = _runs(text or [], model, None if any_tokenizer else pool)
                meant = [
                    number for number, kept in pool.records.items()
                    if (until is not None and kept.made < until)
                    or any(holds(kept.tokens & (TYPES_FROM - 1), run) for run in runs)
                ]  # fmt: skip
                guards = list((folder / GUARDS).glob("*.safetensors"))
                if not (meant or pool.needs_scrub):
                    guards = []
                else:  # guards first: a call that is killed finds the records again, and goes on
                    for file in (*guards, *(folder / GUARDS).glob(f"*{DAMAGED}*")):
                        file.unlink(missing_ok=True)
                    shutil.rmtree(folder / ASIDE, ignore_errors=True)
                take_out(pool, meant)
                findings += check(pool)
                forgotten, begun = forgotten + len(meant), begun + len(guards)
            finally:
                pool.close()
        out.result({"path": str(db), "forgotten": forgotten, "guards": begun, "ok": not findings})
        sound = f"{len(findings):,} of the others are damaged" if findings else "all others match their checksums"
        done = f"{forgotten:,} records forgotten, {begun} guards begin anew"
        out.say(f"{db}: {done if forgotten else 'no record is meant, so nothing was changed'}; {sound}")
        for place in aside:
            if place.exists():
                out.say(f"Note: {place} holds what was damaged and cannot be searched: remove it if it may hold this")
            else:
                out.say(
                    "Note: what was set aside as damaged is removed too: it may hold the same, and cannot be searched"
                )


def compact(db: DatabasePath, json: Json = None, quiet: Quiet = False) -> None:
    """Write a database of rows anew, without gaps.

    It is left as it is if that gains nothing. Models that serve from it go on. The folder needs room for both at once.
    """
    with output(json, quiet) as out:
        pool = opened(db, fills=True)
        try:
            before = pool.nbytes
            pool.rewrite()
            after, records = pool.nbytes, len(pool)
        finally:
            pool.close()
        out.result({"path": str(db), "bytes_before": before, "bytes": after, "records": records})
        out.say(f"{db}: {records:,} records, {size(before)} before, {size(after)} now")


def merge(db: DatabasePath, others: Others, json: Json = None, quiet: Quiet = False) -> None:
    """Add the records of other databases of the same model.

    All of them are prepared, or all fill themselves. Records that are there already are not added twice. DB is made if
    there is none and the others are prepared, as shards of attmemo build-database --shard are. In databases that fill
    themselves records stay as old, and as often used, as they were; the next process that fills holds its own bound.
    """
    stopped = "interrupted; what was copied is published, the same command goes on"
    with output(json, quiet, stopped) as out:
        from attmemo.db.pools.filling import is_filling
        from attmemo.errors import DatabaseError

        fill = {path: is_filling(path) for path in (db, *others) if path.exists()}
        if len(set(fill.values())) > 1:
            these = ", ".join(str(path) for path, fills in fill.items() if fills)
            raise DatabaseError(f"{these} fill themselves, the others are prepared.", "merge databases of one sort")
        if not any(fill.values()):
            _merge_prepared(db, others, out)
            return
        from attmemo.db.pools.maintenance import merge as put_in

        pools = [opened(db, fills=True)]
        try:
            pools += [opened(other, fills=False) for other in others]
            added = put_in(pools[0], pools[1:])
            records = len(pools[0])
        finally:
            for pool in pools:
                pool.close()
        out.result({"path": str(db), "added": added, "records": records})
        out.say(f"{db}: {added:,} records added, {records:,} in all")


def _merge_prepared(db: Path, others: list[Path], out: Output) -> None:
    from attmemo.db import read_manifest
    from attmemo.db.pools.filling import is_sealed
    from attmemo.db.pools.merging import merge_prepared

    done = merge_prepared(db, others, lambda count, total: out.stages("copying", count, total))
    out.result({"path": str(db), "added": done.added, "doubled": done.doubled, "records": done.records})
    out.say(f"{db}: {done.added:,} records added, {done.doubled:,} were there, {done.records:,} in all")
    place = shlex.quote(str(db))
    following = f"check {place}" if is_sealed(db) else f"train-embedder {place}"
    if not is_sealed(db) and read_manifest(db).embedder is not None:
        following = f"tune {place} --data FILE, or attmemo train-embedder {place}"
    out.say(f"Next: attmemo {following}")


def show(out: Output, found: dict[str, Any]) -> None:
    """What `attmemo inspect` shows of a database of rows."""
    model, counts = found["model"], found["counts"]
    used = "" if found["prepared"] else f", used {found['hits']:,} times"
    rows = {
        "model": model["name"],
        "family": f"{model['family']}, {model['layers']} layers, {model['heads']} heads, {model['hidden']} wide",
        "computed in": model["dtype"],
        "fingerprint": model["fingerprint"],
        "keeps": f"rows, stored as {found['storage']}; {'prepared' if found['prepared'] else 'it fills itself'}",
        "since": _when(found["made"]),
        "records": f"{found['records']:,}{used}",
        "size": f"{size(found['bytes'])} in {found['segments']} segments, records {size(found['record_bytes'])}",
        "so far": _so_far(counts),
    }
    if found["set_aside_bytes"]:
        rows["set aside"] = f"{size(found['set_aside_bytes'])} that were found damaged"
    rows |= {f"namespace {name}": size(nbytes) for name, nbytes in found["namespaces"].items()}
    rows |= {f"guard of answer={guard['answer']}": guard["says"] for guard in found["guards"]}
    out.table(found["path"], (), list(rows.items()))
    ages = [
        (f"up to {age['age']}" if age["age"] != "longer" else "longer", cell(age["records"]), cell(age["hits"]),
         cell(age["never_used"]))
        for age in found["ages"]
    ]  # fmt: skip
    if ages:
        out.table("Records by age", ("age", "records", "used", "never used"), ages)
    if found["history"]:
        rows_of = [
            (_when(part["begin"]), cell(part["requests"]), percent(part["rows"] / max(part["tokens"], 1)))
            for part in together(found["history"], _SHOWN)
        ]
        out.table("Tokens recomputed, checks included", ("from", "requests", "recomputed"), rows_of)


def together(history: list[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """Periods one behind the other as one, so that at most so many are left."""
    size = -(-len(history) // most)
    parts = [history[start : start + size] for start in range(0, len(history), size)]
    names = ("requests", "tokens", "rows")
    return [{"begin": part[0]["begin"]} | {name: sum(one[name] for one in part) for name in names} for part in parts]


def _so_far(counts: dict[str, int]) -> str:
    """What became of records."""
    gone = {
        "not used since they were written": counts.get("evicted", 0) - counts.get("evicted_used", 0),
        "used less than those that were carried": counts.get("evicted_used", 0),
    }  # fmt: skip
    why = ", ".join(f"{count:,} {reason}" for reason, count in gone.items() if count)
    fates = ("added", "carried", "evicted", "forgotten", "damaged")
    words = [f"{counts[name]:,} {name}" for name in fates if counts.get(name)]
    return ", ".join(words).replace("evicted", f"evicted ({why})") or "nothing was stored"


def _when(moment: float) -> str:
    return datetime.datetime.fromtimestamp(moment).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")


def _moment(text: str) -> float:
    try:
        return datetime.datetime.fromisoformat(text).astimezone().timestamp()
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no date; write 2026-11-22 or 2026-11-22T18:00.") from None


def _runs(texts: list[str], model: str | None, pool: SharedPool | None) -> list[Any]:
    """Token ids of texts, without those that begin and end an input. `pool`: its tokenizer must be this one."""
    if not texts:
        return []
    import numpy as np

    from attmemo.errors import DatabaseError
    from attmemo.loading import load_tokenizer, tokenizer_digest

    tokenizer, found = load_tokenizer(str(model)), []
    if pool is not None and pool.filling.model.tokenizer not in (None, tokenizer_digest(tokenizer)):
        raise DatabaseError(
            f"{pool.path}: its records were made with another tokenizer than that of {model}: nothing was forgotten.",
            "--model: the model whose records these are (attmemo inspect); or --any-tokenizer, if this one is right",
        )
    for text in texts:
        for form in (text, f" {text}"):  # a word has other tokens at the beginning of a text, in some vocabularies
            ids = np.array(tokenizer(form, add_special_tokens=False)["input_ids"], np.int32)
            if not len(ids) or (ids == getattr(tokenizer, "unk_token_id", None)).all():
                raise typer.BadParameter(f"{text!r} has no token that the tokenizer of {model} knows.")
            found.append(ids)
    return found
