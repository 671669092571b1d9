"""Measure the guard: what it serves and what changes, from the first request on, with nothing stored before.

    python scripts/bench_guard.py SHARED OUT CASE…      all cases: --help
    python scripts/bench_guard.py SHARED OUT --table    the table of what OUT holds
    python scripts/bench_guard.py SHARED OUT --merge docs/guard.json    all that OUT holds in one file
    python scripts/bench_guard.py SHARED docs guard-ablations           each mechanism taken away; has its own file

`SHARED` holds `data/loghub_2k` and `models/deberta-loghub`. Each case writes OUT/CASE.json. Streams are the first
lines of the later 30 % of each log, in order of time. They run through the path that a user gets: with the guard, with
exact answers wherever one is below the margin, without the certificate, without the margin, and without any guard. An
answer counts as changed if it is another one than the same model gives with `reuse="none"`.
"""

from __future__ import annotations

import argparse
import collections
import csv
import json
import logging
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from measured_at import gathered, write_json, write_record
from scipy.stats import rankdata
from torch import nn
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer
from workloads import lines_of as whole_log

from attmemo import memoize
from attmemo.guard.answers import Answers
from attmemo.guard.certificate import Certificate, Counts, highest_rate
from attmemo.guard.guard import ALL, Guard
from attmemo.guard.margin import CLASSES, VECTORS
from attmemo.guard.verdict import Verdict
from attmemo.kernels.plan import Evidence
from attmemo.profiler.demo import model_path
from attmemo.system.machine import conditions
from attmemo.wording import percent

LOGS = ("OpenSSH", "HDFS", "BGL", "Apache", "Android", "Hadoop", "Mac", "Thunderbird")
EMBEDDED = ("OpenSSH", "HDFS", "Apache", "BGL")
BUDGET, LINES = 0.01, 600
INSTRUCTION = (
    "Classify the sentiment of the review below as positive or negative . Answer with one word . Review :"
)


class Rich(Certificate):
    """Affords everything: no answer costs anything."""

    @property
    def highest(self) -> float:
        return 0.0


class Unproven(Guard):
    """Reuses all that is known, without a certificate."""

    def __init__(self, budget: float, confidence: float, **options: Any) -> None:
        super().__init__(budget, confidence, **options)
        self.certificate = Rich(budget, confidence)


class Certain(Guard):
    """Takes every answer for sure: no margin."""

    def __init__(self, budget: float, confidence: float, **options: Any) -> None:
        super().__init__(budget, confidence, **options)
        self._without()

    def compare_vectors(self) -> None:
        super().compare_vectors()
        self._without()

    def _without(self) -> None:
        self.margin.least = self.margin.least_freely = -np.inf
        self.margin._take = lambda step: None  # type: ignore[method-assign]


class Unguarded(Certain):
    """Reuses whatever supplies enough tokens."""

    def decide(
        self, evidence: Sequence[int], firsts: Sequence[int] | None = None, room: int = 0, most: int = ALL
    ) -> list[Verdict | None]:
        found = [Verdict.SERVE if one >= Evidence.UNKNOWN else None for one in evidence]
        self._done["reused"] += len(found) - found.count(None)
        return found


class Closed(Guard):
    """Takes no value that was not seen: no slot becomes free."""

    def __init__(self, budget: float, confidence: float, **options: Any) -> None:
        super().__init__(budget, confidence, **options, free=False)


class Numeric(Guard):
    """Takes words that were not seen in no slot, numbers in free ones."""

    def __init__(self, budget: float, confidence: float, **options: Any) -> None:
        super().__init__(budget, confidence, **options)
        numbers, _, penalty = self.verified.needs
        self.verified.needs = numbers, 0, penalty


GUARDS: dict[str, type[Guard]] = {
    "guard": Guard, "no certificate": Unproven, "no margin": Certain, "no guard": Unguarded,
}  # fmt: skip


