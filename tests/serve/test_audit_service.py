"""scripts/audit_service.py: an audit from outside finds answers that changed, and its bound is right."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from services import WORDS, living, tiny

SCRIPT = Path(__file__).parents[2] / "scripts" / "audit_service.py"
TEXTS = [f"{' '.join(WORDS)} {number}" for number in range(12)]


@pytest.fixture(scope="module", name="audit")
def _audit() -> Any:
    spec = importlib.util.spec_from_file_location("audit_service", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.mark.parametrize(
    ("task", "classes"), [("embedding", None), ("classifier", 3), ("reranker", 1), ("tagger", None)]
)
def test_answers_of_an_exact_service_never_differ(
    audit: Any, task: str, classes: int | None, tmp_path: Path
) -> None:
    tags = ("O", "B-A", "I-A") if task == "tagger" else ()
    with living(tiny(tmp_path, classes, tags), database=None, budget=0) as live:
        found = audit.audit(live.url, TEXTS)
    assert (found["task"], found["changed"], found["texts"]) == (task, 0, len(TEXTS))
    assert found["at_most"] == pytest.approx(1 - 0.05 ** (1 / len(TEXTS)))


def test_a_service_whose_reused_answers_are_others_is_found_out(
    audit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with living(tiny(tmp_path, 3), database=None, budget=0) as live:
        run = live.service.model.run

        def another(sequences: Any, *, reuse: bool, **more: Any) -> Any:
            answers = run(sequences, reuse=reuse, **more)
            for one in answers if reuse else ():
                one.value = -one.value
            return answers

        monkeypatch.setattr(type(live.service.model), "run", lambda _, *args, **more: another(*args, **more))
        found = audit.audit(live.url, TEXTS)
    assert found["changed"] == len(TEXTS)
    assert found["at_most"] == 1.0


@pytest.mark.parametrize(("changed", "count", "bound"), [(0, 299, 0.009969), (1, 100, 0.046560), (5, 50, 0.199077)])
def test_the_bound_is_that_of_clopper_and_pearson(audit: Any, changed: int, count: int, bound: float) -> None:
    beta = pytest.importorskip("scipy.stats").beta
    assert audit.upper_bound(changed, count) == pytest.approx(beta.ppf(0.95, changed + 1, count - changed))
    assert audit.upper_bound(changed, count) == pytest.approx(bound, abs=1e-3)


@pytest.mark.parametrize(
    ("task", "one", "other", "differs"),
    [
        ("embedding", [1.0, 0.0], [2.0, 0.1], False), ("embedding", [1.0, 0.0], [1.0, 0.3], True),
        ("classifier", "A", "A", False), ("classifier", "A", "B", True),
        ("reranker", 0.5, 0.54, False), ("reranker", 0.5, 0.56, True),
    ],
)  # fmt: skip
def test_answers_differ_as_the_guard_says(audit: Any, task: str, one: Any, other: Any, differs: bool) -> None:
    assert audit.differ(task, one, other) is differs
