"""Self-attention of packed sequences, over rows read where they lie: `native/row_attention.c` and its oracle in torch.

Encoders: sequences lie one behind the other, without padding, and each token sees all tokens of its sequence. Keys and
values of some tokens may come from a record of an earlier input; queries are then those of the other tokens.
Shapes: B sequences, N fresh rows in all, H heads of D numbers, n_b keys of sequence b.
"""

from __future__ import annotations

import copy
import ctypes
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attmemo.kernels import _row_attention as native
from attmemo.kernels.omp_team import join_torch

_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # as `enum type` has them
_NONE = b""
NOT_STORED = (_NONE, _NONE, _NONE, _NONE, _NONE, 0, 0, 0, 0)
NOT_TURNED = (0, 0, 0, 0)
NOT_DISTANT = (0, 0, 0, 0, 0, _NONE, 0)
_RECORDS, _DISTANCES = 3, 6  # which of the arguments are records, and terms by distance


@dataclass(frozen=True)
class Layout:
    """Where queries and keys of a batch lie: made once a forward, for all layers.

    Attributes
    ----------
    starts
        ``[B + 1]``. Fresh rows of sequence b are ``starts[b]`` to ``starts[b + 1] - 1``; N is the last.
    key_starts
        ``[B + 1]``. Sequence b has ``n_b = key_starts[b + 1] - key_starts[b]`` keys, at positions 0 to ``n_b - 1``.
    positions
        ``[N]``. Position of each fresh row in its sequence; they increase within a sequence. None: every row is fresh.
    sources
        ``[key_starts[-1]]``. Where the key at each position lies: the number of a fresh row (>= 0), or row
        ``-1 - source`` of the sequence's record (< 0). None: every row is fresh.
    asked
        ``[B + 1]``. Queries of sequence b are ``asked[b]`` to ``asked[b + 1] - 1``, and `positions` are theirs. None:
        every fresh row is a query.
    """

    starts: npt.NDArray[np.int64]
    key_starts: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int32] | None = None
    sources: npt.NDArray[np.int32] | None = None
    asked: npt.NDArray[np.int64] | None = None

    def asking(self, rows: npt.NDArray[np.int64]) -> Layout:
        """The same, where only these fresh rows are queries; their numbers ``[W]`` rise."""
        asked = np.searchsorted(rows, self.starts).astype(np.int64)
        if self.positions is None:
            positions = (rows - np.repeat(self.starts[:-1], np.diff(asked))).astype(np.int32)
        else:
            positions = self.positions[rows]
        return Layout(self.starts, self.key_starts, positions, self.sources, asked)


@dataclass(frozen=True)
class Stored:
    """Keys and values of records, of one layer, in memory that is only read. The caller keeps it alive.

    Attributes
    ----------
    keys, values
        ``[B]``. Addresses of row 0 of each sequence's record; a row has H * D numbers or codes. 0: no record.
    rows
        ``[B]``. Rows of each record.
    dtype
        float32, float16, bfloat16, or int8: codes, to be multiplied with scales.
    row_bytes
        Bytes from a row to the next.
    key_scales, value_scales
        ``[B]``. Addresses of the float32 scales of codes, one for each row and head: ``[row][head]``.
    scale_row_bytes
        Bytes from the scales of a row to those of the next.
    still
        Whether no key has moved: a row's number in its record says nothing of its position.
    """

    keys: npt.NDArray[np.uint64]
    values: npt.NDArray[np.uint64]
    rows: npt.NDArray[np.int64]
    dtype: torch.dtype
    row_bytes: int
    key_scales: npt.NDArray[np.uint64] | None = None
    value_scales: npt.NDArray[np.uint64] | None = None
    scale_row_bytes: int = 0
    still: bool = False


