"""Measure a database that fills itself: what it saves from the first request on, and what filling costs.

    python scripts/bench_filling.py SHARED OUT CASE…      all cases: --help

`SHARED` holds `data/loghub_2k`, `data/imdb`, `data/ag_news` and `models/deberta-loghub`. Each case writes
OUT/CASE.json; `cold` draws OUT/cold.png too. Times are ratios of passes that take turns in one run.
"""

from __future__ import annotations

import argparse
import logging
import os
import resource
import shutil
import statistics
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
import workloads
from bench_guard import SETTINGS, Unguarded, answered, lines_of, load
from matplotlib.figure import Figure
from measured_at import write_record
from simulate_filling import Every, Unbounded, other_texts, simulate, stream
from transformers import BertConfig, BertModel

from attmemo import memoize, unmemoize
from attmemo.db.pools.filling import Filling
from attmemo.db.pools.pool import Entry
from attmemo.db.pools.segment import rounded
from attmemo.db.pools.shared_pool import SharedPool
from attmemo.guard.guard import Guard
from attmemo.profiler.plots import STYLE, png
from attmemo.profiler.turns import alternate
from attmemo.rows.index import DEFAULT, TokenIndex
from attmemo.rows.token_kinds import kinds_of

LOGS = ("OpenSSH", "HDFS", "BGL", "Apache", "Mac")
BOUND = 256 << 20
ROUNDS = 4  # of each measurement of what filling costs
Batch = dict[str, torch.Tensor]


def cold(shared: Path, out: Path) -> dict[str, Any]:
    """Rows computed from the first line of each log on: in the library, and simulated on tokens alone."""
    found: dict[str, Any] = {}
    curves: dict[str, list[float]] = {}
    for which, logs in (("minilm", LOGS), ("deberta", ("OpenSSH", "HDFS"))):
        tokenizer, (model, _) = load(shared, which)
        for log in logs:
            lines = workloads.lines_of(shared / "data", log)
            encoded = [tokenizer(line, truncation=True, max_length=256, return_tensors="pt") for line in lines]
            asked = [(inputs["input_ids"][0].numpy().astype(np.int32), True) for inputs in encoded]
            rule, kinds = DEFAULT.for_classes() if which == "deberta" else DEFAULT, kinds_of(tokenizer)
            simulated = simulate(asked, Every(), Unbounded(1 << 60), rule, kinds)
            one: dict[str, Any] = {"simulated": simulated["rows"] / simulated["tokens"]}
            for name, kind in (("no guard", Unguarded), ("guard", Guard)):
                memoize(model, database=":memory:", tokenizer=tokenizer, gate=False, threshold=0.5, budget=0.01,
                        linear="exact")  # fmt: skip
                handle: Any = model.attmemo
                handle.guard_anew(kind(0.01, 0.95, seed=0))
                curve = []
                for inputs in encoded:
                    with torch.inference_mode():
                        model(**inputs)
                    stats = handle.stats()
                    curve.append(stats["rows_computed"])
                handle.flush()
                tokens = np.cumsum([len(tokens) for tokens, _ in asked])
                one[name] = curve[-1] / int(tokens[-1])
                one[f"{name}, records"] = handle.stats()["records"]
                curves[f"{which}, {log}, {name}"] = (np.array(curve) / tokens).tolist()
                unmemoize(model)
            found[f"{which}, {log}"] = one
            print(which, log, one, flush=True)
    (out / "cold.png").write_bytes(draw(curves))
    return found


