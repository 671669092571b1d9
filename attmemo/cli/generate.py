"""`attmemo generate`: a line of output for every line of a file."""

from __future__ import annotations

import json as jsonlib
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from attmemo.cli.console import Output, cell, output
from attmemo.cli.files import check_apart, check_writable
from attmemo.cli.options import Json, Quiet

if TYPE_CHECKING:
    from attmemo.fastseq.pipeline.metrics import Measure

CONTEXT: Any = {"token_normalize_func": lambda name: name.replace("_", "-")}
"""Options are taken with underscores too, as FastSeq's command spells them."""

AUTO: Any = "auto"


def parse_batch(text: str) -> int | str:
    """``auto``, or a number of texts."""
    if text == "auto":
        return text
    if not text.isdigit() or int(text) < 1:
        raise typer.BadParameter(f"{text!r} is not a batch size; write auto, or a number of texts.")
    return int(text)


def check_batch(text: str) -> str:
    """Refuse what `parse_batch` cannot read; typer has no type for what it returns."""
    parse_batch(text)
    return text


def generate(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A model directory, or a name on the hub.", show_default=False)
    ],
    source: Annotated[Path, typer.Argument(metavar="INPUT", help="UTF-8, a text a line.", show_default=False)],
    destination: Annotated[
        Path,
        typer.Argument(metavar="OUTPUT", help="File to write: a line for every line of INPUT.", show_default=False),
    ],
    task: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="What for: summarization, translation, or a task of the model's own configuration, whose prefix and "
            "settings are then used. With a reference, translation is scored by BLEU, all else by ROUGE.",
        ),
    ] = "summarization",
    causal_lm: Annotated[
        bool, typer.Option("--causal-lm", help="Load as a decoder; models without an encoder always are.")
    ] = False,
    device: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="cpu, cuda, cuda:1, …  [default: a GPU if there is one]"),
    ] = None,
    dtype: Annotated[
        Literal["float32", "float16", "bfloat16"], typer.Option(help="What the model computes in.")
    ] = "float32",
    fp16: Annotated[bool, typer.Option("--fp16", help="The same as --dtype float16.")] = False,
    batch_size: Annotated[
        str,
        typer.Option(
            "--batch-size",
            "--bs",
            metavar="N",
            callback=check_batch,
            help="Texts in a batch; auto: the most that fit in memory. One that does not fit is halved.",
        ),
    ] = AUTO,
    num_beams: Annotated[
        int | None,
        typer.Option("--num-beams", "--beam", metavar="N", min=1, help="Beams.  [default: the model's own]"),
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Tokens to generate at most.  [default: the model's own]")
    ] = None,
    max_gen_length: Annotated[
        int | None,
        typer.Option(
            "--max-gen-length",
            "--max-length",
            metavar="N",
            min=1,
            help="The same, for a decoder with its padded prompt.",
        ),
    ] = None,
    min_gen_length: Annotated[
        int | None,
        typer.Option("--min-gen-length", "--min-length", metavar="N", help="Tokens to generate at least."),
    ] = None,
    min_new_tokens: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="The same, for a decoder without its prompt.")
    ] = None,
    no_repeat_ngram_size: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="No N tokens twice in an output.")
    ] = None,
    encoder_no_repeat_ngram_size: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="No N tokens of the text in its output.")
    ] = None,
    length_penalty: Annotated[
        float | None, typer.Option(metavar="X", help="Above 0: beam search likes long outputs.")
    ] = None,
    early_stopping: Annotated[
        bool | None, typer.Option(help="Stop beam search when there are as many outputs as beams.")
    ] = None,
    early_stopping_never: Annotated[
        bool, typer.Option("--early-stopping-never", help="Stop it when no longer output could be better.")
    ] = False,
    num_return_sequences: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Outputs for each text, in one line, joined by ####.")
    ] = None,
    do_sample: Annotated[
        bool | None,
        typer.Option("--do-sample/--no-do-sample", help="Draw tokens at random.  [default: the model's own]"),
    ] = None,
    temperature: Annotated[float | None, typer.Option(metavar="X", help="Of sampling.")] = None,
    top_k: Annotated[int | None, typer.Option(metavar="N", min=0, help="Sample among the N likeliest.")] = None,
    top_p: Annotated[
        float | None, typer.Option(metavar="P", min=0.0, max=1.0, help="Sample among the likeliest, P together.")
    ] = None,
    min_p: Annotated[
        float | None, typer.Option(metavar="P", min=0.0, max=1.0, help="Sample none below P times the likeliest.")
    ] = None,
    typical_p: Annotated[
        float | None, typer.Option(metavar="P", min=0.0, max=1.0, help="Sample among the most typical, P together.")
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(metavar="X", help="Above 1: tokens that were used become less likely.")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            help="Of sampling. A resumed run samples as one that was not interrupted, unless memory ran out.",
        ),
    ] = None,
    decoder_start_token_id: Annotated[
        int | None, typer.Option(metavar="ID", help="Token to begin with.  [default: the model's own]")
    ] = None,
    eos_token_id: Annotated[
        int | None, typer.Option(metavar="ID", help="Token to end with.  [default: the model's own]")
    ] = None,
    source_lang: Annotated[
        str | None, typer.Option(metavar="CODE", help="Language of the input, for models of many (mBART, NLLB).")
    ] = None,
    target_lang: Annotated[
        str | None, typer.Option(metavar="CODE", help="Language of the output, for models of many.")
    ] = None,
    prefix: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Put before every text.  [default: the model's, for the task]")
    ] = None,
    max_tokenizer_length: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Cut texts to N tokens.  [default: what the model takes]")
    ] = None,
    no_truncation: Annotated[
        bool, typer.Option("--no-truncation", help="Refuse texts that are longer than the model takes.")
    ] = False,
    padding: Annotated[
        Literal["longest", "max_length"],
        typer.Option(help="Pad to the longest of the batch, or all to the greatest length; the output is the same."),
    ] = "longest",
    padding_side: Annotated[
        Literal["left", "right"] | None, typer.Option(help="Where padding goes.  [default: as the model needs it]")
    ] = None,
    use_slow_tokenizer: Annotated[
        bool,
        typer.Option("--use-slow-tokenizer", help="Taken for FastSeq's sake: transformers 5 has one for each model."),
    ] = False,
    return_tensors: Annotated[
        Literal["pt"], typer.Option(help="Taken for FastSeq's sake; tensors are torch's.")
    ] = "pt",
    include_special_tokens: Annotated[
        bool, typer.Option("--include-special-tokens", help="Leave special tokens in the output.")
    ] = False,
    clean_up_tokenization_spaces: Annotated[
        bool, typer.Option("--clean-up-tokenization-spaces", help="Take away spaces before punctuation.")
    ] = False,
    output_summaries_only: Annotated[
        bool, typer.Option("--output-summaries-only", help="Of a decoder: what follows the text, without the text.")
    ] = False,
    output_sequence_scores: Annotated[
        bool, typer.Option("--output-sequence-scores", help="After each output a tab and its score (beam search).")
    ] = False,
    n_obs: Annotated[
        int | None,
        typer.Option("--n-obs", "--limit", metavar="N", help="Only the first N lines; below 0, and by default, all."),
    ] = None,
    preprocess_workers: Annotated[int, typer.Option(metavar="N", min=1, help="Threads that tokenize ahead.")] = 2,
    postprocess_workers: Annotated[
        int, typer.Option(metavar="N", min=1, help="Threads that turn tokens into text behind.")
    ] = 1,
    window: Annotated[
        int,
        typer.Option(metavar="N", min=1, help="Lines that are sorted by length together, so that little is padded."),
    ] = 512,
    buckets: Annotated[bool, typer.Option(help="Sort lines by length; else batches are of neighbours.")] = True,
    without_fastseq_opt: Annotated[
        bool, typer.Option("--without-fastseq-opt", help="Generate as stock transformers does, for comparison.")
    ] = False,
    attention: Annotated[
        Literal["auto", "shared", "el"],
        typer.Option(
            help="How the fast path keeps the states of a text: keys and values once for all beams, or one hidden "
            "state for all layers (smaller, more arithmetic). auto: as the model and the machine want it."
        ),
    ] = "auto",
    restart: Annotated[
        bool, typer.Option("--restart", help="Begin anew, whatever an interrupted run has left.")
    ] = False,
    reference_path: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="What the lines should be: score the output against it. Needs pip install 'attmemo[generate]'.",
        ),
    ] = None,
    score_path: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the scores as JSON; with --reference-path.")
    ] = None,
    json: Json = None,
    quiet: Quiet = False,
) -> None:
    """Generate a line of text for every line of a file.

    Summaries, translations, continuations: with any encoder-decoder or causal language model of transformers, and the
    outputs that its own generate would give. Stopping is safe at any time: the same command goes on where it ended.
    A blank line gives a blank line. Takes the options of FastSeq's command, underscores and all.

    \b
    attmemo generate ./bart-large-cnn articles.txt summaries.txt --num-beams 4 --no-repeat-ngram-size 3
    attmemo generate org/opus-mt en.txt ro.txt --task translation --reference-path ro.ref --score-path bleu.json
    """
    if score_path is not None and reference_path is None:
        raise typer.BadParameter("--score-path needs --reference-path.")
    if early_stopping_never and early_stopping is not None:
        raise typer.BadParameter("--early-stopping-never, or one of --early-stopping and --no-early-stopping.")
    if n_obs == 0:
        raise typer.BadParameter("--limit 0 is no line at all; leave it out, or give -1, for all lines.")
    stopped = f"interrupted; {destination}.part holds what was generated, the same command resumes"
    with output(json, quiet, stopped) as out:
        from attmemo.errors import AttmemoError

        part = destination.with_name(destination.name + ".part")
        written = {"OUTPUT": destination, "OUTPUT.part": part, "--score-path": score_path}
        if json is not None and json != "-":
            written["--json"] = Path(json)
        read = {"INPUT": source, "the reference": reference_path}
        check_apart(*({name: path for name, path in files.items() if path is not None} for files in (written, read)))
        measure: Measure = "bleu" if "translation" in task else "rouge"
        limit = None if n_obs is None or n_obs < 0 else n_obs  # FastSeq's -1: all
        references = None
        if reference_path is not None:
            references = _references(reference_path, source, limit, measure)
        if score_path is not None:
            check_writable("--score-path", score_path)

        import torch

        from attmemo.fastseq.pipeline.loading import load_generator
        from attmemo.fastseq.pipeline.pipeline import Pipeline
        from attmemo.loading import quiet as hushed

        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        out.say(f"Loading {model}")
        loaded = load_generator(
            model,
            dtype=torch.float16 if fp16 else getattr(torch, dtype),
            device=device,
            causal=causal_lm,
            task=task,
        )
        settings = dict(loaded.settings)
        if max_new_tokens is not None or max_gen_length is not None:
            settings.pop("max_length", None)
        asked = {
            "num_beams": num_beams,
            "max_new_tokens": max_new_tokens,
            "max_length": max_gen_length,
            "min_length": min_gen_length if min_gen_length is not None and min_gen_length >= 0 else None,
            "no_repeat_ngram_size": no_repeat_ngram_size,
            "encoder_no_repeat_ngram_size": encoder_no_repeat_ngram_size,
            "length_penalty": length_penalty,
            "min_new_tokens": min_new_tokens,
            "early_stopping": "never" if early_stopping_never else early_stopping,
            "num_return_sequences": num_return_sequences,
            "do_sample": do_sample,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "typical_p": typical_p,
            "repetition_penalty": repetition_penalty,
            "decoder_start_token_id": decoder_start_token_id,
            "eos_token_id": eos_token_id,
            "forced_bos_token_id": _languages(loaded.tokenizer, source_lang, target_lang),
            "output_scores": output_sequence_scores or None,
        }
        settings.update({name: value for name, value in asked.items() if value is not None})
        maker = loaded.model
        if not without_fastseq_opt:
            from attmemo.fastseq import wrap

            maker = wrap(loaded.model, attention=attention)
        pipeline = Pipeline(
            maker,
            loaded.tokenizer,
            batch=parse_batch(batch_size),  # type: ignore[arg-type]
            window=window,
            buckets=buckets,
            prefix=loaded.prefix if prefix is None else prefix,
            max_source=max_tokenizer_length,
            truncate=not no_truncation,
            padding=padding,
            padding_side=padding_side,
            new_only=output_summaries_only,
            keep_special=include_special_tokens,
            clean_up=clean_up_tokenization_spaces or None,
            encoders=preprocess_workers,
            decoders=postprocess_workers,
            seed=seed,
            config=loaded.model.config,
            device=device,
            progress=out.stages,
            **settings,
        )
        try:
            with hushed():
                done = pipeline.run(
                    source,
                    destination,
                    limit=limit,
                    resume=not restart,
                    identity={"source_lang": source_lang, "target_lang": target_lang},
                )
        except ValueError as error:
            if not _refuses_options(error):
                raise
            refused = str(error).strip().splitlines() or ["no reason given"]
            raise AttmemoError(f"these options cannot be generated with: {refused[0]}", "change them") from error
        found: dict[str, Any] = {
            "model": model,
            "output": str(destination),
            "fastseq": not without_fastseq_opt and maker.cache_mode_for(settings) != "stock",
            **asdict(done),
        }
        if not without_fastseq_opt:
            found["fastseq_stats"] = maker.stats()
        _say(out, destination, found)
        if references is not None:
            several = settings.get("num_return_sequences", 1) > 1
            found["scores"] = _score(measure, destination, references, several, output_sequence_scores)
            out.say("  " + ", ".join(f"{name} {cell(value)}" for name, value in found["scores"].items()))
            if score_path is not None:
                score_path.write_text(jsonlib.dumps(found["scores"], indent=2) + "\n", encoding="utf-8")
        out.result(found)


def _references(path: Path, source: Path, limit: int | None, measure: Measure) -> list[str]:
    """The reference's lines, one for each that will be generated; refused before the work, not after it."""
    from itertools import islice

    from attmemo.errors import DataError
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
    from attmemo.errors import AttmemoError

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
        f"  {found['lines']:,} lines ({found['generated']:,} generated now, {found['resumed']:,} there before), "
        f"{found['seconds']:.1f} s, {rate:.2f} a second, {found['batches']:,} batches"
    )
    if found["blank"]:
        out.say(f"  {found['blank']:,} lines were blank and stay so.")
    if found["truncated"]:
        out.say(f"  {found['truncated']:,} texts were cut to what the model takes; --no-truncation refuses them.")
    for reason, count in found.get("fastseq_stats", {}).get("stock_reasons", {}).items():
        out.say(f"  {count:,} batches took the stock path: {reason}.")
    if found["halvings"]:
        out.say(f"  Memory ran out and the batch was halved {found['halvings']:,} times.")
