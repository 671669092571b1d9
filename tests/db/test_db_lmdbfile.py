"""The guard in front of LMDB: it lets every file pass that LMDB wrote, and none that could end the process."""

from __future__ import annotations

import random
import struct
import threading
from pathlib import Path

import lmdb
import pytest
from children import in_child
from databases import memory_directory
from db_tools import KEY, write_entries
from hypothesis import given, settings
from hypothesis import strategies as st

from attmemo.db.lmdbfile import check_environment


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    batches=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300), st.integers(0, 500)), min_size=1, max_size=6),
    nbytes=st.sampled_from([1, 17, 40, 401, 1999, 2033, 2050, 4096, 9000]),
)
def test_a_sound_file_passes(batches: list[tuple[int, int, int]], nbytes: int) -> None:
    """Appending, overwriting and cutting, values in the page and on pages of their own: all of it passes."""
    with memory_directory() as folder:
        write_entries(folder, batches, nbytes)
        check_environment(folder / "data.mdb")


@pytest.mark.parametrize("nbytes", [17, 401, 5000])
def test_a_file_that_passes_never_ends_the_process(nbytes: int, tmp_path: Path) -> None:
    """Whatever passes after random damage, LMDB can walk, cut and extend without a signal."""
    write_entries(tmp_path, [(0, 200, 190), (190, 60, 220), (100, 20, 200)], nbytes)
    body = (tmp_path / "data.mdb").read_bytes()
    (tmp_path / "damaged").mkdir()
    file = tmp_path / "damaged" / "data.mdb"

    def damage() -> None:
        generator = random.Random(nbytes)
        refused = 0
        for _ in range(400):
            hostile = bytearray(body)
            for _ in range(generator.randint(1, 3)):
                page = generator.randrange(len(body) // 4096)
                place = page * 4096 + generator.randrange(generator.choice((160, 160, 4096)))
                hostile[place] = generator.choice((hostile[place] ^ 1 << generator.randrange(8), 0, 255))
            if generator.random() < 0.1:
                del hostile[generator.randrange(len(hostile)) :]
            file.write_bytes(hostile)
            try:
                check_environment(file)
            except ValueError:
                refused += 1
                continue
            try:
                write_entries(tmp_path / "damaged", [(0, 0, 150), (150, 60, 400)], nbytes)
                with lmdb.open(str(tmp_path / "damaged"), map_size=1 << 28) as e, e.begin() as transaction:
                    assert sum(1 for _ in transaction.cursor()) < 10_000
            except lmdb.Error:
                pass
        assert refused > 40, refused

    assert in_child(damage) == 0


def _root(body: bytes | bytearray) -> int:
    """Page number of the root of the tree of entries: from the newer meta page."""
    metas = [at for at in (0, 4096) if struct.unpack_from("<I", body, at + 16)[0] == 0xBEEFC0DE]
    newest = max(metas, key=lambda at: int(struct.unpack_from("<Q", body, at + 144)[0]))
    return int(struct.unpack_from("<Q", body, newest + 128)[0])


def _nodes(body: bytes | bytearray, page: int) -> tuple[int, ...]:
    (lower,) = struct.unpack_from("<H", body, page * 4096 + 12)
    return struct.unpack_from(f"<{(lower - 16) // 2}H", body, page * 4096 + 16)


def _refused(file: Path, body: bytes | bytearray) -> bool:
    file.write_bytes(body)
    try:
        check_environment(file)
    except ValueError:
        return True
    return False


def test_a_cycle_is_refused(tmp_path: Path) -> None:
    """A branch that points at itself, at a meta page, behind the end, or where its sister points: refused."""
    write_entries(tmp_path, [(0, 2000, 3000)], 100)
    file = tmp_path / "data.mdb"
    body = file.read_bytes()
    root = _root(body)
    assert struct.unpack_from("<H", body, root * 4096 + 10)[0] == 1, "one page was enough: no branch to damage"
    first, second = _nodes(body, root)[:2]
    low, high = struct.unpack_from("<HH", body, root * 4096 + second)
    for child in (root, 0, 1, len(body) // 4096, 1 << 31, low | high << 16):
        hostile = bytearray(body)
        struct.pack_into("<HH", hostile, root * 4096 + first, child & 0xFFFF, child >> 16)
        assert _refused(file, hostile), child
    assert not _refused(file, body)


def test_overlapping_nodes_are_refused(tmp_path: Path) -> None:
    """Two entries that share their bytes would underflow when LMDB deletes one: refused. So are gaps."""
    write_entries(tmp_path, [(0, 10, 20)], 100)
    file = tmp_path / "data.mdb"
    body = file.read_bytes()
    leaf = _root(body)
    nodes = _nodes(body, leaf)
    assert len(nodes) == 10
    for place, node in ((0, nodes[1]), (3, nodes[3] + 2), (9, nodes[0])):
        hostile = bytearray(body)
        struct.pack_into("<H", hostile, leaf * 4096 + 16 + 2 * place, node)
        assert _refused(file, hostile), place
    hostile = bytearray(body)
    struct.pack_into("<H", hostile, leaf * 4096 + nodes[5], 98)  # a value two bytes shorter
    assert _refused(file, hostile)


def test_a_torn_read_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read while two commits went by: the meta pages are others now, so it is read again; else it is damage."""
    write_entries(tmp_path, [(0, 10, 20)], 100)
    file = tmp_path / "data.mdb"
    before = bytearray(file.read_bytes())
    before[_root(before) * 4096 + 10] = 77
    write_entries(tmp_path, [(10, 10, 30)], 100)
    reads = [bytes(before), file.read_bytes()]
    monkeypatch.setattr(Path, "read_bytes", lambda _: reads.pop(0))
    check_environment(file)
    assert reads == []
    torn = bytearray(file.open("rb").read())
    torn[_root(torn) * 4096 + 10] = 77
    file.write_bytes(torn)
    reads.append(bytes(torn))
    with pytest.raises(ValueError, match="has flags 77"):
        check_environment(file)


@pytest.mark.parametrize("body", [b"", b"\0" * 500, b"\0" * 8192, b"\xff" * 8192, b"\0" * 100_000])
def test_a_file_of_nothing_is_refused(body: bytes, tmp_path: Path) -> None:
    """Empty, zeros, ones."""
    (tmp_path / "data.mdb").write_bytes(body)
    with pytest.raises(ValueError, match="bytes"):
        check_environment(tmp_path / "data.mdb")


def test_a_commit_under_way_is_no_damage(tmp_path: Path) -> None:
    """While another process's builder commits, the file is read again until it stands still: never a false alarm."""
    write_entries(tmp_path, [(0, 500, 600)], 100)
    done = threading.Event()

    def commit() -> None:
        generator = random.Random(8)
        with lmdb.open(str(tmp_path), map_size=1 << 28, sync=False) as environment:
            while not done.is_set():
                with environment.begin(write=True) as transaction:
                    for _ in range(30):
                        transaction.put(KEY.pack(generator.randrange(800)), generator.randbytes(100))
                done.wait(0.0005)

    builder = threading.Thread(target=commit)
    builder.start()
    try:
        for _ in range(100):
            check_environment(tmp_path / "data.mdb")
    finally:
        done.set()
        builder.join()
