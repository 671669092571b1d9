"""Three levels of memoization for two trained models: thresholds found by the tuner, what they serve, what changes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from loghub_windows import windows
from torch import Tensor

from attmemo import memoize, unmemoize
from attmemo.db import Database
from attmemo.embed.training import TrainOptions
from attmemo.profiler.answers import ask, changed, prepare
from attmemo.profiler.build import BuildOptions, build_database
from attmemo.profiler.map_trial import CONTROLS, serving_control
from attmemo.profiler.models import LoadedModel, Tokens, load_model, tokenize
from attmemo.profiler.train import train_database
from attmemo.profiler.tune import TuneOptions, tune
from paper import sst2
from paper.frame import Found, Run

LEVELS = {"conservative": 0.01, "moderate": 0.03, "aggressive": 0.1}  # changed answers that the tuner may allow
MODELS = {"minilm-sst2": "MiniLM (BERT), SST-2", "deberta-loghub": "DeBERTa-v2, log windows"}
STORED = 6000
WINDOW = 128  # tokens of a window of log lines


def window_texts(run: Run, begin: float, end: float, count: int) -> tuple[list[str], list[str]]:
    """Windows of log lines between two shares of each log, and their labels."""
    rows = pd.DataFrame(windows(run.shared / "data/loghub_2k", begin, end))
    known = set(json.loads((run.shared / "models/deberta-loghub/config.json").read_text())["label2id"])
    rows = rows[rows["label"].isin(known)].sample(frac=1.0, random_state=0)[:count]
    return rows["text"].tolist(), rows["label"].tolist()


def window_database(run: Run, profile: bool = False) -> Path:
    """A trained database of windows, as `sst2.database` has one of phrases."""
    folder = run.work / f"windows{'-profile' if profile else ''}"

    def make() -> Found:
        if profile:
            shutil.copytree(window_database(run), folder, dirs_exist_ok=True)
            train_database(folder, TrainOptions(steps=run.size(300, 10)), profile=True)
            return {}
        file = run.work / "windows.jsonl"
        texts = window_texts(run, 0.0, 0.7, run.size(1200, 40))[0]
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        loaded = load_model(str(run.shared / "models/deberta-loghub"))
        build_database(loaded, [file], folder, BuildOptions(max_length=run.size(WINDOW, 24), text_column="text"))
        train_database(folder, TrainOptions(steps=run.size(300, 10)), profile=False)
        return {}

    run.part(folder.name, make)
    return folder


def asked(run: Run, name: str, loaded: LoadedModel, count: int) -> tuple[list[Tokens], Tensor]:
    """What no threshold was chosen on: SST-2 dev, or the last 15 % of each log. With labels."""
    if name == "minilm-sst2":
        texts, labels = sst2.sentences(run, "dev", count)
        return sst2.tokens(loaded, texts), labels
    texts, names = window_texts(run, 0.85, 1.0, count)
    return tokenize(loaded, texts, run.size(WINDOW, 24)), torch.tensor([loaded.labels[label] for label in names])


def database(run: Run, name: str, profile: bool = False) -> Path:
    if name == "minilm-sst2":
        return sst2.database(run, run.size(STORED, 60), profile)[0]
    return window_database(run, profile)


def tuned(run: Run, name: str) -> Found:
    """By level: thresholds from a budget on one part of the data, and what they do on another."""
    return run.part(f"levels-{name}", lambda: _tuned(run, name))


def _tuned(run: Run, name: str) -> Found:
    path = database(run, name)
    loaded = load_model(str(run.shared / "models" / name))
    count = run.size(620, 12)
    part = sst2.sentences(run, "test_labeled", count) if name == "minilm-sst2" else window_texts(run, 0.7, 0.85, count)
    file = run.work / f"tune-{name}.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in part[0]))
    tokens, labels = asked(run, name, loaded, run.size(872 if name == "minilm-sst2" else 400, 10))
    prepared = prepare(loaded, tokens, 32)
    with torch.inference_mode():
        exact = ask(loaded, prepared)
    rows = []
    for level, budget in LEVELS.items():
        options = TuneOptions(budget=budget, text_column="text", allow_uncertified=True)
        found = tune(path, [file], options)
        row = {
            key: found[key]
            for key in ("thresholds", "radii", "certified", "observed", "upper_bound", "served", "judged")
        }
        rows.append(
            {"level": level, "budget": budget, **row, **_at(loaded, path, found["radii"], prepared, exact, labels)}
        )
        run.tell(f"{name}, {level}: {rows[-1]['rate']:.3f} served, {rows[-1]['changed']:.3f} changed")
    return {"stored": len(Database(path)), "tuned_on": count, "asked": len(tokens),
            "accuracy": sst2.accuracy(exact, labels), "levels": rows}  # fmt: skip


def _at(
    loaded: LoadedModel, path: Path, radii: Sequence[float], prepared: Any, exact: Tensor, labels: Tensor
) -> dict[str, Any]:
    """What is served and what changes at these distances, and with the controls' maps in the same places."""
    with Database(path) as opened:
        memoize(loaded.model, 0.0, opened, gate=False)
        handle: Any = loaded.model.attmemo
        handle.planner.set_radii(list(radii))
        handle.reset_stats()
        given = ask(loaded, prepared)
        found: dict[str, Any] = {"rate": handle.stats()["hit_rate"], "accuracy": sst2.accuracy(given, labels)}
        found["changed"] = float(changed(loaded.kind, exact, given, 0.98).float().mean())
        for name in CONTROLS:
            with serving_control(handle.engine, name):
                given = ask(loaded, prepared)
            found[name] = sst2.accuracy(given, labels)
            found[f"changed, {name}"] = float(changed(loaded.kind, exact, given, 0.98).float().mean())
        unmemoize(loaded.model)
    return found