@dataclass(frozen=True)
class Turn:
    """Rotary positions: a key of a record is turned by the distance that it moved.

    Its old position is its row in the record. Halves are turned against each other (`rotate_half` in transformers).
    `cos` and `sin` are float32 ``[2 * span - 1, half]``, row ``span - 1 + new position - old position``. The first
    ``2 * half`` numbers of a head are turned.
    """

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True)
class Disentangled:
    """DeBERTa's terms: products with keys and queries that stand for distances.

    Attributes
    ----------
    key
        ``[R, H * D]``, in the type of the queries: a query is multiplied with a row of these (c2p). None: it is not.
    query
        ``[R, H * D]``: a key is multiplied with a row of these (p2c). None: it is not.
    bucket
        int32 ``[2 * span - 1]``: the row, of both, for position of the query - position of the key, + span - 1. In
        transformers this is ``clamp(make_log_bucket_position(distance) + pos_ebd_size, 0, 2 * pos_ebd_size - 1)``:
        buckets of opposite distances are opposite, so what p2c reads at ``-bucket`` is the same row.
    """

    key: Tensor | None
    query: Tensor | None
    bucket: npt.NDArray[np.int32]

    @cached_property
    def native(self) -> tuple[Any, list[Tensor]]:
        """What native code gets, and tensors that must stay alive meanwhile. ValueError: parts do not fit."""
        kept = [None if t is None else t.contiguous() for t in (self.key, self.query)]
        given = [t for t in kept if t is not None]
        if not given:
            return NOT_DISTANT, []
        alike = all(t.dim() == 2 and (t.dtype, len(t)) == (given[0].dtype, len(given[0])) for t in given)
        if not alike or len(self.bucket) % 2 != 1:
            raise ValueError("relative keys and queries differ in rows or type, or buckets are not [2 * span - 1]")
        line = given[0].shape[1] * given[0].element_size()
        key, query = (0 if t is None else t.data_ptr() for t in kept)
        return (key, line, query, line, len(given[0]), _array(self.bucket, np.int32), len(self.bucket) // 2 + 1), given


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, heads: int, layout: Layout, *, scale: float,
    stored: Stored | None = None, turn: Turn | None = None, table: Tensor | None = None, window: int | None = None,
    disentangled: Disentangled | None = None, causal: bool = False, sinks: Tensor | None = None,
    out: Tensor | None = None, threads: int | None = None, isa: str = "",
) -> Tensor:  # fmt: skip
    """Attend with each query over all keys of its sequence: ``[W, H * D]``.

    Parameters
    ----------
    queries, keys, values
        Fresh rows, ``[N, G * D]`` on the CPU, of one type: float32, bfloat16 or float16. Rows may lie apart. Queries
        are ``[W, H * D]``: those that the layout asks for. H is a multiple of G: head h reads head ``h // (H / G)``.
    scale
        Products of queries and keys, and those of `disentangled`, are multiplied with it.
    stored, turn
        Records, and how far keys of these are turned.
    table
        float32 ``[H or 1, 2 * span - 1]``, added to the scores: ``span - 1 + position of the key - of the query``.
    window
        Keys are seen whose position differs by less than this. None: all are.
    causal
        Keys behind the query's own position are not seen.
    sinks
        float32 ``[H]``: of each head a score that softmax counts beside those of the keys. It has no value.
    out
        Where the result is written; it shares no memory with what is read. None: a new tensor.
    threads
        None: as many as torch uses.
    isa
        One of `instruction_sets`. Empty: the best.

    Raises
    ------
    ValueError
        Arguments do not fit each other; nothing was written.
    MemoryError
        There is no memory for some hundred rows a thread.
    """
    if out is None:
        out = torch.empty(queries.shape, dtype=queries.dtype)
    call = Attend(
        queries, keys, values, heads, layout, scale=scale, stored=stored, turn=turn, table=table, window=window,
        disentangled=disentangled, causal=causal, sinks=sinks, out=out, threads=threads, isa=isa,
    )  # fmt: skip
    native.attend(*call.arguments)
    return out


