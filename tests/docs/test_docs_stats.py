"""The keys of `stats()` that count reasons, and the page that says what each of them means."""

from __future__ import annotations

import re
from typing import get_args

from docs_tools import page, table_rows

from attmemo.forward.stats import Skip
from attmemo.rows.filler import TOO_MANY
from attmemo.rows.live_store import KNOWN, LARGE, SPARE

TEXT = page("python.md")


def keys(head: str) -> list[str]:
    """The keys of the first table behind a text."""
    return [key for row in table_rows(TEXT, head) for key in re.findall(r"`(\w+)`", row[0])]


def test_the_page_says_what_each_reason_against_a_lookup_means() -> None:
    assert sorted(keys("`not_looked_up` has")) == sorted(get_args(Skip))


def test_the_page_says_what_became_of_sequences_that_could_be_records() -> None:
    assert {KNOWN, LARGE, SPARE, TOO_MANY} < set(keys("`offered` has"))


def test_keys_are_short_and_can_be_names() -> None:
    for key in (*get_args(Skip), *keys("`offered` has")):
        assert re.fullmatch(r"[a-z_]{4,24}", key)
