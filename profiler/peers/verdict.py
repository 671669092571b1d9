"""Who wins in a table of cells."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from attmemo.perfmodel.tuner import upper_bound
from attmemo.profiler.peers.paths import CACHE, PATHS, REUSE

Cell = Mapping[str, Any]
SURE: Final = 0.95
"""How sure it must be that a path changes more answers than the budget allows, before the path is left out."""


class Verdict(NamedTuple):
    """The fastest peer and the fastest path of attmemo at one batch size, None where no answer was good enough.

    `beyond` is a path that is faster than both, and changes more answers than the budget allows. `key` names the speed
    of a cell that was compared.
    """

    batch: int
    peer: Cell | None
    own: Cell | None
    beyond: Cell | None
    key: str = "speed"

    @property
    def peer_wins(self) -> bool:
        """No path of attmemo is faster. A cache belongs to the side of the path that it stands in front of."""
        return self.own is None or (self.peer is not None and self.peer[self.key] >= self.own[self.key])


def title_of(cell: Cell) -> str:
    """The path of a cell, for readers."""
    if cell["path"] == CACHE:
        return f"cache + {PATHS[cell['behind']].title}" if "behind" in cell else "cache"
    return PATHS[cell["path"]].title + (", sorted" if cell["by_length"] else "")


def verdicts(found: Mapping[str, Any], *, late: bool = False) -> list[Verdict]:
    """One for each batch size of a result of `measure`; with `late`, of its windows in the last third of the stream.

    A path counts unless its answers show that it changes more of them than the budget allows: one change of 32 does
    not show that for a budget of 1 %, two do. Of random weights (``model["random"]``) every path counts: their answers
    mean nothing. A path with answers of its own counts nowhere.
    """
    said, key = [], "late_speed" if late else "speed"
    for size in found["batch"]:
        cells = [cell for cell in found["cells"] if cell["batch"] == size and cell.get(key) is not None]
        cells = [cell for cell in cells if cell["path"] == CACHE or not PATHS[cell["path"]].other]
        good = [cell for cell in cells if found["model"].get("random") or _within(cell, found["budget"], late)]
        peer, own = (_fastest([cell for cell in good if _is_own(cell) is reuse], key) for reuse in (False, True))
        fastest = max((cell[key] for cell in (peer, own) if cell), default=0.0)
        beyond = [cell for cell in cells if cell not in good and cell[key] > fastest]
        said.append(Verdict(size, peer, own, _fastest(beyond, key), key))
    return said


def sentences(found: Mapping[str, Any]) -> list[str]:
    """Who wins; where a peer wins first."""
    ordered = sorted(verdicts(found), key=lambda one: (not one.peer_wins, one.batch))
    won: dict[str, list[str]] = {}
    for one in ordered:
        won.setdefault("A peer" if one.peer_wins else "attmemo", []).append(str(one.batch))
    first = "; ".join(f"{who} wins at batch {', '.join(sizes)}" for who, sizes in won.items())
    return [f"{first}.", *map(_sentence, ordered)]


def _sentence(one: Verdict) -> str:
    first, second = (one.peer, one.own) if one.peer_wins else (one.own, one.peer)
    if first is None:
        return f"Batch {one.batch}: only the original model in float32 keeps the answers within the budget."
    text = f"Batch {one.batch}: {title_of(first)} has {first['speed']:.2f} times the speed of the original model"
    if second is not None:
        text += f", {title_of(second)} {second['speed']:.2f}"
    if one.beyond is not None:
        changed = f"{100 * one.beyond['quality']['changed']:.1f} %"
        text += f". {title_of(one.beyond)} has {one.beyond['speed']:.2f} but changes {changed} of the answers"
    return f"{text}."


def _within(cell: Cell, budget: float, late: bool) -> bool:
    """Whether the answers are: those to all texts; with `late`, those in the last third too."""
    judged = cell["quality"], cell.get("late_quality") if late else None
    return all(_least_changed(quality) <= budget for quality in judged if quality)


def _least_changed(quality: Cell) -> float:
    """The lower bound of the share of changed answers (Clopper and Pearson)."""
    texts = quality["texts"]
    return 1.0 - upper_bound(texts - round(quality["changed"] * texts), texts, SURE)


def _is_own(cell: Cell) -> bool:
    return cell.get("behind", cell["path"]) in REUSE


def _fastest(cells: list[Cell], key: str) -> Cell | None:
    return max(cells, key=lambda cell: float(cell[key]), default=None)
