"""`attmemo generate`: a line of output for every line of a file."""

from __future__ import annotations

import json as jsonlib
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import typer

from attmemo.cli.console import Output, cell, output
from attmemo.cli.files import check_apart, check_writable
from attmemo.cli.generate_options import CHOICES, signature
from attmemo.errors import AttmemoError, DataError
from attmemo.wording import counted

if TYPE_CHECKING:
    from attmemo.fastseq.pipeline.loading import Generator
    from attmemo.fastseq.pipeline.metrics import Measure

CONTEXT: Any = {"token_normalize_func": lambda name: name.replace("_", "-")}
"""Options are taken with underscores too, as FastSeq's command spells them."""


def generate(**given: Any) -> None:
    """Generate a line of text for every line of a file.

    Summaries, translations, continuations: with any encoder-decoder or causal language model of transformers, and the
    outputs that its own generate would give. Stopping is safe at any time: the same command goes on where it ended.
    A blank line gives a blank line. Takes the options of FastSeq's command, underscores and all.

    \b
    attmemo generate ./bart-large-cnn articles.txt summaries.txt --num-beams 4 --no-repeat-ngram-size 3
    attmemo generate org/opus-mt en.txt ro.txt --task translation --reference-path ro.ref --score-path bleu.json
    """
    asked = SimpleNamespace(**given)  # one attribute for each row of `CHOICES`
    _check_usage(asked)
    stopped = f"interrupted; {asked.destination}.part holds what was generated, the same command resumes"
    with output(asked.json, asked.quiet, stopped) as out:
        _check_files(asked)
        measure: Measure = "bleu" if "translation" in asked.task else "rouge"
        limit = None if asked.n_obs is None or asked.n_obs < 0 else asked.n_obs  # FastSeq's -1: all
        references = asked.reference_path and _references(asked.reference_path, asked.source, limit, measure)
        if asked.score_path is not None:
            check_writable("--score-path", asked.score_path)
        out.say(f"Loading {asked.model}")
        loaded = _load(asked)
        settings = _settings(asked, loaded)
        fast, maker = not asked.without_fastseq_opt, loaded.model
        if fast:
            from attmemo.fastseq import accelerate

            maker = accelerate(maker, weights=asked.weights, attention=asked.attention)
        done = _run(asked, loaded, maker, settings, limit, out)
        found: dict[str, Any] = {"model": asked.model, "output": str(asked.destination)}
        found |= {"fastseq": fast and maker.cache_mode_for(settings) != "stock", **asdict(done)}
        if fast:
            found["fastseq_stats"] = maker.stats()
        _say(out, asked.destination, found)
        if references is not None:
            several = settings.get("num_return_sequences", 1) > 1
            found["scores"] = _score(measure, asked.destination, references, several, asked.output_sequence_scores)
            out.say("  " + ", ".join(f"{name} {cell(value)}" for name, value in found["scores"].items()))
            if asked.score_path is not None:
                asked.score_path.write_text(jsonlib.dumps(found["scores"], indent=2) + "\n", encoding="utf-8")
        out.result(found)


generate.__signature__ = signature()  # type: ignore[attr-defined]


def _check_usage(asked: SimpleNamespace) -> None:
    """Refuse options that contradict each other."""
    if asked.score_path is not None and asked.reference_path is None:
        raise typer.BadParameter("--score-path needs --reference-path.")
    if asked.early_stopping_never and asked.early_stopping is not None:
        raise typer.BadParameter("--early-stopping-never, or one of --early-stopping and --no-early-stopping.")
    if asked.weights is not None and asked.without_fastseq_opt:
        raise typer.BadParameter("--weights are fastseq's: leave out --without-fastseq-opt.")
    if asked.n_obs == 0:
        raise typer.BadParameter("--limit 0 is no line at all; leave it out, or give -1, for all lines.")


def _check_files(asked: SimpleNamespace) -> None:
    """Refuse a file that would be written over another one."""
    part = asked.destination.with_name(asked.destination.name + ".part")
    written = {"OUTPUT": asked.destination, "OUTPUT.part": part, "--score-path": asked.score_path}
    if asked.json is not None and asked.json != "-":
        written["--json"] = Path(asked.json)
    read = {"INPUT": asked.source, "the reference": asked.reference_path}
    check_apart(*({name: path for name, path in files.items() if path is not None} for files in (written, read)))


def _load(asked: SimpleNamespace) -> Generator:
    import torch

    from attmemo.fastseq.pipeline.loading import load_generator

    asked.device = asked.device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.float16 if asked.fp16 else getattr(torch, asked.dtype)
    return load_generator(asked.model, dtype=dtype, device=asked.device, causal=asked.causal_lm, task=asked.task)


