"""Models that are served today: exact and 8-bit blocks beside the original and other runtimes.

    python scripts/bench_served_models.py ../shared docs/served-models.json --page docs/served-models.md
    python scripts/bench_served_models.py ../shared docs/served-models.json qwen3 bart  # these; the others stay
    python scripts/bench_served_models.py ../shared docs/served-models.json prefix --layers 6
    python scripts/bench_served_models.py ../shared docs/served-models.json --only-page --page docs/served-models.md

Wants openvino, nncf, onnxruntime, onnx, onnxscript, llama-cpp-python and gguf; what is not installed, or cannot
compute a model, is left out by name. Each way has a process and one thread of its own, and all take turns. Times are
those of the processor, medians of rounds. Answers are compared with those of the original model in its number type.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import bench_prefix
import torch
from marked import replace_measured, table
from measured_at import measured_at
from served_models import ROUTES, SHAPES, Texts, by_length, cases_of, convert, write
from torch import Tensor

from attmemo.system.machine import conditions
from attmemo.wording import counted

Key = tuple[str, bool]


def serve(pipe: Connection, route: str, name: str, folder: Path) -> None:
    """A way in its process: takes texts, and whether they may be sorted; gives seconds and answers."""
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            way = ROUTES[route].ready(name, folder)
            ways = {False: way, True: by_length(way)}
            pipe.send(None)
            while (order := pipe.recv()) is not None:
                texts, ordered = order
                start = time.process_time()
                given = ways[ordered](texts)
                pipe.send((time.process_time() - start, given.numpy()))
    except Exception as error:  # whatever another library raises
        pipe.send(_line(error))


def make(pipe: Connection, name: str, file: str | None, folder: Path) -> None:
    """Write weights, or one converted file, in a process of its own."""
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            write(name, folder) if file is None else convert(name, file, folder)
        pipe.send(None)
    except Exception as error:
        pipe.send(_line(error))


def _line(error: Exception) -> str:
    said = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {said[0][:120] if said else ''}"


class Failed(Exception):
    """A way cannot take part; the message says why."""


class Process:
    """A function in a process of its own, which gets one end of a pipe."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=function, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()
        self.hear()

    def hear(self) -> Any:
        """What it says. Failed: it cannot go on."""
        try:
            said = self._pipe.recv()
        except EOFError:
            raise Failed("its process died") from None
        if isinstance(said, str):
            raise Failed(said)
        return said

    def ask(self, texts: Texts, ordered: bool) -> tuple[float, Tensor]:
        """Seconds, and answers."""
        self._pipe.send((texts, ordered))
        seconds, given = self.hear()
        return seconds, torch.from_numpy(given)

    def end(self) -> None:
        """End it."""
        if self._process.is_alive():
            self._pipe.send(None)
        self._process.join()


def opened(name: str, routes: Sequence[str], folder: Path) -> tuple[dict[str, Process], dict[str, str]]:
    """Processes of ways that are ready, and why others are left out."""
    found: dict[str, Process] = {}
    left_out: dict[str, str] = {}
    for route in routes:
        try:
            for file in ROUTES[route].files:
                if not (folder / file).exists():
                    Process(make, name, file, folder).end()
            found[route] = Process(serve, route, name, folder)
        except Failed as error:
            left_out[ROUTES[route].title] = str(error)
            print(name, route, error, flush=True)
    return found, left_out


