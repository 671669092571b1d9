"""What a service tells its clients: nothing about who asked before, and no path of its machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer
from services import Live, living, spawned, tiny

from attmemo.cli.app import app
from attmemo.serve.settings import Settings

TEI_HEADERS = {
    "x-compute-type", "x-compute-time", "x-compute-characters", "x-compute-tokens", "x-total-time",
    "x-tokenization-time", "x-queue-time", "x-inference-time",
}  # fmt: skip
TEXT = "alpha 7 beta 8 gamma 9 delta 10 epsilon"
ASKED: list[tuple[str, Any]] = [
    ("/embed", {"inputs": TEXT}), ("/embed_all", {"inputs": TEXT}), ("/v1/embeddings", {"input": TEXT}),
    ("/similarity", {"inputs": {"source_sentence": TEXT, "sentences": [TEXT]}}), ("/", {"inputs": TEXT}),
]  # fmt: skip


@pytest.fixture(scope="module", name="model")
def _model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny(tmp_path_factory.mktemp("folders") / "my-model", None)


def own_headers(live: Live, path: str, body: Any) -> set[str]:
    reply = live.post(path, body)
    assert reply.status == 200
    return {name for name in reply.headers if name.startswith("x-")}


def test_no_header_tells_whether_a_text_was_asked_before(model: str) -> None:
    with living(model) as live:
        for path, body in ASKED:
            for _ in range(2):
                assert own_headers(live, path, body) == TEI_HEADERS
                live.service.model.handle.flush()
        counts = live.service.model.handle.stats()
        assert counts["reused"] + counts["repeated"] > 0, "records served"


def test_headers_of_rows_are_there_where_they_are_asked_for(model: str) -> None:
    rows = {"x-attmemo-rows-computed", "x-attmemo-rows-total", "x-attmemo-reuse"}
    with living(model, row_headers=True) as live:
        for path, body in ASKED:
            assert own_headers(live, path, body) == TEI_HEADERS | rows


def test_no_path_of_the_machine_is_in_an_answer(model: str) -> None:
    with living(model) as live:
        live.service.model.handle.engine.counters.failure("a record failed", OSError(2, "none", f"{model}/a: (b)"), 3)
        live.service.model.handle.engine.counters.failure("a record failed", OSError(2, "none", f"{model}/c"), 4)
        info, shown = live.get("/info").json, live.get("/live").json
        answer = live.post("/v1/embeddings", {"input": "alpha"}).json
        assert (info["model_id"], info["served_model_name"], answer["model"], shown["model"]) == ("my-model",) * 4
        assert shown["alarms"] == ["7 sequences: a record failed (FileNotFoundError)"]
        state = "/", "/info", "/live", "/metrics", "/health", "/api-doc/openapi.json"
        read = [live.get(path).body for path in state]
        for path, body in [*ASKED, ("/predict", {"inputs": "a"}), ("/embed", {}), ("/embed", b"{"), ("/none", {})]:
            read.append(live.post(path, body).body)
    assert not [text for text in read if str(Path(model).parent).encode() in text]


def test_a_name_that_was_given_is_the_served_name(model: str) -> None:
    with living(model, served_model_name="a/name") as live:
        info = live.get("/info").json
        assert (info["model_id"], info["served_model_name"]) == ("my-model", "a/name")
        assert live.post("/v1/embeddings", {"input": "alpha"}).json["model"] == "a/name"


def test_names_of_models(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(Path(model).parent))
    monkeypatch.chdir(model)
    for given in (model, f"{model}/", ".", "../my-model", "~/my-model", "/nowhere/my-model"):
        assert Settings(given).name == "my-model", given
    for hub in ("my-model-on-the-hub", "sentence-transformers/all-MiniLM-L6-v2"):
        assert (Settings(hub).name, Settings(hub).model_name) == (hub, hub)


def test_logs_have_rows_for_the_operator_at_debug_alone(model: str, caplog: pytest.LogCaptureFixture) -> None:
    with living(model) as live:
        for level, lines in (("INFO", 0), ("DEBUG", 1)):
            caplog.clear()
            with caplog.at_level(level, "attmemo.serve"):
                assert live.post("/embed", {"inputs": TEXT}).status == 200
            asked = [vars(record)["fields"] for record in caplog.records if record.message == "request"]
            assert [one["rows-computed"] <= one["compute-tokens"] == 11 for one in asked] == [True] * lines


def test_the_command_turns_headers_of_rows_on(model: str, tmp_path: Path) -> None:
    options: Any = typer.main.get_command(app)
    (option,) = (one for one in options.commands["serve"].params if one.name == "row_headers")
    assert ("--row-headers" in option.opts, option.default) == (True, False)
    with spawned(model, tmp_path, "--reuse", "none", "--drain-seconds", "0", ATTMEMO_ROW_HEADERS="1") as server:
        assert server.post("/embed", {"inputs": TEXT}).headers["x-attmemo-reuse"] == "none"
        assert server.end() == 0