@dataclass(frozen=True)
class Served:
    """A model, and the same one exact."""

    model: nn.Module
    exact: nn.Module
    tokenizer: Any
    answers: Answers

    @classmethod
    def of(cls, shared: Path, which: str, kind: type[Guard], seed: int = 0, **settings: Any) -> Served:
        """A model with a guard of this kind, and nothing stored; `seed` is that of the draw."""
        tokenizer, both = load(shared, which)
        model, exact = both
        answers = Answers(settings.get("answer", "auto"), 0.98)
        memoize(model, database=":memory:", reuse="rows", tokenizer=tokenizer, gate=False, **settings, budget=0.01,
                linear="exact")  # fmt: skip
        memoize(exact, reuse="none")
        handle: Any = model.attmemo
        handle.deferred.idle.close()  # later requests verify: else numbers would depend on when this machine rests
        handle.guard_anew(kind(BUDGET, 0.95, seed=seed))
        return cls(model, exact, tokenizer, answers)

    def run(self, texts: Sequence[str] | Sequence[tuple[str, str]], batch: int, longest: int) -> dict[str, Any]:
        """Answers to a stream, and what the guard did."""
        handle: Any = self.model.attmemo
        before, tokens, changed = handle.stats(), 0, []
        served = []
        for start in range(0, len(texts), batch):
            inputs = self.tokenizer(
                texts[start : start + batch], truncation=True, max_length=longest, padding=True, return_tensors="pt"
            )
            count = len(inputs["input_ids"])
            tokens += int(inputs["attention_mask"].sum())
            done = answered(handle.stats())
            with torch.inference_mode():
                seen = self.answers.read(self.model(**inputs), inputs["attention_mask"])
                true = self.answers.read(self.exact(**inputs), inputs["attention_mask"])
            changed += [self.answers.differ(seen, place, true, place) for place in range(count)]
            served.append((answered(handle.stats()) - done, count))
        handle.flush()  # what is owed takes rows, too
        after = handle.stats()
        half = sum(count for _, count in served) / 2
        seen_lines = late = 0
        for number, count in served:
            late += number if seen_lines >= half else 0
            seen_lines += count
        return {
            "lines": len(texts), "tokens": tokens, "changed": int(sum(changed)),
            "changed_at": [place for place, one in enumerate(changed) if one],
            "served": sum(number for number, _ in served), "served_late": late,
            "rows": after["rows_computed"] - before["rows_computed"],
            "done": _gained(before["guard"]["done"], after["guard"]["done"]),
            "records": after["records"], "state": after["guard"]["state"], "says": after["guard"]["says"],
        }  # fmt: skip


def answered(stats: dict[str, Any]) -> int:
    """Answers that came from records."""
    return int(stats["reused"] + stats["repeated"])


def load(shared: Path, which: str) -> tuple[Any, list[nn.Module]]:
    """The tokenizer, and two copies of the model, in float32."""
    if which != "minilm":
        path = shared / "models" / {"deberta": "deberta-loghub"}.get(which, which)
        kind: Any = AutoModelForSequenceClassification
    else:
        path = Path(model_path())
        kind = AutoModel
    models = [kind.from_pretrained(path, dtype=torch.float32).eval() for _ in range(2)]
    return AutoTokenizer.from_pretrained(path), models


def lines_of(shared: Path, name: str, window: int = 1, count: int = LINES, part: str = "later") -> list[str]:
    """The first lines of the later 30 % of a log, or all before; a window is a line and those before, newest first."""
    lines = whole_log(shared / "data", name)
    windows = [" [SEP] ".join(lines[max(0, i - window + 1) : i + 1][::-1]) for i in range(len(lines))]
    cut = int(len(windows) * 0.7)
    return windows[:cut] if part == "first" else windows[cut:][:count]


