"""A service in shadow mode, with a log of changed answers, and the command that shows the log."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from command_line import refuse, succeed
from services import living, tiny

from attmemo.errors import ArgumentError
from attmemo.guard.change_log import Case, ChangeLog
from attmemo.guard.verdict import Verdict
from attmemo.serve.settings import Settings

LINE = "alpha beta gamma delta epsilon zeta eta theta iota kappa lamda {}"


@pytest.fixture(scope="module", name="classifier")
def _classifier(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny(tmp_path_factory.mktemp("classifier"), 3)


def test_every_answer_is_exact_and_metrics_say_what_would_be_reused(classifier: str) -> None:
    with living(classifier, shadow=True, database=None, linear="exact") as live:
        answers = {}
        for number in range(20):
            text = LINE.format(number % 5)
            found = live.post("/predict", {"inputs": text, "raw_scores": True}).json
            exact = live.post("/predict", {"inputs": text, "raw_scores": True, "reuse": "off"}).json
            assert found == exact
            assert answers.setdefault(text, found) == found
            assert live.service.model.handle.flush()
        metrics = live.get("/metrics").body.decode()
        counts = dict(line.split(" ") for line in metrics.splitlines() if line.startswith("attmemo_"))
        assert float(counts["attmemo_shadow_tried_total"]) == 20
        assert float(counts["attmemo_reused_total"]) == float(counts["attmemo_repeated_total"]) == 0
        shadow = live.get("/live").json["shadow"]
        assert shadow["repeated"] >= 3, "the first text has a record, and came four times"
        assert np.isclose(float(counts["attmemo_shadow_changed_total"]), shadow["changed"])
        assert live.get("/live").json["guard"]["says"].startswith("shadow mode: all 20 answers were exact")


def test_shadow_mode_needs_a_budget(classifier: str) -> None:
    with pytest.raises(ArgumentError, match="shadow mode"):
        Settings(classifier, shadow=True)


def test_the_command_shows_a_log(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = ChangeLog(path)
    assert "0 verified answers had changed" in succeed("changes", path)
    log.note(Case("a" * 16, 3, "b" * 16, "fully"), Verdict.OWE, 0.5, {7}, 0, given=True)
    said = succeed("changes", path)
    assert "1 verified answer had changed" in said
    assert "b" * 16 in said
    assert json.loads(succeed("changes", path, "--json", "-"))["given"] == 1


def test_the_command_refuses_what_is_no_log(tmp_path: Path) -> None:
    assert "there is no such file" in refuse("changes", tmp_path / "none")
