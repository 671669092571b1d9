"""A segment of records: what was written is read by every process, and a file that is something else is told."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attmemo.db.pools.segment import (
    AHEAD,
    ALIGNED,
    BYTES_PER_MARK,
    FEWEST_MARKS,
    PIECE,
    Bytes,
    Segment,
    bytes_for,
    marks_for,
    rounded,
    start_of,
)
from attmemo.errors import DatabaseCorruptError, DatabaseTruncatedError

SIZE: Final = 1 << 16
START: Final = start_of(marks_for(SIZE))


def body(seed: int, nbytes: int = 1000) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes).astype(np.uint8)


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(name="file")
def _file(tmp_path: Path) -> Path:
    return tmp_path / "0000000007"


@pytest.fixture(name="segment", params=["memory", "file"])
def _segment(request: pytest.FixtureRequest, file: Path) -> Segment:
    return Segment.in_memory(7, SIZE) if request.param == "memory" else Segment.create(file, 7, SIZE)


def test_memory_is_asked_for_up_to_the_last_byte_of_a_segment_and_not_behind() -> None:
    size = 5 * AHEAD + 4096
    segment = Segment.in_memory(1, size)
    first = start_of(marks_for(size))
    lengths = [3, AHEAD - 1, 2 * AHEAD + 4097, 70]
    lengths.append(size - first - sum(lengths))
    expected = body(3, size - first)
    at = first
    for length in lengths:
        segment.write(at, expected[at - first : at - first + length])
        at += length
    assert at == size
    assert np.array_equal(segment.bytes_at(first, size - first), expected)
    segment.write(first, expected[:100][::-1].copy())  # where a record was before
    assert np.array_equal(segment.bytes_at(first, 100), expected[:100][::-1])


class TestSizes:
    @settings(max_examples=300, deadline=None, derandomize=True)
    @given(st.integers(0, 1 << 40), st.sampled_from([1 << 14, 1 << 20, 32 << 20]))
    def test_a_new_segment_has_room_for_the_record_it_is_made_for(self, record: int, usual: int) -> None:
        nbytes = bytes_for(rounded(record), usual)
        assert nbytes >= usual
        assert nbytes % 4096 == 0
        assert start_of(marks_for(nbytes)) + rounded(record) <= nbytes
        assert nbytes in (usual, bytes_for(rounded(record), 0)), "no more than either asks for"

    @settings(max_examples=300, deadline=None, derandomize=True)
    @given(st.integers(0, 1 << 40))
    def test_records_are_aligned(self, nbytes: int) -> None:
        assert rounded(nbytes) % ALIGNED == start_of(marks_for(nbytes)) % ALIGNED == 0
        assert 0 <= rounded(nbytes) - nbytes < ALIGNED
        assert marks_for(nbytes) == max(FEWEST_MARKS, nbytes // BYTES_PER_MARK)

    def test_records_begin_behind_all_marks(self, segment: Segment) -> None:
        assert segment.marks is not None
        segment.write(segment.start, np.full(SIZE - segment.start, 255, np.uint8))
        segment.marks[:] = 3
        assert bytes(segment.bytes_at(segment.start, SIZE - segment.start)) == b"\xff" * (SIZE - segment.start)
        assert len(segment.marks) == segment.room == marks_for(SIZE)


class TestBytes:
    def test_what_was_written_is_read_where_it_lies(self, segment: Segment) -> None:
        for place, offset in enumerate((START, START + 1024, SIZE - 1000)):
            segment.write(offset, body(place))
        segment.sync()
        for place, offset in enumerate((START, START + 1024, SIZE - 1000)):
            found = segment.bytes_at(offset, 1000)
            assert np.array_equal(found, body(place))
            assert found.ctypes.data == segment.address + offset
        segment.check_whole()

    def test_between_pieces_in_memory_the_caller_may_pause(self) -> None:
        segment = Segment.in_memory(7, 8 * PIECE)
        whole, seen = body(3, 2 * PIECE + 1), list[bytes]()
        segment.write(START, whole, lambda: seen.append(bytes(segment.bytes_at(START, len(whole)))))
        written = [bytes(whole[:end]) for end in (PIECE, 2 * PIECE, len(whole))]
        assert seen == [part.ljust(len(whole), b"\0") for part in written]

    def test_another_opening_reads_what_was_written_before_and_after(self, file: Path) -> None:
        own = Segment.create(file, 7, SIZE)
        own.write(START, body(1))
        other = Segment.open(file, 7, SIZE)
        own.write(START + 1024, body(2))
        assert np.array_equal(other.bytes_at(START, 1000), body(1))
        assert np.array_equal(other.bytes_at(START + 1024, 1000), body(2))
        assert (other.number, other.nbytes, other.start, other.room) == (7, SIZE, own.start, own.room)

    def test_a_reader_holds_the_bytes_of_a_file_that_was_removed(self, file: Path) -> None:
        segment = Segment.create(file, 7, SIZE)
        segment.write(START, body(1))
        found = segment.bytes_at(START, 1000)
        file.unlink()
        segment.check_whole()
        assert np.array_equal(found, body(1))
        del segment
        gc.collect()
        assert np.array_equal(found, body(1)), "what is read holds its memory"

    def test_bytes_in_a_file_cannot_be_changed_by_a_reader(self, file: Path) -> None:
        found = Segment.create(file, 7, SIZE).bytes_at(START, 1000)
        with pytest.raises(ValueError, match="read-only"):
            found[0] = 1

    def test_a_file_takes_its_space_from_the_disk_at_once(self, file: Path) -> None:
        Segment.create(file, 7, SIZE)
        assert file.stat().st_size == SIZE
        assert file.stat().st_blocks * 512 >= SIZE

    def test_a_segment_that_nothing_holds_gives_its_descriptor_back(self, file: Path) -> None:
        before = descriptors()
        segment = Segment.create(file, 7, SIZE)
        assert descriptors() > before
        del segment
        assert descriptors() == before


class TestMarks:
    def test_uses_are_counted_for_each_record(self, segment: Segment) -> None:
        assert segment.marks is not None
        np.add.at(segment.marks, [0, 3, 3, segment.room - 1], 1)
        assert [segment.hits(place) for place in range(segment.room)] == [1, 0, 0, 2, *[0] * (segment.room - 5), 1]

    def test_all_openings_of_a_file_share_them(self, file: Path) -> None:
        own = Segment.create(file, 7, SIZE)
        other = Segment.open(file, 7, SIZE)
        for one in (own, other):
            assert one.marks is not None
            one.marks[5] += 1
        assert own.hits(5) == other.hits(5) == Segment.open(file, 7, SIZE).hits(5) == 2

    def test_where_they_cannot_be_written_nothing_was_used(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        Segment.create(file, 7, SIZE).write(START, body(1))
        own = os.open

        def read_only(path: Any, flags: int, *more: Any, **options: Any) -> int:
            if flags & os.O_RDWR:
                raise PermissionError(13, "Permission denied")
            return own(path, flags, *more, **options)

        monkeypatch.setattr(os, "open", read_only)
        segment = Segment.open(file, 7, SIZE)
        assert (segment.marks, segment.hits(2)) == (None, 0)
        assert np.array_equal(segment.bytes_at(START, 1000), body(1))


class TestRefused:
    @pytest.mark.parametrize("place", [0, 16, 24, 32])
    def test_another_head_is_told(self, file: Path, place: int) -> None:
        Segment.create(file, 7, SIZE)
        content = bytearray(file.read_bytes())
        content[place] ^= 1
        file.write_bytes(content)
        before = descriptors()
        with pytest.raises(DatabaseCorruptError, match="expected segment 7"):
            Segment.open(file, 7, SIZE)
        assert descriptors() == before

    def test_another_number_or_size_than_the_catalogues_is_told(self, file: Path) -> None:
        Segment.create(file, 7, SIZE)
        for number, nbytes in ((8, SIZE), (7, SIZE - 4096)):
            with pytest.raises(DatabaseCorruptError, match="expected segment"):
                Segment.open(file, number, nbytes)

    @pytest.mark.parametrize("left", [0, 10, 4096, SIZE - 1])
    def test_a_file_that_was_cut_is_told(self, file: Path, left: int) -> None:
        segment = Segment.create(file, 7, SIZE)
        os.truncate(file, left)
        before = descriptors()
        with pytest.raises(DatabaseTruncatedError, match=f"has {left} bytes, expected {SIZE}"):
            Segment.open(file, 7, SIZE)
        assert descriptors() == before
        with pytest.raises(DatabaseTruncatedError, match=f"was cut to {left} bytes"):
            segment.check_whole()

    def test_a_disk_without_room_leaves_no_file(self, file: Path) -> None:
        before = descriptors()
        with pytest.raises(OSError, match=r"."):
            Segment.create(file, 7, 1 << 62)
        assert not file.exists()
        assert descriptors() == before