def streams(
    shared: Path, which: str, logs: Sequence[str], batch: int, window: int = 1,
    guards: Sequence[str] = tuple(GUARDS), **settings: Any,
) -> dict[str, Any]:  # fmt: skip
    """All logs, one after the other, beside one database."""
    found: dict[str, Any] = {}
    for name in guards:
        kind = GUARDS[name]
        served = Served.of(shared, which, kind, **settings)
        found[name] = {}
        for log in logs:
            found[name][log] = served.run(lines_of(shared, log, window), batch, 256)
            print(name, log, {key: found[name][log][key] for key in ("served", "changed", "state")}, flush=True)
    return found


def growing(shared: Path) -> list[str]:
    """Return reviews that are read again with each sentence that was added."""
    file, found = shared / "data" / "imdb" / "test_subset.jsonl", list[str]()
    for line in file.read_text(encoding="utf-8").splitlines()[:160]:
        parts = re.split(r"(?<=[.!?]) +", json.loads(line)["text"].replace("<br />", " "))[:6]
        found += [" ".join(parts[: end + 1]) for end in range(len(parts))]
    return found[:420]


def instructed(shared: Path) -> list[str]:
    """Return sentences behind one instruction."""
    rows = (shared / "data" / "sst2" / "dev.tsv").read_text(encoding="utf-8").splitlines()[1:401]
    return [f"{INSTRUCTION} {row.split(chr(9))[0]}" for row in rows]


def pairs(shared: Path) -> list[tuple[str, str]]:
    """Return questions, each with all 77 hypotheses of a zero-shot classifier."""
    folder = shared / "data" / "banking77"
    names = json.loads((folder / "categories.json").read_text(encoding="utf-8"))
    with (folder / "test.csv").open(encoding="utf-8", newline="") as file:
        texts = [row["text"] for row in csv.DictReader(file)][::300][:7]
    return [(text, f"The customer asks about {name.replace('_', ' ')}.") for text in texts for name in names]


def is_relevant(output: Any) -> torch.Tensor:
    """Return whether a pair fits, ``[B]``."""
    found: torch.Tensor = (output.logits[:, 0] > 0).long()
    return found


ABLATIONS: dict[str, tuple[type[Guard], dict[str, Any]]] = {
    "the guard": (Guard, {}), "without a certificate": (Unproven, {}), "without a margin": (Certain, {}),
    "without free slots for words": (Numeric, {}), "without free slots": (Closed, {}),
    "without records of grown texts": (Guard, {"grown": False}),
    "without neighbours of changed tokens": (Guard, {"near": 0}),
}  # fmt: skip
"""Each mechanism taken away: the guard, and settings."""


def ablations(shared: Path) -> dict[str, Any]:
    """Measure the guard without one mechanism at a time, with three seeds of the draw."""
    runs = []
    for what, (kind, settings) in ABLATIONS.items():
        for seed in (0, 1, 2):
            runs.append({"what": what, "seed": seed, **workloads(shared, seed, kind, **settings)})
            print(what, seed, flush=True)
    return {"rows": runs}


def workloads(
    shared: Path, seed: int, kind: type[Guard] = Guard, grown: bool = True, **settings: Any
) -> dict[str, Any]:  # fmt: skip
    """Measure a guard beside logs: what a rule is worth elsewhere.

    `grown`: whether long texts that go on become records of their own.
    """
    logs = [line for log in LOGS for line in lines_of(shared, log, count=400)]
    found = {}
    for name, folder, texts, rule in (
        ("logs", "deberta-loghub", logs, "auto"), ("growing", "minilm-sst2", growing(shared), "auto"),
        ("instructed", "minilm-sst2", instructed(shared), "auto"),
        ("pairs", "minilm-banking77-pair", pairs(shared), is_relevant),
    ):  # fmt: skip
        served = Served.of(shared, folder, kind, seed, answer=rule, **(SETTINGS | settings))
        handle: Any = served.model.attmemo
        if not grown:
            handle.planner._grown = lambda *_: []
        run = served.run(texts, 1, 256)
        found[name] = {key: run[key] for key in ("lines", "tokens", "rows", "changed")}
        print(name, found[name], flush=True)
    return found


