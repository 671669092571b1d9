"""SST-2 and the classifier that was trained on it; databases of its phrases, made once for several figures."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from attmemo.db import Database
from attmemo.embed.training import TrainOptions
from attmemo.profiler.build import BuildOptions, build_database
from attmemo.profiler.models import LoadedModel, Tokens, load_model, tokenize
from attmemo.profiler.train import train_database
from paper.frame import Run

LONGEST = 64  # tokens; no sentence of SST-2 has more


def model(run: Run) -> LoadedModel:
    """MiniLM-L6, fine-tuned on SST-2."""
    return load_model(str(run.shared / "models/minilm-sst2"))


def sentences(run: Run, part: str, count: int, words: int = 1) -> tuple[list[str], Tensor]:
    """So many texts of train, dev or test_labeled with at least so many words, drawn once for all; their labels.

    The train part is full of fragments of a few words that no one asks.
    """
    rows = pd.read_csv(run.shared / f"data/sst2/{part}.tsv", sep="\t", quoting=3)
    rows = rows[rows["sentence"].str.split().str.len() >= words]
    order = np.random.default_rng(7).permutation(len(rows))[:count]
    chosen = rows.iloc[order]
    return chosen["sentence"].tolist(), torch.tensor(chosen["label"].tolist())


def tokens(loaded: LoadedModel, texts: list[str], longest: int = LONGEST) -> list[Tokens]:
    return tokenize(loaded, texts, longest)


def database(run: Run, count: int, profile: bool = False) -> tuple[Path, dict[str, Any]]:
    """A trained database of so many train phrases of at least eight words, and what it cost; kept in the work folder.

    The record of the cost is written last: a database without one is made again.
    """
    folder = run.work / f"sst2-{count}{'-profile' if profile else ''}"
    note = folder.with_suffix(".json")
    if note.is_file():
        return folder, json.loads(note.read_text())
    shutil.rmtree(folder, ignore_errors=True)
    if profile:
        bare, cost = database(run, count)
        shutil.copytree(bare, folder)
        train_database(folder, TrainOptions(steps=run.size(300, 10)), profile=True)
        note.write_text(json.dumps(cost))
        return folder, cost
    loaded = model(run)
    file = run.work / f"sst2-{count}.txt"
    file.write_text("".join(f"{text}\n" for text in sentences(run, "train", count, 8)[0]))
    start, cpu = time.perf_counter(), time.process_time()
    built = build_database(loaded, [file], folder, BuildOptions(max_length=LONGEST))
    cost: dict[str, Any] = {
        "build_seconds": time.perf_counter() - start, "build_cpu_seconds": time.process_time() - cpu,
        "records": built.records, "bytes": built.bytes, "storage": built.storage,
    }  # fmt: skip
    stages: dict[str, float] = {}

    def stage(what: str, done: int, total: int) -> None:
        stages.setdefault(what, time.process_time())

    cpu = time.process_time()
    options = TrainOptions(steps=run.size(300, 10))
    trained = train_database(folder, options, profile=False, progress=stage)
    cost |= {"train_cpu_seconds": time.process_time() - cpu, "stages": {k: v - cpu for k, v in stages.items()}}
    cost |= {"train_seconds": trained["seconds"], "layers": trained["layers"]}
    note.write_text(json.dumps(cost))
    run.tell(f"database of {count} phrases: {cost['build_seconds']:.0f} s, trained in {trained['seconds']:.0f} s")
    return folder, cost


def accuracy(answers: Tensor, labels: Tensor) -> float:
    return float((answers.argmax(1) == labels).float().mean())


def open_database(run: Run, count: int, profile: bool = False) -> Database:
    return Database(database(run, count, profile)[0])
