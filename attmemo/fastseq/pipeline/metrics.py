"""ROUGE and BLEU of generated lines against references, by the packages that papers use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from attmemo.errors import AttmemoError
from attmemo.system.extras import install

Measure = Literal["rouge", "bleu"]

_PACKAGES = {"rouge": "rouge-score", "bleu": "sacrebleu"}


def score(measure: Measure, lines: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Score line by line against references.

    Parameters
    ----------
    measure : {"rouge", "bleu"}
        ROUGE-1, -2, -L and -Lsum, each the mean of the lines' F-measures, with Porter's stemmer; or corpus BLEU and
        chrF with sacrebleu's own tokenization (13a).

    Raises
    ------
    AttmemoError
        The package is not installed, or there is not one reference a line.
    """
    check(measure)
    if len(lines) != len(references) or not lines:
        raise AttmemoError(
            f"{len(lines):,} lines were generated, the reference has {len(references):,}: expected as many.",
            "give a reference with one line for each line of the input",
        )
    return _rouge(lines, references) if measure == "rouge" else _bleu(lines, references)


def check(measure: Measure) -> None:
    """Refuse a measure whose package is missing, before the work and not after it."""
    try:
        if measure == "rouge":
            import rouge_score  # noqa: F401
        else:
            import sacrebleu  # noqa: F401
    except ImportError as error:
        raise AttmemoError(
            f"{measure.upper()} needs the package {_PACKAGES[measure]}: {error}.", install("generate")
        ) from error


def _rouge(lines: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    from rouge_score.rouge_scorer import RougeScorer

    names = ("rouge1", "rouge2", "rougeL", "rougeLsum")
    # ROUGE-Lsum compares sentence by sentence; a line of the file holds several.
    scorer = RougeScorer(list(names), use_stemmer=True, split_summaries=False)
    sums = dict.fromkeys(names, 0.0)
    for line, reference in zip(lines, references, strict=True):
        found = scorer.score(_sentences(reference), _sentences(line))
        for name in names:
            sums[name] += found[name].fmeasure
    return {name: 100 * total / len(lines) for name, total in sums.items()}


def _sentences(line: str) -> str:
    """One sentence a line, as ROUGE-Lsum wants it, split at a full stop and a space."""
    return line.replace(". ", ".\n").replace("! ", "!\n").replace("? ", "?\n")


def _bleu(lines: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    import sacrebleu

    both = [list(references)]
    return {
        "bleu": float(sacrebleu.corpus_bleu(list(lines), both).score),
        "chrf": float(sacrebleu.corpus_chrf(list(lines), both).score),
    }
