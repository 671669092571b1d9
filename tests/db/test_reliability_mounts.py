"""A file system over others. Remote ones cannot be mounted here; the README promises nothing of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from children import in_child
from databases import LENGTHS, contents, fill, findings
from db_tools import Tmpfs

from attmemo.db import KIND_MAP, Database
from attmemo.mmap import CopyFetcher, MapFetcher, ViewFetcher


def test_an_overlay_never_shows_a_reader_another_file_than_it_opened(tmp_path: Path) -> None:
    """A builder's first write copies a file up: who opened it before keeps the one below, who comes after does not."""
    tmpfs = Tmpfs(tmp_path)

    def mounted() -> Path:
        tmpfs.mount("size=64m")
        for name in ("lower", "upper", "work", "both"):
            (tmp_path / name).mkdir()
        fill(tmp_path / "lower" / "db", LENGTHS[:4])
        options = f"lowerdir={tmp_path}/lower,upperdir={tmp_path}/upper,workdir={tmp_path}/work,userxattr"
        if tmpfs.libc.mount(b"overlay", os.fsencode(tmp_path / "both"), b"overlay", 0, options.encode()):
            os._exit(77)
        return tmp_path / "both" / "db"

    def body() -> None:
        path = mounted()
        before = contents(path)
        with Database(path) as old:
            slots = old.slots_of(KIND_MAP, 1, torch.tensor([0, 2]).numpy())
            expected = [old.map(1, record).clone() for record in (0, 2)]
            fill(path)
            for fetcher in (CopyFetcher(), ViewFetcher(), MapFetcher(strict=True)):
                with fetcher.fetch(old.arena(KIND_MAP, LENGTHS[0]), slots) as batch:
                    assert all(torch.equal(batch[i], expected[i]) for i in range(2)), fetcher.name
                fetcher.close()
            assert len(old) == 4
        after = contents(path)
        assert {key: after[key] for key in before} == before
        assert len(after) == len(LENGTHS)
        assert findings(path) == []
        assert len(contents(tmp_path / "lower" / "db")) == 4

    code = in_child(body, first=tmpfs.unshare, quiet=False)
    if code == 77:
        pytest.skip("an overlay cannot be mounted here")
    assert code == 0
