"""Audits a running service from outside: asks texts with reuse, then again without, and compares the answers.

    python scripts/audit_service.py URL N [--texts FILE] [--key KEY] [--budget 0.01]

N texts are drawn by chance from the lines of FILE; without one, lines are invented, which say little of your traffic.
Each is asked as clients do, and at once again with the header `x-attmemo-reuse: off`. A class has changed if it is
another class, a vector if its cosine is below 0.98, a score if it moved by more than 0.05, a list of spans if one is
another one. Printed: the share of answers that changed, and an upper bound of it at 95 % (Clopper and Pearson).
Exit code 1: the share that was seen is above the budget by more than chance. It needs Python alone, not attmemo.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import urllib.request
from pathlib import Path
from typing import Any

COSINE, STEP, CONFIDENCE = 0.98, 0.05, 0.95
LINE = "sshd[{}]: Failed password for {} from 10.{}.{}.{} port {} ssh2"
USERS = ("root", "guest", "admin", "alice", "bob")


def ask(url: str, path: str, body: Any = None, key: str | None = None, reuse: str = "on") -> Any:
    """The JSON that a service answers."""
    headers = {"content-type": "application/json", "x-attmemo-reuse": reuse}
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    raw = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url.rstrip("/") + path, raw, headers), timeout=60) as found:
        return json.load(found)


def invented(count: int, seed: int) -> list[str]:
    """So many lines of a log that never was."""
    chance = random.Random(seed)
    return [
        LINE.format(chance.randrange(99999), chance.choice(USERS), *(chance.randrange(256) for _ in range(3)),
                    chance.randrange(65536))
        for _ in range(count)
    ]  # fmt: skip


def answer(url: str, task: str, text: str, query: str, **how: Any) -> Any:
    """What a service gives for a text: a vector, a class, a score, or spans."""
    if task == "embedding":
        return ask(url, "/embed", {"inputs": text}, **how)[0]
    if task == "reranker":
        return ask(url, "/rerank", {"query": query, "texts": [text]}, **how)[0]["score"]
    if task == "tagger":
        found = ask(url, "/spans", {"inputs": text}, **how)
        return [[span["entity_group"], span["start"], span["end"]] for span in found]
    return max(ask(url, "/predict", {"inputs": text}, **how), key=lambda one: one["score"])["label"]


def differ(task: str, one: Any, other: Any) -> bool:
    """Whether two answers are different ones."""
    if task == "embedding":
        product = sum(a * b for a, b in zip(one, other, strict=True))
        return product < COSINE * math.hypot(*one) * math.hypot(*other)
    return abs(one - other) > STEP if task == "reranker" else bool(one != other)


def at_most(changed: int, count: int, chance: float) -> float:
    """Probability that so many or fewer of `count` changed, where each does with this chance."""
    if chance >= 1.0:
        return float(changed >= count)
    logs = [
        math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1)
        + k * math.log(chance) + (count - k) * math.log1p(-chance)
        for k in range(changed + 1)
    ]  # fmt: skip
    return math.fsum(map(math.exp, logs))


def upper_bound(changed: int, count: int, confidence: float = CONFIDENCE) -> float:
    """The highest share of changed answers that these do not rule out (Clopper and Pearson, one-sided)."""
    low, high = 0.0, 1.0
    for _ in range(60 if changed < count else 0):
        middle = (low + high) / 2
        low, high = (middle, high) if at_most(changed, count, middle) > 1 - confidence else (low, middle)
    return high


def audit(url: str, texts: list[str], key: str | None = None) -> dict[str, Any]:
    """Ask each text twice; the counts, JSON-able."""
    task = next(iter(ask(url, "/info", key=key)["model_type"]))
    changed = 0
    for text in texts:
        given = answer(url, task, text, texts[0], key=key)
        exact = answer(url, task, text, texts[0], key=key, reuse="off")
        changed += differ(task, given, exact)
    bound = upper_bound(changed, len(texts))
    return {"url": url, "task": task, "texts": len(texts), "changed": changed,
            "share": changed / len(texts), "at_most": bound, "confidence": CONFIDENCE}  # fmt: skip


def main() -> int:
    """Run an audit; whether the budget was seen to be broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("count", type=int)
    parser.add_argument("--texts", type=Path, help="a file with a text in each line")
    parser.add_argument("--key")
    parser.add_argument("--budget", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    texts = invented(given.count, given.seed)
    if given.texts is not None:
        lines = [line for line in given.texts.read_text(encoding="utf-8").splitlines() if line.strip()]
        texts = random.Random(given.seed).sample(lines, min(given.count, len(lines)))
    if not texts:
        parser.error("there is no text to ask")
    found = audit(given.url, texts, given.key)
    print(json.dumps(found))
    broken = found["changed"] > 0 and at_most(found["changed"] - 1, len(texts), given.budget) > CONFIDENCE
    share, most = (f"{100 * found[key]:.2f} %" for key in ("share", "at_most"))
    print(f"{found['changed']} of {len(texts)} answers changed ({share}), at most {most} at {100 * CONFIDENCE:.0f} %"
          + ("; that is above the budget by more than chance" if broken else ""))  # fmt: skip
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
