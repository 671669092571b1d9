"""Speed and quality of a memoized model: timed in turns, compared with exact answers, controls, other thresholds."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from attmemo.errors import DataError
from attmemo.guard.answers import SCORE_STEP
from attmemo.profiler.answers import Batch, ask, changed, cosine, harm, perplexity
from attmemo.profiler.models import GIVES, LoadedModel, NextToken, answers
from attmemo.profiler.open import Asked
from attmemo.profiler.trial import Path, Trial
from attmemo.profiler.turns import Job, Progress, interleave, silent, told

SWEEP_SEQUENCES: Final = 400
_MEANS: Final = {"classifier": "another class", "language-model": "another first token", "tagger": "other spans"}

MOVED: Final = f"a score that moved by more than {SCORE_STEP:g}"


def time_paths(
    loaded: LoadedModel, trial: Trial, handle: Any, prepared: Sequence[Batch], repeats: int, tell: Progress,
    compiling: bool,
) -> tuple[dict[str, Any], list[str]]:  # fmt: skip
    """Milliseconds a sequence of every path, where the memoized one spends them, and what could not be timed.

    The memoized path is on afterwards, and the handle has counted its timed passes alone.
    """
    paths = trial.paths(handle)
    notes = []
    if compiling:
        handle.disable()
        try:
            compiled = _compile(loaded, prepared, tell)
        except (RuntimeError, OSError) as error:  # no C++ compiler, or a model that cannot be traced
            notes.append(f"torch.compile could not be timed: {str(error).splitlines()[0][:200]}")
        else:
            paths["compile"] = lambda: compiled

    def started() -> None:
        paths["memoized"]()
        handle.reset_stats()

    spent = time_passes(loaded, prepared, paths, repeats, tell, started)
    paths["memoized"]()
    runs = repeats * sum(len(batch) for batch, _ in prepared)
    per_sequence = {name: 1e3 * median(seconds) * repeats / runs for name, seconds in spent.items()}
    memoized_ms = per_sequence.pop("memoized")
    best = min(per_sequence, key=lambda name: per_sequence[name])
    ratios = {
        name: sorted(a / b for a, b in zip(spent[name], spent["memoized"], strict=True)) for name in per_sequence
    }
    # Parts are counted over all passes together: they are shares of that time, given as shares of the median pass.
    whole = 1e3 * sum(spent["memoized"])
    parts = {part: memoized_ms * ms / whole for part, ms in trial.parts_ms(handle).items()}
    parts["other"] = max(0.0, memoized_ms - sum(parts.values()))
    return {
        "exact_ms": per_sequence, "best_exact": best, "memoized_ms": memoized_ms, "speedup": median(ratios[best]),
        "speedup_low": ratios[best][0], "speedup_high": ratios[best][-1], "per": "sequence", "parts_ms": parts,
        "speedups": {name: median(found) for name, found in ratios.items()},
    }, notes  # fmt: skip


def time_passes(
    loaded: LoadedModel, prepared: Sequence[Batch], paths: dict[str, Path], repeats: int, tell: Progress = silent,
    started: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:  # fmt: skip
    """Seconds of a pass over all batches, by path and repeat; `started` is called after the uncounted turn.

    A turn of the paths is one batch.
    """
    models: dict[str, nn.Module | None] = {}

    def job(name: str) -> Job:
        return lambda turn: answers(loaded, prepared[max(turn - 1, 0) % len(prepared)][1], models[name])

    def switch(name: str) -> None:
        models[name] = paths[name]()

    def begin(turn: int) -> None:
        if turn == 1:
            started()

    with torch.inference_mode():
        jobs, turns = {name: job(name) for name in paths}, repeats * len(prepared)
        spent = interleave(jobs, turns, tell=tell, what="timing", before=begin, ready=switch)
    parts = {name: np.reshape(times.milliseconds, (repeats, -1)).sum(1) for name, times in spent.items()}
    return {name: (1e-3 * passes).tolist() for name, passes in parts.items()}


def _compile(loaded: LoadedModel, prepared: Sequence[Batch], tell: Progress) -> nn.Module:
    """The exact model under torch.compile, warmed up on every shape that will be asked."""
    plain = copy.deepcopy(loaded.model)
    asked = NextToken(plain) if loaded.kind == "language-model" else plain
    compiled: nn.Module = torch.compile(asked)  # type: ignore[assignment]
    shapes = {tuple(inputs["input_ids"].shape): inputs for _, inputs in prepared}
    with torch.inference_mode():
        for inputs in told(tell, "compiling", list(shapes.values())):
            for _ in range(2):
                answers(loaded, inputs, compiled)
    return compiled


@dataclass
class Judge:
    """The exact model's answers, by row, and the labels if there are any: other answers are compared with these."""

    loaded: LoadedModel
    prepared: Sequence[Batch]
    exact: Tensor
    labels: Tensor | None
    min_cosine: float

    def perplexity(self) -> tuple[float | None, int]:
        """Of a language model as it is now, and of how many tokens; None of one that is none."""
        language = self.loaded.kind == "language-model"
        return perplexity(self.loaded, self.prepared) if language else (None, 0)

    def compare(self, given: Tensor) -> dict[str, Any]:
        """How answers differ from the exact ones, JSON-able."""
        kind, exact = self.loaded.kind, self.exact
        share = float(changed(kind, exact, given, self.min_cosine).float().mean())
        means = _MEANS.get(kind, "another class" if exact.ndim == 1 else f"cosine below {self.min_cosine:g}")
        values = {
            "agreement": 1.0 - share, "changed": share, "changed_means": means,
            "accuracy_exact": self._accuracy(exact), "accuracy_memoized": self._accuracy(given),
        }  # fmt: skip
        if kind == "language-model":
            return values | _spread("total_variation", harm(kind, exact, given))
        if exact.ndim == 1:
            return values
        if kind == "classifier" and exact.shape[1] == 1:
            return values | {"changed_means": MOVED} | _spread("score_distance", harm(kind, exact, given))
        if kind == "classifier":
            values |= _spread("logit_distance", (exact - given).norm(dim=1))
        near = cosine(exact, given)
        lowest = {"cosine_p1": float(near.quantile(0.01)), "cosine_min": float(near.min())}
        return values | {"cosine_mean": float(near.mean())} | lowest

    def sample(self, sequences: int) -> Judge:
        """The same of some of the batches, no more than about so many sequences."""
        some = self.prepared[:: max(1, len(self.exact) // sequences)]
        rows = [item.row for batch, _ in some for item in batch]
        where = {row: place for place, row in enumerate(rows)}
        renumbered = [([replace(item, row=where[item.row]) for item in batch], inputs) for batch, inputs in some]
        labels = None if self.labels is None else self.labels[rows]
        return replace(self, prepared=renumbered, exact=self.exact[rows], labels=labels)

    def _accuracy(self, given: Tensor) -> float | None:
        """Share of right answers among the texts whose label the model knows."""
        if self.labels is None:
            return None
        return float((given.argmax(1) == self.labels)[self.labels >= 0].float().mean())


def _spread(name: str, values: Tensor) -> dict[str, float]:
    return {f"{name}_mean": float(values.mean()), f"{name}_p99": float(values.quantile(0.99))}


def read_labels(loaded: LoadedModel, asked: Asked, column: str | None) -> Tensor | None:
    """Class numbers of the labels, -1 where the model does not know one; None without a column of labels.

    A model that gives no classes, or knows none of the labels, is a `DataError`.
    """
    if column is None:
        return None
    if loaded.kind != "classifier":
        raise DataError(
            f"the model gives {GIVES[loaded.kind]}, not classes, so there is nothing to compare column {column!r} "
            "with.",
            "leave --label-column out; answers are compared with the exact model's in any case",
        )
    known = loaded.labels
    classes = range(int(loaded.model.config.num_labels))  # type: ignore[union-attr,arg-type]
    labels = [row.label for row in asked.rows]
    numbers = [known.get(str(label), label if isinstance(label, int) and label in classes else -1) for label in labels]
    if all(number < 0 for number in numbers):
        raise DataError(
            f"no label of column {column!r} is one of the model's; seen {labels[0]!r}, "
            f"expected one of {', '.join(list(known)[:5])}…",
            "check --label-column",
        )
    return torch.tensor(numbers)


def try_controls(
    judge: Judge, trial: Trial, handle: Any, found: dict[str, Any], duplicates: float, tell: Progress
) -> Any:
    """Rows of a table: the memoized model, the controls in its place, and a cache of exact duplicates."""
    rows = [_control("memoized", {key: found[key] for key in trial.rates(handle)}, found["quality"])]
    for name in told(tell, "controls", trial.controls):
        handle.reset_stats()
        with trial.control(handle, name):
            quality = judge.compare(ask(judge.loaded, judge.prepared))
            rates = trial.rates(handle)
            rows.append(_control(name, rates, quality | {"perplexity_memoized": judge.perplexity()[0]}))
    # It changes nothing, and serves the texts that were left out.
    duplicate = {"name": "duplicate cache", "hit_rate": duplicates, "agreement": 1.0, "accuracy": None}
    return [*rows, duplicate | {"cosine_mean": 1.0}]


def _control(name: str, rates: dict[str, float], quality: dict[str, Any]) -> dict[str, Any]:
    keys = "agreement", "cosine_mean", "cosine_p1", "logit_distance_mean", "total_variation_mean"
    row = {key: quality.get(key) for key in keys}
    accuracy, surprise = quality["accuracy_memoized"], quality.get("perplexity_memoized")
    return {"name": name, **rates, **row, "accuracy": accuracy, "perplexity": surprise}


def sweep_thresholds(judge: Judge, trial: Trial, tell: Progress) -> list[dict[str, Any]]:
    """Speed and quality at one threshold for all layers, on a sample, without a gate."""
    judge, handle = judge.sample(SWEEP_SEQUENCES), trial.serve_at_will()
    paths = trial.paths(handle)
    found = []
    for threshold in told(tell, "threshold sweep", trial.sweep):
        trial.set_threshold(handle, threshold)
        paths["memoized"]()  # the timing of the threshold before may have ended with an exact path
        handle.reset_stats()
        quality = judge.compare(ask(judge.loaded, judge.prepared))
        row = {"threshold": threshold, "gate": "off", **trial.rates(handle)}
        row |= {key: quality.get(key) for key in ("agreement", "changed", "cosine_mean", "cosine_p1")}
        row["perplexity"] = judge.perplexity()[0]
        spent = {name: seconds[0] for name, seconds in time_passes(judge.loaded, judge.prepared, paths, 1).items()}
        row["speedup"] = spent["stock"] / spent["memoized"]
        if "packed" in spent:
            row["speedup_packed"] = spent["packed"] / spent["memoized"]
        found.append(row)
    return found
