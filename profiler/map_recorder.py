"""Records of attention maps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from attmemo.adapters import Adapter, Site
from attmemo.db import KIND_INPUT, KIND_MAP, DatabaseWriter, ModelInfo
from attmemo.db.forms import STORAGE
from attmemo.db.kinds import kinds_of_maps
from attmemo.errors import AttmemoError
from attmemo.profiler import admit
from attmemo.profiler.capture import Capture
from attmemo.profiler.models import Tokens
from attmemo.profiler.recorder import Admission, Form, Place, Slots
from attmemo.reuse.maps import Maps


class MapRecorder:
    """Records of a model's attention maps, and of the hidden states that entered the layers.

    Parameters
    ----------
    form : Form
        As `map_form` gives it.
    """

    def __init__(self, model: nn.Module, adapter: Adapter, sites: Sequence[Site], form: Form) -> None:
        self.form = form
        self._capture = Capture(model, adapter, sites)

    def __enter__(self) -> MapRecorder:
        self._capture.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._capture.__exit__()

    def run(self, inputs: Mapping[str, Tensor]) -> list[Slots]:
        return [Maps.slots(hidden, maps) for maps, hidden in self._capture.run(dict(inputs))]

    def admission(self, admit: float | None, writer: DatabaseWriter) -> Admission:
        return _Everything() if admit is None else _ByMaps(admit, writer)


def map_form(info: ModelInfo, storage: str, inputs: str) -> Form:
    """How maps of a model are stored, of what was asked for ("auto": what suits it).

    Probabilities lie in [0, 1], where float16 has eight times the resolution of bfloat16; but a bfloat16 model
    multiplies bfloat16 maps as they lie, on the matrix unit.
    """
    if storage == "auto":
        storage = "bfloat16" if info.dtype == "bfloat16" else "float16"
    if storage not in STORAGE:
        raise AttmemoError(f"maps are not stored as {storage}.", f"--dtype {', '.join(STORAGE)}")
    if inputs == "auto":
        inputs = "first" if storage == "uint8" else "all"
    settings = {} if inputs == "all" else {"inputs": inputs}
    return Form(storage, settings, kinds_of_maps(info, storage, settings))


class _Everything:
    """Stores every text."""

    def before(self, place: Place, tokens: Tokens) -> bool:
        return True

    def after(self, place: Place, slots: Slots) -> bool:
        return True

    def stored(self, record: int, slots: Slots) -> None:
        """Nothing is compared later."""

    def save(self) -> None:
        """Nothing was left out."""


class _ByMaps:
    """Leaves out texts whose maps a record has. Held-out texts all stay: without near ones predictions would look
    too bad."""

    def __init__(self, threshold: float, writer: DatabaseWriter) -> None:
        self._known = admit.Admission(threshold, writer)

    def before(self, place: Place, tokens: Tokens) -> bool:
        return place.held_out or not self._known.left_out(place.source, place.row)

    def after(self, place: Place, slots: Slots) -> bool:
        if place.held_out or self._known.admits(slots[KIND_MAP], slots[KIND_INPUT][0]):
            return True
        self._known.leave_out(place.source, place.row)
        return False

    def stored(self, record: int, slots: Slots) -> None:
        self._known.remember(record, slots[KIND_INPUT][0])

    def save(self) -> None:
        self._known.save()
