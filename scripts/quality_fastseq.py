"""Compare what types of `fastseq` write with what float32 writes, on trained weights: docs/fastseq-types.{json,md}.

python scripts/quality_fastseq.py ../shared/data

Two trained models. A small BART, trained here for some minutes by `train_tiny_bart.py`, restores sentences in which
words are left out; ROUGE and BLEU are those against the sentences. stories260K, a Llama, goes on with the beginnings
of sentences of WMT; there is no reference, so ROUGE is that against the text of float32. Both are narrow, so rounding
moves them more than it moves large models. CTranslate2 runs where it is installed.

For bfloat16 it also looks for the step where a greedy text parts from transformers' text in bfloat16: how far apart
the two words were in either, and in the same weights computed in float32; and how many texts transformers itself
changes when it computes attention in another way.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import torch
from bench_fastseq import TYPES, Peer, conditions, made_of
from convert_stories import convert
from fastseq_tables import table_of_types
from measured_at import write_record
from torch import Tensor
from train_tiny_bart import train
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from attmemo import fastseq
from attmemo.fastseq.pipeline.metrics import score

NAMES = ("stock float32", "float32", "bfloat16", "int8", "bfloat16, int8", "CTranslate2 float32", "CTranslate2 int8")
SEARCHES = {"greedy": 1, "4 beams": 4}


def masked(lines: list[str], tokenizer: Any, share: float = 0.15) -> list[str]:
    """Lines with some of their pieces left out, the same every time."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for line in lines:
        ids = torch.tensor(tokenizer(line, add_special_tokens=False)["input_ids"][:60])
        ids[torch.rand(len(ids), generator=generator) < share] = tokenizer.mask_token_id
        found.append(tokenizer.decode(ids.tolist()))
    return found


def write(folder: Path, name: str, lines: list[str], new: int, beams: int, batch: int) -> list[str]:
    """What one type makes of lines."""
    engine, dtype, weights = TYPES[name]
    seq2seq = (folder / "seq2seq").exists()
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="right" if seq2seq else "left")
    if engine == "ctranslate2":
        peer = Peer(folder, new, beams, batch, 1, dtype, 0)
        peer.settings |= {"min_decoding_length": 1} if peer.encoder_decoder else {"min_length": 1}
        return peer(lines)
    kind = AutoModelForSeq2SeqLM if seq2seq else AutoModelForCausalLM
    model: Any = kind.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    if engine == "fastseq":
        model = fastseq.accelerate(model, weights=weights)
    texts: list[str] = []
    for first in range(0, len(lines), batch):
        given = tokenizer(lines[first : first + batch], return_tensors="pt", padding=True, return_token_type_ids=False)
        prompt = 0 if model.config.is_encoder_decoder else given["input_ids"].shape[1]
        tokens = model.generate(**given, num_beams=beams, max_new_tokens=new, do_sample=False)[:, prompt:]
        texts += tokenizer.batch_decode(tokens, skip_special_tokens=True)
    return texts


def compare(task: str, folder: Path, lines: list[str], references: list[str] | None, new: int) -> list[dict[str, Any]]:
    """A row for each search and type."""
    rows = []
    for search, beams in SEARCHES.items():
        expected: list[str] = []
        for name in NAMES:
            try:
                texts = write(folder, name, lines, new, beams, 25)
            except ImportError:
                continue
            expected = expected or texts
            ruler = references or expected
            row: dict[str, Any] = {"task": task, "search": search, "type": name, "lines": len(lines)}
            row["equal"] = sum(one == other for one, other in zip(texts, expected, strict=True))
            row["scores"] = score("rouge", texts, ruler) | score("bleu", texts, ruler)
            rows.append(row)
            print(row, flush=True)
    return rows


