"""Time the original generation beside each step of fastseq, in one run, and write docs/fastseq-bench.{json,md}.

python scripts/bench_fastseq.py --shape bart-large --length 1024 128 --new 100 --beams 4 --batch 4
python scripts/bench_fastseq.py --shape tiny --length 32 --new 8          # a smoke test: seconds

Models have the named shape and random weights, so no sentence ends by itself: `--new` tokens are generated for each
(min_new_tokens = max_new_tokens). The time is that from lines of text to lines of text: tokenizing, generating,
decoding, writing. Every round runs every rung once, in another order; the table has the medians. On a GPU a round
that is not counted comes first. Loading the weights from a folder is timed for itself and added in a column of its
own.

Rungs, each with what is before it: `stock`; `shared` (cross-attention cache or prompt kept once a sample); `+ngram`
(the kernel that blocks n-grams); `+pipeline` (`attmemo.fastseq.Pipeline` on what `wrap` chooses by itself, as users
get it); `+batch` (the planner's batch instead of `--batch`). Beside them `el`, EL-Attention whether it pays or not,
`no cache`, the original with `use_cache=False`, and `ctranslate2`, which needs that package.

python scripts/bench_fastseq.py --types --shape bart-large --length 128 --new 32 --rounds 2

`--types` measures types instead, docs/fastseq-types.{json,md}: the original and `fastseq.accelerate` in float32,
bfloat16 and 8 bits, and CTranslate2 in those that it has for such a processor; with `--only` also what `wrap` gives;
for Qwen3's shape also llama.cpp and OpenVINO (`--beams 1`), which want the packages `gguf` and `llama-cpp-python`,
and `openvino` and `optimum-intel`. Each runs in a process of its own, in turns: greedy with one line, and beams
with `--batch` lines, each once with one line for a few tokens, and then whole, which counts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from fastseq_shapes import SHAPES, lines_of, make_tokenizer
from fastseq_tables import table, table_of_types
from measured_at import measured_at, processor_of, write_record
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from attmemo import fastseq
from attmemo.fastseq.generate.shape import ModelShape
from attmemo.profiler.peers.table import measured_under
from attmemo.profiler.process import apart
from attmemo.profiler.turns import alternate
from attmemo.system import machine

TYPES = {  # name: engine, dtype, weights
    "stock float32": ("stock", "float32", None),
    "stock bfloat16": ("stock", "bfloat16", None),
    "shared float32": ("shared", "float32", None),  # what `wrap` gives with this `attention`
    "shared bfloat16": ("shared", "bfloat16", None),
    "EL float32": ("el", "float32", None),
    "EL bfloat16": ("el", "bfloat16", None),
    "float32": ("fastseq", "float32", None),
    "bfloat16": ("fastseq", "bfloat16", None),
    "int8": ("fastseq", "float32", "int8"),
    "bfloat16, int8": ("fastseq", "bfloat16", "int8"),
    "CTranslate2 float32": ("ctranslate2", "float32", None),
    "CTranslate2 int8": ("ctranslate2", "int8", None),
    "llama.cpp Q8_0": ("llama.cpp", "Q8_0", None),
    "OpenVINO int8": ("openvino", "int8", None),
}
ON_REQUEST = {"shared", "el", "llama.cpp", "openvino"}  # the last two: greedy alone, of Qwen3 alone
SETTING = ("shape", "length", "new", "beams", "batch")
RUNGS = ("stock", "shared", "+ngram", "+pipeline", "+batch", "el", "no cache", "ctranslate2")


class Peer:
    """CTranslate2 on the same weights: its own C++ decoder, which reads text as pieces."""

    def __init__(
        self, folder: Path, new: int, beams: int, batch: int, threads: int, kind: str = "float32", ngrams: int = 3
    ) -> None:
        import ctranslate2

        converted = folder / "ctranslate2"
        if not converted.exists():
            ctranslate2.converters.TransformersConverter(str(folder)).convert(str(converted))
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.encoder_decoder = encoder_decoder = AutoConfig.from_pretrained(folder).is_encoder_decoder
        start = time.perf_counter()
        engine = ctranslate2.Translator if encoder_decoder else ctranslate2.Generator
        self.engine = engine(str(converted), device="cpu", intra_threads=threads, compute_type=kind)
        self.load_seconds = time.perf_counter() - start
        shared = {"beam_size": beams, "no_repeat_ngram_size": ngrams, "max_batch_size": batch}
        if encoder_decoder:
            self.settings = shared | {"max_decoding_length": new, "min_decoding_length": new, "max_input_length": 0}
        else:
            self.settings = shared | {"max_length": new, "min_length": new, "include_prompt_in_result": False}
        self.generate = self.engine.translate_batch if encoder_decoder else self.engine.generate_batch

    def __call__(self, lines: list[str]) -> list[str]:
        """Text to text."""
        pieces = [self.tokenizer.convert_ids_to_tokens(ids) for ids in self.tokenizer(lines)["input_ids"]]
        found = self.generate(pieces, **self.settings)
        if self.encoder_decoder:
            ids = [self.tokenizer.convert_tokens_to_ids(one.hypotheses[0]) for one in found]
        else:
            ids = [one.sequences_ids[0] for one in found]
        texts: list[str] = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        return texts


class Bench:
    """One model, one setting, and its rungs."""

    def __init__(
        self, options: argparse.Namespace, folder: Path, length: int, new: int, beams: int, model: Any
    ) -> None:
        self.options = options
        self.model = model
        self.batch = options.batch
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.lines = lines_of(model.config.vocab_size, options.lines, length)
        self.settings = {
            "num_beams": beams,
            "max_new_tokens": new,
            "min_new_tokens": new,
            "no_repeat_ngram_size": 3,
            "do_sample": False,
        }
        self.shared = fastseq.wrap(model, attention="shared")
        self.el = fastseq.wrap(model, attention="el") if "el" in options.rungs else None
        self.fast = fastseq.wrap(model)
        self.peer = None
        if "ctranslate2" in options.rungs:
            self.peer = Peer(folder, new, beams, self.batch, options.threads)
        self.outputs: dict[str, list[str]] = {}
        self.cpu_seconds: dict[str, list[float]] = {}

    def run(self, rung: str) -> float:
        """Seconds from lines to lines."""
        with tempfile.TemporaryDirectory() as folder:
            start, cpu = time.perf_counter(), time.process_time()
            if rung in ("+pipeline", "+batch"):
                texts = self._pipeline("auto" if rung == "+batch" else self.batch)
            elif rung == "ctranslate2":
                assert self.peer is not None
                texts = self.peer(self.lines)
            else:
                engine = {"stock": self.model, "no cache": self.model, "el": self.el}.get(rung, self.shared)
                texts = self._plain(engine, swap=rung != "shared", use_cache=rung != "no cache")
            Path(folder, "out.txt").write_text("\n".join(texts) + "\n")
            seconds = time.perf_counter() - start
        self.outputs[rung] = texts
        self.cpu_seconds.setdefault(rung, []).append(time.process_time() - cpu)
        return seconds

    def _plain(self, engine: Any, swap: bool, use_cache: bool) -> list[str]:
        from attmemo.fastseq.generate import loop

        texts: list[str] = []
        kept = loop.swap_ngram_processors
        if not swap:  # this rung still has the original n-gram processor
            loop.swap_ngram_processors = lambda processors, in_place: 0
        try:
            for first in range(0, len(self.lines), self.batch):
                inputs = self.tokenizer(
                    self.lines[first : first + self.batch],
                    return_tensors="pt",
                    padding=True,
                    return_token_type_ids=False,
                ).to(self.model.device)
                prompt = 0 if self.model.config.is_encoder_decoder else inputs["input_ids"].shape[1]
                tokens = engine.generate(**inputs, **self.settings, use_cache=use_cache)[:, prompt:]
                texts += self.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        finally:
            loop.swap_ngram_processors = kept
        return texts

    def _pipeline(self, batch: int | str) -> list[str]:
        pipeline = fastseq.Pipeline(self.fast, self.tokenizer, batch=batch, **self.settings)
        return list(pipeline(self.lines))


def measure(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """All settings of one shape, each round running every rung once."""
    rungs = list(options.rungs)
    torch.manual_seed(0)
    fresh = SHAPES[options.shape]().eval().to(getattr(torch, options.dtype))
    fresh.save_pretrained(folder)
    make_tokenizer(fresh.config).save_pretrained(folder)
    kind = type(fresh)
    del fresh
    loading = []
    for _ in range(3):
        start = time.perf_counter()
        model = kind.from_pretrained(folder).eval().to(options.device)
        fastseq.wrap(model)
        loading.append(time.perf_counter() - start)
    load = statistics.median(loading)
    rows = []
    for length in options.length:
        for new in options.new:
            for beams in options.beams:
                before = os.getloadavg()[0]
                bench = Bench(options, folder, length, new, beams, model)
                seconds: dict[str, list[float]] = {rung: [] for rung in rungs}
                if options.device == "cuda":  # the first work of a shape loads and chooses kernels: seconds
                    for rung in rungs:
                        bench.run(rung)
                    bench.cpu_seconds.clear()
                for number in range(options.rounds):
                    for rung in alternate(rungs, number):
                        seconds[rung].append(bench.run(rung))
                        print(
                            f"{options.shape} N={length} T={new} M={beams} {rung}: {seconds[rung][-1]:.2f} s",
                            flush=True,
                        )
                # The states of the last token are not needed; an encoder-decoder has a first one of its own.
                kept = new if model.config.is_encoder_decoder else new - 1
                loads = dict.fromkeys(rungs, load)
                if bench.peer:
                    loads["ctranslate2"] = bench.peer.load_seconds
                row: dict[str, Any] = {
                    "shape": options.shape,
                    "length": length,
                    "new": new,
                    "beams": beams,
                    "batch": options.batch,
                    "lines": options.lines,
                    "seconds": {rung: statistics.median(values) for rung, values in seconds.items()},
                    "load_seconds": loads,
                    "rounds": seconds,
                    "cpu_seconds": {rung: statistics.median(values) for rung, values in bench.cpu_seconds.items()},
                    "load": [before, os.getloadavg()[0]],
                    "same_text": {rung: bench.outputs[rung] == bench.outputs[rungs[0]] for rung in rungs},
                    "counts": bench.fast.stats()["counts"],
                    "cache_bytes": (bench.shared if "shared" in rungs else bench.fast).stats()["cache_bytes"],
                    "el_cache_bytes": bench.el.stats()["cache_bytes"] if bench.el else None,
                    "formula_bytes": {
                        mode: ModelShape.of(model.config, model.dtype).cache_bytes(
                            min(options.batch, options.lines), beams, length, kept, mode
                        )
                        for mode in ("stock", "shared", "el")
                    },
                }
                row["ratio"] = {rung: row["seconds"][rungs[0]] / value for rung, value in row["seconds"].items()}
                rows.append(row)
    return rows


def measure_type(name: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One type in this process: both settings."""
    torch.set_num_threads(options.threads)
    engine, dtype, weights = TYPES[name]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = AutoConfig.from_pretrained(folder)
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model: Any = None
    found: dict[str, Any] = {"packed_bytes": None}
    if engine in ("stock", "shared", "el", "fastseq"):
        model = kind.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        if engine == "fastseq":
            model = fastseq.accelerate(model, weights=weights)
            found["packed_bytes"] = model.packed_bytes
        elif engine != "stock":
            model = fastseq.wrap(model, attention=engine)
    new, length = options.new[0], options.length[0]
    for setting, beams, batch in (("greedy", 1, 1), ("beams", options.beams[0], options.batch)):
        lines = lines_of(config.vocab_size, batch, length)
        ngrams = 3 if beams > 1 else 0
        if engine == "ctranslate2":
            peer = Peer(folder, new, beams, batch, options.threads, dtype, ngrams)

            def generate(lines: list[str], new: int, peer: Peer = peer) -> list[str]:
                names = ("max_decoding_length", "min_decoding_length") if peer.encoder_decoder else (
                    "max_length", "min_length"
                )  # fmt: skip
                peer.settings |= dict.fromkeys(names, new)
                return peer(lines)
        elif engine == "llama.cpp":
            from llama_peer import LlamaPeer

            generate = LlamaPeer(folder, new, length, batch, options.threads)  # type: ignore[assignment]
        elif engine == "openvino":
            from openvino_peer import OpenVINOPeer

            generate = OpenVINOPeer(folder, options.threads)  # type: ignore[assignment]
        else:
            settings = {"num_beams": beams, "no_repeat_ngram_size": ngrams, "do_sample": False}

            def generate(lines: list[str], new: int, settings: dict[str, Any] = settings) -> list[str]:  # type: ignore[misc]
                given = tokenizer(lines, return_tensors="pt", padding=True, return_token_type_ids=False)
                prompt = 0 if config.is_encoder_decoder else given["input_ids"].shape[1]
                tokens = model.generate(**given, **settings, max_new_tokens=new, min_new_tokens=new)[:, prompt:]
                return list(tokenizer.batch_decode(tokens, skip_special_tokens=True))

        generate(lines[:1], 3)
        start, before = time.perf_counter(), time.process_time()
        texts = generate(lines, new)
        spent = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - before}
        found[setting] = {**spent, "texts": texts}
    some = torch.ones(1 << 26)
    rates = []
    for _ in range(5):
        start = time.perf_counter()
        some.sum()
        rates.append(some.nbytes / (time.perf_counter() - start))
    found["bytes_a_second"] = max(rates)
    return found