def _settings(asked: SimpleNamespace, loaded: Generator) -> dict[str, Any]:
    """Arguments of the model's ``generate``: those of its configuration for the task, then those that were given."""
    settings = dict(loaded.settings)
    if asked.max_new_tokens is not None or asked.max_gen_length is not None:
        settings.pop("max_length", None)
    given = {choice.setting: getattr(asked, choice.name) for choice in CHOICES if choice.setting}
    if asked.min_gen_length is not None and asked.min_gen_length < 0:  # FastSeq's -1: none
        given["min_length"] = None
    given["early_stopping"] = "never" if asked.early_stopping_never else asked.early_stopping
    given["forced_bos_token_id"] = _languages(loaded.tokenizer, asked.source_lang, asked.target_lang)
    given["output_scores"] = asked.output_sequence_scores or None
    return settings | {name: value for name, value in given.items() if value is not None}


def _run(
    asked: SimpleNamespace, loaded: Generator, maker: Any, settings: dict[str, Any], limit: int | None, out: Output
) -> Any:
    from attmemo.fastseq.pipeline.pipeline import Pipeline
    from attmemo.loading import quiet

    pipeline = Pipeline(
        maker, loaded.tokenizer,
        prefix=loaded.prefix if asked.prefix is None else asked.prefix, truncate=not asked.no_truncation,
        clean_up=asked.clean_up_tokenization_spaces or None, config=loaded.model.config, device=asked.device,
        progress=out.stages, **{choice.pipeline: getattr(asked, choice.name) for choice in CHOICES if choice.pipeline},
        **settings,
    )  # fmt: skip
    made_with = {"source_lang": asked.source_lang, "target_lang": asked.target_lang, "weights": asked.weights}
    try:
        with quiet():
            resume = not asked.restart
            return pipeline.run(asked.source, asked.destination, limit=limit, resume=resume, identity=made_with)
    except ValueError as error:
        if not _refuses_options(error):
            raise
        refused = str(error).strip().splitlines() or ["no reason given"]
        raise AttmemoError(f"these options cannot be generated with: {refused[0]}", "change them") from error


def _references(path: Path, source: Path, limit: int | None, measure: Measure) -> list[str]:
    """The reference's lines, one for each that will be generated; refused before the work, not after it."""
    from attmemo.fastseq.pipeline.lines import count_lines, read_lines
    from attmemo.fastseq.pipeline.metrics import check

    check(measure)
    lines, _ = count_lines(source, limit)
    references = list(islice(read_lines(path), limit))
    if len(references) != lines:
        raise DataError(
            f"{path} has {len(references):,} lines, {source} has {lines:,}: expected as many.",
            "give a reference with one line for each line of the input",
        )
    return references


def _refuses_options(error: ValueError) -> bool:
    """Whether transformers' generation itself raised it, and not a file, a tokenizer or the model's arithmetic."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and str(trace.tb_frame.f_globals.get("__name__")).startswith("transformers.generation.")


def _score(measure: Measure, destination: Path, references: list[str], joined: bool, scored: bool) -> dict[str, float]:
    from attmemo.fastseq.pipeline.lines import read_lines
    from attmemo.fastseq.pipeline.metrics import score
    from attmemo.fastseq.pipeline.result import best_of

    lines = [best_of(line, joined=joined, scored=scored) for line in read_lines(destination)]
    return score(measure, lines, references)


def _languages(tokenizer: Any, source: str | None, target: str | None) -> int | None:
    """Tell the tokenizer its languages; returns the token that the target language begins with."""
    for option, code in (("--source-lang", source), ("--target-lang", target)):
        if code is None:
            continue
        if not hasattr(tokenizer, "src_lang"):
            raise AttmemoError(f"{option} {code}: this model has no languages to choose from.", f"leave out {option}")
        if tokenizer.convert_tokens_to_ids(code) in (None, tokenizer.unk_token_id):
            raise AttmemoError(
                f"{option} {code}: the tokenizer does not know it.", "codes look like en_XX or eng_Latn"
            )
    if source is not None:
        tokenizer.src_lang = source
    return None if target is None else int(tokenizer.convert_tokens_to_ids(target))


def _say(out: Output, destination: Path, found: dict[str, Any]) -> None:
    out.say(str(destination))
    rate = found["generated"] / found["seconds"] if found["seconds"] else 0.0
    out.say(
        f"  {counted(found['lines'], 'line')} ({found['generated']:,} generated now, {found['resumed']:,} there "
        f"before), {found['seconds']:.1f} s, {rate:.2f} a second, {counted(found['batches'], 'batch', 'batches')}"
    )
    if found["blank"]:
        out.say(f"  {counted(found['blank'], 'line')} left blank.")
    if found["truncated"]:
        out.say(f"  {counted(found['truncated'], 'text')} cut to what the model takes; --no-truncation refuses them.")
    for reason, count in found.get("fastseq_stats", {}).get("stock_reasons", {}).items():
        out.say(f"  {counted(count, 'batch', 'batches')} took the original path: {reason}.")
    if found["halvings"]:
        out.say(f"  Memory ran out and the batch was halved {found['halvings']:,} times.")
