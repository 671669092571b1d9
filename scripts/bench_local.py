"""Models whose layers are all local: packed blocks beside the original, and documents of which a sentence is edited.

    python scripts/bench_local.py docs/local.json --page docs/local.md              # some minutes, 6 GB
    python scripts/bench_local.py docs/local.json --page docs/local.md --only-page  # only the page's table

The model has the shape of `openai/privacy-filter` (experts, sinks, windows of 128 tokens to each side) and random
weights; few words, as embeddings take no time. Times are those of the processor, of one thread: whole calls on token
ids, both sides in turns, medians. Answers are compared bit by bit.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from marked import replace_measured
from measured_at import measured_at
from transformers import OpenAIPrivacyFilterConfig, OpenAIPrivacyFilterForTokenClassification

from attmemo import memoize
from attmemo.system.machine import conditions

VOCABULARY, TEXTS, LENGTHS, SENTENCE = 2_000, 32, (10, 200), 20
DOCUMENTS = 400, 2000, 6000


def model_of(layers: int, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    config = OpenAIPrivacyFilterConfig(vocab_size=VOCABULARY, num_hidden_layers=layers, pad_token_id=0, eos_token_id=1)
    return OpenAIPrivacyFilterForTokenClassification(config).eval().to(dtype)


def batch_of(texts: list[Any]) -> dict[str, torch.Tensor]:
    longest = max(map(len, texts))
    ids, mask = torch.zeros(2, len(texts), longest, dtype=torch.long)
    for row, own in enumerate(texts):
        ids[row, : len(own)], mask[row, : len(own)] = torch.from_numpy(own), 1
    return {"input_ids": ids, "attention_mask": mask}


def timed(model: Any, inputs: Any) -> tuple[float, torch.Tensor]:
    with torch.inference_mode():
        start = time.thread_time()
        found = model(**inputs).logits
        return time.thread_time() - start, found[inputs["attention_mask"].bool()]


def mixed(model: Any, rounds: int) -> dict[str, Any]:
    """Texts of mixed lengths: the original, and its blocks without padding, in turns."""
    random = np.random.default_rng(1)
    inputs = batch_of([random.integers(5, VOCABULARY, n) for n in random.integers(*LENGTHS, TEXTS)])
    seconds: dict[bool, list[float]] = {True: [], False: []}
    answers = {}
    for round_ in range(rounds + 1):
        for packed in (False, True):
            (model.attmemo.enable if packed else model.attmemo.disable)()
            with model.attmemo.observe(reuse=False):  # or rows of the round before would be read
                taken, answers[packed] = timed(model, inputs)
            seconds[packed] += [taken] * (round_ > 0)
    model.attmemo.enable()
    stock, ours = median(seconds[False]), median(seconds[True])
    near = (answers[True].float() - answers[False].float()).abs().max() / answers[False].float().abs().max()
    return {
        "tokens": int(inputs["attention_mask"].sum()), "padded": inputs["input_ids"].numel(), "stock": stock,
        "packed": ours, "ratio": stock / ours, "gap": float(near),
    }  # fmt: skip


def edits(model: Any, length: int, rounds: int) -> dict[str, Any]:
    """A document, and a sentence in its middle that is another one each time: stored rows, and all computed."""
    random = np.random.default_rng(length)
    text = random.integers(5, VOCABULARY, length)
    timed(model, batch_of([text]))
    whole, local, equal, rows = [], [], True, []
    for _ in range(rounds):
        other = text.copy()
        other[length // 2 : length // 2 + SENTENCE] = random.integers(5, VOCABULARY, SENTENCE)
        inputs = batch_of([other])
        answers = {}
        for reuse in (True, False) if len(rows) % 2 else (False, True):
            with model.attmemo.observe(reuse=reuse) as seen:
                taken, answers[reuse] = timed(model, inputs)
            (local if reuse else whole).append(taken)
            rows += [seen.rows[0]] * reuse
        equal = equal and torch.equal(answers[True], answers[False])
    return {
        "tokens": length, "rows": median(rows), "whole": median(whole), "local": median(local),
        "ratio": median(whole) / median(local), "equal": equal,
    }  # fmt: skip


def table(result: dict[str, Any]) -> str:
    """The numbers in Markdown."""
    machine, said = result["conditions"], {True: "the same bits", False: "differ"}
    lines = [
        f"{machine['cpu']}, {', '.join(machine['features'])}; one thread, time of the processor, medians of "
        f"{result['rounds']} rounds; commit {result['commit']}, {result['date']}:", "",
        f"| {TEXTS} texts of {LENGTHS[0]} to {LENGTHS[1]} tokens | layers | original | packed | ratio |",
        "|---|---|---|---|---|",
    ]  # fmt: skip
    for kind, one in result["mixed"].items():
        cells = f"{one['layers']} | {one['stock']:.2f} s | {one['packed']:.2f} s | {one['ratio']:.1f}"
        lines.append(f"| {kind}: {one['tokens']} tokens, {one['padded']} with padding | {cells} |")
    lines += ["", "| a sentence edited in a document of | computed | every row | local rows | ratio | answers |",
              "|---|---|---|---|---|---|"]  # fmt: skip
    for one in result["edits"]:
        cells = f"{one['rows']:.0f} | {one['whole']:.2f} s | {one['local']:.2f} s | {one['ratio']:.2f}"
        lines.append(f"| {one['tokens']} tokens | {cells} | {said[one['equal']]} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--types", nargs="*", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--documents", type=int, nargs="*", default=DOCUMENTS)
    parser.add_argument("--page", type=Path, help="put the tables into this page")
    parser.add_argument("--only-page", action="store_true", help="measure nothing")
    args = parser.parse_args()
    result = json.loads(args.output.read_text()) if args.output.exists() else {}
    if not args.only_page:
        torch.set_num_threads(1)
        result |= {"mixed": {}, "edits": []}
        for kind in args.types:
            layers = args.layers if kind == "bfloat16" else min(args.layers, 2)  # 5 GB of weights, and as much packed
            model = memoize(model_of(layers, getattr(torch, kind)), reuse="local")
            result["mixed"][kind] = mixed(model, args.rounds) | {"layers": layers}
            print(kind, json.dumps(result["mixed"][kind]), flush=True)
            if kind == args.types[-1]:
                for length in args.documents:
                    result["edits"].append(edits(model, length, args.rounds))
                    print(json.dumps(result["edits"][-1]), flush=True)
            del model
        result |= measured_at() | {"rounds": args.rounds, "conditions": conditions() | {"threads": 1}}
        args.output.write_text(json.dumps(result, indent=1) + "\n")
    if args.page is not None:
        replace_measured(args.page, table(result))


if __name__ == "__main__":
    main()