def measure_types(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """A row for each setting of one shape; every type in a process of its own, in turns."""
    torch.manual_seed(0)
    fresh = SHAPES[options.shape]().eval()
    fresh.save_pretrained(folder)
    config = fresh.config
    make_tokenizer(config).save_pretrained(folder)
    del fresh
    usual = [name for name, (engine, *_) in TYPES.items() if engine not in ON_REQUEST]
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in options.only or usual}
    before = os.getloadavg()[0]
    for name in [name for number in range(options.rounds) for name in alternate(list(runs), number)]:
        begin = time.perf_counter()
        runs[name].append(apart(measure_type, name, options, folder))
        times = {setting: round(runs[name][-1][setting]["seconds"], 2) for setting in ("greedy", "beams")}
        print(options.shape, name, times, f"{time.perf_counter() - begin:.0f} s in all", flush=True)
    facts = conditions(options) | made_of() | {"load": [before, os.getloadavg()[0]]}
    rows = []
    for setting, beams, batch in (("greedy", 1, 1), ("beams", options.beams[0], options.batch)):

        def spent(kind: str, setting: str = setting) -> dict[str, list[float]]:
            return {name: [run[setting][kind] for run in some] for name, some in runs.items()}

        expected = next(iter(runs.values()))[0][setting]["texts"]
        rows.append(
            facts
            | {
                "shape": options.shape,
                "length": options.length[0],
                "new": options.new[0],
                "beams": beams,
                "batch": batch,
                "rounds_each": options.rounds,
                "seconds": {name: statistics.median(values) for name, values in spent("seconds").items()},
                "cpu_seconds": {name: statistics.median(values) for name, values in spent("cpu_seconds").items()},
                "rounds": spent("seconds"),
                "cpu_rounds": spent("cpu_seconds"),
                "same": {
                    name: sum(one == other for one, other in zip(some[0][setting]["texts"], expected, strict=True))
                    for name, some in runs.items()
                },
                "packed_bytes": {name: some[0]["packed_bytes"] for name, some in runs.items()},
                "bytes_a_second": max(run["bytes_a_second"] for some in runs.values() for run in some),
            }
        )
    return rows


