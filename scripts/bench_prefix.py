"""Equal prefixes of causal models: a query before many documents, and a policy before many messages.

    python scripts/bench_prefix.py docs/prefix.json --layers 6 --page docs/prefix.md   # some minutes
    python scripts/bench_prefix.py docs/prefix.json --page docs/prefix.md --only-page  # only the page's table

The model has the shape of Qwen3-0.6B and random weights. Times are whole calls of the model on token ids, the least of
some in turns: `--clock processor` counts what the thread worked, for a machine that has other things to do, too.
Answers are compared bit by bit.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from marked import replace_measured
from measured_at import measured_at
from transformers import Qwen3Config, Qwen3ForSequenceClassification

from attmemo import memoize
from attmemo.system.machine import conditions

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "processor": time.thread_time}
QUERY, DOCUMENTS, LENGTHS = 120, 32, (100, 300)
POLICY, MESSAGE, MESSAGES = 800, 60, 6
VOCABULARY = 32_000


def model_of(layers: int) -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=1024, intermediate_size=3072, num_hidden_layers=layers,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128, num_labels=1, pad_token_id=0,
    )  # fmt: skip
    return Qwen3ForSequenceClassification(config).eval().to(torch.bfloat16)


def batch_of(sequences: list[Any]) -> dict[str, torch.Tensor]:
    """Padded on the left, as decoders that rerank are."""
    longest = max(map(len, sequences))
    ids, mask = torch.zeros(2, len(sequences), longest, dtype=torch.long)
    for row, own in enumerate(sequences):
        ids[row, longest - len(own) :], mask[row, longest - len(own) :] = torch.from_numpy(own), 1
    return {"input_ids": ids, "attention_mask": mask}


def timed(model: Any, inputs: Any, clock: Callable[[], float]) -> tuple[float, torch.Tensor]:
    with torch.inference_mode():
        start = clock()
        found = model(**inputs).logits
        return clock() - start, found


def rerank(model: Any, rounds: int, clock: Callable[[], float]) -> dict[str, Any]:
    """One query, many documents, in one batch: prefixes computed once, and for each sequence, in turns."""
    memoize(model)
    stack, random = model.attmemo.engine.reuse, np.random.default_rng(1)
    query, (least, most) = random.integers(5, VOCABULARY, QUERY), LENGTHS
    documents = [random.integers(5, VOCABULARY, n) for n in random.integers(least, most + 1, DOCUMENTS)]
    inputs = batch_of([np.concatenate([query, own]) for own in documents])
    seconds: dict[bool, list[float]] = {True: [], False: []}
    answers = {}
    for _ in range(rounds):
        for stack.shares in (True, False):
            taken, answers[stack.shares] = timed(model, inputs, clock)
            seconds[stack.shares].append(taken)
    stack.shares = True
    tokens = int(inputs["attention_mask"].sum())
    left = (tokens - (DOCUMENTS - 1) * QUERY) / tokens
    ratio = min(seconds[False]) / min(seconds[True])
    return {
        "tokens": tokens, "left": left, "whole": min(seconds[False]), "shared": min(seconds[True]), "ratio": ratio,
        "of bound": ratio * left, "equal": torch.equal(answers[True], answers[False]),
    }  # fmt: skip


def guard(model: Any, rounds: int, clock: Callable[[], float]) -> dict[str, Any]:
    """One request after the other, all behind one policy; a new policy in every round."""
    memoize(model, reuse="prefix")
    random = np.random.default_rng(2)
    first, later, equal = [], [], True
    for _ in range(rounds):
        policy = random.integers(5, VOCABULARY, POLICY)
        for number in range(MESSAGES):
            inputs = batch_of([np.concatenate([policy, random.integers(5, VOCABULARY, MESSAGE)])])
            taken, seen = timed(model, inputs, clock)
            (later if number else first).append(taken)
            with model.attmemo.observe(reuse=False):
                equal = equal and torch.equal(seen, timed(model, inputs, clock)[1])
    return {
        "first": min(first), "later": min(later), "ratio": min(first) / min(later),
        "ratio of medians": median(first) / median(later), "equal": equal,
    }  # fmt: skip


def table(result: dict[str, Any]) -> str:
    """The numbers in Markdown."""
    machine, one, two = result["conditions"], result["rerank"], result["guard"]
    kind = "time of the processor" if result["clock"] == "processor" else "wall time"
    ms = [f"{1e3 * seconds:.0f} ms" for seconds in (one["whole"], one["shared"], two["first"], two["later"])]
    least, most = LENGTHS
    said = {True: "the same bits", False: "differ"}
    lines = [
        f"{machine['cpu']}, {', '.join(machine['features'])}; {machine['threads']} thread(s), bfloat16, "
        f"{result['layers']} layers, {kind}, least of {result['rounds']} rounds; commit {result['commit']}, "
        f"{result['date']}:", "",
        "| | every row | equal prefixes once | ratio | bound | answers |",
        "|---|---|---|---|---|---|",
        f"| a query of {QUERY} tokens before {DOCUMENTS} documents of {least} to {most}, one batch | {ms[0]} "
        f"| {ms[1]} | {one['ratio']:.2f} | {1 / one['left']:.2f} | {said[one['equal']]} |",
        f"| a policy of {POLICY} tokens before a message of {MESSAGE}: first request, later ones | {ms[2]} | {ms[3]} "
        f"| {two['ratio']:.1f} | {(POLICY + MESSAGE) / MESSAGE:.1f} | {said[two['equal']]} |",
    ]  # fmt: skip
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--case", choices=["rerank", "guard"], nargs="*", default=["rerank", "guard"])
    parser.add_argument("--page", type=Path, help="put the table into this page")
    parser.add_argument("--only-page", action="store_true", help="measure nothing")
    args = parser.parse_args()
    result = json.loads(args.output.read_text()) if args.output.exists() else {}
    if not args.only_page:
        torch.set_num_threads(args.threads)
        model = model_of(args.layers)
        for name, case in (("rerank", rerank), ("guard", guard)):
            if name in args.case:
                result[name] = case(model, args.rounds, CLOCKS[args.clock])
                print(name, json.dumps(result[name]), flush=True)
        result |= {
            "layers": args.layers, "rounds": args.rounds, "clock": args.clock,
            "conditions": conditions() | {"threads": args.threads},
        } | measured_at()  # fmt: skip
        args.output.write_text(json.dumps(result, indent=1) + "\n")
    if args.page is not None:
        replace_measured(args.page, table(result))


if __name__ == "__main__":
    main()
