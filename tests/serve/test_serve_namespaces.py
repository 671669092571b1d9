"""`attmemo serve --namespaces`: a header names whose records a request reads and leaves."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from services import Live, connect, living, tiny, told, whole

from attmemo.db.namespaces import named_in
from attmemo.serve.queue import Queue, Request, Waiting

TEXT = "alpha 7 beta 8 gamma 9 delta 10 epsilon"
ROWS = 11
EMPTY = {"database": ":memory:", "reuse": "rows", "row_headers": True}


@pytest.fixture(scope="module", name="model")
def _model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny(tmp_path_factory.mktemp("model"), 3)


def rows(live: Live, text: str = TEXT, **headers: str) -> int:
    """Rows that an answer took; what it leaves is stored when this returns."""
    reply = live.post("/predict", {"inputs": text}, **headers)
    assert reply.status == 200
    live.service.model.handle.flush()
    return int(reply.headers["x-attmemo-rows-computed"])


def test_a_text_of_another_namespace_is_computed_whole(model: str) -> None:
    with living(model, namespaces=4, **EMPTY) as live:
        assert [rows(live, x_attmemo_namespace=name) for name in ("a", "a", "b", "b")] == [ROWS, 0, ROWS, 0]
        assert [rows(live), rows(live), rows(live, x_attmemo_namespace="c")] == [ROWS, 0, ROWS]
        assert rows(live, x_attmemo_namespace="a", x_attmemo_reuse="off") == ROWS
        found = live.get("/live").json
        assert (found["repeated"], found["database"]["records"]) == (3, 4)


def test_namespaces_answer_as_one_would(model: str) -> None:
    with living(model, namespaces=4, **EMPTY) as live:
        bodies = [{"inputs": f"{TEXT} {number % 5}"} for number in range(40)]
        expected = [live.post("/predict", body | {"reuse": "off"}).json for body in bodies]

        def ask(number: int) -> Any:
            return live.post("/predict", bodies[number], x_attmemo_namespace=f"tenant {number % 3}").json

        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(ask, range(40)))
        # The head is torch's own, in float32: its last bits depend on what else is in a batch.
        for one, other in zip(found, expected, strict=True):
            assert [entry["label"] for entry in one] == [entry["label"] for entry in other]
            assert [entry["score"] for entry in one] == pytest.approx([entry["score"] for entry in other], rel=1e-6)
        spaces = live.service.model.handle.namespaces()
        assert sorted(spaces) == ["tenant 0", "tenant 1", "tenant 2"]
        assert sum(found["sequences"] for found in spaces.values()) == 40


@pytest.mark.parametrize("path", ["/predict", "/tokenize"])
def test_a_service_without_namespaces_refuses_the_header(model: str, path: str) -> None:
    with living(model) as live:
        reply = live.post(path, {"inputs": TEXT}, x_attmemo_namespace="a")
        assert reply.status == 422
        assert "no namespaces" in reply.json["error"]


def test_names_that_are_none_and_too_many_are_refused(model: str) -> None:
    with living(model, namespaces=2, **EMPTY) as live:
        for name, told in (("", "1 to 128"), ("x" * 129, "1 to 128")):
            reply = live.post("/predict", {"inputs": TEXT}, x_attmemo_namespace=name)
            assert (reply.status, told in reply.json["error"]) == (422, True)
        for name in "vwxyz":  # what is refused takes no room
            assert live.post("/predict", {"inputs": 5}, x_attmemo_namespace=name).status == 422
        for name in ("a", "b", "a"):
            assert live.post("/predict", {"inputs": TEXT}, x_attmemo_namespace=name).status == 200
        reply = live.post("/predict", {"inputs": TEXT}, x_attmemo_namespace="c")
        assert (reply.status, "2 namespaces already" in reply.json["error"]) == (422, True)
        assert live.post("/predict", {"inputs": TEXT}).status == 200
        told = live.get("/metrics").body.decode().splitlines()
        assert "attmemo_namespaces 2.0" in told
        assert 'te_request_failure{err="namespace"} 3.0' in told


def test_a_header_that_is_given_twice_is_refused(model: str) -> None:
    """Else a client could add its own to that of the gateway before the service."""
    with living(model, namespaces=2) as live, connect(live) as connection:
        connection.sendall(whole({"inputs": "alpha"}, b"x-attmemo-namespace: a\r\nx-attmemo-namespace: b\r\n"))
        status, body = told(connection)
        assert (status, "given 2 times" in body["error"]) == (422, True)


def test_namespaces_are_kept_in_folders_and_go_on_after_a_restart(model: str, tmp_path: Path) -> None:
    options = EMPTY | {"database": str(tmp_path / "db"), "namespaces": 2}
    with living(model, **options) as live:
        assert rows(live, x_attmemo_namespace="a") == ROWS
    assert list(named_in(tmp_path / "db")) == ["a"]
    with living(model, **options) as live:
        assert rows(live, x_attmemo_namespace="b") == ROWS
        assert rows(live, x_attmemo_namespace="a") == 0


def test_no_batch_has_sequences_of_two_namespaces() -> None:
    queue, names = Queue(1000), ["a", None, "a", "b", "b", None, "a"]
    every = [Request(1, each=False, reuse=True, namespace=name) for name in names]
    queue.put([Waiting(request, 0, [1], [0], 1) for request in every])
    batches = []
    while len(queue):
        taken = queue.take()
        assert taken is not None
        batches.append([one.request.namespace for one in taken[0]])
    assert batches == [["a"] * 3, [None] * 2, ["b"] * 2]
