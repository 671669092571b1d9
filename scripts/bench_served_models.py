"""Models that are served today: exact and 8-bit blocks beside the original and other runtimes.

    python scripts/bench_served_models.py ../shared docs/served-models.json --page docs/served-models.md
    python scripts/bench_served_models.py ../shared docs/served-models.json qwen3 bart  # these; the others stay
    python scripts/bench_served_models.py ../shared docs/served-models.json prefix --layers 6  # equal prefixes
    python scripts/bench_served_models.py ../shared docs/served-models.json products budget  # what explains the others
    python scripts/bench_served_models.py ../shared docs/served-models.json --only-page --page docs/served-models.md \
        --also docs/served-models-amx.json  # the tables of both processors

Wants openvino, nncf, onnxruntime, onnx, onnxscript, llama-cpp-python and gguf; what is not installed, or cannot
compute a model, is left out by name. Each way has a process of its own, with one thread, or with two if it dies with
one, and all take turns. Times are those of the processor, medians of rounds. Answers are compared with those of the
original model in its number type.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import bench_prefix
import numpy as np
import torch
from marked import replace_measured, table
from measured_at import measured_at
from results.files import standing
from served_models import (
    ROUTES,
    SHAPES,
    TEXTS,
    Texts,
    by_length,
    cases_of,
    convert,
    forms,
    linear_layers,
    spans,
    write,
)  # fmt: skip
from torch import Tensor

from attmemo.profiler.models import Tokens
from attmemo.profiler.process import Process, ProcessDied, ProcessError, apart
from attmemo.profiler.turns import alternate
from attmemo.system.machine import conditions
from attmemo.wording import counted

Key = tuple[str, bool]
EXTRAS = "prefix", "budget", "products"


class TimedWay:
    """A way in its process: takes texts, and whether they may be sorted; gives seconds and answers."""

    @torch.inference_mode()
    def __init__(self, route: str, name: str, folder: Path, threads: int) -> None:
        torch.set_num_threads(threads)
        way = ROUTES[route].ready(name, folder)
        self._ways = {False: way, True: by_length(way)}

    @torch.inference_mode()
    def ask(self, texts: Texts, ordered: bool) -> tuple[float, np.ndarray]:
        start = time.process_time()
        given = self._ways[ordered](texts)
        return time.process_time() - start, given.numpy()


class WayProcess(Process):
    """The process of a way: with one thread; with two where it dies with one, as OpenVINO does in bfloat16 on AMX."""

    def __init__(self, route: str, name: str, folder: Path) -> None:
        self.note = ""  # behind its title
        try:
            super().__init__(TimedWay, route, name, folder, 1)
        except ProcessDied:
            super().__init__(TimedWay, route, name, folder, 2)
            self.note = ", two threads"

    def ask(self, texts: Texts, ordered: bool) -> tuple[float, Tensor]:
        """Seconds, and answers."""
        seconds, given = self.call(TimedWay.ask, texts, ordered)
        return seconds, torch.from_numpy(given)


class Tagger:
    """The tagger in its process: takes texts; gives seconds, with what was done since the last ones, and spans."""

    @torch.inference_mode()
    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        self._way, self._handle = spans(folder, **options)
        self._way([Tokens(0, list(range(1000, 1020)), None)])
        self._handle.reset_stats()
        self._before = time.process_time()

    @torch.inference_mode()
    def ask(self, texts: Texts) -> tuple[float, list[int]]:
        given, before = self._way(texts), self._before
        self._before = time.process_time()
        return self._before - before, given

    def counts(self) -> dict[str, Any]:
        stats = self._handle.stats()
        guard = stats["guard"] or {}
        return {"share_computed": stats["share_computed"], **{name: guard.get(name) for name in (
            "reused", "repeated", "state", "says")}}  # fmt: skip


@torch.inference_mode()
def make(name: str, file: str | None, folder: Path) -> None:
    """Write weights, or one converted file, with one thread."""
    torch.set_num_threads(1)
    write(name, folder) if file is None else convert(name, file, folder)


@torch.inference_mode()
def multiply(name: str, folder: Path, tokens: int) -> float:
    """Seconds of bare products, with one thread."""
    torch.set_num_threads(1)
    return linear_layers(name, folder, tokens)


def opened(
    name: str, routes: Sequence[str], folder: Path, stack: ExitStack
) -> tuple[dict[str, WayProcess], dict[str, str]]:
    """Processes of ways that are ready, which end with `stack`, and why others are left out."""
    found: dict[str, WayProcess] = {}
    left_out: dict[str, str] = {}
    for route in routes:
        try:
            for file in ROUTES[route].files:
                if not (folder / file).exists():
                    apart(make, name, file, folder)
            found[route] = stack.enter_context(WayProcess(route, name, folder))
        except ProcessError as error:
            left_out[ROUTES[route].title] = str(error)
            print(name, route, error, flush=True)
    return found, left_out


def measure(name: str, requests: Sequence[Texts], running: dict[str, WayProcess], rounds: int) -> dict[str, Any]:
    """All ways of one case, in turns."""
    lengths = {len(text) for texts in requests for text in texts}
    keys: list[Key] = [(route, ROUTES[route].padded and len(lengths) > 1) for route in running]
    seconds: dict[Key, list[float]] = {key: [] for key in keys}
    answers: dict[Key, list[Tensor]] = {}
    for number in range(rounds):
        for key in alternate(keys, number):
            given = [running[key[0]].ask(texts, key[1]) for texts in requests]
            seconds[key].append(sum(one for one, _ in given))
            answers[key] = [answer for _, answer in given]
            print(name, *key, round(seconds[key][-1], 3), flush=True)
    stock = "original", False
    found: dict[str, Any] = {
        "tokens": sum(len(text) for texts in requests for text in texts), "rounds": rounds,
        "padded": sum(len(texts) * max(map(len, texts)) for texts in requests), "ways": [],
    }  # fmt: skip
    for key in keys:
        route, note = ROUTES[key[0]], running[key[0]].note
        found["ways"].append({
            "title": route.title + note + ", sorted" * key[1], "side": route.side, "bits8": route.bits8,
            "seconds": median(seconds[key]), "all": seconds[key],
            "alike": likeness(name, answers[stock], answers[key]),
        })  # fmt: skip
    return found


def likeness(name: str, expected: Sequence[Tensor], given: Sequence[Tensor]) -> float:
    """The lowest cosine; of tags the share of texts whose tags are all the same."""
    pairs = [pair for one, other in zip(expected, given, strict=True) for pair in zip(one, other, strict=True)]
    if SHAPES[name].pooling == "tags":
        return sum(torch.equal(one, other) for one, other in pairs) / len(pairs)
    return min(float(one @ other) for one, other in pairs)


def weights_of(name: str, shared: Path, work: Path) -> Path:
    """The folder of a model, with its weights in it."""
    folder = work / name
    folder.mkdir(parents=True, exist_ok=True)
    if name == "tagger":
        for file in (shared / "models" / "minilm-pii").iterdir():
            (folder / file.name).unlink(missing_ok=True)
            (folder / file.name).symlink_to(file.resolve())
    elif not (folder / "weights.pt").exists():
        apart(make, name, None, folder)
    return folder


def measure_shape(name: str, args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """All cases of a model, and the ways that are left out."""
    begun, folder = measured_at(), weights_of(name, args.shared, work)
    with ExitStack() as stack:
        running, left_out = opened(name, args.ways.split(","), folder, stack)
        cases = {case: measure(name, requests, running, args.rounds)
                 for case, requests in cases_of(name, args.shared).items()}  # fmt: skip
    return {"cases": cases, "left_out": left_out} | begun


def measure_products(shapes: dict[str, Any], shared: Path, work: Path) -> None:
    """Put the seconds of bare products into each case that was measured."""
    for name, one in shapes.items():
        folder = weights_of(name, shared, work)
        for case in one["cases"].values():
            case["products"] = apart(multiply, name, folder, case["tokens"])


def budgeted(shared: Path, folder: Path, count: int = 4000) -> dict[str, Any]:
    """The tagger on forms in the order of time: exact, and within a budget of 1 %, some requests each in turns.

    What a guard does beside requests is in its seconds, too.
    """
    begun, own = measured_at(), forms(shared, count)
    requests = [own[at : at + TEXTS] for at in range(0, len(own), TEXTS)]
    seconds: list[list[float]] = [[], []]
    spans_of: list[list[int]] = [[], []]
    with Process(Tagger, folder, {}) as exact, Process(Tagger, folder, {"budget": 0.01, "linear": "exact"}) as guarded:
        for first in range(0, len(requests), 5):
            for number, way in enumerate((exact, guarded)):
                for texts in requests[first : first + 5]:
                    taken, given = way.call(Tagger.ask, texts)
                    seconds[number].append(taken)
                    spans_of[number] += given
        found = guarded.call(Tagger.counts)
    half = len(requests) // 2
    parts = {"first half": slice(half), "second half": slice(half, None)}
    return found | begun | {
        "forms": count, "changed": sum(map(int.__ne__, *spans_of)) / count, "exact": sum(seconds[0]),
        "over exact": {part: sum(seconds[0][at]) / sum(seconds[1][at]) for part, at in parts.items()},
    }  # fmt: skip


def prefixes(layers: int, rounds: int) -> dict[str, Any]:
    """A query before many documents and a policy before many messages, as `bench_prefix.py` measures them."""
    torch.set_num_threads(1)
    begun, model, clock = measured_at(), bench_prefix.model_of(layers), bench_prefix.CLOCKS["processor"]
    return {
        "rerank": bench_prefix.rerank(model, rounds, clock), "guard": bench_prefix.guard(model, rounds, clock),
        "layers": layers, "rounds": rounds, "clock": "processor", "conditions": conditions() | {"threads": 1},
    } | begun  # fmt: skip


# -- the page


def best(ways: Sequence[dict[str, Any]], side: str, bits8: bool) -> dict[str, Any] | None:
    """The fastest way of a side."""
    own = [way for way in ways if way["side"] == side and way["bits8"] is bits8]
    return min(own, key=lambda way: float(way["seconds"]), default=None)


def rows_of(result: dict[str, Any], bits8: bool) -> Iterator[list[str]]:
    """Lines of a table of exact ways, or of those in 8 bits."""
    for name, one in result["shapes"].items():
        for case, found in one["cases"].items():
            stock, own, peer = (best(found["ways"], *side) for side in (
                ("original", False), ("own", bits8), ("peer", bits8)))  # fmt: skip
            if own is None or stock is None:
                continue
            cells = [SHAPES[name].title, case, _seconds(stock["seconds"])]
            if not bits8:
                cells.append(_seconds(found["products"]) if "products" in found else "–")
            cells += [_seconds(own["seconds"]), f"{stock['seconds'] / own['seconds']:.1f}"]
            cells += ["–", "–"] if peer is None else [
                f"{peer['title']} {_seconds(peer['seconds'])}", f"{peer['seconds'] / own['seconds']:.2f}"]  # fmt: skip
            yield cells


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s"


HEAD = "model | asked | original | bare products | exact | over the original | best peer | over it"
HEAD8 = "model | asked | original | int8 | over the original | best peer in 8 bits | over it"


def tables(result: dict[str, Any]) -> str:
    """The numbers in Markdown."""
    machine, shapes = result["conditions"], result["shapes"]
    commits = sorted({f"{one['commit']}, {one['date']}" for one in shapes.values()})
    rounds = {case["rounds"] for one in shapes.values() for case in one["cases"].values()}
    lines = [
        f"{machine['cpu']}, {', '.join(machine['features'])}; bfloat16, time of the processor, medians of "
        f"{counted(min(rounds), 'round')} or more; commit {'; '.join(commits)}:", "",
        *table(HEAD, rows_of(result, False)), *table(HEAD8, rows_of(result, True)),
        "Answers beside those of the original (bfloat16): the lowest cosine; of tags the share of equal texts:", "",
        *table("model | answers", [[SHAPES[name].title, "; ".join(_alike(one))] for name, one in shapes.items()]),
    ]  # fmt: skip
    if "budget" in result:
        lines += [*_budget(result["budget"]), ""]
    if "prefix" in result:
        lines += ["Equal prefixes of the Qwen3-0.6B shape:", "", bench_prefix.table(result["prefix"]), ""]
    left = [f"* {SHAPES[name].title}, {title}: {why}" for name, one in shapes.items()
            for title, why in one["left_out"].items()]  # fmt: skip
    return "\n".join([*lines, *(["Left out:", "", *left] if left else [])])


def _budget(one: dict[str, Any]) -> list[str]:
    ratios = (f"{one['over exact'][part]:.2f}" for part in ("first half", "second half"))
    cells = [str(one["forms"]), f"{100 * (one['reused'] + one['repeated']) / one['forms']:.1f} %",
             f"{one['share_computed']:.2f}", *ratios, f"{100 * one['changed']:.2f} %",
             standing(one["state"])]  # fmt: skip
    return [f"minilm-pii with `budget=0.01, linear=\"exact\"`, {TEXTS} forms at once, what the guard does beside "
            f"requests included (commit {one['commit']}):", "",
            *table("forms | reused or repeated | tokens recomputed | speed, exact = 1: first half | second half "
                   "| changed | guard", [cells])[:-1]]  # fmt: skip


def _alike(one: dict[str, Any]) -> list[str]:
    lowest: dict[str, float] = {}
    for case in one["cases"].values():
        for way in case["ways"]:
            title = way["title"].removesuffix(", sorted")
            lowest[title] = min(way["alike"], lowest.get(title, 1.0))
    return [f"{title} {alike:.4f}" for title, alike in lowest.items() if title != "original"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shared", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("shape", nargs="*", choices=[*SHAPES, *EXTRAS, []], metavar="SHAPE")
    parser.add_argument("--layers", type=int, default=28, help="layers of the model with equal prefixes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", default=",".join(ROUTES))
    parser.add_argument("--work", type=Path, help="a folder that keeps weights and converted models")
    parser.add_argument("--page", type=Path, help="put the tables into this page")
    parser.add_argument("--also", type=Path, nargs="+", default=[], help="results of other processors for the page")
    parser.add_argument("--only-page", action="store_true", help="measure nothing")
    args = parser.parse_intermixed_args()
    result = json.loads(args.output.read_text()) if args.output.exists() else {"shapes": {}}
    with tempfile.TemporaryDirectory() as other:
        work = args.work or Path(other)
        for name in [] if args.only_page else args.shape or [*SHAPES, *EXTRAS]:
            if name == "prefix":
                result["prefix"] = prefixes(args.layers, args.rounds)
            elif name == "budget":
                result["budget"] = budgeted(args.shared, weights_of("tagger", args.shared, work))
            elif name == "products":
                measure_products(result["shapes"], args.shared, work)
            else:
                result["shapes"][name] = measure_shape(name, args, work)
                result["conditions"] = conditions() | {"threads": 1}
            args.output.write_text(json.dumps(result, indent=1) + "\n")
    if args.page is not None:
        others = [json.loads(file.read_text()) for file in args.also]
        replace_measured(args.page, "\n\n".join(map(tables, [result, *others])))


if __name__ == "__main__":
    main()
