"""Texts that look alike and do not mean the same: what the calibrated score lets through."""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from attmemo import memoize
from attmemo.db import SEQUENCE, Database
from attmemo.embed.calibration import Calibration
from attmemo.embed.siamese import load_embedders
from attmemo.embed.similarity import similarity_score
from attmemo.models import adapter_for
from attmemo.profiler.map_recorder import Capture
from attmemo.profiler.models import collate, load_model, tokenize

BOUND = 0.2
"""Share of lookalikes that may be taken although their maps are less similar than was asked. The score is a bound that
held for 90 % of the held-out texts; these were made to look like stored ones."""


def other_numbers(line: str, rng: random.Random) -> str:
    return re.sub(r"\d", lambda _: str(rng.randrange(10)), line)


def negated(line: str, rng: random.Random) -> str:
    words = line.split(" ")
    words.insert(rng.randrange(1, len(words) + 1), rng.choice(["not", "no", "never"]))
    return " ".join(words)


def exchanged(line: str, rng: random.Random) -> str:
    words = line.split(" ")
    a, b = rng.randrange(len(words)), rng.randrange(len(words))
    words[a], words[b] = words[b], words[a]
    return " ".join(words)


def opposite(line: str, rng: random.Random) -> str:
    words = line.split(" ")
    words[rng.randrange(len(words))] = rng.choice(["failed", "denied", "closed", "error", "deleted"])
    return " ".join(words)


def files_of(path: Path) -> dict[str, str]:
    return {
        str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(path.rglob("*"))
        if file.is_file() and file.name != "lock.mdb"
    }


@pytest.mark.parametrize("change", [other_numbers, negated, exchanged, opposite])
def test_lookalikes_are_never_taken_for_the_real_thing(
    bert_database: Path,
    tiny_bert: str,
    log_lines: list[str],
    change: Callable[[str, random.Random], str],
    record_property: Callable[[str, object], None],
) -> None:
    rng = random.Random(34)
    texts = [change(line, rng) for line in log_lines[:120]]
    loaded = load_model(tiny_bert)
    adapter, sites = adapter_for(loaded.model)
    with Database(bert_database) as database, Capture(loaded.model, adapter, sites) as capture, torch.no_grad():
        ref = database.embedder_ref()
        embedder = load_embedders(database.derived(ref.weights), database.manifest.model.hidden)[SEQUENCE]
        index = database.index(SEQUENCE)
        curves = [Calibration.from_dict(ref.calibration[str(SEQUENCE)][str(layer)], "") for layer in range(len(sites))]
        predicted, true = [], []
        for item in tokenize(loaded, texts, 48):
            (maps, hidden), = capture.run(collate(loaded, [item]))
            length = len(hidden[0])
            if length not in index.lengths:
                continue
            ids, distances = index.search(length, embedder.embed(hidden[0][None], [length]).numpy(), 1)
            for layer, curve in enumerate(curves):
                predicted.append(float(curve.predict(distances[0, 0])))
                true.append(float(similarity_score(maps[layer], database.map(layer, int(ids[0, 0])))))
    asked, found = np.array(predicted), np.array(true)
    assert len(asked) > 60
    for threshold in (0.7, 0.8, 0.9):
        wrong = float(np.mean((asked >= threshold) & (found < threshold)))
        taken = float(np.mean(asked >= threshold))
        record_property(f"{change.__name__} {threshold}", f"taken {taken:.3f}, wrongly {wrong:.3f}")
        assert wrong <= BOUND, (threshold, wrong)


def test_serving_changes_no_byte_of_the_database(bert_database: Path, tiny_bert: str, log_lines: list[str]) -> None:
    before = files_of(bert_database)
    loaded = load_model(tiny_bert)
    model = memoize(loaded.model, threshold=0.1, database=bert_database, gate=False)
    with torch.inference_mode():
        for item in tokenize(loaded, log_lines[:20], 48):
            model(**collate(loaded, [item]))
    assert model.attmemo.stats()["hits"] > 0
    assert files_of(bert_database) == before