def alone(shared: Path, which: str, logs: Sequence[str], batch: int, **settings: Any) -> dict[str, Any]:
    """Each log with a guard and a database of its own."""
    return {
        log: Served.of(shared, which, Guard, **settings).run(lines_of(shared, log), batch, 256) for log in logs
    }


def predictors(shared: Path) -> dict[str, Any]:
    """What says beforehand that an answer from a record is another one: of each stream, without a guard.

    The area under the curve is the probability that an answer that changed looks worse than one that did not. The
    curve has, for margins (of vectors: cosines to the record's own answer), the share of the answers that are at least
    so sure, and of these the share that changed.
    """
    found: dict[str, Any] = {}
    for what, which, logs in (("classes", "deberta", LOGS), ("vectors", "minilm", EMBEDDED)):
        served, seen = Served.of(shared, which, Unguarded, **SETTINGS), list[tuple[float, ...]]()
        handle: Any = served.model.attmemo
        looked, own = list[tuple[int, float]](), handle.guarded._low

        def low(margins: Any, asking: Any, places: Any, looked: Any = looked, own: Any = own) -> set[int]:
            looked.append((int(asking.plan.changes.word.sum()), float(margins[0])))
            return own(margins, asking, places)  # type: ignore[no-any-return]

        handle.guarded._low = low
        for log in logs:
            for line in lines_of(shared, log):
                looked.clear()
                run = served.run([line], 1, 256)
                if looked and np.isfinite(looked[0][1]):
                    words, margin = looked[0]
                    seen.append((run["changed"], margin, -run["rows"] / run["tokens"], -words))
        changed, *looks = np.array(seen).T
        names = ("margin", "share of the rows computed", "words changed")
        steps = (VECTORS if what == "vectors" else CLASSES).steps
        found[what] = {
            "answers": len(changed), "changed": int(changed.sum()),
            "area": {name: _area(look, changed == 1) for name, look in zip(names, looks, strict=True)},
            "curve": [[step, float((looks[0] >= step).mean()), float(changed[looks[0] >= step].mean())]
                      for step in (0.0, *steps)],
        }  # fmt: skip
        print(what, found[what], flush=True)
    return found


def _area(look: np.ndarray[Any, Any], changed: np.ndarray[Any, Any]) -> float:
    """The probability that an answer that changed looks worse than one that did not; ties count half."""
    ranks = rankdata(look)
    worse = ranks[~changed].mean() - (np.count_nonzero(~changed) + 1) / 2  # changed ones below one that did not, mean
    return float(worse / np.count_nonzero(changed))


def switch(shared: Path) -> dict[str, Any]:
    """A stream that goes from one log to another: shares of 100 lines each."""
    found = {}
    for first, second in (("OpenSSH", "HDFS"), ("HDFS", "Thunderbird"), ("Apache", "Android")):
        served = Served.of(shared, "deberta", Guard, **SETTINGS)
        parts = [*lines_of(shared, first), *lines_of(shared, second)]
        found[f"{first}, {second}"] = [served.run(parts[i : i + 100], 1, 256) for i in range(0, len(parts), 100)]
    return found


TEMPLATES: dict[str, list[tuple[str, list[str]]]] = {
    "reversed word": [
        ("Accepted password for user{} from 10.0.{}.{} port {} ssh2", ["Accepted", "Failed"]),
        ("interface eth{} link is up, {} Mbps, {} peers, {} ms", ["up", "down"]),
        ("disk {} of host {} is healthy, temperature {} C, {} errors", ["is healthy", "is not healthy"]),
    ],
    "status code": [
        ("GET /api/v{}/items/{} HTTP/1.1 status 200 length {} time {}", ["status 200", "status 500"]),
        ("job {} on node {} ended with code 0 after {} s, {} retries", ["code 0", "code 137"]),
    ],
    "number that matters": [
        ("fan {} of chassis {} runs at 40 percent, {} rpm, sensor {}", ["40 percent", "0 percent"]),
        ("temperature of cpu {} on board {} is 45 C, limit 90 C, {} {}", ["45 C", "145 C"]),
    ],
}
"""Lines with fields that vary, and the words in them that are exchanged."""