def measure(name: str, requests: Sequence[Texts], running: dict[str, Process], rounds: int) -> dict[str, Any]:
    """All ways of one case, in turns."""
    lengths = {len(text) for texts in requests for text in texts}
    keys: list[Key] = [(route, ROUTES[route].padded and len(lengths) > 1) for route in running]
    seconds: dict[Key, list[float]] = {key: [] for key in keys}
    answers: dict[Key, list[Tensor]] = {}
    for number in range(rounds):
        for key in keys if number % 2 else keys[::-1]:
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
        route = ROUTES[key[0]]
        found["ways"].append({
            "title": route.title + ", sorted" * key[1], "side": route.side, "bits8": route.bits8,
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


def row_of(name: str, case: str, found: dict[str, Any]) -> list[str]:
    """A line of the table: exact times and ratios, then those in 8 bits."""
    ways = found["ways"]
    cells = [SHAPES[name].title, case]
    stock = best(ways, "original", False)
    for bits8 in (False, True):
        own, peer = best(ways, "own", bits8), best(ways, "peer", bits8)
        if not bits8:
            assert stock is not None
            assert own is not None
            cells += [_seconds(stock), _seconds(own), f"{stock['seconds'] / own['seconds']:.1f}"]
        elif own is not None:
            cells += [_seconds(own)]
        if own is None or peer is None:
            cells += ["–"] * (1 + (own is None and bits8))
        else:
            cells += [f"{peer['seconds'] / own['seconds']:.2f}: {peer['title']} {_seconds(peer)}"]
    return cells


def _seconds(way: dict[str, Any]) -> str:
    return f"{way['seconds']:.2f} s"


HEAD = "model | asked | original | exact | over original | over the best peer | int8 | over the best int8 peer"


def tables(result: dict[str, Any]) -> str:
    """The numbers in Markdown."""
    machine = result["conditions"]
    commits = sorted({f"{one['commit']} ({one['date']})" for one in result["shapes"].values()})
    least = min(case["rounds"] for one in result["shapes"].values() for case in one["cases"].values())
    lines = [
        f"{machine['cpu']}, {', '.join(machine['features'])}; one thread, bfloat16, time of the processor, medians of "
        f"{counted(least, 'round')} or more; commit {', '.join(commits)}:", "",
        *table(HEAD, [row_of(name, case, found) for name, one in result["shapes"].items()
                      for case, found in one["cases"].items()]),
        "Answers beside those of the original (bfloat16): the lowest cosine; of tags the share of equal texts:",
        "",
        *table("model | answers", [[SHAPES[name].title, "; ".join(_alike(one))] for name, one in
                                   result["shapes"].items()]),
    ]  # fmt: skip
    if "prefix" in result:
        lines += ["Equal prefixes of the Qwen3-0.6B shape:", "", bench_prefix.table(result["prefix"]), ""]
    left = [f"* {SHAPES[name].title}: {title}: {why}" for name, one in result["shapes"].items()
            for title, why in one["left_out"].items()]  # fmt: skip
    return "\n".join([*lines, *(["Left out:", "", *left] if left else [])])


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
    parser.add_argument("shape", nargs="*", choices=[*SHAPES, "prefix", []], metavar="SHAPE")
    parser.add_argument("--layers", type=int, default=28, help="layers of the model with equal prefixes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", default=",".join(ROUTES))
    parser.add_argument("--work", type=Path, help="a folder that keeps weights and converted models")
    parser.add_argument("--page", type=Path, help="put the tables into this page")
    parser.add_argument("--only-page", action="store_true", help="measure nothing")
    args = parser.parse_args()
    result = json.loads(args.output.read_text()) if args.output.exists() else {"shapes": {}}
    with tempfile.TemporaryDirectory() as other:
        for name in [] if args.only_page else args.shape or [*SHAPES, "prefix"]:
            if name == "prefix":
                result["prefix"] = prefixes(args.layers, args.rounds)
                args.output.write_text(json.dumps(result, indent=1) + "\n")
                continue
            begun, folder = measured_at(), (args.work or Path(other)) / name
            folder.mkdir(parents=True, exist_ok=True)
            if name == "tagger":
                for file in (args.shared / "models" / "minilm-pii").iterdir():
                    (folder / file.name).unlink(missing_ok=True)
                    (folder / file.name).symlink_to(file.resolve())
            elif not (folder / "weights.pt").exists():
                Process(make, name, None, folder).end()
            running, left_out = opened(name, args.ways.split(","), folder)
            cases = {case: measure(name, requests, running, args.rounds)
                     for case, requests in cases_of(name, args.shared).items()}  # fmt: skip
            for process in running.values():
                process.end()
            result["shapes"][name] = {"cases": cases, "left_out": left_out} | begun
            result["conditions"] = conditions() | {"threads": 1}
            args.output.write_text(json.dumps(result, indent=1) + "\n")
    if args.page is not None:
        replace_measured(args.page, tables(result))


if __name__ == "__main__":
    main()
