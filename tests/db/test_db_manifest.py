"""The manifest is untrusted until it has been looked at: every field, with a checksum that fits the lie."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from db_tools import body_of, seal, use

from attmemo.db import manifest as manifest_module
from attmemo.db import read_manifest
from attmemo.db.files import MANIFEST
from attmemo.db.manifest import Manifest
from attmemo.errors import DatabaseCorruptError, DatabaseError, FormatVersionError, PageSizeError

Body = dict[str, Any]
Path_ = tuple[str | int, ...]


@pytest.fixture
def body(whole: Path) -> Iterator[Body]:
    """Its manifest as JSON, to be changed; the file is put back afterwards."""
    raw = (whole / MANIFEST).read_bytes()
    yield body_of(whole)
    (whole / MANIFEST).write_bytes(raw)


def refuse(whole: Path, body: object, words: str, kind: type[DatabaseError] = DatabaseCorruptError) -> None:
    seal(whole, body)
    with pytest.raises(kind, match=words) as caught:
        use(whole)
    assert caught.value.hint


def test_a_manifest_survives_writing_and_reading(whole: Path) -> None:
    """What dump writes, parse reads, field by field."""
    manifest = read_manifest(whole)
    assert Manifest.parse(manifest.dump(), whole) == manifest
    assert manifest.dump() == (whole / MANIFEST).read_bytes()


def _leaves(data: Any, at: Path_ = ()) -> Iterator[Path_]:
    """Every place in nested JSON that the parser looks at by name."""
    if at and at[-1] in ("settings", "calibration", "layers") and isinstance(data, dict):
        return
    if at:
        yield at
    if isinstance(data, dict):
        for key, value in data.items():
            yield from _leaves(value, (*at, key))
    elif isinstance(data, list) and at[-1] != "shape":
        for index, value in enumerate(data[:1]):
            yield from _leaves(value, (*at, index))


def _put(data: Any, at: Path_, value: Any) -> None:
    for key in at[:-1]:
        data = data[key]
    data[at[-1]] = value


def _drop(data: Any, at: Path_) -> None:
    for key in at[:-1]:
        data = data[key]
    del data[at[-1]]


OPTIONAL = {("embedder", "report", "dimension"), ("embedder", "report", "layers")}
OPTIONAL |= {("embedder",), ("profile",), ("tuning",), ("model", "tokenizer")}


def test_a_missing_field_is_refused_by_name(whole: Path, body: Body) -> None:
    """Each field left out in turn: refused, and named."""
    fields = [at for at in _leaves(body) if isinstance(at[-1], str) and at not in OPTIONAL]
    assert len(fields) > 50
    for at in fields:
        if at[:2] == ("model", "fields") and len(at) == 3:
            continue  # what a fingerprint is made of is the fingerprint's matter
        short = copy.deepcopy(body)
        _drop(short, at)
        seal(whole, short)
        if at[:2] == ("embedder", "indexes") and len(at) == 3:
            with pytest.raises(DatabaseError, match="no index for layer"):
                use(whole)
            continue
        with pytest.raises(DatabaseError) as caught:
            use(whole)
        assert str(at[-1]) in str(caught.value) or "format" in str(caught.value), (at, str(caught.value))


@pytest.mark.parametrize("wrong", [None, True, -1, 0, 1.5, 1 << 70, "x", "\ud800", [], {}, [[]], {"a": None}])
def test_a_field_of_another_type_is_an_error_of_this_library(whole: Path, body: Body, wrong: object) -> None:
    """Each field in turn is something else: an error of this library, or nothing was wrong with it."""
    for at in list(_leaves(body)):
        changed = copy.deepcopy(body)
        _put(changed, at, wrong)
        seal(whole, changed)
        with suppress(DatabaseError):
            use(whole)


def _arena(b: Body, kind: str = "map") -> Body:
    found: Body = b["lengths"][0]["arenas"][kind]
    return found


NUMBERS: list[tuple[str, Callable[[Body], object], str]] = [
    ("negative records", lambda b: b.update(records=-1), "'records' is -1"),
    ("a million records more", lambda b: b.update(records=1_000_008), "at most 8 places"),
    ("too many records to count", lambda b: b.update(records=1 << 63), "'records' is"),
    ("fewer records than entries", lambda b: b.update(records=7, embedder=None), "records have digest"),
    ("no layers", lambda b: b["model"].update(layers=0), "'model.layers' is 0"),
    ("other layers", lambda b: b["model"].update(layers=4), r"expected SlotKind\(name='map'"),
    ("other heads", lambda b: b["model"].update(heads=4), r"expected SlotKind\(name='map'"),
    ("other hidden size", lambda b: b["model"].update(hidden=1 << 20), r"expected SlotKind\(name='map'|name='input'"),
    ("pages of no power of two", lambda b: b.update(page_size=5000), "power of two"),
    ("slots at half the stride", lambda b: _arena(b).update(stride=2048), "stride' is 2048"),
    ("slots at twice the stride", lambda b: _arena(b).update(stride=8192), "stride' is 8192"),
    ("a stride that wraps", lambda b: _arena(b).update(stride=1 << 63), "stride' is"),
    ("no header", lambda b: _arena(b).update(header=0), "header' is 0"),
    ("a header of another size", lambda b: _arena(b).update(header=8192), "bytes long|checksum"),
    ("an endless header", lambda b: _arena(b).update(header=1 << 47), "header' is"),
    ("negative places", lambda b: b["lengths"][0].update(places=-2), "places' is -2"),
    ("places that wrap", lambda b: b["lengths"][0].update(places=1 << 62), "places' is"),
    ("places that no disk holds", lambda b: b["lengths"][0].update(places=1 << 40), "a disk can hold|bytes long"),
    ("fewer places", lambda b: b["lengths"][0].update(places=2), "at most 7 places"),
    ("another type of a kind", lambda b: b["kinds"][0].update(dtype="float16"), "dtype='float32'"),
    ("a type of no kind", lambda b: b["kinds"][0].update(dtype="float12"), "dtype='float32'"),
    ("another storage type", lambda b: b.update(storage="float16"), "dtype='float16'"),
    ("a shape of no sequence", lambda b: b["kinds"][0].update(shape=["m"]), r"expected SlotKind\(name='map'"),
    ("a shape of nothing", lambda b: b["kinds"][0].update(shape=[]), r"expected SlotKind\(name='map'"),
    ("a shape with a hole", lambda b: b["kinds"][0].update(shape=[2, 0, "n"]), r"expected SlotKind\(name='map'"),
    ("a kind that is none", lambda b: b["kinds"][0].update(name="words"), "expected one of map, input"),
    ("a kind twice", lambda b: b["kinds"].append(b["kinds"][0]), "each kind once"),
    ("a kind without slots", lambda b: b["lengths"][0]["arenas"].pop("input"), "arenas.input' is missing"),
    ("no kinds", lambda b: b.update(kinds=[]), "bytes, expected"),
    ("a length twice", lambda b: b["lengths"].append(b["lengths"][0]), "each length once"),
    ("no lengths", lambda b: b.update(lengths=[]), "at most 0 places"),
    ("an uuid that is none", lambda b: b.update(uuid="../../etc"), "uuid"),
    ("an uuid that is no hex", lambda b: b.update(uuid="g" * 32), "uuid"),
    ("another uuid", lambda b: b.update(uuid="0" * 32), "header"),
    ("an index of more records", lambda b: b["embedder"].update(next_id=9), "'embedder.next_id' is 9"),
    ("an index of fewer records", lambda b: b["embedder"].update(next_id=3), r"names record \d of 3"),
    ("an index of a layer that is none", lambda b: b["embedder"]["indexes"].update({"2": {}}), "names from -1 to 1"),
    ("an index of no number", lambda b: b["embedder"]["indexes"].update({"x": {}}), "is 'x', expected names"),
    ("another index library", lambda b: b["embedder"].update(backend="annoy"), "backend 'annoy'"),
    ("another dimension", lambda b: b["embedder"]["report"].update(dimension=5), "another dimension"),
    ("a dimension that is none", lambda b: b["embedder"]["report"].update(dimension="x"), "dimension' is 'x'"),
    ("other catalogue", lambda b: b.update(records_digest="0" * 32), "records have digest"),
    ("a digest that is none", lambda b: b.update(records_digest="xyz"), "records_digest"),
    ("no digest", lambda b: b.update(records_digest=None), "'records_digest' is missing"),
    ("half a letter", lambda b: b["model"].update(name="\ud800"), "expected text in Unicode"),
]


@pytest.mark.parametrize(("lie", "words"), [n[1:] for n in NUMBERS], ids=[n[0] for n in NUMBERS])
def test_a_lie_is_refused(whole: Path, body: Body, lie: Callable[[Body], object], words: str) -> None:
    """One number or name that does not fit the rest: refused with the field or the file it contradicts."""
    lie(body)
    refuse(whole, body, words, DatabaseError)


@pytest.mark.parametrize(
    "name",
    [
        "../db/embedder.safetensors",
        "/etc/passwd",
        "a/../../b.safetensors",
        "a/b/c.safetensors",
        "..",
        "",
        "A.safetensors",
        "embedder-000005.safetensors\n",
        "embedder-000005.safetensors/",
        "./embedder-000005.safetensors",
        "a\0.safetensors",
    ],
)
def test_no_path_leads_out_of_the_database(whole: Path, body: Body, name: str) -> None:
    """A derived file has a name that this library gives; any other is refused before it is opened."""
    for place in (body["embedder"]["weights"], body["embedder"]["indexes"]["0"]):
        before, place["file"] = place["file"], name
        refuse(whole, body, "text like")
        place["file"] = before


def test_another_version_is_refused(whole: Path, body: Body) -> None:
    """A database of another format is refused by both version numbers, not as corrupt, and told what to do."""
    for version in (0, 1, 3, "1.5", None, True):
        body["version"] = version
        refuse(whole, body, rf"(?s)format version {version!r}.*reads version 2.*build it again", FormatVersionError)


def test_rows_in_the_form_of_maps_are_refused_with_the_command_that_builds_them_anew(whole: Path, body: Body) -> None:
    """Such databases were built before rows had the form of pools."""
    body["storage"] = "int8"
    body["kinds"] = [{"name": "tokens"}, {"name": "rows"}, {"name": "scales"}, {"name": "last"}]
    refuse(whole, body, r"(?s)rows in a form.*build-database --reuse rows", FormatVersionError)


def test_another_page_size_is_refused(whole: Path, body: Body) -> None:
    """Slots in pages of 512 bytes cannot be mapped here: refused by name."""
    body["page_size"] = 512
    body["lengths"] = []
    body["records"] = 0
    body["embedder"] = None
    refuse(whole, body, "built for pages of 512", PageSizeError)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "null",
        "1",
        '"x"',
        "{",
        '{"format": "attmemo-database"}',
        "[" * 100_000,
        '{"a": NaN}',
        "9" * 5000,
    ],
)
def test_other_json_is_refused(whole: Path, body: Body, text: str) -> None:
    """Whatever else is in the file, sealed: refused by name, deep nesting and endless numbers too."""
    refuse(whole, text, "", DatabaseError)


def test_not_a_number_is_refused(whole: Path, body: Body) -> None:
    """NaN is no JSON: a manifest with one could never be written again."""
    body["profile"] = {"cost": float("nan")}
    refuse(whole, body, "NaN is not a JSON number")


@pytest.mark.parametrize("raw", [b"", b"\n", b"\n\n", b"\xff\xfe\n\n", b"{}\n0\n", b"{}", b"\0" * 5000])
def test_other_bytes_are_refused(whole: Path, body: Body, raw: bytes) -> None:
    """No seal, no text, nothing."""
    (whole / MANIFEST).write_bytes(raw)
    with pytest.raises(DatabaseCorruptError):
        use(whole)


def test_an_endless_manifest_is_not_read(whole: Path, body: Body, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its size is looked at before it is read."""
    monkeypatch.setattr(manifest_module, "MAX_BYTES", 100)
    seal(whole, body)
    with pytest.raises(DatabaseCorruptError, match="at most 100 expected"):
        read_manifest(whole)
