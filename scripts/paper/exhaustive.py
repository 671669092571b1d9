"""Exhaustive search for the most similar map: padded as in AttMEMO, or over valid tokens of one length."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from attmemo.embed.similarity import similarity_matrix
from attmemo.models import adapter_for
from attmemo.profiler.map_recorder import Capture
from attmemo.profiler.models import LoadedModel, Tokens, batches, collate


def padded_inputs(items: Sequence[Tokens], length: int) -> dict[str, Tensor]:
    """Inputs of exactly so many tokens; padding is masked, as in the paper."""
    ids = pad_sequence([torch.tensor(item.ids) for item in items], batch_first=True)
    ids = torch.nn.functional.pad(ids, (0, length - ids.shape[1]))
    lengths = torch.tensor([len(item) for item in items])
    return {"input_ids": ids, "attention_mask": (torch.arange(length)[None] < lengths[:, None]).long()}


def padded_maps(loaded: LoadedModel, items: Sequence[Tokens], length: int, width: int, heads: int = 1) -> list[Tensor]:
    """By layer the first heads' maps, half precision, ``[N, heads, length, width]``: no token lies behind `width`."""
    adapter, sites = adapter_for(loaded.model)
    found: list[list[Tensor]] = [[] for _ in sites]
    with Capture(loaded.model, adapter, sites) as capture:
        for start in range(0, len(items), 32):
            seen = capture.run(padded_inputs(items[start : start + 32], length))
            for layer, maps in enumerate(seen.maps):
                found[layer].append(maps[:, :heads, :, :width].half())
    return [torch.cat(parts) for parts in found]


def best_padded(queries: Tensor, records: Tensor, block: int = 1000) -> tuple[Tensor, Tensor]:
    """Score and place of the most similar record of every query, by Eq. 1 over all rows, those of padding too.

    Columns that are zero in a whole block are not compared: sorted by length, most blocks are narrow.
    """
    best, place = torch.full((len(queries),), -1.0), torch.zeros(len(queries), dtype=torch.long)
    for start in range(0, len(records), block):
        right = records[start : start + block].float()
        for first in range(0, len(queries), 64):
            part = slice(first, first + 64)
            left = queries[part].float()
            wide = max(_columns(left), _columns(right))
            scores, at = (1.0 - _distance(left[..., :wide], right[..., :wide])).max(1)
            better = scores > best[part]
            best[part] = torch.where(better, scores, best[part])
            place[part] = torch.where(better, at + start, place[part])
    return best, place


def _columns(maps: Tensor) -> int:
    return int(maps.amax((0, 1, 2)).nonzero().max()) + 1


def _distance(left: Tensor, right: Tensor) -> Tensor:
    """One minus Eq. 1, ``[Q, R]``: columns need not be as many as rows."""
    rows = left.shape[1] * left.shape[2]
    return torch.cdist(left.flatten(1), right.flatten(1), p=1.0) / (2.0 * rows)


def best_valid(loaded: LoadedModel, stored: Sequence[Tokens], asked: Sequence[Tokens]) -> list[Tensor]:
    """By layer the score of the most similar record of the same length, all heads, valid tokens only.

    A query without a record of its length has -1.
    """
    adapter, sites = adapter_for(loaded.model)
    wanted = {len(item) for item in asked}
    maps: dict[str, dict[int, list[list[Tensor]]]] = {}
    with Capture(loaded.model, adapter, sites) as capture:
        for name, items in (("stored", [item for item in stored if len(item) in wanted]), ("asked", list(asked))):
            by_length: dict[int, list[list[Tensor]]] = defaultdict(list)
            for batch in batches(items, 32):
                for item, (own, _) in zip(batch, capture.run(collate(loaded, batch)), strict=True):
                    by_length[len(item)].append([layer.half() for layer in own])
            maps[name] = by_length
    found: list[list[Tensor]] = [[] for _ in sites]
    for length, queries in maps["asked"].items():
        records = maps["stored"].get(length)
        for layer in range(len(sites)):
            if records is None:
                found[layer].append(torch.full((len(queries),), -1.0))
                continue
            left = torch.stack([own[layer] for own in queries])
            right = torch.stack([own[layer] for own in records])
            found[layer].append(similarity_matrix(left, right).max(1).values)
    return [torch.cat(parts) for parts in found]
