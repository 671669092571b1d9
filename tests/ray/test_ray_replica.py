"""Local replicas: copied once, whole or not at all, never changed."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from pools import damage
from stored_rows import StoredRows

from attmemo import Database
from attmemo.db import read_manifest
from attmemo.db.files import MANIFEST, PREPARED
from attmemo.db.pools.filling import Filling, is_sealed
from attmemo.errors import DatabaseCorruptError, DatabaseError, DatabaseNotFoundError, StorageFullError
from attmemo.profiler.build import BuildOptions, build_database
from attmemo.profiler.models import load_model
from attmemo.profiler.open import open_database
from attmemo.ray import ensure_local, replica


def build(model: str, log: Path, path: Path, limit: int, reuse: str | None = None) -> None:
    """Build, or go on with, a database of so many lines."""
    options = BuildOptions(storage="float32", reuse=reuse or ("rows" if is_sealed(path) else "maps"), limit=limit)
    build_database(load_model(model), [log], path, options)


@pytest.fixture(scope="module", params=["rows", "maps"])
def built(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_bert: str, service_log: Path
) -> Path:
    path = tmp_path_factory.mktemp("built") / "db"
    build(tiny_bert, service_log, path, 60, request.param)
    return path


@pytest.fixture(name="source")
def _source(built: Path, tmp_path: Path) -> Path:
    """A database of its own for each test; what a builder leaves lies there too."""
    path = tmp_path / "source"
    shutil.copytree(built, path)
    (path / "guard").mkdir()
    (path / "guard" / "0123.safetensors").write_bytes(b"learned")
    return path


def names(cache: Path) -> list[str]:
    """Replicas and parts of them."""
    return sorted(entry.name for entry in cache.iterdir() if not entry.name.endswith(".lock"))


def check_replica(found: Path, source: Path) -> None:
    if is_sealed(source):
        copy = StoredRows(found)
        assert (copy.filling, len(copy)) == (Filling.read(source), copy.filling.records)
        assert found.name == f"{copy.filling.uuid}-{copy.filling.edition}"
        return
    with Database(found) as copy, Database(source) as original:
        assert not copy.check()
        assert (copy.manifest, len(copy)) == (original.manifest, len(original))
        assert f"{copy.manifest.uuid}-{copy.manifest.generation:08d}" in found.name


def head(path: Path) -> Path:
    return path / (PREPARED if is_sealed(path) else MANIFEST)


@pytest.mark.parametrize("form", ["{}", "file://{}", "local://{}", "memory:/{}"])
def test_a_replica_holds_the_database_and_what_guards_learned(form: str, source: Path, tmp_path: Path) -> None:
    if "file" not in form and form != "{}":
        fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")
        if form.startswith("memory"):
            fsspec.filesystem("memory").put(f"{source}/", f"{source}/", recursive=True)
    place = form.format(source)
    found = ensure_local(place, tmp_path / "cache")
    check_replica(found, source)
    assert (found / "guard" / "0123.safetensors").read_bytes() == b"learned"
    assert not (found / "builder.lock").exists()
    before = head(found).stat()
    assert ensure_local(place, tmp_path / "cache") == found
    after = head(found).stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns), "copied once"
    assert names(tmp_path / "cache") == [found.name]


def test_the_default_place_is_in_the_cache_directory(source: Path, tmp_path: Path) -> None:
    assert ensure_local(source).parent == tmp_path / "cache" / "replicas"


def test_a_new_generation_has_a_replica_of_its_own(
    source: Path, tmp_path: Path, tiny_bert: str, service_log: Path
) -> None:
    first = ensure_local(source, tmp_path / "cache")
    with closing(open_database(first)) as old:
        count = len(old)
    build(tiny_bert, service_log, source, 90)
    second = ensure_local(source, tmp_path / "cache")
    assert second != first
    check_replica(second, source)
    with closing(open_database(first)) as old:
        assert len(old) == count


def test_copies_that_went_on_apart_do_not_share_a_replica(
    source: Path, tmp_path: Path, tiny_bert: str, service_log: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(source, other)
    for path, limit in ((source, 90), (other, 120)):
        build(tiny_bert, service_log, path, limit)
    found = [ensure_local(path, tmp_path / "cache") for path in (source, other)]
    assert found[0] != found[1]
    for one, path in zip(found, (source, other), strict=True):
        check_replica(one, path)


def _ensure(source: Path, cache: Path, log: Path, before: Callable[[int], object]) -> None:
    """In a process of its own: one line for each file, then `before` is called with its number, then it is copied."""
    get, seen = replica._Source.get, list[str]()

    def told(self: Any, name: str, target: Path) -> None:
        seen.append(name)
        with log.open("a") as stream:
            stream.write(f"{os.getpid()} {name}\n")
        before(len(seen))
        get(self, name, target)

    replica._Source.get = told  # type: ignore[method-assign]
    ensure_local(source, cache)


def test_of_processes_that_ask_at_once_one_copies(source: Path, tmp_path: Path) -> None:
    context, log = multiprocessing.get_context("fork"), tmp_path / "log"
    asked = (source, tmp_path / "cache", log, lambda _: time.sleep(0.001))
    processes = [context.Process(target=_ensure, args=asked) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4
    copied = [line.split() for line in log.read_text().splitlines()]
    assert len({pid for pid, _ in copied}) == 1
    assert len({name for _, name in copied}) == len(copied)
    check_replica(ensure_local(source, tmp_path / "cache"), source)


def test_a_copy_that_is_killed_is_never_taken_for_whole(source: Path, tmp_path: Path) -> None:
    cache, log = tmp_path / "cache", tmp_path / "log"

    def stop_at_the_second(number: int) -> None:
        while number == 2:  # until it is killed
            signal.pause()

    asked = (source, cache, log, stop_at_the_second)
    process = multiprocessing.get_context("fork").Process(target=_ensure, args=asked, daemon=True)
    process.start()
    while not log.exists() or len(log.read_text().splitlines()) < 2:
        assert process.is_alive()
        time.sleep(0.002)
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    assert [name.endswith(".part") for name in names(cache)] == [True]
    with pytest.raises(DatabaseNotFoundError):
        open_database(cache / names(cache)[0])
    found = ensure_local(source, cache)
    check_replica(found, source)
    assert names(cache) == [found.name]


def test_a_damaged_database_gives_no_replica(source: Path, tmp_path: Path) -> None:
    file = max((source / ("segments" if is_sealed(source) else "arena")).iterdir())
    if is_sealed(source):
        damage(StoredRows(source).kept[7])
    else:
        body = bytearray(file.read_bytes())
        body[read_manifest(source).page_size] ^= 1
        file.write_bytes(body)
    with pytest.raises(DatabaseCorruptError, match=r"damaged in 1 places.*do not match their checksum"):
        ensure_local(source, tmp_path / "cache")
    file.unlink()
    with pytest.raises(DatabaseCorruptError, match=r"no file that its manifest names|cannot be read"):
        ensure_local(source, tmp_path / "cache")
    assert names(tmp_path / "cache") == []


def test_a_database_that_is_published_meanwhile_is_copied_anew(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_bert: str, service_log: Path
) -> None:
    get, published = replica._Source.get, threading.Event()

    def publish_once(self: Any, name: str, target: Path) -> None:
        get(self, name, target)
        if not published.is_set():
            published.set()
            build(tiny_bert, service_log, source, 90)

    monkeypatch.setattr(replica._Source, "get", publish_once)
    found = ensure_local(source, tmp_path / "cache")
    check_replica(found, source)
    assert names(tmp_path / "cache") == [found.name]


def test_a_full_disk_is_said_before_anything_is_copied(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(StorageFullError, match=r"a replica needs [\d,]+ bytes, 1,000 are free"):
        ensure_local(source, tmp_path / "cache")
    assert names(tmp_path / "cache") == []


def test_what_is_no_prepared_database_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatabaseNotFoundError, match=r"has no MANIFEST.json"):
        ensure_local(tmp_path / "nothing", tmp_path / "cache")
    with pytest.raises(DatabaseNotFoundError, match=r"has no MANIFEST.json"):
        ensure_local("memory://nothing", tmp_path / "cache")
    with pytest.raises(DatabaseError, match=r"cannot be opened"):
        ensure_local("nosuchscheme://nothing", tmp_path / "cache")
    (tmp_path / "filling").mkdir()
    (tmp_path / "filling" / "FILLING.json").write_text("{}")
    with pytest.raises(DatabaseError, match=r"fills itself: every node has its own"):
        ensure_local(tmp_path / "filling", tmp_path / "cache")