def greedy(model: Any, tokenizer: Any, lines: list[str], new: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Of each line what goes in `[n]`, the tokens written `[T]`, and the logits of each step `[T, V]`."""
    found = []
    for first in range(0, len(lines), 25):
        given = tokenizer(lines[first : first + 25], return_tensors="pt", padding=True, return_token_type_ids=False)
        out = model.generate(
            **given, max_new_tokens=new, do_sample=False, return_dict_in_generate=True, output_logits=True
        )
        logits = torch.stack(out.logits, 1).float()
        for row, mask in enumerate(given["attention_mask"].bool()):
            found.append((given["input_ids"][row][mask], out.sequences[row, -logits.shape[1] :], logits[row]))
    return found


def exact_logits(model: Any, source: Tensor, written: Tensor) -> Tensor:
    """Logits `[V]` behind what was written, without a cache and without padding."""
    with torch.no_grad():
        if model.config.is_encoder_decoder:
            start = torch.tensor([model.config.decoder_start_token_id])
            return model(input_ids=source[None], decoder_input_ids=torch.cat((start, written))[None]).logits[0, -1]
        return model(input_ids=torch.cat((source, written))[None]).logits[0, -1]


def partings(task: str, folder: Path, lines: list[str], new: int) -> dict[str, Any]:
    """Where greedy texts of bfloat16 part from those of transformers in bfloat16."""
    seq2seq = (folder / "seq2seq").exists()
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="right" if seq2seq else "left")
    kind = AutoModelForSeq2SeqLM if seq2seq else AutoModelForCausalLM
    stock = kind.from_pretrained(folder, dtype=torch.bfloat16).eval()
    exact = kind.from_pretrained(folder, dtype=torch.bfloat16).eval().float()
    eager = kind.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager").eval()
    theirs, own = (greedy(model, tokenizer, lines, new) for model in (stock, fastseq.accelerate(stock)))
    others = greedy(eager, tokenizer, lines, new)
    found: list[dict[str, float]] = []
    for (source, text, scores), (_, mine, my_scores) in zip(theirs, own, strict=True):
        length = min(len(text), len(mine))
        apart = (text[:length] != mine[:length]).nonzero().flatten().tolist()
        if not apart:
            continue
        step = apart[0]
        pair = torch.stack((text[step], mine[step]))
        right = exact_logits(exact, source, text[:step])
        top = float(scores[step, pair[0]].abs())
        found.append({
            "step": step, "gap": float(scores[step, pair[0]] - scores[step, pair[1]]),
            "own_gap": float(my_scores[step, pair[1]] - my_scores[step, pair[0]]),
            "exact_gap": float(right[pair[0]] - right[pair[1]]),
            "spacing": 2.0 ** (math.floor(math.log2(max(top, 1e-30))) - 7),
            "off": float((scores[step] - right).std()), "own_off": float((my_scores[step] - right).std()),
        })  # fmt: skip
    equal = {
        name: sum(torch.equal(one[1], other[1]) for one, other in zip(theirs, some, strict=True))
        for name, some in (("fastseq", own), ("eager", others))
    }
    return {"task": task, "lines": len(lines), "equal": equal, "partings": found}


def main() -> None:
    """Train, write texts, compare; the rest of the record is kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--lines", type=int, default=400)
    parser.add_argument("--output", type=Path, default=Path("docs/fastseq-types"), help="without an ending")
    parser.add_argument("--stories", action="store_true", help="only where stories260K's texts in bfloat16 part")
    options = parser.parse_args()
    options.device, options.dtype, options.rounds = "cpu", "several", 1
    facts = conditions(options) | made_of()
    record = json.loads(options.output.with_suffix(".json").read_text())
    parted: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        sentences = (options.data / "wmt16_enro" / "newsdev2016.en").read_text().splitlines()[-options.lines :]
        if not options.stories:
            folder = Path(place, "bart")
            model, tokenizer, sentences = train(options.data / "wmt16_enro", options.steps, held_out=options.lines)
            model.config.normalize_before = False  # CTranslate2 asks for it
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            (folder / "seq2seq").touch()
            holes = masked(sentences, tokenizer)
            rows = compare("restore sentences", folder, holes, sentences, 80)
            parted = [partings("restore sentences", folder, holes, 80)]
        folder = Path(place, "stories")
        convert(options.data / "weights_stories260K", folder)
        beginnings = [" ".join(line.split()[:6]) for line in sentences[: options.lines // 4]]
        if not options.stories:
            rows += compare("continue sentences", folder, beginnings, None, 60)
            record["quality"] = {"conditions": facts, "steps": options.steps, "rows": rows}
        parted.append(partings("continue sentences", folder, beginnings, 60))
    kept = [task for task in record.get("bfloat16", []) if task["task"] not in {task["task"] for task in parted}]
    record["bfloat16"] = kept + [task | {"conditions": facts} for task in parted]
    write_record(options.output.with_suffix(".json"), record)
    options.output.with_suffix(".md").write_text(table_of_types(record))


if __name__ == "__main__":
    main()
