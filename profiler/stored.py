"""Find the texts that a database holds already: each would find itself, and every number would flatter.

A database of rows keeps tokens. One of maps keeps no text, but the hidden states that entered the first layer. They
tell texts apart as the model sees them: as tokens, cut to the greatest length. A digest of each text would be faster,
but older databases have none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from attmemo.adapters import adapter_for
from attmemo.db import KIND_INPUT, KIND_TOKENS, Database
from attmemo.profiler.models import LoadedModel, Tokens, collate
from attmemo.profiler.row_recorder import row_tokens

_CHANNELS: Final = 8  # of every token, compared with all records; the few that agree are compared in full
_BATCH: Final = 64


class _Entered(Exception):
    """The first layer was reached; the rest of the model need not run."""


def stored_texts(
    loaded: LoadedModel, database: Database, tokens: Sequence[Tokens], sources: int | None = None
) -> set[int]:
    """Rows of the texts that are in the database; `sources`: in the first so many files of it."""
    among = database.records.sources < (len(database.manifest.sources) if sources is None else sources)
    if database.manifest.layers_kept(KIND_TOKENS):
        known = {database.view(KIND_TOKENS, 0, int(record)).numpy().tobytes() for record in np.flatnonzero(among)}
        return {item.row for item in tokens if row_tokens(loaded, item).tobytes() in known}
    found = set()
    for length, items in by_length(tokens).items():
        records = np.flatnonzero((database.records.lengths == length) & among)
        if not len(records):
            continue
        some = torch.stack([database.input(0, int(record))[:, :_CHANNELS] for record in records])  # [R, n, c]
        for item, hidden in zip(items, first_inputs(loaded, items), strict=True):
            alike = _near(database, some, hidden[:, :_CHANNELS]).flatten(1).all(1)
            if any(_near(database, database.input(0, int(r)), hidden).all() for r in records[alike.numpy()]):
                found.add(item.row)
    return found


def by_length(tokens: Iterable[Tokens]) -> dict[int, list[Tokens]]:
    """Texts by how many tokens they have."""
    found: dict[int, list[Tokens]] = defaultdict(list)
    for item in tokens:
        found[len(item)].append(item)
    return found


def first_inputs(loaded: LoadedModel, items: Sequence[Tokens]) -> Iterator[Tensor]:
    """Hidden states ``[n, H]`` that enter the first layer, of texts of one length."""
    adapter, sites = adapter_for(loaded.model)
    module = sites[0].module
    entered: list[Tensor] = []

    def keep(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        entered.append(adapter.named(args, kwargs)["hidden_states"])
        raise _Entered

    hook = module.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        for start in range(0, len(items), _BATCH):
            with torch.inference_mode(), suppress(_Entered):
                adapter.host(loaded.model)(**collate(loaded, items[start : start + _BATCH]))
            yield from entered.pop().float()
    finally:
        hook.remove()


def _near(database: Database, stored: Tensor, hidden: Tensor) -> Tensor:
    """Which numbers are equal, but for the rounding of storage and of another batch."""
    kept = database.view(KIND_INPUT, 0, 0).dtype
    scale = float(hidden.abs().mean())
    return torch.isclose(stored, hidden, rtol=max(torch.finfo(kept).eps, 2.0**-9), atol=2.0**-7 * scale)
