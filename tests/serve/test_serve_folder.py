"""A service starts on its folder whatever happened to the folder: restarts must not end where the last one did."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from pools import refuse
from services import living

TEXTS = ["alpha 1 beta", "alpha 2 beta", "gamma 3 delta"]


def answers(model: str, folder: Path) -> tuple[list[list[float]], int]:
    """What a service on a folder answers, and how many records there are then."""
    with living(model, database=None, fill=str(folder), max_bytes=1 << 24) as server:
        reply = server.post("/embed", {"inputs": TEXTS})
        assert reply.status == 200, reply.body
        handle = server.service.model.module.attmemo
        assert handle.flush()
        assert server.post("/embed", {"inputs": TEXTS}).status == 200  # from its records: now the guard has decided
        return reply.json, int(handle.stats()["records"])


@pytest.mark.parametrize("part", ["FILLING.json", "catalogue/data.mdb", "segments/*", "guard/*.safetensors"])
@pytest.mark.parametrize("size", [0, 100, 4096])
def test_a_service_starts_whatever_part_of_its_folder_is_cut(
    model: str, tmp_path: Path, part: str, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "db"
    expected, records = answers(model, folder)
    assert records == len(TEXTS)
    (file,) = folder.glob(part)
    os.truncate(file, size)
    caplog.clear()
    for _ in range(2):
        found, records = answers(model, folder)
        assert records == len(TEXTS)
        assert found == [pytest.approx(one, abs=1e-4) for one in expected]
    assert caplog.text.count("set aside") == 1


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT], ids=errno.errorcode.get)
def test_a_service_with_a_new_folder_starts_on_a_full_disk(
    model: str, tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected, _ = answers(model, tmp_path / "other")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse(code))
        found, records = answers(model, tmp_path / "db")
    assert found == [pytest.approx(one, abs=1e-4) for one in expected]
    assert records == len(TEXTS)
    assert caplog.text.count("kept in memory only") == 1
    assert answers(model, tmp_path / "db")[1] == len(TEXTS)
    assert caplog.text.count("kept in memory only") == 1
