"""The options of `attmemo generate`, as a table: name, type, default, help, flags, and where the value goes."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from attmemo.cli.options import Json, Quiet


def parse_batch(text: str) -> int | Literal["auto"]:
    """``auto``, or a number of texts."""
    if text == "auto":
        return "auto"
    if not text.isdigit() or int(text) < 1:
        raise typer.BadParameter(f"{text!r} is not a batch size; write auto, or a number of texts.")
    return int(text)


@dataclass(frozen=True)
class Choice:
    """One option: its name in Python, how typer reads it, and the argument that takes its value.

    `setting` is an argument of the model's ``generate``, set if the user gives a value; `pipeline` one of
    `attmemo.fastseq.Pipeline`.
    """

    name: str
    annotation: Any
    default: Any
    setting: str = ""
    pipeline: str = ""


def _option(name: str, kind: Any, default: Any, text: str, flags: str = "", *, to: str = "", **more: Any) -> Choice:
    """An option for the command itself or, with `to`, for an argument of the pipeline."""
    if kind in (int, float):
        more.setdefault("metavar", "N" if kind is int else "X")
    kind = kind | None if default is None else kind
    return Choice(name, Annotated[kind, typer.Option(*flags.split(), help=text, **more)], default, pipeline=to)


def _flag(name: str, text: str, *, to: str = "") -> Choice:
    """An option without a value and without a ``--no-`` twin."""
    return _option(name, bool, False, text, "--" + name.replace("_", "-"), to=to)


def _setting(name: str, kind: Any, text: str, flags: str = "", *, to: str = "", **more: Any) -> Choice:
    """An argument of the model's ``generate``, of the same name or named by `to`; the model's own if not given."""
    return replace(_option(name, kind, None, text, flags, **more), setting=to or name)


_SHARE: Any = {"metavar": "P", "min": 0.0, "max": 1.0}
_FILE: Any = {"metavar": "FILE"}

CHOICES: tuple[Choice, ...] = (
    _option("task", str, "summarization", "What for: summarization, translation, or a task of the model's own "
            "configuration, whose prefix and settings are then used. With a reference, translation is scored by BLEU, "
            "all else by ROUGE.", metavar="NAME"),
    _flag("causal_lm", "Load as a decoder; models without an encoder always are."),
    _option("device", str, None, "cpu, cuda, cuda:1, …  [default: a GPU if there is one]", metavar="NAME"),
    _option("dtype", Literal["float32", "float16", "bfloat16"], "float32", "What the model computes in."),
    _flag("fp16", "The same as --dtype float16."),
    _option("weights", Literal["int8"], None, "int8: linear layers in 8 bits; faster, and other texts at times. CPU."),
    _option("batch_size", Any, "auto", "Texts in a batch; auto: the most that fit in memory. One that does not fit is "
            "halved.", "--batch-size --bs", to="batch", metavar="N", parser=parse_batch),
    _setting("num_beams", int, "Beams.  [default: the model's own]", "--num-beams --beam", min=1),
    _setting("max_new_tokens", int, "Tokens to generate at most.  [default: the model's own]", min=1),
    _setting("max_gen_length", int, "The same, for a decoder with its padded prompt.", "--max-gen-length --max-length",
             to="max_length", min=1),
    _setting("min_gen_length", int, "Tokens to generate at least.", "--min-gen-length --min-length", to="min_length"),
    _setting("min_new_tokens", int, "The same, for a decoder without its prompt.", min=0),
    _setting("no_repeat_ngram_size", int, "No N tokens twice in an output.", min=0),
    _setting("encoder_no_repeat_ngram_size", int, "No N tokens of the text in its output.", min=0),
    _setting("length_penalty", float, "Above 0: beam search likes long outputs."),
    _option("early_stopping", bool, None, "Stop beam search when there are as many outputs as beams."),
    _flag("early_stopping_never", "Stop it when no longer output could be better."),
    _setting("num_return_sequences", int, "Outputs for each text, in one line, joined by ####.", min=1),
    _setting("do_sample", bool, "Draw tokens at random.  [default: the model's own]", "--do-sample/--no-do-sample"),
    _setting("temperature", float, "Of sampling."),
    _setting("top_k", int, "Sample among the N likeliest.", min=0),
    _setting("top_p", float, "Sample among the likeliest, P together.", **_SHARE),
    _setting("min_p", float, "Sample none below P times the likeliest.", **_SHARE),
    _setting("typical_p", float, "Sample among the most typical, P together.", **_SHARE),
    _setting("repetition_penalty", float, "Above 1: tokens that were used become less likely."),
    _option("seed", int, None, "Of sampling. A resumed run samples as one that was not interrupted, unless memory ran "
            "out.", to="seed", min=0),
    _setting("decoder_start_token_id", int, "Token to begin with.  [default: the model's own]", metavar="ID"),
    _setting("eos_token_id", int, "Token to end with.  [default: the model's own]", metavar="ID"),
    _option("source_lang", str, None, "Language of the input, for models of many (mBART, NLLB).", metavar="CODE"),
    _option("target_lang", str, None, "Language of the output, for models of many.", metavar="CODE"),
    _option("prefix", str, None, "Put before every text.  [default: the model's, for the task]", metavar="TEXT"),
    _option("max_tokenizer_length", int, None, "Cut texts to N tokens.  [default: what the model takes]",
            to="max_source", min=1),
    _flag("no_truncation", "Refuse texts that are longer than the model takes."),
    _option("padding", Literal["longest", "max_length"], "longest", "Pad to the longest of the batch, or all to the "
            "greatest length; the output is the same.", to="padding"),
    _option("padding_side", Literal["left", "right"], None, "Where padding goes.  [default: as the model needs it]",
            to="padding_side"),
    _flag("use_slow_tokenizer", "Taken for FastSeq's sake: transformers 5 has one for each model."),
    _option("return_tensors", Literal["pt"], "pt", "Taken for FastSeq's sake; tensors are torch's."),
    _flag("include_special_tokens", "Leave special tokens in the output.", to="keep_special"),
    _flag("clean_up_tokenization_spaces", "Take away spaces before punctuation."),
    _flag("output_summaries_only", "Of a decoder: what follows the text, without the text.", to="new_only"),
    _flag("output_sequence_scores", "After each output a tab and its score (beam search)."),
    _option("n_obs", int, None, "Only the first N lines; below 0, and by default, all.", "--n-obs --limit"),
    _option("preprocess_workers", int, 2, "Threads that tokenize ahead.", to="encoders", min=1),
    _option("postprocess_workers", int, 1, "Threads that turn tokens into text behind.", to="decoders", min=1),
    _option("window", int, 512, "Lines that are sorted by length together, so that little is padded.", to="window",
            min=1),
    _option("buckets", bool, True, "Sort lines by length; else batches are of neighbours.", to="buckets"),
    _flag("without_fastseq_opt", "Generate as transformers alone does, for comparison."),
    _option("attention", Literal["auto", "shared", "el"], "auto", "How the fast path keeps the states of a text: keys "
            "and values once for all beams, or one hidden state for all layers (smaller, more arithmetic). auto: as "
            "the model and the machine want it."),
    _flag("restart", "Begin anew, whatever an interrupted run has left."),
    _option("reference_path", Path, None, "What the lines should be: score the output against it. Needs "
            "pip install '.[generate]'.", **_FILE),
    _option("score_path", Path, None, "Write the scores as JSON; with --reference-path.", **_FILE),
)  # fmt: skip


def signature() -> inspect.Signature:
    """The whole command's: its arguments, `CHOICES`, and what all commands share."""
    needed = inspect.Parameter.empty
    arguments = (
        Choice("model", _argument(str, "MODEL", "A model directory, or a name on the hub."), needed),
        Choice("source", _argument(Path, "INPUT", "UTF-8, a text a line."), needed),
        Choice("destination", _argument(Path, "OUTPUT", "File to write: a line for every line of INPUT."), needed),
    )
    shared = (Choice("json", Json, None), Choice("quiet", Quiet, False))
    return inspect.Signature([
        inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=one.default, annotation=one.annotation)
        for one in (*arguments, *CHOICES, *shared)
    ])  # fmt: skip


def _argument(kind: Any, metavar: str, text: str) -> Any:
    return Annotated[kind, typer.Argument(metavar=metavar, help=text, show_default=False)]
