"""One reader of JSON for manifest, profile, tuning and calibration: a wrong field is an error by its name."""

from __future__ import annotations

from typing import Any

import pytest

from attmemo.errors import DatabaseCorruptError
from attmemo.perfmodel.tuning import Tuning
from attmemo.system.json_fields import Field

TUNING = {"lookup": "sequence", "thresholds": [0.5, 0.9], "budget": 0.01}


def test_a_place_is_named_as_python_would_write_it() -> None:
    field = Field.parse('{"costs": [{"a": 1.5}, {"a": null}]}', "profile", "measure again")
    assert field["costs"].items()[0]["a"].number() == 1.5
    with pytest.raises(DatabaseCorruptError, match=r"profile: the field 'costs\[1\]\.a' is missing") as caught:
        field["costs"].items()[1]["a"].number()
    assert caught.value.hint == "measure again"


@pytest.mark.parametrize("text", ["", "{", '{"a": NaN}', '{"a": -Infinity}', "[" * 100_000, "9" * 5000])
def test_text_that_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(DatabaseCorruptError, match="not JSON"):
        Field.parse(text, "here", "")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lookup": "token"}, r"tuning\.lookup"),
        ({"thresholds": [0.5]}, "each of 2 layers"),
        ({"thresholds": [0.5, 1.5]}, r"tuning\.thresholds\[1\]"),
        ({"thresholds": [0.5, True]}, r"tuning\.thresholds\[1\]"),
        ({"thresholds": None}, r"tuning\.thresholds"),
        ({"budget": "x"}, r"tuning\.budget"),
        ({"radii": [0.5]}, "each of 2 layers"),
    ],
)
def test_a_malformed_tuning_is_refused_by_field(change: dict[str, Any], words: str) -> None:
    with pytest.raises(DatabaseCorruptError, match=words) as caught:
        Tuning.from_dict(TUNING | change, 2, "db")
    assert "attmemo tune db" in str(caught.value)


def test_a_tuning_of_version_1_reads_and_unknown_fields_are_ignored() -> None:
    plain = Tuning.from_dict(TUNING | {"sentence": "…"}, 2, "db")
    assert plain == Tuning("sequence", (0.5, 0.9), 0.01)
    more = Tuning.from_dict(TUNING | {"radii": [-1, 0.25], "confidence": 0.95, "certified": True}, 2, "db")
    assert more.radii == (-1.0, 0.25)
