"""A small database of attention maps, made and tuned in seconds: the maps' place in the demo's table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from attmemo.embed.training import TrainOptions
from attmemo.memoization import memoize
from attmemo.profiler.build import BuildOptions, build_database
from attmemo.profiler.models import LoadedModel
from attmemo.profiler.peers.ways import Way, another, way_of
from attmemo.profiler.train import train_database
from attmemo.profiler.tune import TuneOptions, tune

STORED: Final = 256
"""Lines whose maps are stored: 225 MiB with six layers and lines of 64 tokens."""
JUDGED: Final = 128
"""Further lines that choose the threshold. They are too few to certify a budget of 1 %: that takes 299."""
_STEPS: Final = 60
"""Of training. The long way takes 300, and measures the machine's costs, which alone takes longer than all of this."""

_RADII: Final = 1
"""Tested each time the distance doubles."""


def quick_maps(
    loaded: LoadedModel, lines: Sequence[str], longest: int, budget: float, folder: Path, tell: Callable[[str], None]
) -> Way:
    """A way that is served from the maps of these lines, `STORED` and `JUDGED` of them.

    Parameters
    ----------
    loaded : LoadedModel
        Loaded from a directory; it is copied.
    longest : int
        Tokens; longer lines are cut.
    budget : float
        Share of the answers that may change; the threshold follows what was observed.
    folder : path
        Takes the database.
    tell : callable
        Told what is being done.
    """
    files = folder / "stored.log", folder / "judged.log"
    for file, part in zip(files, (lines[:STORED], lines[STORED : STORED + JUDGED]), strict=True):
        file.write_text("".join(f"{line}\n" for line in part), encoding="utf-8")
    database = folder / "maps"
    tell("storing attention maps of the first lines")
    build_database(loaded, [files[0]], database, BuildOptions(max_length=longest))
    tell("training the embedder of the maps")
    train_database(database, TrainOptions(steps=_STEPS, near=4, random=2), profile=False)
    tell("choosing the threshold of the maps")
    tune(database, [files[1]], TuneOptions(budget=budget, allow_uncertified=True, fineness=_RADII))
    served = another(loaded)
    memoize(served.model, database=database, reuse="maps")
    return way_of(served)
