"""Reading databases of version 1 of the format; `attmemo migrate` converts them.

Shape, type and number of slots were stored for each kind and length, slot numbers in each record; keys of the
catalogue had no prefix; its digest was a chain over the values in order.
"""

from __future__ import annotations

from itertools import islice

import numpy as np
import xxhash

from attmemo.db.catalogue import Catalogue, Snapshot, value_type
from attmemo.db.forms import STORAGE
from attmemo.db.kinds import INPUTS, kinds_of_maps
from attmemo.db.manifest import Manifest, ModelInfo, read_page_size, read_rest
from attmemo.db.slots import SlotClass
from attmemo.fields import Field

PREFIX = b""  # of keys of the catalogue; those of version 2 are a byte longer, so both may lie side by side
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
    return Manifest(
        version=1, kinds=tuple(kinds.values()), records=records, next_id=records, places=places,
        records_digest=None if digest is None else digest.text("([0-9a-f]{32})?"),
        classes=tuple(classes[name] for name in sorted(classes)), page_size=page, model=model,
        **read_rest(body, model, "records", records),
    )  # fmt: skip


def snapshot(catalogue: Catalogue, manifest: Manifest) -> Snapshot:
    """The records, their places computed from the slot numbers; DatabaseCorruptError names what is wrong."""
    both = ("<u8", (len(manifest.kinds), manifest.model.layers))
    old = np.dtype([*_FIXED, ("slots", *both), ("checksums", *both)])
    entries = list(islice(catalogue.entries(PREFIX), manifest.records))
    state = b""
    for place, (number, raw) in enumerate(entries):
        if number != place:
            raise catalogue.corrupt(f"record {place} of {manifest.records} is missing")
        state = xxhash.xxh3_128_digest(state + raw)
    found = catalogue.values(entries, manifest, old, state.hex())
    new = np.zeros(len(found), value_type(sum(kind.layers for kind in manifest.kinds)))
    for name, *_ in _FIXED:
        new[name] = found[name]
    # Version 1 always wrote the slots of a record one behind the other.
    new["place"] = found["slots"][:, 0, 0] // manifest.kinds[0].layers
    begin = 0
    for number, kind in enumerate(manifest.kinds):
        slots = new["place"][:, None] * kind.layers + np.arange(kind.layers, dtype=np.uint64)
        if (found["slots"][:, number, : kind.layers] != slots).any():
            raise catalogue.corrupt("a record has slots at places that version 1 never gave")
        new["checksums"][:, begin : begin + kind.layers] = found["checksums"][:, number, : kind.layers]
        begin += kind.layers
    return catalogue.snapshot_of(list(range(len(new))), new)
