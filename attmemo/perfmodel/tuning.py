"""The thresholds that `attmemo tune` chose for one database, and what they were certified for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from attmemo.fields import Field


@dataclass(frozen=True, slots=True)
class Tuning:
    """A chosen operating point.

    Parameters
    ----------
    lookup : {"layer", "sequence"}
        The way of looking up that was tuned.
    thresholds : tuple of float
        Similarity score (Eq. 1, in [0, 1]) that a hit needs, one per layer.
    budget : float
        The share of changed answers that was allowed.
    radii : tuple of float, optional
        The same as `thresholds`, as distances of embeddings: the greatest that hits, -1 if none does.
    confidence : float, optional
        Probability with which the share of changed answers is below the budget.
    certified : bool
        Whether the budget was proved on texts that chose nothing.
    """

    lookup: Literal["layer", "sequence"]
    thresholds: tuple[float, ...]
    budget: float
    radii: tuple[float, ...] | None = None
    confidence: float | None = None
    certified: bool = False

    @classmethod
    def from_dict(cls, data: object, layers: int, source: str) -> Tuning:
        """Read the field `tuning` of a manifest; members with other names are ignored.

        Parameters
        ----------
        data : object
            Parsed JSON.
        layers : int
            Attention layers of the model: there is one threshold for each.
        source : str
            The database, for messages.

        Raises
        ------
        DatabaseCorruptError
            A field is missing or malformed; the message names it.
        """
        field = Field(data, source, f"attmemo tune {source} --data FILE --budget 0.01", "tuning")
        confidence, radii = field.get("confidence"), field.get("radii")
        found = cls(
            lookup="layer" if field["lookup"].text(among=("layer", "sequence")) == "layer" else "sequence",
            thresholds=tuple(field["thresholds"].numbers(0.0, 1.0)),
            budget=field["budget"].number(0.0, 1.0),
            radii=None if radii is None else tuple(radii.numbers(low=-1.0)),
            confidence=None if confidence is None else confidence.number(0.0, 1.0),
            certified=field.object().get("certified") is True,
        )
        for name, values in (("thresholds", found.thresholds), ("radii", found.radii)):
            if values is not None and len(values) != layers:
                field[name].refuse(f"one number for each of {layers} layers")
        return found
