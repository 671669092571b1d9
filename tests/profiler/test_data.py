"""The readers of the user's text: what they must not lose, and what they must refuse."""

from __future__ import annotations

import csv
import gzip
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa  # type: ignore[import-untyped,unused-ignore]
import pyarrow.parquet as pq  # type: ignore[import-untyped,unused-ignore]
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attmemo.errors import DataError
from attmemo.profiler import data
from attmemo.profiler.data import Row, count_rows, digest, read_texts

Write = Callable[[Path, Sequence[str]], None]

# A first row of letters, because a column of nothing but numbers is refused.
FIRST = "the first row"


def write_lines(path: Path, texts: Sequence[str]) -> None:
    path.write_bytes("".join(text + "\n" for text in texts).encode())


def write_csv(path: Path, texts: Sequence[str]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([["id", "text"], *enumerate(texts)])


def write_tsv(path: Path, texts: Sequence[str]) -> None:
    path.write_bytes(("id\ttext\n" + "".join(f"{n}\t{text}\n" for n, text in enumerate(texts))).encode())


def write_jsonl(path: Path, texts: Sequence[str]) -> None:
    path.write_text("".join(json.dumps({"id": n, "text": text}) + "\n" for n, text in enumerate(texts)))


def write_parquet(path: Path, texts: Sequence[str]) -> None:
    table = pa.table({"id": list(range(len(texts))), "text": pa.array(texts, pa.string())})
    pq.write_table(table, path, row_group_size=3)


WRITERS: dict[str, Write] = {
    ".txt": write_lines,
    ".csv": write_csv,
    ".tsv": write_tsv,
    ".jsonl": write_jsonl,
    ".parquet": write_parquet,
}

any_text = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=30)
TEXTS = {
    ".txt": any_text.map(lambda text: text.replace("\n", " ").removesuffix("\r")),
    ".csv": any_text,
    ".tsv": any_text.map(lambda text: text.replace("\n", " ").replace("\t", " ").removesuffix("\r")),
    ".jsonl": any_text,
    ".parquet": any_text,
}


@pytest.fixture
def make(tmp_path: Path) -> Callable[[str, str | bytes], Path]:
    """Write a file of the given name and content."""

    def write(name: str, content: str | bytes) -> Path:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


Make = Callable[[str, str | bytes], Path]


def refusal(files: object, **options: object) -> str:
    """The message with which reading the files is refused."""
    with pytest.raises(DataError) as caught:
        list(read_texts(files, **options))  # type: ignore[arg-type]
    assert caught.value.hint, "a refusal says what to do next"
    return str(caught.value)


