"""Memoization of a real language model: similarity by layer, perplexity, and text after a memoized prefill.

    python scripts/study_decoder.py ../shared results --docs docs      # all kinds of text, about 20 minutes on a core
    python scripts/study_decoder.py ../shared results wikitext         # one of them

The model is stories260K, a Llama of five layers trained on TinyStories (converted by `convert_stories.py`). Records
serve only texts of the same number of tokens, so every text is cut into chunks of exactly 128: `<s>` and 127 tokens of
running text. Per kind of text a database is built from some chunks, and others are asked:

* ``stories``: written by the model itself, sampled at temperature 1; asked are stories with other seeds and other
  beginnings. No other text here is nearer to the model's training text.
* ``captions``: image captions of STS-B one after the other (stored: train, asked: dev and test). Of the real prose at
  hand the nearest in style to children's stories, by the model's bits per character (docs/study-decoder.md).
* ``wikitext``: WikiText-2 (stored: validation, asked: test). Prose that the model knows nothing about.
* ``templates``: six stories with slots for a name, an animal, a place and a thing, as prompts made from templates are
  (asked: combinations that are not stored).

Source of the similarity study: AttMEMO (arXiv 2301.09262), section 6.9 and Fig. 15.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import matplotlib as mpl
import numpy as np
import torch
from convert_stories import convert
from marked import replace_measured, table
from matplotlib.figure import Figure
from measured_at import gathered, write_json, write_record
from torch import Tensor

from attmemo import memoize, unmemoize
from attmemo.db import SEQUENCE, Database
from attmemo.models import adapter_for
from attmemo.profiler.answers import ask, changed, harm, perplexity, prepare
from attmemo.profiler.build import build_from_inputs
from attmemo.profiler.map_recorder import Capture
from attmemo.profiler.map_trial import CONTROLS, serving_control
from attmemo.profiler.models import LoadedModel, Tokens, load_model
from attmemo.profiler.plots import BLUE, GREEN, GREY, INK, ORANGE, STYLE, png
from attmemo.profiler.train import train_database
from attmemo.system.machine import conditions

LENGTH = 128  # tokens of a chunk
STORED, ASKED = 1500, 288  # the paper: 2,778 maps and 288 queries
NEW = 32  # tokens generated behind a memoized prefill
PROMPTED = 96  # chunks that are gone on from
THRESHOLDS = (0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.45, 0.4, 0.35, 0.0)
BATCH = 32
BEGINNINGS = {
    "stored": (
        "Once upon a time, there was a little girl named Lily.",
        "Once upon a time, there was a little boy named Tim.",
        "Once upon a time, in a big forest, there lived a",
        "One day, a little girl named Mia went to the park",
        "One day, Tom and Sue were playing in the garden.",
        "Ben was a happy boy. He liked to",
        "There was a big dog named Max.",
        "Sara and Ben are friends. They like to",
    ),
    "asked": (
        "Once upon a time, there was a small cat named Kitty.",
        "Anna and her mom went to the store.",
        "A little bird lived in a tall tree.",
        "Lucy had a red ball. She loved to",
    ),
}
TEMPLATES = (
    "Once upon a time, there was a little {kind} named {name}. {name} had a pet {animal}. Every day, {name} "
    "and the {animal} went to the {place} to play with a {thing}. One day, the {thing} was gone. {name} was "
    "very sad. The {animal} looked under a big tree and found the {thing}. {name} was so happy and said, "
    '"Thank you, {animal}!" They played together until it was time to go home.',
    "{name} was a {kind} who wanted a {thing}. {name}'s mom said, \"We can go to the {place} and look for "
    'one." At the {place}, they saw a {animal}. The {animal} was lost and scared. {name} gave it some food '
    'and a hug. Then a man came and said, "That is my {animal}! You are very kind. I want to give you this '
    '{thing}." {name} smiled and said thank you. It was the best day.',
    "One day, a {animal} came to the {place}. It saw a {thing} on the ground. The {animal} did not know what "
    'it was. A {kind} named {name} came and said, "Do not be afraid. It is only a {thing}." The {animal} '
    "touched the {thing} and it moved. The {animal} jumped high and ran away. {name} laughed and laughed. "
    "After that, {name} and the {animal} were the best of friends.",
    '{name} liked to go to the {place}. One morning, {name} took a {thing} and walked there with Dad. "Look, '
    'Dad, a {animal}!" said {name}. Dad looked and saw the {animal} too. The {animal} wanted the {thing}. '
    "{name} did not want to share, but Dad said it is good to share. So the {kind} gave the {thing} to the "
    "{animal}, and the {animal} was very happy. {name} was proud and went home with Dad.",
    "There was a {kind}. The {kind}'s name was {name}. In the {place} near the house lived an old {animal}. "
    "The {animal} had lost its {thing} in the rain. {name} wanted to help, so they looked for the {thing} all"
    ' day long. They looked up and they looked down. At last they saw the {thing} behind a rock. "You found '
    'it!" said the {animal}. From that day on the {animal} and {name} had tea together.',
    'It was a sunny day. {name} and a {animal} sat in the {place}. "What is in the box?" asked the {animal}. '
    "{name}, a clever {kind}, opened the box very slowly. In the box there was a shiny {thing}. They both "
    "wanted to play with the {thing}. First {name} played with it, and then the {animal} played with it. When"
    " the sun went down, they put the {thing} back into the box and said good night.",
)
FILLER = " And they all lived happily ever after. The end."  # for a story that short words make too short
SLOTS = {
    "who": (("Lily", "girl"), ("Tim", "boy"), ("Tom", "boy"), ("Mia", "girl"), ("Sue", "girl"), ("Ben", "boy"),
            ("Anna", "girl"), ("Max", "boy"), ("Lucy", "girl"), ("Sam", "boy")),
    "animal": ("dog", "cat", "bird", "frog", "bear", "fox", "duck", "mouse"),
    "place": ("park", "garden", "forest", "zoo", "beach", "farm"),
    "thing": ("ball", "toy", "hat", "book", "kite", "cake", "drum", "doll"),
}  # fmt: skip


# -- texts


def chunks(loaded: LoadedModel, text: str, most: int) -> Tensor:
    """Running text as ``[R, LENGTH]``: each ``<s>`` and the next 127 tokens; spread over the text if it has more."""
    begin = loaded.tokenizer.bos_token_id
    ids = loaded.tokenizer(text, add_special_tokens=False).input_ids
    size = LENGTH - 1
    parts = [[begin, *ids[at : at + size]] for at in range(0, len(ids) - size + 1, size)]
    if len(parts) > most:
        parts = [parts[place] for place in np.linspace(0, len(parts) - 1, most).round().astype(int)]
    return torch.tensor(parts)


def write_stories(loaded: LoadedModel, part: str, count: int, seed: int) -> Tensor:
    """Stories that the model samples, ``[count, LENGTH]``, as many from each beginning."""
    model: Any = loaded.model
    written = []
    each = math.ceil(count / len(BEGINNINGS[part]))
    for number, beginning in enumerate(BEGINNINGS[part]):
        prompt = torch.tensor([loaded.tokenizer(beginning).input_ids]).expand(each, -1)
        torch.manual_seed(seed + number)
        # A story that ends goes on with the next, as in the text that the model was trained on.
        story = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_length=LENGTH,
            min_length=LENGTH,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            eos_token_id=None,
            pad_token_id=0,
        )
        written.append(story)
    return torch.cat(written)[torch.randperm(each * len(written), generator=_generator(seed))[:count]]


def stories(loaded: LoadedModel, shared: Path, stored: int, asked: int) -> tuple[Tensor, Tensor]:
    return write_stories(loaded, "stored", stored, 1000), write_stories(loaded, "asked", asked, 9000)


def captions(loaded: LoadedModel, shared: Path, stored: int, asked: int) -> tuple[Tensor, Tensor]:
    def read(*names: str) -> str:
        rows = [
            line.rstrip("\n").split("\t")
            for name in names
            for line in (shared / f"data/stsb/{name}.csv").open(encoding="utf-8")
        ]
        found = [row for row in rows if row[0] == "main-captions"]
        # The sentences of a pair say the same: first all of the one side, then of the other.
        return " ".join(dict.fromkeys(row[side] for side in (5, 6) for row in found))

    return chunks(loaded, read("sts-train"), stored), chunks(loaded, read("sts-dev", "sts-test"), asked)


def wikitext(loaded: LoadedModel, shared: Path, stored: int, asked: int) -> tuple[Tensor, Tensor]:
    def read(name: str) -> str:
        lines = (shared / f"data/wikitext2/wiki.{name}.raw").read_text(encoding="utf-8").split("\n")
        return " ".join(line.strip() for line in lines if line.strip() and not line.startswith(" ="))

    return chunks(loaded, read("valid"), stored), chunks(loaded, read("test"), asked)


def templates(loaded: LoadedModel, shared: Path, stored: int, asked: int) -> tuple[Tensor, Tensor]:
    every = list(itertools.product(TEMPLATES, SLOTS["who"], SLOTS["animal"], SLOTS["place"], SLOTS["thing"]))
    order = torch.randperm(len(every), generator=_generator(7))[: stored + asked].tolist()
    texts = [
        template.format(name=who[0], kind=who[1], animal=animal, place=place, thing=thing) + FILLER
        for template, who, animal, place, thing in (every[place] for place in order)
    ]
    rows = torch.tensor([loaded.tokenizer(text).input_ids[:LENGTH] for text in texts])
    return rows[:stored], rows[stored:]


KINDS: dict[str, Callable[[LoadedModel, Path, int, int], tuple[Tensor, Tensor]]] = {
    "stories": stories,
    "captions": captions,
    "wikitext": wikitext,
    "templates": templates,
}


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def batches(ids: Tensor, size: int = BATCH) -> Iterator[dict[str, Tensor]]:
    for part in ids.split(size):
        yield {"input_ids": part, "attention_mask": torch.ones_like(part)}


# -- similarity by layer


def packed(maps: Tensor) -> Tensor:
    """Causal maps ``[m, h, n, n]`` as ``[m, h * n (n + 1) / 2]``: all above the diagonal is zero."""
    rows, columns = torch.tril_indices(*maps.shape[-2:])
    return maps[:, :, rows, columns].flatten(1).float()


def similarities(loaded: LoadedModel, database: Database, asked: Tensor, copies: int) -> dict[str, Any]:
    """By layer: score (Eq. 1) of the best record of every query, of the records that lookups find, and of controls."""
    adapter, sites = adapter_for(loaded.model)
    layers, heads = len(sites), database.manifest.model.heads
    maps: list[list[Tensor]] = [[] for _ in range(layers)]
    found: dict[str, list[Any]] = {"sequence": [], "layer": []}
    lengths = [LENGTH] * BATCH
    engines: dict[str, Any] = {}
    for lookup in ("sequence", "layer"):
        memoize(loaded.model, 0.0, database, lookup=lookup, gate=False)
        engines[lookup] = loaded.model.attmemo.engine  # type: ignore[union-attr]
        loaded.model.attmemo.disable()  # type: ignore[union-attr,operator]
    with Capture(loaded.model, adapter, sites) as capture:
        for inputs in batches(asked):
            seen = capture.run(inputs)
            rows = lengths[: len(inputs["input_ids"])]
            found["sequence"].append([engines["sequence"].find(SEQUENCE, seen.inputs[0], rows).records] * layers)
            found["layer"].append([engines["layer"].find(n, seen.inputs[n], rows).records for n in range(layers)])
            for layer in range(layers):
                maps[layer].append(packed(seen.maps[layer]))
    unmemoize(loaded.model)
    strangers = torch.randint(len(database), (len(asked),), generator=_generator(3))
    by_layer = []
    for layer in range(layers):
        queries = torch.cat(maps[layer])
        stored = torch.cat([packed(database.map(layer, record)[None]) for record in range(len(database))])

        def score(distance: Tensor) -> Tensor:
            return 1.0 - distance / (2 * heads * LENGTH)

        scores = score(torch.cat([torch.cdist(part, stored, p=1.0) for part in queries.split(16)]))  # [Q, R]
        each = torch.arange(len(queries))
        told: dict[str, Tensor] = {"best": scores.max(1).values}
        for lookup, parts in found.items():
            told[f"found per {lookup}"] = scores[each, torch.from_numpy(np.concatenate([p[layer] for p in parts]))]
        told["mean map"] = score((queries - stored.mean(0)).abs().sum(1))
        told["random map"] = scores[each, strangers]
        by_layer.append({"layer": layer, "scores": {name: _rounded(values) for name, values in told.items()}})
        print(f"    layer {layer}: best {float(told['best'].mean()):.3f}", file=sys.stderr, flush=True)
    return {"by_layer": by_layer, "exact_duplicates": copies}


def _rounded(values: Tensor) -> list[float]:
    return [round(v, 4) for v in values.tolist()]


# -- predictions and continuations


def serve(loaded: LoadedModel, database: Database, asked: Tensor) -> dict[str, Any]:
    """Perplexity and next tokens by threshold, beside the share of calls served; and the controls."""
    tokens = [Tokens(row, ids, None) for row, ids in enumerate(asked.tolist())]
    prepared = prepare(loaded, tokens, BATCH)
    exact, (surprise, count) = ask(loaded, prepared), perplexity(loaded, prepared)
    points = []
    for lookup in ("sequence", "layer"):
        for threshold in THRESHOLDS:
            memoize(loaded.model, threshold, database, lookup=lookup, gate=False)
            handle: Any = loaded.model.attmemo
            point: dict[str, Any] = {"lookup": lookup, "threshold": threshold}
            given = ask(loaded, prepared)
            stats = handle.stats()
            point["hit_rate"] = stats["hit_rate"]
            point["hit_rate_by_layer"] = [row["hit_rate"] for row in stats["layers"]]
            point["first_token_changed"] = float(changed(loaded.kind, exact, given, 0.0).float().mean())
            point["first_token_total_variation"] = float(harm(loaded.kind, exact, given).mean())
            point["perplexity"] = perplexity(loaded, prepared)[0]
            for name in CONTROLS:
                with serving_control(handle.engine, name):
                    point[f"perplexity, {name}"] = perplexity(loaded, prepared)[0]
            unmemoize(loaded.model)
            points.append(point)
    return {"perplexity_exact": surprise, "tokens": count, "points": points}


def generate(loaded: LoadedModel, database: Database, asked: Tensor, stored: Tensor) -> dict[str, Any]:
    """Greedy text behind a memoized prefill beside that of the exact model, one lookup per sequence."""

    def go_on(prompts: Tensor) -> Tensor:
        model: Any = loaded.model
        told = [
            model.generate(
                **inputs, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0
            )
            for inputs in batches(prompts)
        ]
        return torch.cat(told)[:, LENGTH:]

    def compare(prompts: Tensor, exact: Tensor, threshold: float) -> dict[str, Any]:
        memoize(loaded.model, threshold, database, lookup="sequence", gate=False)
        handle: Any = loaded.model.attmemo
        given = go_on(prompts)
        stats = handle.stats()
        unmemoize(loaded.model)
        same = given == exact
        prefix = same.int().cumprod(1).sum(1)
        # Of the prefill alone: decoding steps are counted as ineligible.
        share = stats["hits"] / (len(prompts) * len(stats["layers"]))
        return {
            "threshold": threshold,
            "hit_rate": share,
            "identical": float(same.all(1).float().mean()),
            "first_token_same": float(same[:, 0].float().mean()),
            "tokens_until_they_part": float(prefix.float().mean()),
        }

    prompts, own = asked[:PROMPTED], stored[:PROMPTED]
    exact = go_on(prompts)
    return {
        "new_tokens": NEW,
        "prompts": len(prompts),
        "own_maps": compare(own, go_on(own), 0.0),
        "points": [compare(prompts, exact, threshold) for threshold in THRESHOLDS],
    }


def study(
    kind: str, loaded: LoadedModel, shared: Path, output: Path, counts: tuple[int, int] = (STORED, ASKED)
) -> dict[str, Any]:
    """Everything about one kind of text, of which at most so many chunks are stored and asked."""
    start = time.monotonic()
    stored, asked = KINDS[kind](loaded, shared, *counts)
    known = {tuple(row) for row in stored.tolist()}
    copies = sum(tuple(row) in known for row in asked.tolist())
    path = output / f"database-{kind}"
    shutil.rmtree(path, ignore_errors=True)
    build_from_inputs(loaded.model, batches(stored), path, name=f"{kind}, chunks of {LENGTH} tokens")
    trained = train_database(path, profile=False)
    print(f"  {kind}: {len(stored)} stored, {len(asked)} asked, {time.monotonic() - start:.0f} s", file=sys.stderr)
    sample = loaded.tokenizer.batch_decode(asked[:, 1:])
    with Database(path) as database:
        result: dict[str, Any] = {
            "stored": len(stored),
            "asked": len(asked),
            "bytes": database.bytes,
            "held_out_similarity": trained["layers"][str(SEQUENCE)],
            "similarity": similarities(loaded, database, asked, copies),
            "serving": serve(loaded, database, asked),
            "generation": generate(loaded, database, asked, stored),
        }
    serving = result["serving"]
    result["bits_per_character"] = math.log2(serving["perplexity_exact"]) * serving["tokens"] / sum(map(len, sample))
    result["example"] = sample[0]
    shutil.rmtree(path)
    print(f"  {kind}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    return result


# -- reporting


def tables(result: dict[str, Any]) -> str:
    """Markdown, as docs/study-decoder.md has it."""
    columns = ("best", "found per sequence", "found per layer", "mean map", "random map")
    rows: list[list[str]] = []
    for kind, part in result["kinds"].items():
        for row in part["similarity"]["by_layer"]:
            first = row["layer"] == 0
            best = np.array(row["scores"]["best"])
            cells = [
                kind if first else "",
                f"{part['stored']} / {part['asked']}" if first else "",
                str(part["similarity"]["exact_duplicates"]) if first else "",
                f"{part['bits_per_character']:.2f}" if first else "",
                str(row["layer"]),
                *(f"{np.mean(row['scores'][name]):.3f}" for name in columns),
                *(f"{100 * (best > bound).mean():.0f} %" for bound in (0.6, 0.8)),
            ]
            rows.append(cells)
    head = "text | chunks stored / asked | exact duplicates | bits per character | layer | "
    lines = table(f"{head}{' | '.join(columns)} | best > 0.6 | best > 0.8", rows)
    lines += [
        "Perplexity (exact: the first line of a kind), at thresholds of the predicted score. The controls serve their "
        "map to the same calls.",
        "",
    ]
    rows = []
    for kind, part in result["kinds"].items():
        rows.append([kind, "–", "exact", "0 %", f"{part['serving']['perplexity_exact']:.3f}", "", "", ""])
        for point in part["serving"]["points"]:
            cells = [
                "",
                point["lookup"],
                f"{point['threshold']:g}",
                f"{100 * point['hit_rate']:.1f} %",
                *(f"{point[key]:.3f}" for key in ("perplexity", *(f"perplexity, {name}" for name in CONTROLS))),
                f"{100 * point['first_token_changed']:.1f} %",
            ]
            rows.append(cells)
    head = "text | lookup per | threshold | calls served | perplexity | with the mean map | with a random map"
    lines += table(f"{head} | other first token", rows)
    lines += [
        f"Greedy continuations of {NEW} tokens after a prefill of {LENGTH}, one lookup per sequence, compared with "
        "the exact model's. Own maps: the prompt itself is in the database (stored as float16).",
        "",
    ]
    rows = []
    for kind, part in result["kinds"].items():
        every = [("own maps", part["generation"]["own_maps"])]
        every += [(f"{point['threshold']:g}", point) for point in part["generation"]["points"]]
        for place, (name, point) in enumerate(every):
            cells = [
                "" if place else kind,
                name,
                f"{100 * point['hit_rate']:.1f} %",
                f"{100 * point['identical']:.1f} %",
                f"{100 * point['first_token_same']:.1f} %",
                f"{point['tokens_until_they_part']:.1f}",
            ]
            rows.append(cells)
    head = "text | threshold | calls of the prefill served | identical continuations | same first token"
    return "\n".join([*lines, *table(f"{head} | tokens until they part, mean", rows)])



def draw(result: dict[str, Any], file: Path) -> None:
    """One row of plots for each kind: similarity by layer, perplexity and continuations against the share served."""
    with mpl.rc_context(STYLE | {"text.parse_math": True}):  # powers of ten on the axis
        file.write_bytes(png(_drawn(result["kinds"])))


def _drawn(kinds: dict[str, Any]) -> Figure:
    figure = Figure(figsize=(15, 3.9 * len(kinds)), layout="constrained", dpi=110)
    grid = figure.subplots(len(kinds), 3, squeeze=False)
    for row, (kind, part) in zip(grid, kinds.items(), strict=True):
        _draw_similarity(row[0], kind, part)
        _draw_perplexity(row[1], part)
        _draw_generation(row[2], part)
    figure.suptitle(
        "stories260K, chunks of 128 tokens: similarity by layer, perplexity and greedy continuations when memoized\n"
        "(points are measured, lines only join them)"
    )
    return figure


def _draw_similarity(axes: Any, kind: str, part: dict[str, Any]) -> None:
    by_layer = part["similarity"]["by_layer"]
    for shift, (name, color) in zip(
        (-0.24, 0.0, 0.24), (("best", BLUE), ("mean map", ORANGE), ("random map", GREY)), strict=True
    ):
        at = [row["layer"] + shift for row in by_layer]
        drawn = axes.violinplot([row["scores"][name] for row in by_layer], at, widths=0.22, showmedians=True)
        for body in drawn["bodies"]:
            body.set(facecolor=color, alpha=0.75)
        for line in ("cmedians", "cmins", "cmaxes", "cbars"):
            drawn[line].set(color=INK, linewidth=0.8)
        axes.plot([], [], color=color, linewidth=6, label="best record" if name == "best" else name)
    found = [float(np.mean(row["scores"]["found per sequence"])) for row in by_layer]
    axes.plot(
        [row["layer"] - 0.24 for row in by_layer], found, "o", color=GREEN, markersize=5, label="found, mean"
    )
    axes.set(title=f"{kind}: similarity, {part['asked']} queries", xlabel="layer", ylim=(0, 1.02))
    axes.set_ylabel("similarity score")
    axes.set_xticks([row["layer"] for row in by_layer])
    axes.legend(fontsize=8, frameon=False, loc="lower left", ncols=2)


def _draw_perplexity(axes: Any, part: dict[str, Any]) -> None:
    serving = part["serving"]
    for lookup, style in (("sequence", "-"), ("layer", "--")):
        points = sorted((p for p in serving["points"] if p["lookup"] == lookup), key=lambda p: p["hit_rate"])
        at = [0.0, *(100 * p["hit_rate"] for p in points)]
        for key, color, name in (
            ("perplexity", BLUE, "memoized"),
            ("perplexity, mean map", ORANGE, "mean map"),
            ("perplexity, random map", GREY, "random map"),
        ):
            values = [serving["perplexity_exact"], *(p[key] for p in points)]
            axes.plot(at, values, style, color=color, marker="o", markersize=3.5, label=f"{name}, per {lookup}")
    axes.axhline(serving["perplexity_exact"], color=INK, linewidth=0.8, linestyle=":")
    axes.set(title=f"perplexity (exact: {serving['perplexity_exact']:.2f})", xlabel="attention calls served, %")
    axes.set_ylabel("perplexity")
    if max(p["perplexity, random map"] for p in serving["points"]) > 4 * serving["perplexity_exact"]:
        axes.set_yscale("log")
    axes.margins(y=0.25)  # room for the legend
    axes.legend(fontsize=8, frameon=False, loc="best", ncols=2)


def _draw_generation(axes: Any, part: dict[str, Any]) -> None:
    points = sorted(part["generation"]["points"], key=lambda p: p["hit_rate"])
    at = [0.0, *(100 * p["hit_rate"] for p in points)]
    for key, color, name in (
        ("identical", BLUE, f"all {NEW} tokens identical"),
        ("first_token_same", GREEN, "first token identical"),
    ):
        values = [100.0, *(100 * p[key] for p in points)]
        axes.plot(at, values, ":", color=color, marker="o", markersize=4, linewidth=1, label=name)
    own = part["generation"]["own_maps"]
    axes.plot([100 * own["hit_rate"]], [100 * own["identical"]], "*", color=ORANGE, markersize=11, label="own maps")
    axes.set(title="greedy continuation behind a memoized prefill", xlabel="calls of the prefill served, %")
    axes.set(ylabel="% of prompts", ylim=(-2, 104), xlim=(-3, 104))
    axes.legend(fontsize=8, frameon=False, loc="lower left")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shared", type=Path, help="folder with data/")
    parser.add_argument("output", type=Path, help="folder for the converted model, databases and results by kind")
    parser.add_argument("kinds", nargs="*", default=list(KINDS), help=f"of {', '.join(KINDS)}")
    parser.add_argument("--stored", type=int, default=STORED, help=f"chunks to store at most [default: {STORED}]")
    parser.add_argument("--asked", type=int, default=ASKED, help=f"chunks to ask at most [default: {ASKED}]")
    parser.add_argument("--docs", type=Path, help="write study-decoder.json, .md and .png here")
    args = parser.parse_args(arguments)
    args.output.mkdir(parents=True, exist_ok=True)
    loaded = load_model(str(convert(args.shared / "data/weights_stories260K", args.output / "model")))
    for kind in args.kinds:
        found = study(kind, loaded, args.shared, args.output, (args.stored, args.asked))
        write_record(args.output / f"{kind}.json", found)
    result = collect(args.output)
    print(tables(result))
    if args.docs is not None:
        write(result, args.docs)


def collect(output: Path) -> dict[str, Any]:
    """The results of all kinds of text that were studied so far."""
    files = {kind: output / f"{kind}.json" for kind in KINDS}
    kinds, stamps = gathered({kind: json.loads(file.read_text()) for kind, file in files.items() if file.is_file()})
    return {
        "schema": "attmemo.study-decoder/1",
        "conditions": {key: value for key, value in conditions().items() if key != "kernel"},
        "length": LENGTH,
        "storage": "float16",
        "kinds": kinds,
        "measured": stamps,
    }


def write(result: dict[str, Any], docs: Path) -> None:
    """The numbers, the tables in the document, and the figure."""
    write_json(docs / "study-decoder.json", result)
    replace_measured(docs / "study-decoder.md", tables(result))
    draw(result, docs / "study-decoder.png")


if __name__ == "__main__":
    main()
