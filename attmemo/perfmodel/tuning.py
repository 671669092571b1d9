"""The thresholds that `attmemo tune` chose for one database, and what they were certified for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from attmemo.system.json_fields import Field


@dataclass(frozen=True, slots=True)
class Tuning:
    """A chosen operating point."""

    lookup: Literal["layer", "sequence"]  # the way of looking up that was tuned
    thresholds: tuple[float, ...]  # similarity score (Eq. 1, in [0, 1]) that a hit needs, by layer
    budget: float  # the share of changed answers that was allowed
    radii: tuple[float, ...] | None = None  # the same as `thresholds`, as greatest distances; -1: no hit

    @classmethod
    def from_dict(cls, data: object, layers: int, source: str) -> Tuning:
        """Read the field `tuning` of a manifest, for a model of so many layers; unknown members are ignored.

        DatabaseCorruptError names `source`, the database, and the first wrong field.
        """
        field = Field(data, source, f"attmemo tune {source} --data FILE --budget 0.01", "tuning")
        radii = field.get("radii")
        found = cls(
            lookup="layer" if field["lookup"].text(among=("layer", "sequence")) == "layer" else "sequence",
            thresholds=tuple(field["thresholds"].numbers(0.0, 1.0)),
            budget=field["budget"].number(0.0, 1.0),
            radii=None if radii is None else tuple(radii.numbers(low=-1.0)),
        )
        for name, values in (("thresholds", found.thresholds), ("radii", found.radii)):
            if values is not None and len(values) != layers:
                field[name].refuse(f"one number for each of {layers} layers")
        return found