@pytest.mark.parametrize("suffix", WRITERS)
def test_no_text_is_altered_lost_or_moved(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"data{suffix}"

    @settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    @given(st.lists(TEXTS[suffix], max_size=6))
    def check(texts: list[str]) -> None:
        texts = [FIRST, *texts]
        WRITERS[suffix](path, texts)
        expected = [Row(text, None, str(path), row) for row, text in enumerate(texts) if text.strip()]
        assert list(read_texts([path])) == expected
        assert count_rows([path]) >= len(expected)

    check()


@pytest.mark.parametrize("suffix", WRITERS)
def test_rows_beyond_the_first_chunk_keep_their_numbers(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "_CHUNK_ROWS", 7)
    path = tmp_path / f"data{suffix}"
    texts = [f"text number {n}" for n in range(30)]
    WRITERS[suffix](path, texts)
    assert [(row.row, row.text) for row in read_texts([path])] == list(enumerate(texts))
    assert count_rows([path]) == 30


@pytest.mark.parametrize("suffix", WRITERS)
def test_blank_rows_are_skipped_but_still_numbered(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"data{suffix}"
    WRITERS[suffix](path, ["one", "", "   ", "four"])
    assert [(row.row, row.text) for row in read_texts([path])] == [(0, "one"), (3, "four")]


@pytest.mark.parametrize("suffix", WRITERS)
def test_a_file_of_blank_rows_is_not_read_as_nothing(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"data{suffix}"
    WRITERS[suffix](path, ["", " "])
    assert "no non-blank rows" in refusal([path])


def test_words_that_pandas_takes_for_missing_stay_texts(make: Make) -> None:
    path = make("a.csv", "text\nhello\nNA\nnull\nnan\nNone\n")
    assert [row.text for row in read_texts([path])] == ["hello", "NA", "null", "nan", "None"]


def test_quotes_do_not_eat_the_rows_of_a_tsv(make: Make) -> None:
    path = make("sst.tsv", 'sentence\tlabel\n"an unclosed quote\t1\nnext "one"\t0\n')
    assert [(row.text, row.label) for row in read_texts([path], label_column="label")] == [
        ('"an unclosed quote', 1),
        ('next "one"', 0),
    ]


def test_windows_line_ends_and_a_byte_order_mark_do_not_enter_the_text(make: Make) -> None:
    texts = [
        [row.text for row in read_texts([path], text_column=column)]
        for path, column in (
            (make("a.log", b"\xef\xbb\xbfone\r\ntwo\r\n"), None),
            (make("a.csv", b"\xef\xbb\xbftext,n\r\none,1\r\ntwo,2\r\n"), "text"),
            (make("a.tsv", b"\xef\xbb\xbfn\ttext\r\n1\tone\r\n2\ttwo\r\n"), "text"),
            (make("a.jsonl", b'\xef\xbb\xbf{"text": "one"}\r\n{"text": "two"}\r\n'), "text"),
        )
    ]
    assert texts == [["one", "two"]] * 4


def test_a_log_line_keeps_its_spaces_and_its_carriage_returns(make: Make) -> None:
    path = make("a.log", b"  indented \t \n10%\r20%\rdone\nlast without newline")
    assert [row.text for row in read_texts([path])] == ["  indented \t ", "10%\r20%\rdone", "last without newline"]
    assert count_rows([path]) == 3


@pytest.mark.parametrize("name", ["a.txt", "a.csv", "a.tsv", "a.jsonl"])
@pytest.mark.parametrize("byte", [b"\xe9", b"\x00"], ids=["Latin-1", "zero"])
def test_bytes_that_are_not_text_are_refused_by_their_line(name: str, byte: bytes, make: Make) -> None:
    line = b'{"text": "caf%s"}' if name.endswith("jsonl") else b"caf%s"
    head = b"text\n" if name[2:] in ("csv", "tsv") else line % b"e" + b"\n"
    path = make(name, head + line % byte + b"\n")
    said = refusal([path])
    assert f"{path}, line 2: " in said
    assert ("not UTF-8" in said and "iconv" in said) if byte == b"\xe9" else "zero byte" in said
    with pytest.raises(DataError, match="line 2"):
        count_rows([path])


def test_a_lone_surrogate_is_replaced(make: Make) -> None:
    (row,) = read_texts([make("a.jsonl", '{"text": "broken \\ud83d emoji"}\n')])
    assert row.text == "broken \ufffd emoji"


def test_labels_are_the_same_python_values_in_every_format(make: Make, tmp_path: Path) -> None:
    values = [1, 0, None]
    table = pa.table({"text": ["a", "b", "c"], "label": pa.array(values, pa.float64())})
    pq.write_table(table, tmp_path / "a.parquet")
    paths = [
        tmp_path / "a.parquet",
        make("a.csv", "text,label\na,1\nb,0.0\nc,\n"),
        make("a.tsv", "text\tlabel\na\t1\nb\t0\nc\t\n"),
        make(
            "a.jsonl", "".join(json.dumps({"text": t, "label": v}) + "\n" for t, v in zip("abc", values, strict=True))
        ),
    ]
    for path in paths:
        labels = [row.label for row in read_texts([path], label_column="label")]
        assert labels == values
        assert [type(label) for label in labels] == [int, int, type(None)]


def test_named_labels_and_codes_with_leading_zeros_stay_text(make: Make) -> None:
    path = make("a.csv", "text,label\na,spam\nb,007\n")
    assert [row.label for row in read_texts([path], label_column="label")] == ["spam", "007"]


def test_a_categorical_parquet_column_is_text(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"n": [1, 2, 3], "kind": pa.array(["x", "y", "x"]).dictionary_encode()}), path)
    assert [row.text for row in read_texts([path])] == ["x", "y", "x"]


def test_a_parquet_column_with_a_dot_in_its_name_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"a": [{"b": 1}], "log.message": ["hello"]}), path)
    assert [row.text for row in read_texts([path], text_column="log.message")] == ["hello"]


