"""The service of `attmemo serve` as a deployment of Ray Serve."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="attmemo[serve] is not installed")
pytest.importorskip("sentence_transformers", reason="attmemo[serve] is not installed")

import numpy as np
from services import ask, tiny

from attmemo.errors import AttmemoError
from attmemo.profiler.build import BuildOptions, build_database
from attmemo.profiler.models import load_model
from attmemo.ray import Encoder, application
from attmemo.serve import Settings


def test_without_ray_the_word_is_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(AttmemoError, match=r"ray is not installed"):
        application(Settings("model"))


@pytest.mark.slow
def test_a_deployment_answers_as_the_service_does(tmp_path: Path) -> None:
    serve = pytest.importorskip("ray.serve", reason="attmemo[ray] is not installed")
    from ray_tools import running

    model, log = tiny(tmp_path / "model", None), tmp_path / "before.log"
    log.write_text("\n".join(f"alpha {n} beta {n} gamma" for n in range(20)) + "\n")
    build_database(load_model(model), [log], tmp_path / "db", BuildOptions(storage="float32", reuse="rows"))
    settings = Settings(model, database=f"file://{tmp_path / 'db'}", fill=False, row_headers=True, budget=0.01)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with running():
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            serve.run(application(settings, cache=str(tmp_path / "replicas")), route_prefix="/")
            url = f"http://127.0.0.1:{port}"
            assert ask(f"{url}/health", None).status == 200
            texts = [f"alpha {n} beta {n + 1} gamma delta" for n in range(30)]
            reply = ask(f"{url}/embed", {"inputs": texts, "normalize": True})
            expected = Encoder(model, reuse="none")({"text": np.array(texts, object)})["embedding"]
            assert reply.status == 200
            assert reply.headers["x-attmemo-reuse"] == "rows"
            assert (np.array(reply.json) * expected).sum(1).min() > 0.98
            assert ask(f"{url}/embed", {"inputs": 3}).status == 422
            assert ask(f"{url}/info", None).json["model_id"] == "model"
            assert len([path for path in (tmp_path / "replicas").iterdir() if path.is_dir()]) == 1
        finally:
            serve.shutdown()
