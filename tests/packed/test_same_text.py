"""The same text has the same bits: alone and in any batch, anywhere in it, with any padding, with 1 thread and with 2.

What kernels of attmemo compute keeps this. What the model's own code computes may not: torch rounds a linear layer by
the number of its rows, and sums by where padding lies. So the blocks' output is compared for one and the same embedded
text. That torch embeds it the same, and that a head answers the same, is asked where torch keeps it.
"""

from __future__ import annotations

from dataclasses import astuple

import pytest
from children import run_child
from same_text import CLASSES, COMBINATIONS, EVERY, LENGTHS, LIMIT, Cell, Seen, best_sets

from attmemo.kernels import _linear, _row_attention

ONCE = [1] * len(LENGTHS)
Asked = list[tuple[str, list[Cell]]]
"""Instruction sets that are left out, and what is checked without them."""

IN_CHILD = """
from same_text import look_without
result = [look_without(*each) for each in asked]
"""


def is_ours(cell: Cell, sets: list[str]) -> bool:
    """Whether kernels of attmemo are to compute all of the blocks with these instruction sets: else torch does."""
    _, single, _, half = sets
    has_own = half != "" if cell.dtype == "bfloat16" else single != "generic"
    return has_own or (cell.linear == "int8" and cell.name != "DeBERTa-v2")  # its convolution is never in 8 bits


def faults_of(cell: Cell, seen: Seen) -> list[str]:
    """Where texts have several bits."""
    found = [] if seen.states == ONCE else [f"states of {seen.states} kinds"]
    # ELECTRA's embedded rows go through a linear layer of torch, and ALBERT's where kernels of attmemo do not compute
    # that type: in float32 a token alone is rounded otherwise.
    if seen.embedded != ONCE and not cell.name.upper().startswith(("ELECTRA", "ALBERT")):
        found.append(f"embedded rows of {seen.embedded} kinds")
    if cell.reader != "head" and any(n > most for n, most in zip(seen.answers, seen.embedded, strict=True)):
        found.append(f"answers of {seen.answers} kinds")
    return found


def look_at(asked: Asked) -> list[list[str]]:
    """Check all cells, in a process whose threads do not spin; the best instruction sets of each part."""
    given = [(words, [astuple(cell) for cell in cells]) for words, cells in asked]
    passive = {"OMP_WAIT_POLICY": "passive"}
    found = run_child(IN_CHILD, timeout=LIMIT, environment=passive, asked=given).result
    faults = []
    for (words, cells), (sets, all_seen) in zip(asked, found, strict=True):
        for cell, seen in zip(cells, all_seen, strict=True):
            wrong = [] if seen is None else faults_of(cell, Seen(**seen))
            if (seen is not None) != is_ours(cell, sets):
                wrong.append("torch computes what kernels of attmemo are to compute, or the other way round")
            faults += [f"{cell} without {words or 'nothing'}: {fault}" for fault in wrong]
    assert faults == [], f"for texts of {LENGTHS} tokens"
    return [sets for sets, _ in found]


def test_a_text_has_the_same_bits_alone_and_in_any_batch() -> None:
    """Every family, with both types and both arithmetics, and the best instruction sets of this machine."""
    cells = [
        Cell(name, "none", *COMBINATIONS[2 * (place % 2) + turn], place)
        for place, name in enumerate(EVERY) for turn in (0, 1)
    ]  # fmt: skip
    assert look_at([("", cells)]) == [best_sets()]


WITHOUT = ["amx", "amx avx512bf16", "avx512", "avx512 avxvnni", "avx512 avx2"]
"""Instruction sets that are left out, so that each other one is the best of some kernel once."""

ALIKE = {
    "BERT classifier", "XLM-RoBERTa", "CamemBERT", "DeBERTa, no terms", "DeBERTa, terms without distances",
    "Qwen2 classifier", "Marian encoder", "Pegasus encoder", "M2M-100 encoder", "mT5 encoder",
    "ALBERT, groups", "DeBERTa v1, c2p", "CLIP text, end by id",
}  # fmt: skip
"""Their blocks are those of another one of `EVERY`: the best instruction sets are enough for them."""


def test_a_text_has_the_same_bits_in_any_batch_with_every_instruction_set() -> None:
    """Every kind of blocks with some of the sets below the best; each set with both types and both arithmetics."""
    kinds = [name for name in EVERY if name not in ALIKE]
    here = [_row_attention.instruction_sets(), *(_linear.instruction_sets(kind) for kind in range(3))]
    every = {name for names in here for name in names}
    best = look_at([
        (words, [Cell(name, "none", *COMBINATIONS[(place + turn) // 3 % 4], place)
                 for place, name in enumerate(kinds) if (place + turn) % 3 == 0])
        for turn, words in enumerate(WITHOUT) if words.split()[-1] in every
    ])  # fmt: skip
    for kernel, names in enumerate(here):
        assert set(names) <= {sets[kernel] for sets in [best_sets(), *best]}


POOLED = {
    "BERT": "mean", "MPNet": "mean", "DistilBERT": "mean", "NomicBERT": "mean", "GTE": "mean",
    "Gemma 3, bidirectional": "mean", "RoBERTa": "cls", "ModernBERT": "cls", "EuroBERT": "max", "Qwen3": "lasttoken",
    "Mistral": "lasttoken", "BERT, wide": "mean",
}  # fmt: skip


def test_a_text_has_one_pooled_vector() -> None:
    """As sentence-transformers pools. With padding on the left torch cuts the sums of a mean elsewhere."""
    pytest.importorskip("sentence_transformers", reason="package sentence-transformers is not installed")
    pooled = enumerate(POOLED.items())
    look_at([("", [Cell(name, mode, *COMBINATIONS[place % 4], place) for place, (name, mode) in pooled])])


def test_a_head_is_given_the_same_bits() -> None:
    """Heads of classes read first rows, or the last token; heads of tokens read all. Their own layer is torch's."""
    heads = [*CLASSES, *(name for name in EVERY if name.endswith("classifier"))]
    look_at([("", [Cell(name, "head", *COMBINATIONS[place % 4], place) for place, name in enumerate(heads)])])
