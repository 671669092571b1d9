"""The saving of the pipeline around `generate`, against the plain loop of a user: end to end, on a CPU.

    python scripts/bench_pipeline.py ../shared/data/wmt16_enro/newsdev2016.en --vocabulary VOCAB --output docs/pipeline

The time includes tokenization, generation, detokenization and writing. All ways share the loading. The model
has random weights in the shape of T5-small and generates as many tokens for every text, so that all ways do the same
work. All of them use stock generation, and they take turns in every pass. VOCAB is a WordPiece vocabulary, a
token a line. Writes OUTPUT.json and OUTPUT.png.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
from matplotlib.figure import Figure
from transformers import BertTokenizerFast, T5Config, T5ForConditionalGeneration

from attmemo.fastseq import Pipeline
from attmemo.profiler.turns import Job, interleave
from attmemo.system.machine import conditions


def plain_loop(model: Any, tokenizer: Any, texts: list[str], output: Path, batch: int, **generation: Any) -> None:
    """Batches of neighbours, one stage after another."""
    with output.open("w") as file:
        for start in range(0, len(texts), batch):
            inputs = tokenizer(texts[start : start + batch], padding=True, truncation=True, return_tensors="pt")
            sequences = model.generate(
                input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], **generation
            )
            for text in tokenizer.batch_decode(sequences, skip_special_tokens=True):
                file.write(text.replace("\n", " ") + "\n")


def _job(work: Callable[[], None]) -> Job:
    return lambda _: work()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path, help="a text a line")
    parser.add_argument("--vocabulary", type=Path, required=True, help="WordPiece, a token a line")
    parser.add_argument("--output", type=Path, default=Path("docs/pipeline"), help="where to write, without suffix")
    parser.add_argument("--lines", type=int, default=96)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--beams", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()

    with arguments.texts.open() as file:
        texts = [line.rstrip("\n") for line in islice(file, arguments.lines)]
    tokenizer = BertTokenizerFast(vocab_file=str(arguments.vocabulary), model_max_length=512)
    torch.manual_seed(0)
    config = T5Config(
        d_model=512, d_kv=64, num_heads=8, num_layers=6, d_ff=2048, vocab_size=len(tokenizer), initializer_factor=1.0,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=tokenizer.sep_token_id,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config).eval()
    generation = {
        "num_beams": arguments.beams,
        "max_new_tokens": arguments.new_tokens,
        "min_new_tokens": arguments.new_tokens,
        "no_repeat_ngram_size": 3,
    }
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "in").write_text("".join(f"{text}\n" for text in texts))

        def pipeline(way: str, **options: Any) -> None:
            made = Pipeline(model, tokenizer, **options, **generation)
            found[way]["summary"] = asdict(made.run(folder / "in", folder / way))

        ways: dict[str, Callable[[], None]] = {
            "plain loop": partial(
                plain_loop, model, tokenizer, texts, folder / "plain loop", arguments.batch, **generation
            ),
            "pipeline, neighbours": partial(pipeline, "pipeline, neighbours", batch=arguments.batch, buckets=False),
            "pipeline, buckets": partial(pipeline, "pipeline, buckets", batch=arguments.batch),
            "pipeline, buckets, planned batch": partial(pipeline, "pipeline, buckets, planned batch"),
        }
        model.generate(**tokenizer(texts[:2], padding=True, return_tensors="pt", return_token_type_ids=False))
        found.update({way: {} for way in ways})
        for way, times in interleave({way: _job(work) for way, work in ways.items()}, arguments.repeats).items():
            found[way]["seconds"] = [1e-3 * ms for ms in times.milliseconds]
        outputs = {way: (folder / way).read_text().split("\n") for way in ways}
    baseline = median(found["plain loop"]["seconds"])
    for way, result in found.items():
        same = sum(a == b for a, b in zip(outputs[way], outputs["plain loop"], strict=True)) - 1
        result.update(
            median=median(result["seconds"]), ratio=baseline / median(result["seconds"]), lines_as_plain_loop=same
        )
        print(f"{way:34} {result['median']:7.2f} s  {result['ratio']:.2f}x  {same} of {len(texts)} lines the same")
    made_on = {name: value for name, value in conditions().items() if name != "kernel"}
    asked = {name: value for name, value in vars(arguments).items() if isinstance(value, int)}
    arguments.output.with_suffix(".json").write_text(
        json.dumps({"conditions": made_on, "asked": asked, "ways": found}, indent=2) + "\n"
    )
    figure = Figure(figsize=(8, 3), layout="constrained")
    axes = figure.subplots()
    axes.barh(list(found), [result["median"] for result in found.values()], color="#1b9e77")
    axes.invert_yaxis()
    axes.set_xlabel(f"seconds for {len(texts)} sentences, lower is better (median of {arguments.repeats})")
    figure.savefig(arguments.output.with_suffix(".png"), dpi=150)


if __name__ == "__main__":
    main()
