"""`attmemo drill`: whether the guard's alarm rises, in a service that is thrown away afterwards."""

from __future__ import annotations

import json as form
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import typer

from attmemo.cli import options
from attmemo.cli.console import Output, output
from attmemo.system.extras import check_installed

WORDS: Final = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lamda", "mu"]
"""Each is in front of the number of one kind of lines: so there are so many slots."""
ROUNDS: Final = 90
"""Numbers that a kind of lines has, from 10 on."""


def drill(
    model: options.Model,
    budget: options.Budget = 0.01,
    dtype: options.LoadedIn = "float32",
    json: options.Json = None, quiet: options.Quiet = False,
) -> None:  # fmt: skip
    """Show that the guard's alarm rises.

    Starts a service of the model on a free port of this machine. Invented lines are asked, and all comparisons say
    that no answer changed, until the guard is certified. Then all say that answers changed: the alarm must rise within
    the promised number of samples, /health and /metrics must say so, and all answers must be exact. Ends with exit
    code 1 if one of these fails. What the model thinks of the lines has no part in it.
    """
    with output(json, quiet) as out:
        check_installed("serve", "fastapi", "orjson", "prometheus_client", "sentence_transformers", "uvicorn")
        out.stages("loading", 0, 1)
        with drilled(model, budget, dtype) as tried:
            out.stages("loading", 1, 1)
            found = tried.run(out)
        _show(out, found)
        out.result(found)
        if not found["passed"]:
            raise typer.Exit(1)


def _show(out: Output, found: dict[str, Any]) -> None:
    for name, passed in found["checks"].items():
        out.say(f"  {'yes' if passed else 'NO ':<4} {name}")
    out.say(
        f"the drill {'passed' if found['passed'] else 'FAILED'}: {found['reused']} answers were reused before; the "
        f"alarm rose after {found['samples']} changed samples, {found['promised']} are promised"
    )


@dataclass(slots=True)
class Drill:
    """A service whose guard is told what comparisons find."""

    url: str
    handle: Any  # of the model
    task: str  # what the service gives
    lies: bool = False  # whether all answers are said to have changed

    def run(self, out: Output) -> dict[str, Any]:
        """Teach, lie, and look; the result, JSON-able."""
        guard, numbers = self.handle.guarded.guard, iter(range(10, 10 + ROUNDS))
        for number in numbers:
            out.stages("collecting evidence", number - 10, ROUNDS)
            self.ask([line(kind, number) for kind in range(len(WORDS))])
            if guard.certified and number > 12:
                break
        guard.drawn = 1.0  # of a certified guard one answer in 130 is a sample: here each one is
        certified, promised = guard.certified, _promised(guard)
        self.ask([line(kind, next(numbers, 99)) for kind in range(len(WORDS))])
        reused, guard_before = self.handle.stats()["reused"], self.health()
        self.lies = True
        number, samples = next(numbers, 99), None
        for kind in range(len(WORDS)):
            changed = guard.certificate.counts.changed
            self.ask([line(kind, number)])
            if guard.epoch:
                samples = changed + 1
                break
        state, before = self.health(), self.handle.stats()["reused"]
        lines = [line(kind, next(numbers, 98)) for kind in range(len(WORDS))]
        exact = self.ask(lines) == self.ask(lines, "off")
        checks = {
            "the guard was certified, and reused answers": certified and reused > 0 and guard_before == "certified",
            "the alarm rose within the promised number of samples": samples is not None and samples <= promised,
            "/health says alarm": state == "alarm",
            "the metric attmemo_guard_state is -1": b"\nattmemo_guard_state -1.0" in self.get("/metrics")[0],
            "all answers are exact afterwards": exact and self.handle.stats()["reused"] == before,
        }
        return {
            "passed": all(checks.values()), "checks": checks, "samples": samples, "promised": promised,
            "reused": reused, "task": self.task,
        }  # fmt: skip

    def ask(self, lines: list[str], reuse: str = "on") -> Any:
        """Answers of the service; all that waits for idle times is done before this returns."""
        path: str = "/embed"
        body: dict[str, Any] = {"inputs": lines}
        if self.task == "classifier":
            path, body = "/predict", {"inputs": [[one] for one in lines]}
        elif self.task == "reranker":
            path, body = "/rerank", {"query": "alpha", "texts": lines}
        asked = urllib.request.Request(
            self.url + path, form.dumps(body).encode(), {"content-type": "application/json", "x-attmemo-reuse": reuse}
        )
        with urllib.request.urlopen(asked, timeout=60) as answer:
            found = form.load(answer)
        self.handle.flush()
        return found

    def health(self) -> str:
        """What ``/health`` says of the guard."""
        return str(self.get("/health")[1].get("x-attmemo-guard"))

    def get(self, path: str) -> tuple[bytes, Any]:
        """Body and headers."""
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return answer.read(), answer.headers


@contextmanager
def drilled(model: str, budget: float, dtype: str) -> Iterator[Drill]:
    """A service on a free port, while inside; its guard compares answers that are all the same."""
    import torch

    from attmemo.memoization import memoize
    from attmemo.serve.server import listen, make_server
    from attmemo.serve.service import Service
    from attmemo.serve.settings import Settings

    service = Service(Settings(model, dtype=dtype)).start()  # type: ignore[arg-type]
    place = listen("127.0.0.1", 0)
    try:
        served = service.model
        memoize(
            served.module, database=":memory:", reuse="rows", budget=budget, gate=False, linear="exact",
            tokenizer=served.tokenizer, answer=lambda output: torch.zeros(len(served._values(output)[0])).long(),
        )  # fmt: skip
        server = make_server(service)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [place]}, daemon=True)
        thread.start()
        found = Drill(f"http://127.0.0.1:{place.getsockname()[1]}", served.handle, served.task)
        found.handle.guarded.answers.differ = lambda *_: found.lies
        try:
            yield found
        finally:
            server.should_exit = True
            thread.join(60)
    finally:
        service.close()
        place.close()


def line(kind: int, number: int) -> str:
    """An invented line: the words in an order of this kind, with a number behind the first."""
    first, *rest = WORDS[kind:] + WORDS[:kind]
    return f"{first} {number} {' '.join(rest)}"


def _promised(guard: Any) -> int:
    """Changed samples, one behind the other, after which the alarm must have risen."""
    from attmemo.guard.certificate import Certificate

    found, count = Certificate(guard.budget, guard.confidence), 1
    found.adopt(guard.certificate.counts.copy())
    while not found.sample(True):
        count += 1
    return count