@pytest.mark.parametrize(
    ("header", "label", "expected"),
    [
        ("id,body", None, "body"),
        ("title,Text", None, "Text"),
        ("line,sentence", None, "sentence"),
        ("tag,body", "tag", "body"),
    ],
)
def test_the_obvious_text_column_needs_no_option(header: str, label: str | None, expected: str, make: Make) -> None:
    cells = {"id": "7", "title": "a title", "line": "a line", "tag": "spam"}
    values = [f"text of {name}" if name == expected else cells[name] for name in header.split(",")]
    path = make("a.csv", f"{header}\n{','.join(values)}\n")
    assert [row.text for row in read_texts([path], label_column=label)] == [f"text of {expected}"]


def test_several_text_columns_are_not_guessed_between(make: Make) -> None:
    said = refusal([make("a.csv", "title,body\na,b\n")])
    assert "'title' (text), 'body' (text)" in said
    assert "--text-column" in said


def test_a_misspelt_column_is_answered_with_the_right_one(make: Make, tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", ["x"])
    for path in (tmp_path / "a.parquet", make("a.csv", "id,text\n1,x\n"), make("a.jsonl", '{"id": 1, "text": "x"}')):
        assert "did you mean --text-column 'text'?" in refusal([path], text_column="Txt")
    said = refusal([path], label_column="label")
    assert "no column 'label'" in said
    assert "--label-column" in said


def test_a_column_of_numbers_is_not_text(make: Make, tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", ["x"])
    for path in (tmp_path / "a.parquet", make("a.csv", "id,text\n1,x\n"), make("a.jsonl", '{"id": 1, "text": "x"}')):
        assert "column 'id' holds numbers, expected text" in refusal([path], text_column="id")
    assert "no column holds text" in refusal([make("b.csv", "a,b\n1,2\n")])


def test_a_number_among_texts_is_named_by_its_row(make: Make) -> None:
    path = make("a.jsonl", '{"text": "x"}\n{"text": 5}\n')
    assert "data row 1 (from 0): column 'text' holds numbers" in refusal([path], text_column="text")


def test_a_headerless_tsv_does_not_lose_its_first_row(make: Make) -> None:
    path = make("cola.tsv", "gj04\t1\t\tOur friends won't buy this analysis.\ngj04\t0\t*\tThey drank the pub.\n")
    assert "looks like data, expected column names" in refusal([path])
    assert "looks like data, expected column names" in refusal([path], text_column="sentence")


def test_malformed_json_is_named_by_its_line(make: Make) -> None:
    path = make("a.jsonl", '{"text": "x"}\n\n{"text": \n')
    assert f"{path}, line 3: malformed JSON" in refusal([path])
    assert "jq -c '.[]'" in refusal([make("b.json", '[{"text": "x"}]')])
    assert "line 1: malformed JSON" in refusal([make("c.json", "[" * 100_000)])


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("text,n\na,1\nb,with a comma,2\n", "Expected 2 fields in line 3, saw 3"),
        ("text,n\na,with a comma,1\n", "Expected 2 fields in line 2, saw 3"),
        ('text,n\n"never closed,1\n', "unexpected end of data"),
    ],
)
def test_a_malformed_csv_is_refused_not_truncated(content: str, expected: str, make: Make) -> None:
    said = refusal([make("a.csv", content)], text_column="text")
    assert expected in said


def test_a_row_that_is_too_long_is_refused_beyond_the_first_chunk(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "_CHUNK_ROWS", 4)
    monkeypatch.setattr(data, "_SAMPLE_ROWS", 2)
    for good in (3, 7, 8, 9):
        path = make("a.csv", "text,n\n" + "a,1\n" * good + "a,b,1\n")
        assert f"Expected 2 fields in line {good + 2}, saw 3" in refusal([path])


def test_a_broken_parquet_file_does_not_escape_as_an_arrow_error(make: Make, tmp_path: Path) -> None:
    assert "malformed .parquet" in refusal([make("a.parquet", "not parquet at all")])
    whole = tmp_path / "b.parquet"
    write_parquet(whole, ["x" * 50] * 9)
    assert "b.parquet" in refusal([make("b.parquet", whole.read_bytes()[:-9])])
    write_parquet(whole, ["x" * 50] * 9)
    damaged = bytearray(whole.read_bytes())
    damaged[4:60] = b"\xff" * 56
    assert "c.parquet" in refusal([make("c.parquet", bytes(damaged))], text_column="id")


