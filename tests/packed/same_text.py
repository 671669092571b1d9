"""Whether a text has the same bits alone and in any batch: models, texts, batches, and how many bits there were."""

from __future__ import annotations

import copy
import os
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from children import run_child
from families import DECODER, SIZES, VOCABULARY, _bias, _make
from packed_models import EXACT, HEADS, LEFT, Inputs, firsts, has_types, head, last
from torch import Tensor, nn

from attmemo import memoize
from attmemo.kernels import _linear, _row_attention
from attmemo.kernels.packed_weights import Panels

LENGTHS = [1, 2, 7, 16, 33, 67, 130]
"""Of the texts: on both sides of a tile of queries, of a block of keys, and of the rows that are few."""

LONGEST = 160
"""Positions of the models."""

LIMIT = 800
"""Seconds until a child is given up: on a slow machine that is shared it takes minutes. A test has 900."""

COMBINATIONS = [("float32", "exact"), ("bfloat16", "int8"), ("float32", "int8"), ("bfloat16", "exact")]
"""Type of a model, and arithmetic of its linear layers."""

_WIDE: dict[str, Any] = {"hidden_size": 384, "num_hidden_layers": 2, "intermediate_size": 1536,
                         "initializer_range": 0.05}  # fmt: skip
WIDE: dict[str, Callable[[], nn.Module]] = {
    "BERT, wide": _make("BertModel", "BertConfig", **SIZES | _WIDE | {"num_attention_heads": 12}),
    "Qwen2, wide": _make("Qwen2Model", "Qwen2Config", **DECODER | _WIDE),
}
"""As wide as real models: threads and chunks of rows share the work in other ways."""

EVERY = list(EXACT | WIDE)
"""Every family with blocks."""

CLASSES = HEADS | {kind.replace("Sequence", "Token"): family for kind, family in HEADS.items()}
"""Models whose heads read first rows alone, or all of them, and their families."""

CUT_BY_PADDING = {"mean"}
"""Readers for which padding on the left moves where torch's sums are cut."""

Text = tuple[Tensor, Tensor]
"""Tokens and their types."""

Answer = Callable[[Inputs], Tensor]
"""What the model gives for a batch, ``[B, L, H]`` or ``[B, H]``."""


@dataclass(frozen=True)
class Batch:
    """Which texts stand in a batch, in this order; columns of padding that no text needs; and the threads."""

    places: tuple[int, ...]
    threads: int = 1
    more: int = 0
    left: bool = False

    def inputs(self, texts: list[Text], types: bool) -> Inputs:
        chosen = [texts[place] for place in self.places]
        width = max(len(tokens) for tokens, _ in chosen) + self.more
        ids, mask, kinds = torch.zeros(3, len(chosen), width, dtype=torch.long)
        for row, (tokens, own_kinds) in enumerate(chosen):
            own = self.own(len(tokens), width)
            ids[row, own], mask[row, own], kinds[row, own] = tokens, 1, own_kinds
        return {"input_ids": ids, "attention_mask": mask} | ({"token_type_ids": kinds} if types else {})

    def own(self, length: int, width: int) -> slice:
        """Where a text of this length lies in a row."""
        return slice(width - length, width) if self.left else slice(length)


def batches(left: bool, seed: int) -> list[Batch]:
    """Each text alone, shared by two threads; and batches of 1 to 16 texts, with repeats, with one thread and two."""
    rng, every = random.Random(seed), range(len(LENGTHS))
    found = [Batch((place,), 2) for place in every]
    for threads, counts in ((1, (1, 2, 5, 16)), (2, (3, 16))):
        for count in counts:
            places = tuple(rng.choices(every, k=count))
            found.append(Batch(places, threads, rng.choice([0, 1, 9]), left and rng.random() < 0.5))
    return [*found, Batch(tuple(rng.sample(every, len(every))))]


def texts_of() -> list[Text]:
    random_ = torch.Generator().manual_seed(7)
    return [
        (torch.randint(5, VOCABULARY, (n,), generator=random_), torch.randint(0, 2, (n,), generator=random_))
        for n in LENGTHS
    ]  # fmt: skip


def model_of(name: str, dtype: str) -> Any:
    """A model of this family with positions for the longest text."""
    bare: Any = (EXACT | WIDE)[name]()
    config = copy.deepcopy(bare.config)
    config.update({"max_position_embeddings": LONGEST + 2})  # some count from 1 or 2 on
    torch.manual_seed(1)
    return _bias(type(bare)(config)).to(getattr(torch, dtype))


def by_our_kernels(model: Any) -> bool:
    """Whether kernels of attmemo compute all linear layers of the blocks, and a convolution beside them."""
    packed = model.attmemo.packed
    layers = [layer for _, layer, _ in packed.linears]
    if getattr(packed.blocks.module, "conv", None) is not None:
        layers.append(packed.blocks._convolution)
    return all(isinstance(layer, Panels) for layer in layers)


def bits(rows: Tensor) -> bytes:
    return rows.contiguous().view(torch.uint8).numpy().tobytes()


