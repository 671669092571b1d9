"""Workloads of many kinds: exact, 8 bits, and a budget, each in a process of its own, some requests each in turns.

    python scripts/bench_workloads.py ../shared docs/workloads.json                    # all: about 10 minutes
    python scripts/bench_workloads.py ../shared docs/workloads.json "log HDFS" rerank  # some; the others stay
    python scripts/bench_workloads.py ../shared docs/workloads.json --page docs/workloads-measured.md  # tables alone

A process is stopped while it is not its turn: what a guard or a filler does beside requests, it does beside its own.
At full load requests come without a pause, and nothing is done in idle times: everything is in the times that a way
costs. At half load there is a pause before each request, as long as an exact one takes, for exact ones too.
Times are whole calls of the model on token ids; answers are compared with the exact ones, request by request.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

from marked import replace_measured
from measured_at import measured_at
from workloads import WORKLOADS, Workload, sign

from attmemo.profiler.process import Process
from attmemo.profiler.turns import alternate
from attmemo.wording import counted

WAYS: dict[str, dict[str, Any]] = {
    "exact": {},
    "int8": {"linear": "int8"},
    "rows": {"budget": 0.01, "database": ":memory:", "linear": "exact"},
    "exact at half load": {},
    "rows at half load": {"budget": 0.01, "database": ":memory:", "linear": "exact"},
    "budget at half load": {"budget": 0.01},
}
HALF = " at half load"
TURN, HALF_TURN = 0.15, 1.0
"""Seconds of exact requests, about, that a way answers before it is another one's turn: a machine's speed may change
within seconds. At half load more: work in pauses that is stopped in its midst gets a false idea of how long it takes.
"""
TOP = 10
"""Places of an order that count."""
HALVES = ("first half", "second half")


class Answerer:
    """One way, in its own process: answers the numbers of requests with seconds and answers."""

    def __init__(self, way: str, stream: str, shared: Path, threads: int) -> None:
        import torch
        from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoTokenizer

        from attmemo import memoize
        from attmemo.guard import idle
        from attmemo.guard.answers import Answers

        if HALF not in way:
            vars(idle)["QUIET"] = 1e9
        torch.set_num_threads(threads)
        workload = WORKLOADS[stream](shared / "data")
        folder = shared / "models" / workload.model
        tokenizer = AutoTokenizer.from_pretrained(folder)
        kind = AutoModelForTokenClassification if workload.tags else AutoModelForSequenceClassification
        self._model = kind.from_pretrained(folder, dtype=torch.bfloat16).eval()
        self._reader = Answers(sign if workload.decides else "auto", 1.0)
        self._reader.meet(self._model, tokenizer)
        options = dict(WAYS[way])
        if options.get("budget") and workload.decides:
            options["answer"] = sign
        if options.get("budget") and workload.most:
            options["max_bytes"] = workload.most
        memoize(self._model, **options)
        self._inputs = [_tokens(tokenizer, request, workload) for request in workload.requests]
        self._decides = workload.decides
        torch.set_grad_enabled(False)

    def tokens(self) -> list[int]:
        return [int(one["attention_mask"].sum()) for one in self._inputs]

    def ask(self, number: int) -> tuple[float, list[int], list[float]]:
        inputs = self._inputs[number]
        start = perf_counter()
        output = self._model(**inputs)
        seconds = perf_counter() - start
        answers = self._reader.read(output, self._reader.mask_in(inputs)).values.tolist()
        return seconds, answers, output.logits[:, 0].float().tolist() if self._decides else []

    def counts(self) -> dict[str, Any]:
        stats = self._model.attmemo.stats()
        guard = stats["guard"] or {}
        return {
            "share_computed": stats["share_computed"], "reused": guard.get("reused", 0),
            "repeated": guard.get("repeated", 0), "state": guard.get("state"), "says": guard.get("says"),
            "linear": stats["linear"], "record_bytes": stats["record_bytes"], "pays": stats["pays"],
        }  # fmt: skip


def _tokens(tokenizer: Any, request: Any, workload: Workload) -> Any:
    first = [one if isinstance(one, str) else one[0] for one in request]
    second = None if isinstance(request[0], str) else [one[1] for one in request]
    return tokenizer(
        first, second, padding=True, truncation=True, max_length=workload.longest, return_tensors="pt"
    )  # fmt: skip


class Way(Process):
    """A process that runs only while it is asked."""

    def __init__(self, name: str, stream: str, shared: Path, threads: int) -> None:
        super().__init__(Answerer, name, stream, shared, threads)
        self._pauses = HALF in name
        self.tokens = self.call(Answerer.tokens)
        self.seconds: list[float] = []
        self.answers: list[list[int]] = []
        self.scores: list[list[float]] = []
        self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        os.kill(self._process.pid, number)

    def ask(self, numbers: range, pause: float) -> None:
        """Let it answer some requests, one behind the other; at half load each behind a pause, in seconds.

        Behind, so that the first one finds no idle work that begins as the process goes on: to be stopped looks to it
        like a long silence.
        """
        self._signal(signal.SIGCONT)
        for number in numbers:
            sleep(pause if self._pauses else 0.0)
            seconds, answers, scores = self.call(Answerer.ask, number)
            self.seconds.append(seconds)
            self.answers.append(answers)
            self.scores.append(scores)
        self._signal(signal.SIGSTOP)

    def counts(self) -> dict[str, Any]:
        """What it counted. From here on it runs."""
        self._signal(signal.SIGCONT)
        return self.call(Answerer.counts)


def measure(stream: str, shared: Path, threads: int, ways: list[str]) -> dict[str, Any]:
    """All ways of one stream."""
    with ExitStack() as stack:
        running = {name: stack.enter_context(Way(name, stream, shared, threads)) for name in ways}
        count = len(running["exact"].tokens)
        for half in (False, True):
            own = {name: way for name, way in running.items() if (HALF in name) is half}
            _in_turns(own, "exact" + HALF * half, HALF_TURN if half else TURN, count)
        counts = {name: way.counts() for name, way in running.items()}
    exact = running["exact"]
    parts = dict(zip(HALVES, (slice(0, count // 2), slice(count // 2, count)), strict=True))
    found: dict[str, Any] = {"requests": count, "tokens": sum(exact.tokens)}
    for name, way in running.items():
        pairs = [pair for own, other in zip(way.answers, exact.answers, strict=True)
                 for pair in zip(own, other, strict=True)]  # fmt: skip
        base = running["exact" + HALF] if HALF in name else exact
        found[name] = counts[name] | {
            "over exact": {part: sum(way.seconds[own]) / sum(base.seconds[own]) for part, own in parts.items()},
            "ms": 1e3 * statistics.median(way.seconds),
            "changed": sum(one != other for one, other in pairs) / len(pairs),
            "answers": len(pairs),
        } | order_kept(exact.scores, way.scores)
    return found


def _in_turns(running: dict[str, Way], exact: str, seconds: float, count: int) -> None:
    """Have these ways answer all requests, some in a turn, that take the exact way about so many seconds."""
    turn, done, each = 0, 0, 4
    while running and done < count:
        numbers = range(done, min(done + each, count))
        for name in alternate(list(running), turn):
            running[name].ask(numbers, statistics.median(running[exact].seconds or [0.03]))
        turn, done = turn + 1, numbers.stop
        each = max(1, round(seconds / statistics.median(running[exact].seconds)))


def order_kept(exact: Sequence[Sequence[float]], given: Sequence[Sequence[float]]) -> dict[str, float]:
    """Of requests that are ordered by their scores: share whose first is the exact one, and the mean nDCG of the first
    ten places, where what an input gains is its exact score from 0 to 1."""
    firsts, gains = [], []
    for own, other in zip(exact, given, strict=True):
        if not own:
            return {}
        best, seen = (sorted(range(len(own)), key=lambda place: -one[place])[:TOP] for one in (own, other))
        gained = [sum(1 / (1 + math.exp(-own[place])) / math.log2(2 + rank) for rank, place in enumerate(order))
                  for order in (best, seen)]  # fmt: skip
        firsts.append(best[0] == seen[0])
        gains.append(gained[1] / gained[0])
    return {"first kept": statistics.fmean(firsts), "ndcg": statistics.fmean(gains)}


def table(result: dict[str, Any]) -> str:
    """The numbers in Markdown."""
    machine = result["conditions"]
    lines = [
        f"{machine['cpu']}, {', '.join(machine['features'])}; {counted(machine['threads'], 'thread')}, bfloat16; "
        f"commit {result['commit']}. Time, exact blocks = 1:", "",
        "| stream | int8 | reuse, full load | reuse, half load | reuse or int8, half load | changed: reuse, int8 |",
        "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for stream, found in result["streams"].items():
        full, half, both, rounded = (found[name] for name in ("rows", "rows" + HALF, "budget" + HALF, "int8"))
        halves = (", ".join(f"{ratio:.2f}" for ratio in one["over exact"].values()) for one in (full, half, both))
        changed = ", ".join(f"{100 * one['changed']:.2f} %" for one in (half, rounded))
        mean = statistics.fmean(rounded["over exact"].values())
        lines.append(f"| {stream} | {mean:.2f} | {' | '.join(halves)} | {changed} |")
    return "\n".join(lines)


def tables(output: Path) -> str:
    """The numbers, and behind them those of a processor with AMX, which lie beside them."""
    other = output.with_stem(output.stem + "-amx")
    return "\n\n".join(table(json.loads(file.read_text())) for file in (output, other) if file.exists())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shared", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("stream", nargs="*", choices=[*WORKLOADS, []], metavar="STREAM")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--page", type=Path, help="measure nothing; put the table into this page")
    args = parser.parse_args()
    result = json.loads(args.output.read_text()) if args.output.exists() else {"streams": {}}
    if args.page is not None:
        replace_measured(args.page, tables(args.output))
        return
    from attmemo.system.machine import conditions

    for stream in args.stream or WORKLOADS:
        found = measure(stream, args.shared, args.threads, args.ways.split(","))
        result["streams"][stream] = found
        result |= {"conditions": conditions() | {"threads": args.threads}} | measured_at()
        args.output.write_text(json.dumps(result, indent=1) + "\n")
        for name in args.ways.split(","):
            own = found[name]
            print(stream, name, {part: round(ratio, 3) for part, ratio in own["over exact"].items()},
                  {name: round(own[name], 4) for name in ("first kept", "ndcg") if name in own},
                  f"changed {100 * own['changed']:.2f} %", own["says"] or "", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
