"""Memoization of a pruned model beside its dense original: the paper's Table 8, on SST-2.

    python scripts/study_pruned.py ../shared results            # prunes, about 7 minutes on two cores, then measures
    python scripts/study_pruned.py ../shared results --reuse    # measures the same pruned model again
    python scripts/study_pruned.py ../shared results --docs docs

The MiniLM sentiment classifier is pruned by magnitude, gradually, to 85 % of the weights of its Linear layers, while
training goes on; a pruned weight stays zero. Both models then get a database of the same training phrases and answer
the dev sentences at three thresholds, in batches of 1, 8 and 32. The script asserts that hit decisions, answers and
accuracy are the same for every batch size.

Source: AttMEMO (arXiv 2301.09262), section 6.8 and Table 8, which prunes BERT models by more than 85 %. The
cubic schedule is that of Zhu and Gupta, "To prune, or not to prune" (arXiv 1710.01878, Eq. 1).
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import numpy as np
import pandas as pd
import torch
from marked import replace_measured
from measured_at import write_record
from paper.exhaustive import padded_inputs
from torch import Tensor, nn

from attmemo import memoize, unmemoize
from attmemo.db import Database
from attmemo.profiler.answers import ask, changed, prepare
from attmemo.profiler.build import BuildOptions, build_database
from attmemo.profiler.map_trial import CONTROLS, serving_control
from attmemo.profiler.models import LoadedModel, Tokens, answers, load_model, tokenize
from attmemo.profiler.train import train_database
from attmemo.profiler.turns import interleave
from attmemo.system.machine import conditions

SPARSITY = 0.85
LEVELS = {"conservative": 0.8, "moderate": 0.7, "aggressive": 0.6}
BATCH_SIZES = (1, 8, 32)
LONGEST = 64  # tokens; no sentence of SST-2 has more
PADDED = 128  # the paper: 512
TIMED = 128  # sentences
STORED = 6000  # phrases of at least eight words: the train split is full of fragments that no one asks


# -- pruning


def linear_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Weights of the Linear layers, the classifier's own apart: it has a fifth of a per mille of them."""
    return {
        f"{name}.weight": module.weight
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name != "classifier"
    }


def sparsity_at(step: int, first: int, last: int, final: float) -> float:
    """Share of pruned weights at a step: fast at first, while there is much that is not missed, then slowly."""
    passed = min(1.0, max(0.0, (step - first) / (last - first)))
    return final * (1.0 - (1.0 - passed) ** 3)


def masks_of(weights: dict[str, nn.Parameter], sparsity: float) -> dict[str, Tensor]:
    """Which weights stay: of each matrix those of greatest magnitude."""
    kept = {}
    for name, weight in weights.items():
        size = weight.detach().abs().flatten().numpy()
        cut = round(sparsity * size.size)
        mask = np.ones(size.size, np.float32)
        mask[np.argpartition(size, cut - 1)[:cut]] = 0.0  # an exact share, also where magnitudes are equal
        kept[name] = torch.from_numpy(mask).view_as(weight)
    return kept


def zeros(weights: dict[str, nn.Parameter]) -> float:
    """Share of zeros in all of them together."""
    return sum(int((w == 0).sum()) for w in weights.values()) / sum(w.numel() for w in weights.values())


