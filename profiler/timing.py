"""End-to-end time of the memoized model and of the exact paths, interleaved batch by batch in one run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn

from attmemo.profiler.answers import Batch
from attmemo.profiler.models import LoadedModel, NextToken, answers
from attmemo.profiler.trial import Path, Trial
from attmemo.profiler.turns import Job, Progress, interleave, silent


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
        for step, inputs in enumerate(shapes.values()):
            tell("compiling", step, len(shapes))
            for _ in range(2):
                answers(loaded, inputs, compiled)
    tell("compiling", len(shapes), len(shapes))
    return compiled