class Attend:
    """A call of `attend` that is still to be done. The parameters, and what is raised, are those of `attend`.

    Attributes
    ----------
    arguments
        Of `attmemo.kernels._row_attention.attend`; they hold addresses, good as long as this object lives.
    """

    def __init__(
        self, queries: Tensor, keys: Tensor, values: Tensor, heads: int, layout: Layout, *, scale: float, out: Tensor,
        stored: Stored | None = None, turn: Turn | None = None, table: Tensor | None = None,
        window: int | None = None, disentangled: Disentangled | None = None, causal: bool = False,
        sinks: Tensor | None = None, threads: int | None = None, isa: str = "",
    ) -> None:  # fmt: skip
        _check(queries, keys, values, heads, out)
        if len(layout.key_starts) == 0:
            raise ValueError("starts and key_starts are int64 [B + 1]")
        columns = queries.shape[1]
        item = queries.element_size()
        turns = None if turn is None else (turn.cos.contiguous(), turn.sin.contiguous())
        added = None if table is None else table.contiguous()
        distances = _distances(disentangled, queries)
        width = columns // heads
        self._queries, self._columns, self._key_heads = queries, keys.shape[1], keys.shape[1] // width
        fits = sinks is None or (sinks.dtype == torch.float32 and sinks.shape == (heads,) and sinks.is_contiguous())
        if sinks is not None and not fits:
            raise ValueError(f"sinks are float32 [{heads}], not {sinks.dtype} {tuple(sinks.shape)}")
        self._alive: Any = (queries, keys, values, out, layout, stored, turns, added, disentangled, sinks)
        self.arguments: Any = (
            tuple([(t.data_ptr(), t.stride(0) * item) for t in (queries, keys, values, out)]),
            (
                _TYPES[queries.dtype], len(queries), len(keys), int(layout.key_starts[-1]), heads, self._key_heads,
                width,
            ),
            (
                _array(layout.starts, np.int64), _array(layout.key_starts, np.int64),
                _array(layout.positions, np.int32), _array(layout.sources, np.int32), _array(layout.asked, np.int64),
            ),
            NOT_STORED if stored is None else _records(stored, keys.shape[1], self._key_heads),
            NOT_TURNED if turns is None else _turns(turns),
            table_of(added, window, heads),
            distances,
            (
                scale, torch.get_num_threads() if threads is None else threads, isa, causal,
                0 if sinks is None else sinks.data_ptr(),
            ),
        )  # fmt: skip

    def of(self, stored: Stored | None, disentangled: Disentangled | None) -> Attend:
        """The same call with other records and terms: all other arguments need no second look."""
        other = copy.copy(self)
        distances = _distances(disentangled, self._queries)
        other._alive = self._alive, stored, disentangled
        records = NOT_STORED if stored is None else _records(stored, self._columns, self._key_heads)
        arguments = list(self.arguments)
        arguments[_RECORDS], arguments[_DISTANCES] = records, distances
        other.arguments = tuple(arguments)
        return other


def instruction_sets() -> list[str]:
    """The instruction sets of this processor that the kernel was built for, best first."""
    return native.instruction_sets()


