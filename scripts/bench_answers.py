"""Orders of rerankers and tags of forms under 8 bits and under a guard: docs/answers-measured.md.

    python scripts/bench_answers.py ../shared docs/answers.json   # a minute on two cores
    python scripts/result_pages.py                                # then: the tables

Answers are compared with those of exact blocks. Shares and counts are measured, no times: other work on the machine
does no harm.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from bench_workloads import order_kept
from marked import table
from measured_at import write_record
from results.files import NONE, standing
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoTokenizer
from workloads import WORKLOADS, Workload, sign

from attmemo import memoize
from attmemo.guard.answers import Answers
from attmemo.wording import percent

BUDGET, MOVED, PART = 0.01, 0.05, 1000
GUARDED: Final = {"budget": BUDGET, "database": ":memory:", "linear": "exact", "gate": False}
METHODS: Final[dict[str, dict[str, Any]]] = {
    "exact": {}, "int8": {"linear": "int8"}, "reuse, score": GUARDED | {"answer": "score"},
    "reuse, sign": GUARDED | {"answer": sign},
}  # fmt: skip
FORMS: Final[dict[str, dict[str, Any]]] = {"exact": {}, "int8": {"linear": "int8"}, "reuse": GUARDED}


def asked(workload: Workload, shared: Path, options: dict[str, Any]) -> Any:
    """A memoized model of a stream, and a function that gives its output and its arguments for a request."""
    folder = shared / "models" / workload.model
    tokenizer = AutoTokenizer.from_pretrained(folder)
    kind = AutoModelForTokenClassification if workload.tags else AutoModelForSequenceClassification
    model = kind.from_pretrained(folder, dtype=torch.bfloat16).eval()
    memoize(model, **options)

    def ask(request: Sequence[Any]) -> tuple[Any, Any]:
        first, second = list(request), None
        if not isinstance(request[0], str):
            first, second = map(list, zip(*request, strict=True))
        given = tokenizer(
            first, second, padding=True, truncation=True, max_length=workload.longest, return_tensors="pt"
        )  # fmt: skip
        with torch.no_grad():
            output = model(**given)
        if options.get("budget"):
            model.attmemo.flush()  # a pause, in which what is owed is verified
        return output, given

    return model, ask


def orders(stream: str, shared: Path) -> dict[str, dict[str, Any]]:
    """What each method does to the scores of a stream, and to the order of each request."""
    workload, exact, found = WORKLOADS[stream](shared / "data"), list[list[float]](), dict[str, dict[str, Any]]()
    for name, options in METHODS.items():
        model, ask = asked(workload, shared, options)
        scores = [ask(request)[0].logits[:, 0].float().tolist() for request in workload.requests]
        exact = exact or scores
        pairs = [pair for own, other in zip(exact, scores, strict=True) for pair in zip(own, other, strict=True)]
        moved = (torch.tensor(pairs, dtype=torch.float64).sigmoid().diff(dim=1).abs() > MOVED).double().mean()
        stats = model.attmemo.stats()
        found[name] = order_kept(exact, scores) | {
            "moved": float(moved), "another sign": sum((a > 0) != (b > 0) for a, b in pairs) / len(pairs),
            "computed": stats["share_computed"] if stats["guard"] else 1.0,
            "reused": stats["guard"]["reused"] / len(pairs) if stats["guard"] else 0.0, "answers": len(pairs),
        }  # fmt: skip
        print(stream, name, json.dumps(found[name]), flush=True)
    return found


def forms(shared: Path) -> dict[str, Any]:
    """Forms with other spans than exact ones, by method; by thousands what was reused and computed again."""
    workload = WORKLOADS["forms"](shared / "data")
    texts = [text for request in workload.requests for text in request]
    requests = [texts[first : first + 8] for first in range(0, len(texts), 8)]
    exact, found = list[Any](), dict[str, Any]()
    for name, options in FORMS.items():
        model, ask = asked(workload, shared, options)
        reader = Answers("auto", 1.0)
        reader.meet(model, AutoTokenizer.from_pretrained(shared / "models" / workload.model))
        spans, parts, before = list[Any](), list[dict[str, Any]](), dict[str, int]()
        for request in requests:
            output, given = ask(request)
            spans += reader.read(output, reader.mask_in(given)).values.tolist()
            if options.get("budget") and len(spans) % PART == 0:
                stats = model.attmemo.stats()
                now = {key: stats["guard"][key] for key in ("reused", "repeated")}
                now |= {"rows": stats["rows_computed"], "tokens": stats["tokens"]}
                other = sum(a != b for a, b in zip(exact, spans, strict=False))
                one = {key: value - before.get(key, 0) for key, value in now.items()}
                parts.append(one | {"forms": len(spans), "other spans": other, "state": stats["guard"]["state"]})
                before = now
        exact = exact or spans
        found[name] = {"other spans": sum(a != b for a, b in zip(exact, spans, strict=True)), "forms": len(spans)}
        found[name] |= {"parts": parts} if parts else {}
        print("forms", name, json.dumps(found[name]), flush=True)
    return found


def table_of_orders(found: dict[str, Any]) -> list[str]:
    """A row for each stream and method."""
    rows = [
        (
            stream, name, f"{one['computed']:.2f}", percent(one["reused"], 1), percent(one["moved"], 2),
            percent(one["another sign"], 2), f"{one['first kept']:.3f}", f"{one['ndcg']:.4f}",
        )
        for stream, methods in found["orders"].items() for name, one in methods.items() if name != "exact"
    ]  # fmt: skip
    head = "stream | method | tokens recomputed | reused | moved by more than 0.05 | another sign | first | nDCG@10"
    return table(head, rows)


def table_of_forms(found: dict[str, Any]) -> list[str]:
    """A row for each thousand of forms, and one for 8 bits."""
    rows = [
        (
            f"reuse, to {one['forms']:,}", percent(one["reused"] / PART, 1), percent(one["repeated"] / PART, 1),
            f"{one['rows'] / one['tokens']:.2f}", str(one["other spans"]), standing(one["state"]),
        )
        for one in found["forms"]["reuse"]["parts"]
    ]  # fmt: skip
    own = found["forms"]["int8"]
    rows.append((f"`linear=\"int8\"`, to {own['forms']:,}", NONE, NONE, NONE, str(own["other spans"]), NONE))
    return table("forms | reused | repeated | tokens recomputed | other spans, so far | guard", rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shared", type=Path)
    parser.add_argument("output", type=Path)
    args = parser.parse_args()
    found = {"orders": {stream: orders(stream, args.shared) for stream in ("rerank", "zero-shot")}}
    write_record(args.output, found | {"forms": forms(args.shared)})


if __name__ == "__main__":
    main()
