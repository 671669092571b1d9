"""What reuse would give on a user's own texts: played on their token ids, with this machine's costs.

No model is asked for an answer. The stream begins with nothing stored. What is computed becomes a record at once,
without a bound of bytes. Planner and guard are the library's own. The guard is told that no answer changes: so its
price is the least that it can be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from attmemo.errors import DataError
from attmemo.guard.answers import is_class_of_first_row
from attmemo.guard.guard import Guard
from attmemo.guard.planner import GuardedPlanner, firsts_of
from attmemo.guard.verdict import Verdict
from attmemo.kernels.align import Rule
from attmemo.kernels.kinds import Kinds
from attmemo.loading import load_config
from attmemo.memoization import memoize
from attmemo.profiler.data import read_texts
from attmemo.profiler.models import LoadedModel, Tokens, greatest_length, load_model, tokenize
from attmemo.profiler.peers.paths import another, way_of
from attmemo.profiler.turns import Job, Progress, interleave, silent, told
from attmemo.rows.index import TokenIndex
from attmemo.rows.layout import RowLayout
from attmemo.rows.planner import THRESHOLD, Asked, RowPlanner
from attmemo.rows.token_kinds import kinds_of
from attmemo.system.machine import conditions
from attmemo.system.precision import has_native_bfloat16
from attmemo.wording import counted

Ints = npt.NDArray[np.int64]
FEWEST: Final = 100
PAYS: Final = 1.15
"""Expected speed over packed blocks from which reuse is recommended: the guard may serve less than is played."""
MANY: Final = 0.3
"""Share of exact duplicates from which a cache is recommended."""
ELSE: Final = {
    "classifier": "Where you can train: a smaller model that learned this one's answers is faster than any reuse.",
    "encoder": "If coarse neighbours are enough, static embeddings (model2vec) need no transformer. Many queries of "
    "the same documents: embed documents once, and compare by late interaction if one vector is too coarse.",
    "tagger": "If requests name the types of spans, a tagger with two encoders (GLiNER) embeds the names once.",
}  # fmt: skip
"""What may serve better than any mode here, by what the model gives."""
_BATCHES: Final = 4
_ROUNDS: Final = 2  # at least


@dataclass(frozen=True, slots=True)
class Played:
    """A stream of texts, in order; arrays have a number for each text."""

    lengths: Ints
    rows: Ints  # computed for the answer
    verified: Ints  # computed once more to verify the guard: from a record, or whole
    records: int  # records, tokens: that are stored at the end
    tokens: int
    known: npt.NDArray[np.bool_]  # whether the very tokens came before
    seconds: float  # of lookups and plans, a text

    def share(self, part: slice = slice(None)) -> float:
        """Share of the rows of these texts that is computed, verifications included."""
        return float((self.rows[part].sum() + self.verified[part].sum()) / self.lengths[part].sum())


def play_tokens(
    texts: Sequence[Tokens], batch: int, threshold: float, rule: Rule, guard: Guard | None, kinds: Kinds
) -> Played:
    """Play a stream in batches; texts of one batch do not serve each other. Without a guard every record serves."""
    index, seen, spent, stored = TokenIndex(), set[bytes](), 0.0, 0
    planner = RowPlanner(index, threshold, rule, relative=True)
    if guard is not None:
        planner = GuardedPlanner(index, threshold, rule, relative=True, guard=guard, kinds=kinds, store=None)
    lengths = np.array([len(text) for text in texts], np.int64)
    rows, verified, known = lengths.copy(), np.zeros_like(lengths), np.zeros(len(texts), np.bool_)
    for start in range(0, len(texts), batch):
        own = [np.array(text.ids, np.int32) for text in texts[start : start + batch]]
        begun = perf_counter()
        asked = Asked.of(np.concatenate(own), lengths[start : start + batch])
        found = planner.planned(asked, index.candidates(asked.tokens, asked.starts))
        if guard is None:
            verdicts: list[Verdict | None] = [Verdict.SERVE if record >= 0 else None for record in found.record]
        else:
            evidence = found.evidence.tolist()
            verdicts = guard.decide(evidence, firsts_of(asked), room=len(own))
            for place, verdict in enumerate(verdicts):
                if verdict in (Verdict.OWE, Verdict.SAMPLE, Verdict.LEARN):
                    guard.compared(verdict, found.changes.of(place), evidence[place], None, False)
        spent += perf_counter() - begun
        new = dict[bytes, npt.NDArray[np.int32]]()
        for place, (tokens, verdict) in enumerate(zip(own, verdicts, strict=True), start):
            computed, name = found.computed[place - start], tokens.tobytes()
            known[place] = name in seen
            if verdict is not None and verdict.serves:
                rows[place], verified[place] = computed, len(tokens) if verdict is Verdict.OWE else 0
                continue
            if verdict in (Verdict.SAMPLE, Verdict.LEARN):
                verified[place] = computed
            if computed:  # else the very tokens are stored
                new[name] = tokens
        seen.update(tokens.tobytes() for tokens in own)
        for tokens in new.values():
            index.add(tokens)
            stored += len(tokens)
    return Played(lengths, rows, verified, len(index), stored, known, spent / max(len(texts), 1))


@dataclass(frozen=True, slots=True)
class AdviseOptions:
    """What is asked."""

    limit: int = 4000  # texts that are read
    batch_size: int = 16  # texts that come at once
    max_length: int | None = None  # tokens of a text at most
    budget: float = 0.01  # share of the answers that may change
    threshold: float = THRESHOLD  # share of its tokens that a record must supply
    near: int | None = None  # near, most_moved: as in `memoize`
    most_moved: int | None = None
    dtype: str = "float32"  # that the model is loaded in
    text_column: str | None = None
    seconds: float = 12.0  # of timing


def advise(
    name: str, files: Sequence[str | Path], options: AdviseOptions | None = None, tell: Progress = silent
) -> dict[str, Any]:
    """Play the first texts of files in their order, time this machine, and recommend.

    Returns
    -------
    dict
        JSON-able: shares of the rows computed, milliseconds, expected speeds, bytes, and ``advice``, sentences.

    Raises
    ------
    DataError
        There is no such model, the files cannot be read, or they have too few texts.
    UnsupportedModelError
        The blocks of this model cannot be run without padding.
    """
    options = options or AdviseOptions()
    load_config(name)  # a model that is none is told before its texts are read
    rows = list(read_texts(files, text_column=options.text_column, limit=options.limit))
    if len(rows) < FEWEST:
        seen = counted(len(rows), "text is", "texts are")
        raise DataError(f"{seen} too few to see what repeats, expected {FEWEST} or more.", "give more texts")
    loaded = load_model(name, options.dtype)
    packed, rounded = another(loaded), another(loaded)
    memoize(packed.model, reuse="none")
    memoize(rounded.model, reuse="none", linear="int8")
    texts = tokenize(loaded, [row.text for row in rows], greatest_length(loaded, options.max_length))
    free, kinds = Rule.of(options.near, options.most_moved), kinds_of(loaded.tokenizer)
    classes = loaded.kind == "classifier" and is_class_of_first_row("class", loaded.model.config)
    ways = {
        "unguarded": (free.for_unguarded(), None),
        "guarded": (free.for_classes() if classes else free, Guard(options.budget, 0.95, seed=0)),
    }
    played = {}
    for kind, (rule, guard) in told(tell, "playing the stream", list(ways.items())):
        played[kind] = play_tokens(texts, options.batch_size, options.threshold, rule, guard, kinds)
    late = slice(len(texts) // 2, None)
    times = _time(loaded, packed, rounded, texts, played, options, tell)
    result: dict[str, Any] = {
        "model": name, "kind": loaded.kind, "texts": len(texts), "tokens": int(played["guarded"].lengths.sum()),
        "batch_size": options.batch_size, "dtype": options.dtype, "budget": options.budget,
        "duplicates": float(played["guarded"].known.mean()), "ms": times, "conditions": conditions(),
        "native_bfloat16": bool(has_native_bfloat16()),
    }  # fmt: skip
    for kind, found in played.items():
        result[kind] = {
            "rows": found.share(), "rows_first_half": found.share(slice(0, late.start)),
            "rows_second_half": found.share(late),
            "records": found.records, "bytes": _bytes(packed, found), "ms_lookup": 1e3 * found.seconds,
            "over_packed": times["packed"] / times[kind], "over_stock": times["stock"] / times[kind],
        }  # fmt: skip
    return result | {"advice": recommend(result)}


def recommend(result: dict[str, Any]) -> list[str]:
    """What to use, and why, in sentences."""
    ms, duplicates, advice = result["ms"], result["duplicates"], []
    if duplicates >= MANY:
        advice.append(
            f"{100 * duplicates:.0f} % of the texts are exact duplicates of earlier ones: put a cache in front of the "
            "model. A cached answer costs nothing and is exact."
        )
    packed, rounded = ms["stock"] / ms["packed"], ms["packed"] / ms.get("int8", float("inf"))
    if packed >= 1.05:
        advice.append(f"memoize(model) is exact and gives {packed:.2f} times the speed of the original model here.")
    elif rounded < PAYS:
        kind = "bfloat16" if result["native_bfloat16"] else "float32"
        advice.append(f"Blocks without padding gain little here: compare with OpenVINO in {kind}.")
    if rounded >= PAYS:
        advice.append(
            f"linear='int8' gives {rounded:.2f} times the speed of exact blocks; answers move a little, and attmemo "
            "evaluate or attmemo bench peers shows by how much. With memoize(model, budget=0.01) 8-bit layers serve "
            "once they are proven."
        )
    more = ELSE.get(result["kind"])
    return [*advice, _of_reuse(result, rounded), *([] if more is None else [more])]


def _of_reuse(result: dict[str, Any], rounded: float) -> str:
    """Whether to reuse rows of similar inputs. `rounded`: how many times as fast 8-bit layers are."""
    guarded, unguarded = result["guarded"]["over_packed"], result["unguarded"]["over_packed"]
    if max(guarded, unguarded) < PAYS:
        cached = result["duplicates"] >= MANY
        return "Reuse adds too little." if cached else "Do not reuse: too little repeats."
    if result["kind"] == "encoder":
        return (
            "Much repeats, but reuse pulls vectors towards each other, and neighbours are lost. Reuse "
            "only if a classifier reads the vectors, and give it: memoize(model, budget=0.01, answer=classifier)."
        )
    if guarded < PAYS:
        return (
            "Much repeats, but each text changes in a way of its own, so the guard verifies for long. A prepared "
            "database, or more traffic than this sample, may pay: try memoize(model, budget=0.01), and look at "
            "model.attmemo.stats()."
        )
    than = " 8-bit layers alone are as fast." if rounded >= guarded else ""
    return (
        f"Use memoize(model, budget=0.01). Expected once the guard has its evidence: up to {guarded:.1f} times the "
        f"speed of exact mode, {result['guarded']['over_stock']:.1f} of the original model.{than} The guard "
        "collects evidence in the pauses between requests; without pauses it may take ten thousand requests. Where "
        "answers change it reuses less: watch model.attmemo.stats()['guard']['says'] on real traffic."
    )


def _bytes(packed: LoadedModel, found: Played) -> int:
    handle: Any = packed.model.attmemo
    blocks, kind = handle.packed.blocks, handle.packed.dtype
    layout = RowLayout(len(blocks.blocks), blocks.heads * blocks.width, blocks.heads, (kind, kind))
    return found.records * layout.nbytes(max(1, found.tokens // max(found.records, 1)))


def _cut(texts: Sequence[Tokens], rows: Sequence[int]) -> list[Tokens]:
    """So many first tokens of each text; a text of no rows is left out."""
    parts = zip(texts, rows, strict=True)
    return [Tokens(t.row, t.ids[:n], None if t.segments is None else t.segments[:n]) for t, n in parts if n > 0]


def _time(
    loaded: LoadedModel, packed: LoadedModel, rounded: LoadedModel, texts: Sequence[Tokens],
    played: Mapping[str, Played], options: AdviseOptions, tell: Progress,
) -> dict[str, float]:  # fmt: skip
    """Milliseconds a text of the second half, timed in turns on batches spread over it.

    Reuse is timed as packed blocks over as many rows as are left to compute, with the lookups that were played. What
    is not in it: reading the records' rows, and attention to them.
    """
    size, half = options.batch_size, len(texts) // 2
    starts = np.linspace(half, max(half, len(texts) - size), _BATCHES).astype(int).tolist()
    ways, exact = {"stock": way_of(loaded), "int8": way_of(rounded)}, way_of(packed)

    def batches(found: Played | None) -> list[list[Tokens]]:
        chosen = []
        for start in starts:
            part = slice(start, start + size)
            first = list(texts[part]) if found is None else _cut(texts[part], found.rows[part].tolist())
            again = [] if found is None else _cut(texts[part], found.verified[part].tolist())
            chosen += [one for one in (first, again) if one]
        return chosen

    parts = {name: batches(None) for name in ("stock", "packed", "int8")}
    parts |= {kind: batches(found) for kind, found in played.items()}

    def job(name: str) -> Job:
        way = ways.get(name, exact)
        return lambda _: [way(batch) for batch in parts[name]]

    with torch.inference_mode():
        jobs = {name: job(name) for name in parts}
        spent = interleave(jobs, _ROUNDS, seconds=options.seconds, tell=tell, what="timing")
    count = sum(min(size, len(texts) - start) for start in starts)
    lookup = {kind: 1e3 * found.seconds for kind, found in played.items()}
    return {name: times.ms / count + lookup.get(name, 0.0) for name, times in spent.items()}
