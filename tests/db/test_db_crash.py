"""A builder that is killed between two steps, and a disk that is really full: what is left can be finished."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from children import in_child
from databases import LENGTHS, contents, fill, findings
from db_tools import READ_ONLY, REMOUNT, SHORT, check_published, need_tmpfs

from attmemo.errors import DatabaseCorruptError, StorageFullError


def test_a_catalogue_ahead_of_the_manifest_opens_and_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The catalogue is one publication ahead of the manifest: legal, opens, and is cut off by the next builder."""
    path = fill(tmp_path / "db", SHORT[:2])

    def build() -> None:
        monkeypatch.setattr("attmemo.db.writer.write_manifest", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        fill(path, (*SHORT[:2], 9, 9))

    assert in_child(build) == -signal.SIGKILL
    assert sorted(contents(path)) == [(0, 0), (0, 1)]
    assert findings(path) == []
    fill(path, SHORT)
    assert contents(path) == contents(fill(tmp_path / "straight", SHORT))


# -- a real full disk: a small tmpfs in a namespace of its own


def test_a_really_full_disk_costs_only_what_was_not_published(tmp_path: Path) -> None:
    """A tmpfs of every size up to what is needed: no signal, a named error, the rest as after any ENOSPC."""
    tmpfs, path = need_tmpfs(tmp_path), tmp_path / "db"
    lengths = LENGTHS[:6]

    def sizes() -> None:
        tmpfs.mount("size=64m")
        expected = contents(fill(path, lengths))
        tmpfs.unmount()
        failed, kib = 0, 4
        while failed == (kib - 4) // 4:
            tmpfs.mount(f"size={kib}k")
            try:
                fill(path, lengths)
            except StorageFullError:
                failed += 1
                if (path / "MANIFEST.json").exists():
                    check_published(path, expected)
                assert not (path / "MANIFEST.json.tmp").exists()
                tmpfs.mount("size=64m", REMOUNT)
                fill(path, lengths)
            assert contents(path) == expected
            assert findings(path) == []
            tmpfs.unmount()
            kib += 4
        assert failed > 20, failed

    assert in_child(sizes, first=tmpfs.unshare) == 0


def test_a_reader_needs_no_room_and_no_right_to_write(tmp_path: Path) -> None:
    """A database copied without LMDB's lock file opens on a read-only disk, and on one without a free byte."""
    tmpfs, path = need_tmpfs(tmp_path), tmp_path / "db"

    def look() -> None:
        tmpfs.mount("size=1m")
        expected = contents(fill(path))
        (path / "catalogue" / "lock.mdb").unlink()
        with (tmp_path / "ballast").open("wb", buffering=0) as stream:
            try:
                while True:
                    stream.write(b"x" * 4096)
            except OSError:
                pass
        assert contents(path) == expected
        tmpfs.mount("size=1m", REMOUNT | READ_ONLY)
        assert contents(path) == expected
        assert findings(path) == []

    assert in_child(look, first=tmpfs.unshare) == 0


def test_a_damaged_catalogue_is_an_error_for_the_builder_and_no_signal(tmp_path: Path) -> None:
    """A builder that resumes on a truncated catalogue gets an error, not SIGBUS."""
    path = fill(tmp_path / "db")
    file = path / "catalogue" / "data.mdb"
    size = file.stat().st_size

    def resume() -> None:
        for cut in (0, 100, 4096, 8192, 12288, size - 4096):
            whole = file.read_bytes()
            os.truncate(file, cut)
            with pytest.raises(DatabaseCorruptError, match="catalogue"):
                fill(path, (*LENGTHS, 3))
            file.write_bytes(whole)

    assert in_child(resume) == 0