def adversaries(shared: Path) -> dict[str, Any]:
    """Lines that mean the opposite of what the database holds, at every stage of learning.

    Each template fills the database and teaches the guard with fields that vary. Then one word is exchanged. Whether
    the exchange changes the answer, the model decides: a classifier of logs. What is asked is whether a change that
    was never verified is served.
    """
    generator = np.random.default_rng(0)
    found: dict[str, Any] = {}
    for kind, templates in TEMPLATES.items():
        total: collections.Counter[str] = collections.Counter()
        for template, (former, other) in templates:
            for taught in (1, 5, 50, 400):
                served = Served.of(shared, "deberta", Unproven, **SETTINGS)  # verification has to do it alone
                for text in fill(template, taught, generator):
                    _answer(served, text)
                for text in fill(template.replace(former, other), 3, generator)[:1]:
                    handle: Any = served.model.attmemo
                    before = answered(handle.stats())
                    same = _answer(served, text)
                    was_served = answered(handle.stats()) > before
                    total.update(asked=1, served=was_served, changed=not same)
        found[kind] = dict(total)
        print(kind, found[kind], flush=True)
    return found


def fill(template: str, count: int, generator: np.random.Generator) -> list[str]:
    """A template with numbers in its fields."""
    return [template.format(*generator.integers(1, 250, 4).tolist()) for _ in range(count)]


def _answer(served: Served, text: str) -> bool:
    """Answer one text; whether the answer is the exact one."""
    inputs = served.tokenizer(text, return_tensors="pt")
    with torch.inference_mode():
        seen = served.answers.read(served.model(**inputs), inputs["attention_mask"])
        true = served.answers.read(served.exact(**inputs), inputs["attention_mask"])
    return not served.answers.differ(seen, 0, true, 0)


def simulated(_: Path) -> dict[str, Any]:
    """Streams of samples with a known rate: false certificates, and the delay of the alarm."""
    generator = np.random.default_rng(0)
    count, length = 1000, 4000
    false = {}
    for rate in (0.0101, 0.012, 0.015):
        samples = generator.random((count, length)) < rate
        false[str(rate)] = float(np.mean([_ever_certified(row) for row in samples]))
    delays = {}
    for rate in (0.02, 0.03, 0.05, 0.10):
        delays[str(rate)] = [_delay(generator.random(20_000) < rate) for _ in range(200)]
    quiet = [_delay(generator.random(20_000) < BUDGET / 2) for _ in range(100)]
    return {
        "streams": count, "samples": length, "falsely_certified": false,
        "alarm_after": {rate: {"median": float(np.median(found)), "p90": float(np.quantile(found, 0.9))}
                        for rate, found in delays.items()},
        "false_alarms_at_half_the_budget": float(np.mean([delay < 20_000 for delay in quiet])),
    }  # fmt: skip


def _ever_certified(samples: np.ndarray[Any, Any]) -> bool:
    """Whether the highest rate ever falls to the budget."""
    changed = np.cumsum(samples)
    for failures in range(int(changed[-1]) + 1):
        places = np.flatnonzero(changed == failures)
        if len(places) and highest_rate(failures, int(places[-1]) + 1 - failures, 0.95) <= BUDGET:
            return True
    return False


def _delay(samples: np.ndarray[Any, Any]) -> int:
    """Samples until the alarm, after a clean start of 400; all requests are served."""
    certificate = Certificate(BUDGET, 0.95)
    certificate.counts.requests = certificate.counts.served = 1
    certificate.counts.same = 400
    for number, changed in enumerate(samples.tolist()):
        if certificate.alarms(bool(changed)):
            return number + 1
    return len(samples)