def made_of() -> dict[str, Any]:
    """Commit, date, and versions of what is compared with."""
    packages = {"ctranslate2": "ctranslate2", "llama.cpp": "llama-cpp-python", "openvino": "openvino"}
    found = measured_under()["packages"]
    return measured_at() | {name: found.get(package) for name, package in packages.items()}


def conditions(options: argparse.Namespace) -> dict[str, Any]:
    """What has to be known to read the numbers."""
    seen = machine.conditions()
    name = torch.cuda.get_device_name() if options.device == "cuda" else processor_of(seen["features"])
    facts = {fact: seen[fact] for fact in ("cores", "threads", "torch", "transformers")}
    return {"processor": name, "dtype": options.dtype, "rounds": options.rounds} | facts


Rows = list[dict[str, Any]]


def with_others(rows: Rows, known: Rows, names: tuple[str, ...]) -> Rows:
    """Known rows of other settings, which these names tell, and behind them these."""

    def key(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row[name] for name in names)

    fresh = {key(row) for row in rows}
    return [row for row in known if key(row) not in fresh] + rows


def write_types(options: argparse.Namespace) -> None:
    """Measure types, and write; rows of other settings that the record already has are kept."""
    place = options.output.with_suffix(".json")
    with tempfile.TemporaryDirectory() as folder:
        rows = measure_types(options, Path(folder))
    record = json.loads(place.read_text()) if place.exists() else {"rows": []}
    record["rows"] = with_others(rows, record["rows"], SETTING)
    write_record(place, record)
    options.output.with_suffix(".md").write_text(table_of_types(record))
    print(table_of_types(record))


def main() -> None:
    """Parse, measure, and write; rows of other settings that the record already has are kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="bart-large")
    parser.add_argument("--length", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--new", type=int, nargs="+", default=[100])
    parser.add_argument("--beams", type=int, nargs="+", default=[4])
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--lines", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rungs", nargs="+", choices=RUNGS, default=["stock", "shared", "+ngram", "+pipeline", "el"])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu", help="cuda: every rung but ctranslate2, with another --output")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, help="without an ending  [docs/fastseq-bench or docs/fastseq-types]")
    parser.add_argument("--types", action="store_true", help="measure types, each in a process of its own")
    parser.add_argument("--only", nargs="+", choices=TYPES, help="these alone; others are compared with the first")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.output is None:
        options.output = Path("docs/fastseq-types" if options.types else "docs/fastseq-bench")
    if options.types:
        write_types(options)
        return
    place = options.output.with_suffix(".json")
    facts = conditions(options)
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(options, Path(folder))
    known = json.loads(place.read_text())["rows"] if place.exists() else []
    record = {"conditions": facts, "rows": with_others(rows, known, (*SETTING, "lines"))}
    write_record(place, record)
    options.output.with_suffix(".md").write_text(table(record))
    print(table(record))


if __name__ == "__main__":
    main()
