"""The invented logs: what a demo and the other tests rely on."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise
from string import Formatter

from attmemo.profiler.logs import PREFIXES, generate_log, read_services

LINES = list(generate_log(6000, seed=3))
SESSIONS, FIELDS = read_services()
MOMENT = {"time", "millis", "nth"}


def shape(line: str) -> str:
    """The line without what varies, near enough to its template."""
    return re.sub(r"\S*[0-9]\S*", "#", line)


def test_a_demo_can_be_repeated() -> None:
    assert list(generate_log(500, seed=3)) == LINES[:500]
    assert list(generate_log(500, seed=4)) != LINES[:500]


def test_as_many_lines_as_asked() -> None:
    assert [len(list(generate_log(n))) for n in (-1, 0, 1, 37)] == [0, 0, 1, 37]


def test_each_line_is_one_line_of_a_file() -> None:
    assert all(line == line.strip() and line.isprintable() and "{" not in line for line in LINES)


def test_hardly_any_line_comes_twice() -> None:
    assert len(set(LINES)) > 0.999 * len(LINES)


def test_lines_have_a_length_that_suits_the_demo() -> None:
    # A wordpiece is a word, a mark, or about three digits of a number.
    pieces = [len(re.findall(r"[a-z]{1,7}|\d{1,3}|[^\w\s]", line.lower())) for line in LINES]
    assert sum(20 <= count <= 60 for count in pieces) > 0.97 * len(pieces)


def test_templates_are_many_and_their_frequencies_skewed() -> None:
    templates = {(session.service, step.template) for session in SESSIONS for step in session.steps}
    assert 35 <= len(templates) <= 55
    common = [count for _, count in Counter(map(shape, LINES)).most_common()]
    assert sum(common[:10]) > 0.3 * len(LINES)
    assert common[0] > 20 * common[min(60, len(common) - 1)]


def test_every_service_speaks() -> None:
    assert {session.service for session in SESSIONS} == set(PREFIXES)
    for mark in (" logind[", "Z web-", " dispatcher.", " <store-", " svc=payments "):
        assert sum(mark in line for line in LINES) > 0.03 * len(LINES)


def test_every_field_of_a_template_is_drawn() -> None:
    texts = [*PREFIXES.values(), *(step.template for session in SESSIONS for step in session.steps)]
    named = {name for text in texts for _, name, _, _ in Formatter().parse(text) if name}
    assert named - MOMENT == set(FIELDS)


def test_time_never_runs_backwards() -> None:
    moments = [match[0] for line in LINES if (match := re.search(r"\d\d:\d\d:\d\d[.,]\d{3}", line))]
    assert len(moments) == len(LINES)
    clock = [moment.replace(",", ".") for moment in moments]
    assert clock == sorted(clock)


def test_sessions_hold_together() -> None:
    attempts = Counter(
        match[1] for line in LINES if (match := re.search(r"password rejected .* from (\S+:\d+), attempt", line))
    )
    assert max(attempts.values()) >= 5, "no client tries again"
    queued = {match[1] for line in LINES if (match := re.search(r"job (\S+#\d+) queued", line))}
    finished = {match[1] for line in LINES if (match := re.search(r"job (\S+#\d+) finished", line))}
    assert len(finished & queued) > 0.95 * len(finished), "jobs end that never began"


def test_sessions_overlap() -> None:
    requests = [match[1] for line in LINES if (match := re.search(r"dispatcher.* job (\S+#\d+) ", line))]
    runs = sum(a != b for a, b in pairwise(requests))
    assert runs > 0.5 * len(requests), "sessions do not overlap"