ROUNDS = 5
PASSES = ("new lines", "the same lines again")
LEARNED = ("OpenSSH", "HDFS")


def overhead(shared: Path) -> dict[str, Any]:
    """What the samples of a certified guard cost requests: milliseconds a line, and what became of the lines.

    A guard that draws samples and one that draws none learn from the first 70 % of two logs and are taken for
    certified. Then the later 30 % go through both twice, a batch each in turns. The time holds what is
    stored and what is verified afterwards: no time is idle. Each round begins with nothing and draws others.
    """
    found: dict[str, Any] = {}
    lines = [line for log in LEARNED for line in lines_of(shared, log)]
    for size in (1, 32):
        rounds = {part: {"guard": list[float](), "nothing drawn": list[float]()} for part in PASSES}
        done: dict[str, list[Any]] = {part: [] for part in PASSES}
        for seed in range(ROUNDS):
            ways = {"guard": _taught(shared, seed), "nothing drawn": _taught(shared, seed, 0.0)}
            for part in PASSES:
                spent, before = dict.fromkeys(ways, 0.0), _done(ways["guard"])
                for number, start in enumerate(range(0, len(lines), size)):
                    for name in sorted(ways, reverse=bool(number % 2)):
                        spent[name] += _timed(ways[name], lines[start : start + size])
                for name in ways:
                    spent[name] += _paid(ways[name])
                    rounds[part][name].append(1e3 * spent[name] / len(lines))
                done[part].append(_gained(before, _done(ways["guard"])))
        found[str(size)] = {part: _overhead_of(rounds[part], done[part]) for part in PASSES}
        print(size, found[str(size)], flush=True)
    return {"conditions": conditions(), "sizes": found}


def _overhead_of(rounds: dict[str, list[float]], done: list[Any]) -> dict[str, Any]:
    ratios = [own / other for own, other in zip(rounds["guard"], rounds["nothing drawn"], strict=True)]
    return {
        "ms": {name: statistics.median(times) for name, times in rounds.items()}, "rounds": rounds,
        "ratios": ratios, "over_nothing_drawn": statistics.median(ratios), "done": done,
        "drawn": sum(one.get(what, 0) for one in done for what in ("sampled", "afterwards"))
        / sum(one.get(what, 0) for one in done for what in ("sampled", "reused", "repeated")),
    }  # fmt: skip


def _taught(shared: Path, seed: int, drawn: float | None = None) -> Served:
    """A model with records of the first 70 % of two logs, and a guard that is certified."""
    served = Served.of(shared, "deberta", Guard, seed, **SETTINGS)
    for log in LEARNED:
        lines = lines_of(shared, log, part="first")
        for start in range(0, len(lines), 32):
            _timed(served, lines[start : start + 32])
    handle: Any = served.model.attmemo
    guard: Guard = handle.guarded.guard
    handle.flush()
    guard.certificate.adopt(Counts(same=2000, requests=4000, served=3000))
    if drawn is not None:
        guard.drawn = drawn
    return served