def draw(curves: dict[str, list[float]]) -> bytes:
    """Share of rows computed over the stream, a panel for each stream, as PNG."""
    names = sorted({name.rsplit(", ", 1)[0] for name in curves}, reverse=True)
    rows = -(-len(names) // 4)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(13, 3 * rows), dpi=120, layout="constrained")
        for place, name in enumerate(names, 1):
            axes = figure.add_subplot(rows, 4, place)
            for kind in ("no guard", "guard"):
                axes.plot(curves[f"{name}, {kind}"], label=kind)
            axes.set(title=name, ylim=(0, 1.6), xlabel="lines so far")
            if place == 1:
                axes.set_ylabel("tokens recomputed, share of all")
                axes.legend()
        return png(figure)


def cost(shared: Path, _: Path) -> dict[str, Any]:
    """What filling adds to requests: with and without, on inputs of which none is like another, and on log lines.

    Both models begin with the same records, made from inputs before, or with none. They take turns in blocks: beside a
    block of one model the filler of the other stands still. There is no guard, which would verify other inputs of each
    model.
    Two copies of one model can differ by 7 % in a median, because their memory lies elsewhere. So the models change
    roles and are prepared in another order from round to round, and all rounds count together. `control`: neither
    model fills.
    """
    tokenizer, models = load(shared, "minilm")
    found: dict[str, Any] = {}
    mixed = [line for log in LOGS for line in lines_of(shared, log)]
    np.random.default_rng(0).shuffle(mixed)
    texts = {
        "never alike": [tokens.tolist() for tokens in other_texts(shared)],
        "log lines": tokenizer(mixed, truncation=True, max_length=256)["input_ids"],
    }
    usual, long = ((1, 2000, 50), (32, 40, 8)), ((1, 2000, 50), (32, 120, 8))
    cases = [("never alike", "", usual), ("log lines", "", usual), ("log lines", "256 MiB", usual),
             ("never alike", "nothing stored before", long)]  # fmt: skip
    for name, how, size, count, block in ((name, how, *one) for name, how, sizes in cases for one in sizes):
        ids = texts[name]
        batches = [tokenizer.pad({"input_ids": ids[i * size : (i + 1) * size]}, return_tensors="pt")
                   for i in range(min(2 * count, len(ids) // size))]  # fmt: skip
        options = {"tokenizer": tokenizer, "gate": False, "reuse": "rows", **SETTINGS}
        options["max_bytes"] = BOUND if how == "256 MiB" else None  # records go for others
        case, before = f"{name}, {size} at once{how and ', ' + how}", how != "nothing stored before"
        with tempfile.TemporaryDirectory() as folder:
            start = Path(folder) / "start"
            handle = unguarded(models[0], fill=start, **options)
            for inputs in batches[:-count] if before else ():
                run(models[0], inputs)
            handle.flush()
            unmemoize(models[0])
            warm = batches[-count - 1]
            found[case] = rounds(models, start, warm, batches[-count:], block, True, options)
            print(case, found[case], flush=True)
            if not how:
                found[f"{case}, control"] = rounds(models, start, warm, batches[-count:], block, False, options)
                print(case, "control", found[f"{case}, control"], flush=True)
    return found


def unguarded(model: Any, **options: Any) -> Any:
    """The handle of a model that is memoized with these options, and whose guard serves whatever is found."""
    memoize(model, **options, budget=0.01, linear="exact")
    model.attmemo.guard_anew(Unguarded(0.01, 0.95, seed=0))
    return model.attmemo


def rounds(
    models: Sequence[Any], start: Path, warm: Batch, batches: Sequence[Batch], block: int, fills: bool,
    options: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """Times of a model that fills a copy of a database, over those of one that only reads; they change roles."""
    times: list[list[float]] = [[], []]
    rows, offered = [0, 0], Counter[str]()
    for turn in range(ROUNDS):
        pair = models if turn % 2 else models[::-1]
        with tempfile.TemporaryDirectory() as folder:
            for place in (0, 1) if turn // 2 % 2 else (1, 0):
                own = shutil.copytree(start, Path(folder) / str(place))
                unguarded(pair[place], database=own, fill=fills and not place, **options)
                run(pair[place], warm)
            thread = pair[0].attmemo.engine.reuse.store._filler
            for first in range(0, len(batches), block):
                order = (0, 1) if first // block % 2 else (1, 0)
                for place in order:
                    with thread._changed if place else nullcontext():  # beside the other model the thread stands still
                        sleep(place * 0.05)  # a transaction that had begun ends
                        for inputs in batches[first : first + block]:
                            begin = perf_counter()
                            run(pair[place], inputs)
                            times[place].append(perf_counter() - begin)
            pair[0].attmemo.flush()
            for place, one in enumerate(pair):
                rows[place] += one.attmemo.stats()["rows_computed"]
            offered += Counter(pair[0].attmemo.stats().get("offered") or {})
            for one in pair:
                unmemoize(one)
    return {
        "median": statistics.median(times[0]) / statistics.median(times[1]),
        "mean": statistics.mean(times[0]) / statistics.mean(times[1]),
        "99th percentile": float(np.percentile(times[0], 99) / np.percentile(times[1], 99)),
        "milliseconds": statistics.median(times[1]) * 1e3, "rows": rows[0] / rows[1],
        "requests": len(times[0]), "offered": dict(offered),
    }  # fmt: skip


def interleaved(models: Sequence[Any], batches: Sequence[Batch]) -> list[list[float]]:
    """Seconds of each request for each model; they take turns, and the one that begins changes."""
    times: list[list[float]] = [[] for _ in models]
    for number, inputs in enumerate(batches):
        for place in alternate(range(len(models)), number):
            begin = perf_counter()
            run(models[place], inputs)
            times[place].append(perf_counter() - begin)
    return times


def run(model: Any, inputs: Batch) -> None:
    """One forward."""
    with torch.inference_mode():
        model(**inputs)


def never(shared: Path, _: Path) -> dict[str, Any]:
    """Inputs that never repeat, through a small database: what grows, and the time beside packed blocks."""
    tokenizer, (model, other) = load(shared, "minilm")
    generator = np.random.default_rng(0)
    words = np.arange(1000, 28000)
    found: dict[str, Any] = {"seen": []}
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder) / "own"
        memoize(model, fill=own, reuse="rows", tokenizer=tokenizer, max_bytes=BOUND, budget=0.01)
        memoize(other, reuse="none")
        totals = [0.0, 0.0]
        for part in range(16):
            batches = []
            for _turn in range(100):
                ids = generator.choice(words, (32, 34))
                ids[:, 0], ids[:, -1] = 101, 102
                inputs = torch.from_numpy(ids)
                batches.append({"input_ids": inputs, "attention_mask": torch.ones_like(inputs)})
            times = interleaved((model, other), batches)
            totals = [total + sum(one) for total, one in zip(totals, times, strict=True)]
            seen = {
                "inputs": 3200 * (part + 1), "ratio": totals[0] / totals[1],
                "disk": sum(file.stat().st_blocks * 512 for file in own.rglob("*") if file.is_file()),
                "files": len(os.listdir("/proc/self/fd")),
                "mappings": len(Path("/proc/self/maps").read_text().splitlines()),
                "resident": int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize(),
            }  # fmt: skip
            found["seen"].append(seen)
            print(seen, flush=True)
        found["stats"] = model.attmemo.stats()
        unmemoize(model)
    return found


def soon(shared: Path, _: Path) -> dict[str, Any]:
    """Seconds from the end of a forward until its records can be found; all cores are busy, and none is found."""
    tokenizer, (minilm, _) = load(shared, "minilm")
    torch.manual_seed(0)
    base = BertModel(BertConfig(), add_pooling_layer=False).eval()
    cases = (("MiniLM, 1 at once", minilm, (1, 40), 4000), ("MiniLM, 32 at once", minilm, (32, 40), 200),
             ("BERT-base, 1 at once", base, (1, 128), 400), ("BERT-base, 1 of 512", base, (1, 512), 100))  # fmt: skip
    found: dict[str, Any] = {}
    for name, model, shape, count in cases:
        generator = np.random.default_rng(0)
        with tempfile.TemporaryDirectory() as folder:
            store = unguarded(
                model, fill=Path(folder) / "own", tokenizer=tokenizer, gate=False, reuse="rows"
            ).engine.reuse.store
            offered, seconds = dict[bytes, float](), list[float]()
            offer, index = store.offer, store._index

            def offering(offers: Any, offer: Any = offer, offered: dict[bytes, float] = offered) -> None:
                offered.update((one.tokens.tobytes(), perf_counter()) for one in offers)
                offer(offers)

            def indexing(
                kept: Any, index: Any = index, offered: dict[bytes, float] = offered, seconds: list[float] = seconds
            ) -> None:
                index(kept)
                seconds += [perf_counter() - offered[np.asarray(one.tokens, np.int32).tobytes()] for one in kept]

            store.offer, store._index = offering, indexing
            begin = perf_counter()
            for _ in range(count):
                inputs = torch.from_numpy(generator.integers(1000, 28000, shape))
                run(model, {"input_ids": inputs, "attention_mask": torch.ones_like(inputs)})
            took = perf_counter() - begin
            found[name] = {
                "requests": count, "seconds": took, "records": len(seconds), "median": statistics.median(seconds),
                "longest": max(seconds), "above one second": sum(one > 1.0 for one in seconds),
                "record_bytes": store.layout.nbytes(shape[1]),
            }  # fmt: skip
            unmemoize(model)
        print(name, found[name], flush=True)
    return found


def opening(_: Path, __: Path) -> dict[str, Any]:
    """Seconds until 100,000 records of a folder can be found."""
    generator = np.random.default_rng(0)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = {"name": "m", "family": "bert", "mask_kind": "padding", "layers": 1, "heads": 1, "hidden": 8}
        rest = {"dtype": "float32", "max_length": 512, "fingerprint": "0" * 64, "fields": {}, "tokenizer": None}
        from attmemo.db import ModelInfo

        pool = SharedPool(folder, 1 << 30, Filling.of(ModelInfo(**model, **rest), "float32"))  # type: ignore[arg-type]
        for _turn in range(100):
            tokens = generator.integers(0, 30000, (1000, 30)).astype(np.int32)
            pool.add([Entry(one, np.zeros(2000, np.uint8)) for one in tokens])
        pool.close()
        for turn in range(3):
            begin = perf_counter()
            pool = SharedPool(folder, 1 << 30, fills=False)
            news = pool.news()
            read = perf_counter()
            index = TokenIndex()
            index.extend([kept.tokens for kept in news.added], [kept.number for kept in news.added])
            done = perf_counter()
            found[str(turn)] = {"records": len(index), "read": read - begin, "index": done - read, "all": done - begin}
            print(found[str(turn)], flush=True)
            pool.close()
    return found


def mixed(shared: Path, _: Path) -> dict[str, Any]:
    """Lines of eight logs and a tenth of texts that never come again, with room for a third of what the logs need.

    The model is a small one with random weights: without a guard, what serves depends on tokens alone.
    """
    requests = stream(shared, "mixed")
    found: dict[str, Any] = {"requests": len(requests)}
    bound = None
    for name in ("unbounded", "a third"):
        config = BertConfig(
            vocab_size=30522, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
        )
        torch.manual_seed(0)
        model: Any = BertModel(config, add_pooling_layer=False).eval()
        handle = unguarded(
            model, database=":memory:", reuse="rows", gate=False, threshold=0.5, max_bytes=bound or 8 << 30
        )
        lines = needed = 0
        for tokens, is_line in requests:
            served, records = answered(handle.stats()), handle.stats()["offered"].get("kept", 0)
            run(model, {"input_ids": torch.from_numpy(tokens.astype(np.int64))[None]})
            handle.flush()
            lines += is_line and answered(handle.stats()) > served
            if is_line and handle.stats()["offered"].get("kept", 0) > records:
                needed += rounded(handle.engine.reuse.store.layout.nbytes(len(tokens)))
        store = handle.engine.reuse.store
        found[name] = {"served": lines / sum(is_line for _, is_line in requests), "counts": store.pool.counts,
                       "bytes": store.nbytes, "bound": bound}  # fmt: skip
        print(name, found[name], flush=True)
        bound = bound or needed // 3
        unmemoize(model)
    found["share"] = found["a third"]["served"] / found["unbounded"]["served"]
    return found


CASES = {"mixed": mixed, "cold": cold, "cost": cost, "never": never, "soon": soon, "opening": opening}


def main() -> None:
    """Run the cases that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shared", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("cases", nargs="*", help=", ".join(CASES))
    options = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    for name in options.cases:
        if name not in CASES:
            parser.error(f"no case {name!r}: {', '.join(CASES)}")
        write_record(options.out / f"{name}.json", CASES[name](options.shared, options.out))


if __name__ == "__main__":
    main()