def attend_plain(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    heads: int,
    layout: Layout,
    *,
    scale: float,
    stored: Stored | None = None,
    turn: Turn | None = None,
    table: Tensor | None = None,
    window: int | None = None,
    disentangled: Disentangled | None = None,
    causal: bool = False,
    sinks: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """`attend` in plain torch, one sequence after the other. Everything is computed, and returned, in `dtype`.

    Rows of records become numbers of the queries' type first, as in the kernel. The layout is not checked.
    """
    width = queries.shape[1] // heads
    shares = queries.shape[1] // keys.shape[1]
    out = torch.zeros(queries.shape, dtype=dtype)
    asked = layout.starts if layout.asked is None else layout.asked
    for b in range(len(layout.starts) - 1):
        fresh, rows = (slice(int(starts[b]), int(starts[b + 1])) for starts in (layout.starts, asked))
        length = int(layout.key_starts[b + 1] - layout.key_starts[b])
        if rows.start == rows.stop:
            continue
        key, value = keys[fresh], values[fresh]
        if layout.sources is not None:
            sources = torch.from_numpy(layout.sources[layout.key_starts[b] : layout.key_starts[b + 1]]).long()
            key, value = (
                _sourced(plane, sources, b, heads // shares, stored, turn, k) for plane, k in ((keys, 0), (values, 1))
            )
        positions = torch.arange(length) if layout.positions is None else torch.from_numpy(layout.positions[rows])
        query, key, value = (t.to(dtype).view(len(t), -1, width) for t in (queries[rows], key, value))
        key, value = (t.repeat_interleave(shares, 1) for t in (key, value))
        distance = positions.long()[:, None] - torch.arange(length)  # [i, j]
        scores = torch.einsum("ihd,jhd->hij", query, key)
        if disentangled is not None:
            bucket = torch.from_numpy(disentangled.bucket).long()
            bucket = bucket[distance + len(bucket) // 2]
            if disentangled.key is not None:
                other = disentangled.key.to(dtype).view(-1, heads, width)[bucket]  # [i, j, h, d]
                scores = scores + torch.einsum("ihd,ijhd->hij", query, other)
            if disentangled.query is not None:
                other = disentangled.query.to(dtype).view(-1, heads, width)[bucket]
                scores = scores + torch.einsum("jhd,ijhd->hij", key, other)
        scores = scores * scale
        if table is not None:
            scores = scores + table.to(dtype)[:, table.shape[1] // 2 - distance]
        if window is not None:
            scores = scores.masked_fill(distance.abs() >= window, -torch.inf)
        if causal:
            scores = scores.masked_fill(distance < 0, -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.to(dtype)[:, None, None].expand(-1, len(query), 1)), -1)
        out[rows] = torch.einsum("hij,jhd->ihd", torch.softmax(scores, -1)[..., :length], value).flatten(1)
    return out


def _sourced(
    fresh: Tensor, sources: Tensor, b: int, heads: int, stored: Stored | None, turn: Turn | None, plane: int
) -> Tensor:
    """The keys or values of a sequence, ``[n_b, H * D]``, from fresh rows and its record."""
    rows = fresh[sources.clamp(min=0)]
    old = -1 - sources
    moved = sources < 0
    if stored is None or not bool(moved.any()):
        return rows
    record = _record(stored, b, fresh.shape[1], heads, plane)[old.clamp(min=0)]
    if turn is not None and plane == 0:
        distance = torch.arange(len(sources)) - old
        index = (distance + len(turn.cos) // 2).clamp(0, len(turn.cos) - 1)
        cos, sin = (t[index][:, None] for t in (turn.cos, turn.sin))  # [n, 1, half]
        half = turn.cos.shape[1]
        low, high, rest = record.float().view(len(rows), heads, -1).tensor_split((half, 2 * half), -1)
        turned = torch.cat((low * cos - high * sin, high * cos + low * sin, rest), -1).flatten(1)
        record = torch.where((distance != 0)[:, None], turned, record)
    return torch.where(moved[:, None], record.to(fresh.dtype), rows)


def _record(stored: Stored, b: int, columns: int, heads: int, plane: int) -> Tensor:
    """All rows of a record's keys or values, float32 ``[rows, H * D]``."""
    rows = int(stored.rows[b])
    address = int((stored.keys, stored.values)[plane][b])
    numbers = _read(address, rows, columns, stored.row_bytes, stored.dtype).float()
    scales = (stored.key_scales, stored.value_scales)[plane]
    if stored.dtype != torch.int8 or scales is None:
        return numbers
    each = _read(int(scales[b]), rows, heads, stored.scale_row_bytes, torch.float32)
    return numbers * each.repeat_interleave(columns // heads, 1)


def _read(address: int, rows: int, columns: int, row_bytes: int, dtype: torch.dtype) -> Tensor:
    """A copy of rows in memory."""
    size = (rows - 1) * row_bytes + columns * dtype.itemsize
    octets = torch.frombuffer(bytearray(ctypes.string_at(address, size)), dtype=torch.uint8)
    return octets.as_strided((rows, columns * dtype.itemsize), (row_bytes, 1)).contiguous().view(dtype)


def _check(queries: Tensor, keys: Tensor, values: Tensor, heads: int, out: Tensor | None) -> None:
    if queries.dtype not in _TYPES:
        raise ValueError(f"queries are {queries.dtype}; expected float32, bfloat16 or float16")
    if queries.dim() != 2 or heads < 1 or queries.shape[1] % heads != 0:
        raise ValueError(f"queries of shape {tuple(queries.shape)} do not have {heads} heads")
    for name, tensor in (("queries", queries), ("keys", keys), ("values", values), ("out", out)):
        if tensor is None:
            continue
        expected = queries if name == "out" else keys if name == "values" else None
        fits = _shares(queries, tensor, heads) if expected is None else tensor.shape == expected.shape
        if not fits or tensor.dtype != queries.dtype:
            raise ValueError(f"{name} {tuple(tensor.shape)} {tensor.dtype} do not fit the queries")
        if tensor.device.type != "cpu" or (tensor.shape[1] > 1 and tensor.stride(1) != 1):
            raise ValueError(f"{name} must be on the CPU, with neighbouring numbers in a row")


def _shares(queries: Tensor, keys: Tensor, heads: int) -> bool:
    """Whether the keys have the queries' heads, or fewer that are shared by as many queries each."""
    columns, width = queries.shape[1], queries.shape[1] // heads
    if width == 0 or keys.dim() != 2 or keys.shape[1] == 0:
        return False
    return keys.shape[1] % width == 0 and columns % keys.shape[1] == 0


def _array(array: npt.NDArray[Any] | None, dtype: type) -> npt.NDArray[Any] | bytes:
    if array is None:
        return _NONE
    if array.dtype != dtype or not array.flags.c_contiguous:
        raise ValueError(f"an array of {array.dtype} where a contiguous one of {np.dtype(dtype)} is expected")
    return array


def _records(stored: Stored, columns: int, heads: int) -> Any:
    codes = stored.dtype == torch.int8
    if not codes and stored.dtype not in _TYPES:
        raise ValueError(f"stored rows are {stored.dtype}; expected float32, bfloat16, float16 or int8")
    if stored.row_bytes < columns * stored.dtype.itemsize or (codes and stored.scale_row_bytes < heads * 4):
        raise ValueError("row_bytes or scale_row_bytes are fewer than those of a row")
    return (
        _array(stored.keys, np.uint64), _array(stored.values, np.uint64), _array(stored.rows, np.int64),
        _array(stored.key_scales, np.uint64), _array(stored.value_scales, np.uint64), _TYPES.get(stored.dtype, 0),
        8 if codes else 0, stored.row_bytes, stored.scale_row_bytes,
    )  # fmt: skip


def _turns(turns: tuple[Tensor, Tensor]) -> tuple[int, int, int, int]:
    cos, sin = turns
    if cos.dtype != torch.float32 or sin.dtype != torch.float32 or cos.shape != sin.shape:
        raise ValueError("cos and sin are float32 of one shape")
    if cos.dim() != 2 or cos.shape[0] % 2 != 1:
        raise ValueError(f"cos and sin are [2 * span - 1, half], not {tuple(cos.shape)}")
    return cos.data_ptr(), sin.data_ptr(), cos.shape[0] // 2 + 1, cos.shape[1]


def table_of(table: Tensor | None, window: int | None, heads: int) -> tuple[int, int, int, int]:
    """A table of biases, or none, and a window as native code has them. The table must stay alive."""
    if window is not None and window < 1:
        raise ValueError(f"a window of {window}: a query must see itself")
    if table is None:
        return 0, 0, 0, window or 0
    if table.dtype != torch.float32 or table.dim() != 2 or table.shape[0] not in (1, heads) or table.shape[1] % 2 != 1:
        raise ValueError(f"the table is float32 [{heads} or 1, 2 * span - 1], not {table.dtype} {tuple(table.shape)}")
    return table.data_ptr(), table.shape[1] // 2 + 1, table.shape[1] if table.shape[0] > 1 else 0, window or 0


def _distances(disentangled: Disentangled | None, queries: Tensor) -> Any:
    """What the native call gets."""
    if disentangled is None:
        return NOT_DISTANT
    arguments, kept = disentangled.native
    for tensor in kept:
        if tensor.dtype != queries.dtype or tensor.shape[1] != queries.shape[1]:
            raise ValueError(f"relative keys and queries {tuple(tensor.shape)} {tensor.dtype} do not fit the queries")
    return arguments


join_torch(native.use_team)