@pytest.mark.parametrize("name", ["a.txt", "a.csv", "a.tsv", "a.jsonl", "a.parquet"])
def test_an_empty_file_is_not_read_as_nothing(name: str, make: Make) -> None:
    assert "empty (0 bytes)" in refusal([make(name, b"")])


@pytest.mark.parametrize("content", ["text,label\n", "\n\n", "\ufeff", "text\n\n \n"])
def test_a_csv_without_data_rows_is_not_read_as_nothing(content: str, make: Make) -> None:
    assert "a.csv" in refusal([make("a.csv", content)])


def test_what_cannot_be_read_twice_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.log")
    for name in ("-", tmp_path / "pipe.log", "/dev/null"):
        assert "write the data to a file first" in refusal([name])


def test_files_that_cannot_be_read_are_named(make: Make, tmp_path: Path) -> None:
    path = make("lines.txt", "x\n")
    assert f"did you mean {path}?" in refusal([tmp_path / "line.txt"])
    assert "is a directory" in refusal([tmp_path])
    assert ".csv, .tsv, .jsonl" in refusal([make("a.xlsx", "x")])
    assert "no data files" in refusal([])
    assert "limit is 0" in refusal([path], limit=0)


@pytest.mark.parametrize(
    ("asked", "there", "meant"),
    [
        ("sshd.lgo", "sshd.log", True), ("today.log", "today.csv", True), ("monday1.log", "monday.log", True),
        ("x.log", "apt.log", False), ("a.txt", "b.txt", False), ("today.log", "auth.log", False),
    ],
)  # fmt: skip
def test_a_file_is_proposed_only_if_its_name_is_near_without_the_suffix(
    asked: str, there: str, meant: bool, tmp_path: Path
) -> None:
    (tmp_path / there).touch()
    said = refusal([tmp_path / asked])
    assert ("did you mean" in said) == meant
    assert ("check the path" in said) != meant


@pytest.mark.parametrize(
    ("content", "expected"),
    [(gzip.compress(b"x\n", mtime=0), "gzip"), ("x\n".encode("utf-16"), "UTF-16"), (b"PAR1....", "Parquet")],
)
def test_a_file_of_another_kind_is_not_read_as_garbage(content: bytes, expected: str, make: Make) -> None:
    assert expected in refusal([make("a.txt", content)])


def test_a_broken_last_file_is_refused_before_the_first_is_read(make: Make, tmp_path: Path) -> None:
    good = make("a.txt", "x\n")
    with pytest.raises(DataError):
        read_texts([good, tmp_path / "missing.txt"])


def test_a_column_of_a_file_without_columns_is_not_ignored(make: Make) -> None:
    lines, table = make("a.txt", "x\n"), make("a.csv", "text,label\ny,1\n")
    assert "no column 'text'" in refusal([lines], text_column="text")
    assert "no label column 'label'" in refusal([table, lines], label_column="label")
    assert [row.text for row in read_texts([lines, table], text_column="text")] == ["x", "y"]


def test_the_limit_counts_over_all_files(make: Make) -> None:
    files = [make("a.txt", "1\n2\n"), make("b.txt", "3\n4\n")]
    assert [row.text for row in read_texts(files, limit=3)] == ["1", "2", "3"]
    assert (count_rows(files), count_rows(files, limit=3), count_rows(files, limit=9)) == (4, 3, 4)


def test_a_single_name_is_not_taken_for_a_list_of_letters(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make("a.txt", "x\n")
    monkeypatch.chdir(path.parent)
    assert [row.source for row in read_texts("./a.txt")] == ["./a.txt"]
    assert count_rows("a.txt") == 1


def test_the_digest_follows_the_content_not_the_name(make: Make, tmp_path: Path) -> None:
    one, same, other = make("a.txt", b"x" * 3_000_000), make("b.txt", b"x" * 3_000_000), make("c.txt", b"y")
    assert digest(one) == digest(str(same)) != digest(other)
    assert len(digest(one)) == 32
    with pytest.raises(DataError, match="missing"):
        digest(tmp_path / "missing.txt")
