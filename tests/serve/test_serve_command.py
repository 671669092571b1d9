"""`attmemo serve` as a command: it ends in order, says nothing of what it was asked, and explains bad input."""

from __future__ import annotations

import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from services import WORDS, ask, living, spawned, tiny, until
from typer.testing import CliRunner

from attmemo import memoize
from attmemo.cli import serve as command
from attmemo.cli.app import app
from attmemo.errors import AttmemoError
from attmemo.serve import Settings
from attmemo.serve import server as http
from attmemo.serve.server import is_open, listen, url_of

SECRET = "zeta 41 zeta 17 zeta"


def attmemo(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from attmemo.cli import main; main()", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, **environment})


def test_sigterm_answers_what_is_in_work_and_closes_the_database(model: str, tmp_path: Path) -> None:
    database = tmp_path / "db"
    texts = [f"{WORDS[n % 12]} {n % 100} {WORDS[n // 12 % 12]} {n // 100 % 100} {n % 7}" for n in range(1000)]
    with spawned(
        model, tmp_path, "--database", str(database), "--budget", "0.01", "--drain-seconds", "3",
        "--max-concurrent-requests", "9999",
    ) as server:  # fmt: skip
        done: list[Any] = []
        threads = [
            threading.Thread(target=lambda: done.append(server.post("/embed", {"inputs": texts}))) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        until(lambda: done or ask(server.url + "/live", None).json["inside"])
        server.process.send_signal(signal.SIGTERM)
        until(lambda: ask(server.url + "/health", None).status == 503)  # it turns before anything else
        assert server.post("/embed", {"inputs": "alpha"}).status == 200, "requests that still come are answered"
        for thread in threads:
            thread.join()
        assert server.process.wait(60) == 0
    assert [(reply.status, len(reply.json)) for reply in done] == [(200, 1000)] * 4
    checked = attmemo("check", str(database))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    shown = json.loads(attmemo("inspect", str(database), "--json", "-").stdout)
    assert shown["records"] > 0


def test_no_text_of_a_request_is_in_logs_metrics_or_the_page(model: str, tmp_path: Path) -> None:
    with spawned(
        model, tmp_path, "--database", ":memory:", "--budget", "0.01", "--json-output", "--log-level", "debug",
        "--drain-seconds", "0", API_KEY="key-of-mine",
    ) as server:  # fmt: skip
        key = {"authorization": "Bearer key-of-mine"}
        bodies: list[Any] = [{"inputs": SECRET}, {"inputs": [SECRET, 3]}, f'{{"inputs": {SECRET}'.encode()]
        bodies += [{"inputs": SECRET, "prompt_name": SECRET}, {"inputs": SECRET, "truncation_direction": SECRET}]
        for body in bodies:
            for path in ("/embed", "/predict", "/v1/embeddings", "/" + WORDS[5], f"/embed?q={WORDS[5]}"):
                server.post(path, body, **key)
        server.post("/embed", bodies[0])
        read = [ask(server.url + path, None).body.decode() for path in ("/metrics", "/live", "/")]
        assert server.end() == 0
        logs = server.errors.read_text()
        assert server.process.stdout is not None
        read += [logs, server.process.stdout.read()]
    for text in read:
        for private in ("zeta", "key-of-mine"):
            assert private not in text, text
    lines = [json.loads(line) for line in logs.splitlines()]
    asked = [line for line in lines if line["message"] == "request"]
    assert len(asked) >= 20
    assert all({"route", "status", "ms", "level", "time"} <= set(line) for line in asked)
    assert {line["status"] for line in asked} == {200, 400, 401, 422, 424}
    assert any(line["message"] == "ending" and line["signal"] == "SIGTERM" for line in lines)


def test_loading_is_said_before_the_model_is_loaded(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from attmemo.serve.service import Service

    seen: list[str] = []

    def start(_: Service) -> None:
        seen.append(stream.getvalue())
        raise AttmemoError("enough", "stop")

    monkeypatch.setattr("attmemo.serve.logs.write_logs", lambda *_: None)
    monkeypatch.setattr(Service, "start", start)
    with redirect_stdout(StringIO()) as stream, pytest.raises(typer.Exit):
        command.serve(model, port=0, budget=0, fill=True)
    assert seen == [f"loading {model} …\n"]


def test_defaults_are_those_of_the_library() -> None:
    of_command = {name: one.default for name, one in inspect.signature(command.serve).parameters.items()}
    of_memoize = {name: one.default for name, one in inspect.signature(memoize).parameters.items()}
    guarding = ("budget", "confidence", "min_cosine")
    for name in (*guarding, "reuse", "linear", "threshold", "near", "max_bytes", "database"):
        usual = of_memoize[name]
        assert getattr(Settings("M"), name) == usual, name
        assert str(of_command[name]) == str(usual), name


def test_options_of_the_guard_and_of_reuse_reach_the_model(tmp_path: Path) -> None:
    chosen: dict[str, Any] = {"budget": 0.05, "confidence": 0.9, "min_cosine": 0.9, "threshold": 0.25, "near": 3}
    with living(tiny(tmp_path, None), reuse="rows", **chosen) as server:
        handle = server.service.model.handle
        assert (handle.guarded.guard.budget, handle.guarded.guard.confidence) == (0.05, 0.9)
        assert handle.guarded.answers.min_cosine == 0.9
        assert (handle.threshold, handle.planner.rule.near) == (0.25, 3)


def test_without_options_a_service_listens_for_its_machine_alone(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def listen(host: str, port: int) -> socket.socket:
        asked.append(host)
        raise AttmemoError("enough", "stop")

    monkeypatch.setattr("attmemo.serve.server.listen", listen)
    for name in ("a-container", "0.0.0.0"):
        monkeypatch.setenv("HOSTNAME", name)
        CliRunner().invoke(app, ["serve", model])
    assert asked == ["127.0.0.1", "0.0.0.0"]


@pytest.mark.parametrize(
    ("host", "url", "reached"),
    [
        ("127.0.0.1", "http://127.0.0.1:{}/", False),
        ("127.9.9.9", "http://127.9.9.9:{}/", False),
        ("0.0.0.0", "http://localhost:{}/", True),
        ("::", "http://localhost:{}/", True),
        ("::1", "http://[::1]:{}/", False),
        ("::ffff:127.0.0.1", "http://[::ffff:127.0.0.1]:{}/", False),
    ],
)
def test_the_url_leads_to_the_service_and_only_loopback_is_not_open(host: str, url: str, reached: bool) -> None:
    try:
        place = listen(host, 0)
    except AttmemoError:
        pytest.skip(f"this machine has no address {host}")
    with place:
        assert url_of(place) == url.format(place.getsockname()[1])
        assert is_open(place) is reached


@pytest.mark.parametrize(
    ("host", "key", "warned"), [("0.0.0.0", None, 1), ("0.0.0.0", "a-key", 0), ("127.0.0.1", None, 0)]
)
def test_an_open_service_without_a_key_is_warned_of_once(
    host: str, key: str | None, warned: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(http, "make_server", lambda _: SimpleNamespace(run=lambda sockets: None))
    service: Any = SimpleNamespace(settings=Settings("M", api_key=key), close=lambda: None)
    http.serve(service, listen(host, 0))
    assert sum("no API key" in record.getMessage() for record in caplog.records) == warned


def test_options_are_read_from_the_environment(model: str, tmp_path: Path) -> None:
    own = {"MAX_CLIENT_BATCH_SIZE": "7", "AUTO_TRUNCATE": "false", "MAX_BATCH_TOKENS": "99", "HOSTNAME": "a-container"}
    with spawned(
        model, tmp_path, "--drain-seconds", "0", ATTMEMO_REUSE="none", SERVED_MODEL_NAME="named", **own
    ) as server:  # fmt: skip
        info = ask(server.url + "/info", None).json
        assert server.end() == 0
    assert (info["max_client_batch_size"], info["max_batch_tokens"], info["auto_truncate"]) == (7, 99, False)
    assert (info["served_model_name"], info["reuse"]) == ("named", "none")


@pytest.mark.parametrize(
    ("words", "code", "what"),
    [
        (["/nowhere/at/all"], 1, "config.json"),
        (["MODEL", "--port", "99999"], 2, "65535"),
        (["MODEL", "--budget", "2"], 2, "share"),
        (["MODEL", "--dtype", "int8"], 2, "int8"),
        (["MODEL", "--host", "203.0.113.7"], 1, "cannot listen"),
        (["MODEL", "--default-prompt", "a", "--default-prompt-name", "b"], 2, "both"),
        (["MODEL", "--default-prompt-name", "b", "--database", ":memory:", "--budget", "0.01"], 1, "no prompt"),
        (["MODEL", "--reuse", "none", "--threshold", "0.5"], 2, "takes no threshold"),
        (["MODEL", "--reuse", "none", "--confidence", "0.99"], 2, "not guarded: reuse is none"),
        (["MODEL", "--budget", "none", "--database", "db", "--min-cosine", "0.9"], 2, "not guarded: budget is None"),
        (["MODEL", "--confidence", "0.99"], 2, "not guarded: budget is 0"),
        (["MODEL", "--near", "-1"], 2, "--near"),
        (["MODEL", "--threshold", "2"], 2, "threshold is a similarity"),
        (["MODEL", "--confidence", "1"], 2, "share"),
        (["MODEL", "--min-cosine", "2"], 2, "cosine"),
        (["CLASSIFIER", "--budget", "0.01", "--min-cosine", "0.9"], 2, "answers are no embeddings"),
        (["MODEL", "--database", ""], 2, "database is an empty text"),
        (["MODEL", "--fill", ""], 2, "fill is an empty text"),
        (["MODEL", "--database", "/nowhere/new"], 1, "attmemo serve: --budget 0.01"),
        (["MODEL", "--reuse", "rows"], 2, "budget=0 allows no change"),
        (["MODEL", "--max-batch-tokens", "0"], 2, "--max-batch-tokens"),
        ([], 2, "MODEL"),
    ],
)
def test_bad_input_is_explained(
    model: str, words: list[str], code: int, what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("attmemo.serve.logs.write_logs", lambda *_: None)  # it is for a process of its own
    if words and "--port" not in words:  # the usual one may be another test's
        words = [*words, "--port", "0"]
    if words[:1] == ["CLASSIFIER"]:
        words = [tiny(tmp_path, 3), *words[1:]]
    found = CliRunner().invoke(app, ["serve", *(model if word == "MODEL" else word for word in words)])
    assert found.exit_code == code
    assert what in found.stderr
    assert ("Next:" in found.stderr) == ("error:" in found.stderr), "wrong words are explained by usage"


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = CliRunner().invoke(app, ["serve", "MODEL", "--host", "127.0.0.1", "--port", str(port)])
    assert found.exit_code == 1
    assert f"port {port}" in found.stderr
    assert "Next:" in found.stderr
