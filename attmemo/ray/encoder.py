"""`Encoder`: one model over a table of texts, batch by batch."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from attmemo.arguments import AUTO, MEMORY
from attmemo.db.pools.filling import is_filling
from attmemo.errors import ArgumentError
from attmemo.ray.columns import Batch, Text, choose, make_columns, read_texts
from attmemo.ray.replica import ensure_local, is_uri
from attmemo.serve.model import Answer, ServedModel, load
from attmemo.serve.settings import DtypeName, Pooling, Settings
from attmemo.serve.texts import default_prompt
from attmemo.system.machine import cores

PIECE: Final = 1024
"""Texts that are given to the tokenizer at a time."""


class Encoder:
    """Embeddings, classes or scores of texts, as columns beside those of a batch.

    Made for ``ray.data.Dataset.map_batches``: each actor makes one, and has one model in memory. Rows of a batch keep
    their order, and all other columns stay.

    Parameters
    ----------
    model : str
        Model directory, or name on the model hub. Every node must see it.
    text : str or pair of str
        Column of the texts; two columns for a model of pairs (query, document).
    outputs : mapping of str to str, optional
        What to give, and the name of its column. Of a model that embeds: ``"embedding"`` float32 ``[B, H]``. Of a
        classifier: ``"class"`` its name, ``"score"`` the probability of this class, ``"scores"`` those of all
        ``[B, C]``. Of a reranker: ``"score"``. Of all: ``"tokens"`` of a text, ``"rows"`` computed for it.
        Default: the embedding, or the class with its score, or the score, under these names.
    database : str, optional
        As `memoize` has it. A URI (``s3://bucket/db``), or a path where `cache` is given: a local replica is made of
        it first, see `ensure_local`.
    cache : str, optional
        Directory of replicas on each node. Default: ``replicas`` in attmemo's cache directory.
    budget : float or None
        As `memoize` has it.
    fill : bool or str, optional
        As `memoize` has it. Default: False with a prepared database, so that actors only read it; else True.
    dtype : {"float32", "bfloat16"}
        Of the weights. Columns are float32.
    pooling : {"mean", "cls", "last-token"}, optional
        How an embedding is made. Default: as the model's own configuration says.
    prompt : str
        What stands before every text.
    normalize : bool
        Give embeddings unit length.
    forward_tokens : int
        Tokens of one forward, at most; a longer text has a forward of its own. A batch is sorted by length first, so
        batches of thousands of rows are good.
    threads : int, optional
        Threads of the model and of its tokenizer. Default: the ``num_cpus`` of the actor, at most the cores of
        its container's quota; outside of Ray as torch has it.
    **options
        More arguments of `memoize`: ``reuse``, ``threshold``, ``gate``, ``max_bytes``, ``min_cosine``, …

    Raises
    ------
    DataError, UnsupportedModelError, DatabaseError, ArgumentError
        The model or the database cannot be used, or cannot give what was asked for.

    Notes
    -----
    With a budget, what is reused depends on what was verified before: two runs may differ by what the budget allows.
    With ``budget=None, fill=False, gate=False`` the answer to a text depends on the text and the database alone, up to
    rounding.
    """

    def __init__(
        self, model: str, *, text: str | Sequence[str] = "text", outputs: Mapping[str, str] | None = None,
        database: str | None = None, cache: str | None = None, budget: float | None = 0,
        fill: bool | str | None = None, dtype: DtypeName = "float32", pooling: Pooling | None = None, prompt: str = "",
        normalize: bool = True, forward_tokens: int = 4096, threads: int | None = None, **options: Any,
    ) -> None:  # fmt: skip
        self._columns = (text,) if isinstance(text, str) else tuple(text)
        if not 1 <= len(self._columns) <= 2 or forward_tokens < 1 or (threads is not None and threads < 1):
            raise ArgumentError(
                f"text={text!r}, forward_tokens={forward_tokens}, threads={threads}: expected one or two columns, and "
                "at least 1.", "correct the argument",
            )  # fmt: skip
        if len(self._columns) == 2 and prompt:
            raise ArgumentError("a prompt stands before single texts; text names two columns.", "leave out prompt")
        threads = threads or _threads_of_actor()
        if threads is not None:
            torch.set_num_threads(threads)
            os.environ.setdefault("RAYON_NUM_THREADS", str(threads))  # of the tokenizer, which would take all cores
        named = database not in (None, MEMORY, AUTO)
        if database is not None and named and (is_uri(database) or cache is not None):
            database = str(ensure_local(database, cache))
        self._model: ServedModel = load(Settings(model, dtype=dtype, pooling=pooling))
        self._outputs = choose(self._model.task, outputs)
        self._prompt = default_prompt(self._model.prompts, prompt, None)
        self._normalize, self._forward_tokens = normalize, forward_tokens
        prepared = database is not None and named and Path(database).exists() and not is_filling(database)
        fill = not prepared if fill is None else fill
        self._model.memoize(database=database, budget=budget, fill=fill, **options)

    @property
    def stats(self) -> dict[str, Any]:
        """The counters of `Memoization.stats`."""
        found: dict[str, Any] = self._model.handle.stats()
        return found

    def __call__(self, batch: Batch) -> Batch:
        """The columns of a batch and those of its answers; DataError if it has no texts to read."""
        texts = read_texts(batch, self._columns)
        for name in self._outputs.values():
            if name in batch:
                raise ArgumentError(f"the data has a column {name!r} already.", "Encoder(…, outputs={what: name})")
        model = self._model
        answers = self._answers(texts)
        return dict(batch) | make_columns(
            answers, self._outputs, model.task, model.width, model.labels, normalize=self._normalize
        )

    def close(self) -> None:
        """Store what waits, and close the database. Ray forgets an actor's object in the end: that closes it too."""
        self._model.close()

    def __del__(self) -> None:
        with suppress(Exception):  # it was not made to the end, or Python ends
            self.close()

    def _answers(self, texts: Sequence[Text | None]) -> list[Answer | None]:
        answers: list[Answer | None] = [None] * len(texts)
        places = [place for place, text in enumerate(texts) if text is not None]
        sequences = self._encode([text for text in texts if text is not None])
        lengths = np.array([len(ids) for ids, _ in sequences], np.int64)
        for part in _forwards(lengths, self._forward_tokens):
            found = self._model.run([sequences[number] for number in part], reuse=True, each=False)
            for number, answer in zip(part, found, strict=True):
                answers[places[number]] = answer
        return answers

    def _encode(self, texts: Sequence[Text]) -> list[tuple[list[int], list[int]]]:
        """Token ids and types of texts; a text that is too long is cut."""
        found: list[tuple[list[int], list[int]]] = []
        for start in range(0, len(texts), PIECE):
            piece = texts[start : start + PIECE]
            pairs = len(self._columns) == 2
            given = [[text[0] for text in piece], [text[1] for text in piece]] if pairs else [
                [f"{self._prompt}{text}" for text in piece]
            ]  # fmt: skip
            encoded = self._model.tokenizer(
                *given, truncation=True, max_length=self._model.longest, return_token_type_ids=True,
                return_attention_mask=False,
            )  # fmt: skip
            found += zip(encoded["input_ids"], encoded["token_type_ids"], strict=True)
        return found


def _forwards(lengths: np.ndarray[Any, np.dtype[np.int64]], most: int) -> Iterator[list[int]]:
    """Which sequences share a forward: neighbours by length, of `most` tokens together, in the order of lengths."""
    order = np.argsort(lengths, kind="stable")
    order = order[lengths[order] > 0]  # an empty text may have no token at all
    ends, filled = [0], 0
    for place, length in enumerate(lengths[order].tolist()):
        if filled and filled + length > most:
            ends.append(place)
            filled = 0
        filled += length
    ends.append(len(order))
    for start, end in pairwise(ends):
        if start < end:
            yield order[start:end].tolist()


def _threads_of_actor() -> int | None:
    """The ``num_cpus`` of this actor, at most the cores that it may keep busy; None outside of one."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    if context.get_actor_id() is None:
        return None
    return max(1, min(int(context.get_assigned_resources().get("CPU", 1)), cores()))