def _gained(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return {what: count - before.get(what, 0) for what, count in after.items()}


def _done(served: Served) -> dict[str, int]:
    handle: Any = served.model.attmemo
    guard = handle.stats()["guard"]
    return guard["done"] | {"afterwards": guard["verified_afterwards"]}


def _timed(served: Served, texts: Sequence[str]) -> float:
    """Seconds of one forward, with all that it stores."""
    inputs = served.tokenizer(texts, truncation=True, max_length=256, padding=True, return_tensors="pt")
    handle: Any = served.model.attmemo
    begin = perf_counter()
    with torch.inference_mode():
        served.model(**inputs)
    handle.engine.reuse.store.flush()
    return perf_counter() - begin


def _paid(served: Served) -> float:
    """Seconds until all that is owed is verified."""
    handle: Any = served.model.attmemo
    begin = perf_counter()
    handle.flush()
    return perf_counter() - begin


SETTINGS: dict[str, Any] = {"threshold": 0.4}


def cases(shared: Path) -> Iterator[tuple[str, Any]]:
    """Each case and what runs it."""
    one = dict(SETTINGS)
    yield "lines", lambda: streams(shared, "deberta", LOGS, 1, **one)
    for seed in (1, 2):
        yield f"seed {seed}", partial(streams, shared, "deberta", LOGS, 1, guards=("guard",), seed=seed, **one)
    yield "guard-ablations", lambda: ablations(shared)
    yield "alone", lambda: alone(shared, "deberta", LOGS, 1, **one)
    yield "near", lambda: streams(shared, "deberta", LOGS, 1, guards=("guard",), near=1, **one)
    yield "near 0", lambda: streams(shared, "deberta", LOGS, 1, guards=("guard",), near=0, **one)
    yield "near 2", lambda: streams(shared, "deberta", LOGS, 1, guards=("guard",), near=2, **one)
    yield "windows", lambda: streams(shared, "deberta", LOGS, 1, 4, ("guard", "no guard"), **one)
    yield "embeddings", lambda: streams(shared, "minilm", EMBEDDED, 1, **one)
    yield "predictors", lambda: predictors(shared)
    yield "switch", lambda: switch(shared)
    yield "adversaries", lambda: adversaries(shared)
    yield "overhead", lambda: overhead(shared)
    yield "simulated", lambda: simulated(shared)


def table(out: Path) -> str:
    """What the files of OUT say, in Markdown."""
    rows = [
        "| stream | | lines | reused | second half | changed | worst log | tokens recomputed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case in ("lines", "seed 1", "seed 2", "near", "windows", "embeddings"):
        file = out / f"{case}.json"
        found = json.loads(file.read_text()) if file.exists() else {}
        for name in GUARDS:
            logs = found.get(name)
            if logs:
                rows.append(f"| {case}, {len(logs)} logs in one stream | {name} | {_sums(list(logs.values()))} |")
        for log, one in found.get("guard", {}).items():
            rows.append(f"| {case}, {log} | guard | {_sums([one])} |")
    return "\n".join(rows)


def merged(out: Path, known: Sequence[str]) -> dict[str, Any]:
    """What the files of OUT hold, by case, without the sentences and places of single runs."""
    files = {name: out / f"{name}.json" for name in known if name != "guard-ablations"}
    found, stamps = gathered({name: json.loads(file.read_text()) for name, file in files.items() if file.exists()})
    return {name: _short(case) for name, case in found.items()} | {"measured": stamps}


def _short(found: Any) -> Any:
    if isinstance(found, list):
        return [_short(item) for item in found]
    if not isinstance(found, dict):
        return found
    return {name: _short(item) for name, item in found.items() if name not in ("says", "changed_at")}


def _sums(runs: list[dict[str, Any]]) -> str:
    lines = sum(run["lines"] for run in runs)
    worst = max(run["changed"] / run["lines"] for run in runs)
    parts = (
        f"{lines:,}",
        f"{sum(run['served'] for run in runs) / lines:.3f}",
        f"{2 * sum(run['served_late'] for run in runs) / lines:.3f}",
        percent(sum(run["changed"] for run in runs) / lines, 2),
        percent(worst, 2),
        f"{sum(run['rows'] for run in runs) / sum(run['tokens'] for run in runs):.3f}",
    )
    return " | ".join(parts)


def main() -> None:
    """Run the cases that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shared", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("cases", nargs="*", help=", ".join(dict(cases(Path()))))
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--merge", type=Path, metavar="FILE")
    options = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    known = dict(cases(options.shared))
    for name in options.cases:
        if name not in known:
            parser.error(f"no case {name!r}: {', '.join(known)}")
        write_record(options.out / f"{name}.json", known[name]())
    if options.table:
        print(table(options.out))
    if options.merge:
        write_json(options.merge, merged(options.out, tuple(known)))


if __name__ == "__main__":
    main()
