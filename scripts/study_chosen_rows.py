"""Which rows are worth computing beside changed tokens: neighbours, or rows that look at what changed (docs/rows.md).

    python scripts/study_chosen_rows.py ../shared chosen-rows.json    # about five minutes on two cores

MiniLM in float32, in plain torch. The first 70 % of a log's lines are stored, 256 later lines are asked, and their
means are compared with the exact ones. A record that supplies half of a line's tokens with one neighbour serves it.
Then more rows are computed: those whose attention in the record, mean of all heads and layers, looks most at tokens
that the line has not; those that moved most (which only the exact answer tells); some at random.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from bench_rows import Case, lines_case, minilm
from measured_at import write_record
from torch import Tensor

from attmemo.kernels.align import LONG, Rule
from attmemo.kernels.kinds import NO_KINDS
from attmemo.rows.index import ANY, TokenIndex

LOGS = ("HDFS", "OpenSSH", "Apache", "BGL", "Mac")
SHARE = 0.03  # of a line's tokens: rows that are computed more
THRESHOLD = 0.5
HEADS = 12

Flags = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Exact:
    """What one input gives, computed whole."""

    keys: list[Tensor]  # of each layer, [n, H]
    values: list[Tensor]
    last: Tensor  # [n, H]
    attention: Tensor  # [n, n], mean of heads and layers


@dataclass(frozen=True)
class Served:
    """A line, its record, and the row of the record that has each token; below 0: none has."""

    exact: Exact
    record: Exact
    source: Ints


Choice = Callable[[Served, Flags], npt.NDArray[np.float64]]
"""How much each row is worth computing."""


class Plain:
    """MiniLM in plain torch, with rows of a record in place of some."""

    def __init__(self) -> None:
        self.model: Any = minilm(torch.float32)
        self.layers: list[Any] = list(self.model.encoder.layer)

    def embed(self, tokens: list[int]) -> Tensor:
        found: Tensor = self.model.embeddings(input_ids=torch.tensor([tokens]))[0]
        return found

    def block(self, layer: Any, hidden: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Rows behind a block, ``[m, H]``, and their attention, the mean of all heads ``[m, n]``."""
        queries, split = layer.attention.self.query(hidden), (-1, HEADS, hidden.shape[1] // HEADS)
        q, k, v = (part.view(split).transpose(0, 1) for part in (queries, keys, values))
        weights = torch.softmax(q @ k.transpose(1, 2) / split[2] ** 0.5, -1)
        mixed = layer.attention.output((weights @ v).transpose(0, 1).flatten(1), hidden)
        return layer.output(layer.intermediate(mixed), mixed), weights.mean(0)

    def whole(self, tokens: list[int]) -> Exact:
        hidden, keys, values, maps = self.embed(tokens), [], [], []
        for layer in self.layers:
            keys.append(layer.attention.self.key(hidden))
            values.append(layer.attention.self.value(hidden))
            hidden, weights = self.block(layer, hidden, keys[-1], values[-1])
            maps.append(weights)
        return Exact(keys, values, hidden, torch.stack(maps).mean(0))

    def served(self, tokens: list[int], one: Served, computed: Flags) -> Tensor:
        """Last hidden states ``[n, H]``. Reused rows follow the computed ones, as `attmemo.kernels.rows` has it."""
        own, kept = (torch.from_numpy(np.flatnonzero(which)) for which in (computed, ~computed))
        rows, hidden = torch.from_numpy(one.source[~computed]).long(), self.embed(tokens)[own]
        for number, layer in enumerate(self.layers):
            attention, both = layer.attention.self, []
            for project, stored in ((attention.key, one.record.keys), (attention.value, one.record.values)):
                fresh = project(hidden)
                plane = fresh.new_empty(len(tokens), fresh.shape[1])
                plane[own], plane[kept] = fresh, stored[number][rows]
                both.append(plane)
            hidden, _ = self.block(layer, hidden, *both)
        last = hidden.new_empty(len(tokens), hidden.shape[1])
        last[own], last[kept] = hidden, one.record.last[rows] + self._drift(hidden, one, computed)
        return last

    def _drift(self, hidden: Tensor, one: Served, computed: Flags) -> Tensor:
        known = one.source[computed] >= 0
        moves = hidden[torch.from_numpy(known)] - one.record.last[torch.from_numpy(one.source[computed][known]).long()]
        if len(moves) < 2:
            return torch.zeros(1)
        within, mean = moves.var(0).sum(), moves.mean(0)
        common = (mean.square().sum() - within / len(moves)).clamp(min=0)
        return common / (common + within) * mean if common > 0 else torch.zeros(1)


def by_attention(one: Served, computed: Flags) -> npt.NDArray[np.float64]:
    """How much the record's row looks at tokens that the line has not."""
    gone = np.ones(len(one.record.last), bool)
    gone[one.source[one.source >= 0]] = False
    found = np.zeros(len(one.source))
    known = one.source >= 0
    found[known] = one.record.attention.numpy()[one.source[known]][:, gone].sum(1)
    return found


def by_move(one: Served, computed: Flags) -> npt.NDArray[np.float64]:
    """How far the row is from the record's."""
    found, known = np.zeros(len(one.source)), one.source >= 0
    found[known] = (one.exact.last[known] - one.record.last[one.source[known]]).norm(dim=1).numpy()
    return found


class AtRandom:
    def __init__(self) -> None:
        self._draw = np.random.default_rng(0)

    def __call__(self, one: Served, computed: Flags) -> npt.NDArray[np.float64]:
        return self._draw.random(len(one.source)) + 1e-9


def more_by(choice: Choice) -> Callable[[Served, Flags], Flags]:
    """With so many rows more that are worth the most."""

    def found(one: Served, computed: Flags) -> Flags:
        worth = np.where(computed, -1.0, choice(one, computed))
        best = np.argsort(-worth, kind="stable")[: round(SHARE * len(worth))]
        more = computed.copy()
        more[best[worth[best] > 0]] = True
        return more

    return found


def beside_long(before: int, behind: int) -> Callable[[Served, Flags], Flags]:
    """With so many neighbours of `LONG` and more changed tokens."""

    def found(one: Served, computed: Flags) -> Flags:
        changed = np.flatnonzero(np.diff(np.concatenate([[False], one.source < 0, [False]]).astype(int)))
        more = computed.copy()
        for start, stop in changed.reshape(-1, 2).tolist():
            if stop - start >= LONG:
                more[max(0, start - before) : stop + behind] = True
        return more

    return found


def same(one: Served, computed: Flags) -> Flags:
    return computed


WAYS: dict[str, tuple[int, Callable[[Served, Flags], Flags]]] = {
    "near=0": (0, same), "near=1": (1, same), "near=2": (2, same),
    "near=1, 2 before long changes": (1, beside_long(2, 1)), "near=1, 2 behind": (1, beside_long(1, 2)),
    "near=1, 2 on both sides": (1, beside_long(2, 2)),
    "near=1, more by attention": (1, more_by(by_attention)),
    "near=1, more at random": (1, more_by(AtRandom())),
    "near=1, more that moved most": (1, more_by(by_move)),
}  # fmt: skip


def measure(plain: Plain, case: Case) -> dict[str, dict[str, float]]:
    """Of each way the share of rows that are computed, and cosines of all lines."""
    index = TokenIndex()
    for tokens in case.stored:
        index.add(np.array(tokens, np.int32))
    exact = {tuple(tokens): plain.whole(tokens) for tokens in case.requests}
    records: dict[int, Exact] = {}
    asked_tokens = np.concatenate([np.array(one, np.int32) for one in case.requests])
    lengths = np.array([len(one) for one in case.requests])
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    candidates = index.candidates(asked_tokens, starts)
    found = {}
    for name, (near, choose) in WAYS.items():
        aligned, rows, cosines = index.plan(asked_tokens, starts, candidates, Rule(near=near), NO_KINDS, ANY), 0, []
        for number, asked in enumerate(case.requests):
            n, record = len(asked), int(aligned.record[number])
            if record < 0 or not n > n - aligned.computed[number] >= THRESHOLD * n:
                rows += n
                cosines.append(1.0)
                continue
            if record not in records:
                records[record] = plain.whole(case.stored[record])
            given = aligned.source[starts[number] : starts[number + 1]]
            source = np.where(given < -1, -2 - given, given).astype(np.int32)
            one = Served(exact[tuple(asked)], records[record], source)
            computed = choose(one, given < 0)
            rows += int(computed.sum())
            means = (plain.served(asked, one, computed).mean(0), one.exact.last.mean(0))
            cosines.append(float(F.cosine_similarity(*means, dim=0)))
        found[name] = {
            "share": rows / int(lengths.sum()), "mean": float(np.mean(cosines)),
            "p1": float(np.quantile(cosines, 0.01)), "below": float(np.mean(np.array(cosines) < 0.98)),
        }  # fmt: skip
        print(f"  {name}: {found[name]}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shared", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("log", nargs="*", default=LOGS)
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    plain, found = Plain(), {}
    for log in args.log:
        print(log, flush=True)
        found[log] = measure(plain, lines_case(args.shared, log))
    write_record(args.output, found)


if __name__ == "__main__":
    main()
