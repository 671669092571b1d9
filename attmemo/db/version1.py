"""Reading databases of version 1 of the format; `attmemo migrate` converts them.

What was different: shape, type and number of slots were stored for each kind and length, slot numbers in each record,
keys of the catalogue had no prefix, and its digest was a chain over the values in order. Version 1 kept two kinds.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from attmemo.db.catalogue import Catalogue, Snapshot, value_type
from attmemo.db.forms import STORAGE
from attmemo.db.kinds import INPUTS, kinds_of_maps
from attmemo.db.manifest import EmbedderRef, Manifest, ModelInfo, read_page_size, read_rest
from attmemo.db.slots import SlotClass
from attmemo.fields import Field

PREFIX = b""
"""Of keys of the catalogue. Those of version 2 are a byte longer, so both may lie side by side."""

_FIXED = [("length", "<u4"), ("source", "<u4"), ("row", "<u8"), ("split", "u1")]


def parse(body: Field) -> Manifest:
    """The manifest, as one of version 2 but for `version` and `records_digest`."""
    model, page = ModelInfo.read(body["model"]), read_page_size(body)
    storage, settings = body["storage"].text(among=STORAGE), body["settings"]
    if "inputs" in settings.object():
        settings["inputs"].text(among=INPUTS)
    kinds = {kind.name: kind for kind in kinds_of_maps(model, storage, settings.object())}
    records, digest = body["records"].integer(high=1 << 40), body.get("records_digest")
    classes: dict[str, SlotClass] = {}
    for item in body["classes"].items():
        kind = kinds[item["kind"].text(among=kinds)]
        length, slots = item["length"].integer(1, 1 << 24), item["slots"].integer(high=1 << 40)
        if item["shape"].value != list(kind.shape_for(length)):
            item["shape"].refuse(f"{list(kind.shape_for(length))}")
        item["dtype"].text(among=(kind.dtype,))
        if slots % kind.layers:
            item["slots"].refuse(f"a multiple of {kind.layers} layers")
        found = SlotClass.read(item, kind, length, slots // kind.layers, page)
        if found.name in classes:
            item.refuse("each kind and length once")
        classes[found.name] = found
    places = {found.length: found.places for found in classes.values()}
    for name in kinds:
        mine = {found.length: found.places for found in classes.values() if found.kind.name == name}
        if mine != places or sum(mine.values()) != records:
            body["classes"].refuse(f"{records} records with slots of kind {name}")
    embedder = body.get("embedder")
    if embedder is not None and embedder["records"].integer() > records:
        embedder["records"].refuse(f"at most {records}")
    return Manifest(
        version=1,
        kinds=tuple(kinds.values()),
        records=records,
        next_id=records,
        records_digest=None if digest is None else digest.text("([0-9a-f]{32})?"),
        places=places,
        classes=tuple(classes[name] for name in sorted(classes)),
        **read_rest(body, model),
        page_size=page,
        model=model,
        embedder=None if embedder is None else EmbedderRef.read(embedder, model, embedder["records"]),
    )


def snapshot(catalogue: Catalogue, manifest: Manifest) -> Snapshot:
    """The records, their places computed from the slot numbers; DatabaseCorruptError names what is wrong."""
    layers = manifest.model.layers
    both = ("<u8", (len(manifest.kinds), layers))
    old = np.dtype([*_FIXED, ("slots", *both), ("checksums", *both)])
    found: list[bytes] = []
    state = b""
    for number, raw in catalogue.entries(PREFIX):
        if len(found) == manifest.records:
            break
        if number != len(found):
            raise catalogue.corrupt(f"record {len(found)} of {manifest.records} is missing")
        if len(raw) != old.itemsize:
            raise catalogue.corrupt(f"record {number} has {len(raw)} bytes, expected {old.itemsize}")
        state = xxhash.xxh3_128_digest(state + raw)
        found.append(raw)
    if len(found) != manifest.records:
        raise catalogue.corrupt(f"it holds {len(found)} records, the manifest says {manifest.records}")
    if manifest.records_digest not in (None, state.hex()):
        raise catalogue.corrupt(f"its records have digest {state.hex()}, expected {manifest.records_digest}")
    values = np.frombuffer(b"".join(found), old)
    try:
        return Snapshot.of(list(range(len(values))), _converted(values, manifest))
    except ValueError as error:
        raise catalogue.corrupt(str(error)) from error


def _converted(old: npt.NDArray[Any], manifest: Manifest) -> npt.NDArray[Any]:
    """Values of version 2. Version 1 always wrote the slots of a record one behind the other."""
    new = np.zeros(len(old), value_type(sum(kind.layers for kind in manifest.kinds)))
    for name, *_ in _FIXED:
        new[name] = old[name]
    new["place"] = old["slots"][:, 0, 0] // manifest.kinds[0].layers
    begin = 0
    for number, kind in enumerate(manifest.kinds):
        slots = new["place"][:, None] * kind.layers + np.arange(kind.layers, dtype=np.uint64)
        if (old["slots"][:, number, : kind.layers] != slots).any():
            raise ValueError("a record has slots at places that version 1 never gave")
        new["checksums"][:, begin : begin + kind.layers] = old["checksums"][:, number, : kind.layers]
        begin += kind.layers
    return new
