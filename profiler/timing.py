"""End-to-end time of the memoized model and of the exact paths, interleaved batch by batch in one run."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from attmemo.profiler.answers import Batch
from attmemo.profiler.models import LoadedModel, NextToken, Progress, answers

if TYPE_CHECKING:
    from attmemo.profiler.trial import Trial

# Switches a way of asking on, and returns the model to ask; None: the one that was loaded.
Path = Callable[[], nn.Module | None]


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

    spent = time_passes(
        loaded, prepared, paths, repeats, lambda done: tell("timing", done, repeats), started
    )
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
    loaded: LoadedModel,
    prepared: Sequence[Batch],
    paths: dict[str, Path],
    repeats: int,
    tick: Callable[[int], None] | None = None,
    started: Callable[[], None] | None = None,
) -> dict[str, list[float]]:
    """Seconds of a pass over all batches, per path and repeat, interleaved batch by batch.

    The order of the paths alternates, so that no path always runs on the other's warm caches. `tick` is called with
    the number of repeats done, `started` once: after the uncounted round.
    """
    spent = {name: [0.0] * repeats for name in paths}
    names = list(paths)
    tick = tick or (lambda done: None)
    with torch.inference_mode():
        for name in names:  # once around, uncounted
            answers(loaded, prepared[0][1], paths[name]())
        if started is not None:
            started()
        for repeat in range(repeats):
            tick(repeat)
            for turn, (_, inputs) in enumerate(prepared):
                shift = (turn + repeat) % len(names)
                for name in names[shift:] + names[:shift]:
                    model = paths[name]()
                    start = time.perf_counter()
                    answers(loaded, inputs, model)
                    spent[name][repeat] += time.perf_counter() - start
    tick(repeats)
    return spent


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