@contextmanager
def of_blocks(model: Any) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Collects the embedded rows and the last hidden states of each call of the blocks."""
    reuse, found = model.attmemo.engine.reuse, list[tuple[Tensor, Tensor]]()
    own = reuse.serve

    def serve(site: Any, call: Any, *given: Any) -> Tensor:
        embedded = call.hidden.clone()
        made: Tensor = own(site, call, *given)
        found.append((embedded, made.clone()))
        return made

    reuse.serve = serve
    # Only through modules blocks are seen: `test_whole_model.py` has the bits of whole forwards in a few calls.
    short = {hook: hook.whole for hook in model.attmemo._hooks if getattr(hook, "whole", None) is not None}
    for hook in short:
        hook.whole = None
    try:
        yield found
    finally:
        for hook, whole in short.items():
            hook.whole = whole
        del reuse.serve


@dataclass
class Seen:
    """How many different bits the texts had: embedded rows; states of the blocks for one embedding; answers."""

    embedded: list[int]
    states: list[int]
    answers: list[int]


def look(model: Any, answer: Answer, asked: list[Batch], *, first: bool = False) -> Seen:
    """Ask for the batches. `first`: only first rows are looked at."""
    texts, types = texts_of(), has_types(model)
    embedded, answers = ([set[bytes]() for _ in texts] for _ in range(2))
    states = [defaultdict[bytes, set[bytes]](set) for _ in texts]
    before = torch.get_num_threads()
    try:
        for batch in asked:
            torch.set_num_threads(batch.threads)
            inputs = batch.inputs(texts, types)
            with of_blocks(model) as calls, torch.inference_mode():
                found = answer(inputs)
            ((rows, made),) = calls
            for number, place in enumerate(batch.places):
                own = batch.own(LENGTHS[place], rows.shape[1])
                given = bits(rows[number, own])
                embedded[place].add(given)
                states[place][given].add(bits(made[number, :1] if first else made[number, own]))
                answers[place].add(bits(found[number, own] if found.dim() == 3 else found[number]))
    finally:
        torch.set_num_threads(before)
    stats = model.attmemo.stats()
    assert not stats["failures"]
    assert not stats["ineligible"]
    return Seen([len(one) for one in embedded], [max(map(len, one.values())) for one in states], [*map(len, answers)])


@dataclass(frozen=True)
class Cell:
    """What is checked.

    Attributes
    ----------
    name : str
        A family, or the class of a model with a head.
    reader : str
        Who reads the states: "none" (they are compared as they are), "head", or a pooling of sentence-transformers.
    dtype, linear : str
        One of `COMBINATIONS`.
    seed : int
        Of the batches.
    """

    name: str
    reader: str
    dtype: str
    linear: str
    seed: int

    def look(self) -> Seen | None:
        """What the texts had; None: kernels of attmemo do not compute all of the blocks."""
        if self.name in CLASSES:
            model: Any = head(self.name, CLASSES[self.name], max_position_embeddings=LONGEST + 2)
            model = model.to(getattr(torch, self.dtype))
        else:
            model = model_of(self.name, self.dtype)
        memoize(model, reuse="none", linear=self.linear)
        if not by_our_kernels(model):
            return None
        first = self.reader == "head" and model.attmemo.stats()["first_row"]
        before, asked = firsts(model), batches(self.name in LEFT and self.reader not in CUT_BY_PADDING, self.seed)
        seen = look(model, self._answer(model), asked, first=first)
        assert firsts(model) == before + (len(asked) if first else 0)
        return seen

    def _answer(self, model: Any) -> Answer:
        if self.reader == "none":
            return lambda inputs: last(model, inputs)
        if self.reader == "head":
            return lambda inputs: model(**inputs).logits
        from sentence_transformers.models import Normalize, Pooling  # seconds to import

        pooling, normalize = Pooling(model.config.hidden_size, pooling_mode=self.reader), Normalize()

        def pooled(inputs: Inputs) -> Tensor:
            features = {"token_embeddings": last(model, inputs), "attention_mask": inputs["attention_mask"]}
            found: Tensor = normalize(pooling(features))["sentence_embedding"]
            return found

        return pooled


def best_sets() -> list[str]:
    """The instruction sets in use: of attention, of layers in float32, 8 bits and bfloat16; ``""``: there is none."""
    layers = [_linear.instruction_sets(kind) for kind in range(3)]
    return [sets[0] if sets else "" for sets in (_row_attention.instruction_sets(), *layers)]


def look_without(words: str, cells: Sequence[Sequence[Any]]) -> list[Any]:
    """`best_sets` without these instruction sets, and what each cell found.

    Kernels ask the environment once a process: they have not been asked yet in this one, and are asked in a fork.
    """

    def body() -> list[Any]:
        os.environ["ATTMEMO_WITHOUT"] = words
        found = [Cell(*cell).look() for cell in cells]
        return [best_sets(), [None if seen is None else asdict(seen) for seen in found]]

    return list(run_child(body, timeout=LIMIT).result)