def training_batches(
    loaded: LoadedModel, rows: pd.DataFrame, size: int, seed: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Ids, mask and labels of random batches of similar length, without end."""
    ids = [item.ids for item in tokenize(loaded, rows["sentence"].tolist(), LONGEST)]
    labels = rows["label"].to_numpy()
    lengths = np.array([len(i) for i in ids])
    generator = np.random.default_rng(seed)
    while True:
        # Sorted by length with a little noise: little padding, and other batches in every epoch.
        order = np.argsort(lengths + generator.random(len(ids)), kind="stable")
        parts = np.array_split(order, len(order) // size)
        for place in generator.permutation(len(parts)):
            part = parts[place]
            longest = int(lengths[part].max())
            tokens = torch.zeros(len(part), longest, dtype=torch.long)
            for row, number in enumerate(part):
                tokens[row, : lengths[number]] = torch.tensor(ids[number])
            mask = (torch.arange(longest)[None] < torch.from_numpy(lengths[part])[:, None]).long()
            yield tokens, mask, torch.from_numpy(labels[part])


def prune(
    loaded: LoadedModel, rows: pd.DataFrame, steps: int, size: int = 64, rate: float = 1e-4, seed: int = 0
) -> dict[str, Any]:
    """Prune in place to `SPARSITY`, training on and learning from the dense model's answers as well as the labels.

    Weights are pruned anew every ten steps until seven tenths of the way, and then only trained.
    """
    start, cpu = time.monotonic(), time.process_time()
    torch.manual_seed(seed)
    model: Any = loaded.model
    teacher: Any = load_model(loaded.name).model
    weights = linear_weights(model)
    model.train()
    # Half of the weights are embeddings, which are neither pruned nor worth the time.
    trained = [p for name, p in model.named_parameters() if ".embeddings." not in name]
    model.base_model.embeddings.requires_grad_(False)
    optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0.01, fused=True)
    native = bool({"amx_bf16", "avx512_bf16"} & set(conditions()["features"]))
    warm = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm, max(0.0, (steps - step) / (steps - warm)))
    )
    last = int(0.7 * steps)
    masks = masks_of(weights, 0.0)
    for step, (tokens, mask, labels) in zip(range(steps), training_batches(loaded, rows, size, seed), strict=False):
        if step % 10 == 0 or step == last:
            masks = masks_of(weights, sparsity_at(step, warm, last, SPARSITY))
            apply(weights, masks)
        with torch.autocast("cpu", torch.bfloat16, enabled=native):
            with torch.no_grad():
                target = teacher(input_ids=tokens, attention_mask=mask).logits.float().softmax(1)
            logits = model(input_ids=tokens, attention_mask=mask).logits.float()
        cross_entropy = nn.functional.cross_entropy
        loss = 0.5 * cross_entropy(logits, labels) + 0.5 * cross_entropy(logits, target)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        apply(weights, masks)
        if step % 50 == 0 or step == steps - 1:
            print(
                f"  step {step}: loss {loss.item():.3f}, {100 * zeros(weights):.1f} % zeros, "
                f"{time.monotonic() - start:.0f} s",
                file=sys.stderr,
                flush=True,
            )
    model.eval()
    return {
        "sparsity": zeros(weights),
        "linear_weights": sum(w.numel() for w in weights.values()),
        "trained": "all but the embeddings" + (", matrix products in bfloat16" if native else ""),
        "steps": steps,
        "batch_size": size,
        "rate": rate,
        "seed": seed,
        "seconds": time.monotonic() - start,
        "cpu_seconds": time.process_time() - cpu,
    }


def apply(weights: dict[str, nn.Parameter], masks: dict[str, Tensor]) -> None:
    """Set the pruned weights to zero."""
    with torch.no_grad():
        for name, weight in weights.items():
            weight.mul_(masks[name])


# -- measuring


def decide(loaded: LoadedModel, database: Database, tokens: list[Tokens], size: int) -> dict[str, Any]:
    """Answers ``[Q, C]`` in batches of one size, and which layers served each sequence, from which record.

    What served is read off the engine itself: the plan that every call followed.
    """
    model: Any = loaded.model
    engine = model.attmemo.engine
    served = np.full((engine.layers, len(tokens)), -1, np.int64)
    now: list[Tokens] = []
    count = engine.counters.call

    def watched(layer: int, plan: Any, *rest: Any) -> None:
        share = plan.layers.get(layer)
        if share is not None:
            served[layer, [now[place].row for place in share.sequences.tolist()]] = share.records
        count(layer, plan, *rest)

    engine.counters.call = watched
    try:
        given = []
        order = []
        for batch in prepare(loaded, tokens, size):
            now[:] = batch[0]
            renumbered = [Tokens(place, item.ids, item.segments) for place, item in enumerate(batch[0])]
            given.append(ask(loaded, [(renumbered, batch[1])]))
            order += [item.row for item in batch[0]]
    finally:
        del engine.counters.call
    answers = torch.cat(given)
    return {"answers": answers[torch.tensor(order).argsort()], "served": served}


def measure(loaded: LoadedModel, path: Path, texts: list[str], labels: Tensor) -> list[dict[str, Any]]:
    """One row per level: accuracy, changed answers and hits, asserted to be the same for every batch size."""
    tokens = tokenize(loaded, texts, LONGEST)
    rows = []
    with Database(path) as database:
        exact = {size: ask(loaded, prepare(loaded, tokens, size)) for size in BATCH_SIZES}
        reference = exact[BATCH_SIZES[-1]]
        for level, threshold in LEVELS.items():
            memoize(loaded.model, threshold, database, gate=False)
            model: Any = loaded.model
            try:
                found = {size: decide(loaded, database, tokens, size) for size in BATCH_SIZES}
                controls = {}
                for name in CONTROLS:
                    with serving_control(model.attmemo.engine, name):
                        controls[name] = ask(loaded, prepare(loaded, tokens, BATCH_SIZES[-1]))
            finally:
                unmemoize(loaded.model)
            first = found[BATCH_SIZES[0]]
            accuracies, spread = {}, 0.0
            for size, outcome in found.items():
                assert np.array_equal(outcome["served"], first["served"]), f"other hits in batches of {size}"
                same = torch.equal(outcome["answers"].argmax(1), first["answers"].argmax(1))
                assert same, f"other answers in batches of {size}"
                spread = max(spread, float((outcome["answers"] - first["answers"]).abs().max()))
                accuracies[str(size)] = accuracy(outcome["answers"], labels)
            assert len(set(accuracies.values())) == 1
            given = found[BATCH_SIZES[-1]]["answers"]
            rows.append(
                {
                    "level": level,
                    "threshold": threshold,
                    "hit_rate": float((first["served"] >= 0).mean()),
                    "sequences_served": float((first["served"] >= 0).any(0).mean()),
                    "accuracy_exact": accuracy(reference, labels),
                    "accuracy": accuracies,
                    "changed": float(changed(loaded.kind, reference, given, 0.98).float().mean()),
                    "largest_logit_difference_between_batch_sizes": spread,
                    "changed_by_controls": {
                        name: float(changed(loaded.kind, reference, value, 0.98).float().mean())
                        for name, value in controls.items()
                    },
                }
            )
    return rows


def timed(loaded: LoadedModel, path: Path, texts: list[str], turns: int = 5) -> dict[str, Any]:
    """Milliseconds of a text, exact and at each level: padded and eager as in the paper, and on the best path."""
    slow = copy.deepcopy(loaded)
    slow.model.set_attn_implementation("eager")  # type: ignore[operator]
    tokens, size = tokenize(loaded, texts, LONGEST), BATCH_SIZES[-1]
    given = {
        "padded, eager": (slow, [padded_inputs(tokens[at : at + size], PADDED) for at in range(0, len(tokens), size)]),
        "best": (loaded, [inputs for _, inputs in prepare(loaded, tokens, size)]),
    }
    jobs: dict[str, Callable[[int], None]] = {}

    def job(name: str, own: LoadedModel, batches: list[dict[str, Tensor]]) -> None:
        def run(_turn: int) -> None:
            for inputs in batches:
                answers(own, inputs)

        jobs[name] = run

    seen = conditions()
    torch.set_num_threads(seen["cores"])
    with Database(path) as database, torch.inference_mode():
        for way, (own, batches) in given.items():
            job(f"{way}, exact", own, batches)
            for level, threshold in LEVELS.items():
                served = copy.deepcopy(own)
                memoize(served.model, threshold, database, gate=False)
                job(f"{way}, {level}", served, batches)
        spent = interleave(jobs, turns)
    return {
        "texts": len(texts), "batch_size": size, "padded_to": PADDED, "threads": seen["cores"], "load": seen["load"],
        "ms": {name: one.ms / len(texts) for name, one in spent.items()},
    }  # fmt: skip


def accuracy(answers: Tensor, labels: Tensor) -> float:
    return float((answers.argmax(1) == labels).float().mean())


# -- reporting


def table(result: dict[str, Any]) -> str:
    """Markdown, as docs/study-pruned.md has it."""
    lines = [
        "| model | level | threshold | calls served | accuracy: exact | batch 1 | batch 8 | batch 32 "
        "| changed answers | the same calls: mean map / random map |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, part in result["models"].items():
        for row in part["levels"]:
            controls = " / ".join(f"{100 * row['changed_by_controls'][c]:.1f} %" for c in CONTROLS)
            cells = [
                name,
                row["level"],
                f"{row['threshold']:g}",
                f"{100 * row['hit_rate']:.1f} %",
                f"{row['accuracy_exact']:.4f}",
                *(f"{row['accuracy'][str(size)]:.4f}" for size in BATCH_SIZES),
                f"{100 * row['changed']:.1f} %",
                controls,
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def read(shared: Path, name: str) -> pd.DataFrame:
    return pd.read_csv(shared / f"data/sst2/{name}.tsv", sep="\t", quoting=3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shared", type=Path, help="folder with data/sst2 and models/minilm-sst2")
    parser.add_argument("output", type=Path, help="folder for the pruned model and the databases")
    parser.add_argument("--steps", type=int, default=900, help="of pruning and training [default: 900]")
    parser.add_argument("--reuse", action="store_true", help="take the pruned model of an earlier run")
    parser.add_argument("--docs", type=Path, help="write study-pruned.json and the table of study-pruned.md here")
    args = parser.parse_args()
    dense, pruned = args.shared / "models/minilm-sst2", args.output / "pruned"
    train, dev = read(args.shared, "train"), read(args.shared, "dev")
    notes = pruned / "pruning.json"
    if not (args.reuse and notes.is_file()):
        loaded = load_model(str(dense))
        said = prune(loaded, train, args.steps)
        model: Any = loaded.model
        model.save_pretrained(pruned)
        loaded.tokenizer.save_pretrained(pruned)
        notes.write_text(json.dumps(said, indent=1))
    stored = train[train["sentence"].str.split().str.len() >= 8]["sentence"].tolist()[:STORED]
    phrases = args.output / "phrases.txt"
    phrases.write_text("".join(f"{text}\n" for text in stored))
    result: dict[str, Any] = {
        "schema": "attmemo.study-pruned/1",
        "conditions": {key: value for key, value in conditions().items() if key != "kernel"},
        "data": {"stored": len(stored), "asked": len(dev), "max_length": LONGEST},
        "lookup": "sequence",
        "pruning": json.loads(notes.read_text()),
        "models": {},
    }
    for name, place in {"dense": dense, "pruned": pruned}.items():
        loaded = load_model(str(place))
        path = args.output / f"database-{name}"
        build_database(loaded, [phrases], path, BuildOptions(max_length=LONGEST))
        trained = train_database(path, profile=False)
        levels = measure(loaded, path, dev["sentence"].tolist(), torch.tensor(dev["label"].tolist()))
        timing = timed(loaded, path, dev["sentence"].tolist()[:TIMED])
        result["models"][name] = {
            "times": timing,
            "zeros_in_linear_weights": zeros(linear_weights(loaded.model)),
            "held_out_similarity": trained["layers"]["-1"],
            "levels": levels,
        }
    write_record(args.output / "study-pruned.json", result)
    if args.docs is not None:
        write_record(args.docs / "study-pruned.json", result)
        replace_measured(args.docs / "study-pruned.md", table(result))
    print(table(result))


if __name__ == "__main__":
    main()
