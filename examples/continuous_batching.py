"""Serve a small Llama to requests that come and go, and measure the price of a quantised cache.

    python examples/continuous_batching.py ../shared/data/weights_stories260K

The folder is a llama2.c checkpoint (converted on the way, see scripts/convert_stories.py), or a Llama checkpoint of
transformers with its tokenizer. Prompts of different lengths arrive at different steps. Prefill and decode go through
the model together. Prompts with the same beginning share pages, and when pages run out a request waits. The script
compares the answers with the text that transformers generates for each prompt alone. Then it prints the perplexity of
examples/stories.txt, which the model has not seen, with caches of several types.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from attmemo.fastseq.serving.cached_model import CachedModel, make_cache
from attmemo.fastseq.serving.server import Request, Server, ServerStats

HERE = Path(__file__).resolve().parent
PROMPTS = (
    "Once upon a time",
    "Once upon a time, there was a little girl named Lily. She loved to play with her toys. One day, she",
    "Once upon a time, there was a little girl named Lily. She loved to play with her toys. Her mom said",
    "The dog was sad because",
    "Tom and Sue went to the park. They saw a big tree and wanted to climb it. Tom said",
    "One day, a small bird",
    "Once upon a time, there was a little girl named Lily. She loved to play with her toys. In the garden",
    "Ben had a red ball. He liked to play with it every day. But one day",
)
CACHES: dict[str, dict[str, Any]] = {
    "float32": {},
    "int8, groups of 8": {"quant_bit": 8, "quant_group": 8},
    "int8, groups of 8, float16 scales": {"quant_bit": 8, "quant_group": 8, "scale_dtype": torch.float16},
    "int4, groups of 2, float16 scales": {"quant_bit": 4, "quant_group": 2, "scale_dtype": torch.float16},
    "int4, groups of 4, float16 scales": {"quant_bit": 4, "quant_group": 4, "scale_dtype": torch.float16},
    "int4, groups of 8, float16 scales": {"quant_bit": 4, "quant_group": 8, "scale_dtype": torch.float16},
}


@dataclass(frozen=True)
class Arrival:
    """A request and the step at which it arrives."""

    step: int
    prompt: list[int]
    max_new_tokens: int


@dataclass(frozen=True)
class Quality:
    """The quality of predictions with one kind of cache."""

    cache: str
    bytes_per_token: int
    perplexity: float


def load(folder: Path) -> tuple[Any, Any]:
    """Model and tokenizer; a llama2.c checkpoint is converted first."""
    if not (folder / "config.json").exists():
        sys.path.insert(0, str(HERE.parent / "scripts"))
        from convert_stories import convert

        with tempfile.TemporaryDirectory() as target:
            return load(convert(folder, target))
    return AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


def make_arrivals(prompts: list[list[int]], count: int, seed: int = 0) -> list[Arrival]:
    """Requests for these prompts in turn, at random steps and with random answer lengths."""
    draw, step, arrivals = random.Random(seed), 0, []
    for at in range(count):
        arrivals.append(Arrival(step, prompts[at % len(prompts)], draw.randint(4, 90)))
        step += draw.choice([0, 0, 1, 3, 8])
    return arrivals


def serve(server: Server, arrivals: list[Arrival], stop: set[int], show: bool = False) -> list[Request]:
    """The server loop: requests arrive, and every step is one pass for all requests."""
    requests: list[Request] = []
    step = 0
    while len(requests) < len(arrivals) or server.waiting or server.running:
        while len(requests) < len(arrivals) and arrivals[len(requests)].step <= step:
            arrival = arrivals[len(requests)]
            requests.append(server.submit(arrival.prompt, arrival.max_new_tokens, stop))
        for request in server.step():
            if show:
                stats = server.cache.stats()
                print(
                    f"step {step:4}: request {requests.index(request):2} done ({request.finish}): "
                    f"{len(request.prompt):3} + {len(request.tokens):2} tokens, {request.shared:2} shared, "
                    f"{request.preempted} times put back; {len(server.running)} running, "
                    f"{len(server.waiting)} waiting; {stats.pages_used} of {stats.pages} pages used, "
                    f"{stats.pages_shared} shared"
                )
        step += 1
    return requests


@torch.inference_mode()
def generate_alone(model: Any, arrival: Arrival, stop: set[int]) -> list[int]:
    """The greedy answer of transformers to one request."""
    prompt = torch.tensor([arrival.prompt])
    answer = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=arrival.max_new_tokens,
        do_sample=False,
        eos_token_id=sorted(stop) or None,
    )
    tokens: list[int] = answer[0, prompt.shape[1] :].tolist()
    return tokens


@torch.inference_mode()
def exact_perplexity(model: Any, texts: list[list[int]]) -> float:
    """Perplexity of texts by transformers, without any cache."""
    losses = []
    for text in texts:
        tokens = torch.tensor([text])
        logits = model(tokens, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        losses.append(-logits.gather(1, tokens[0, 1:, None])[:, 0])
    return math.exp(torch.cat(losses).mean())


def measure_quality(
    model: Any, texts: list[list[int]], caches: dict[str, dict[str, Any]], chunk: int = 64
) -> list[Quality]:
    """Perplexity of the same texts with each kind of cache, `chunk` tokens per pass."""
    found = []
    for name, kind in caches.items():
        cache = make_cache(model, pages=-(-max(map(len, texts)) // 16), page_size=16, **kind)
        with CachedModel(model, cache) as cached:
            scores = torch.cat([cached.score(text, chunk) for text in texts])
        found.append(Quality(name, cache.stats().bytes_per_token, math.exp(-scores.mean())))
    return found


def show_stats(stats: ServerStats) -> None:
    print(
        f"{stats.steps} steps, {stats.mixed} of them with prefill and decode together; "
        f"{stats.tokens} tokens computed, {stats.shared} shared, {stats.preempted} times a request was put back"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of a llama2.c or a transformers checkpoint")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--pages", type=int, default=40, help="few, so that requests wait for pages")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=24, help="new tokens per step; few, to cut long prompts")
    parser.add_argument("--quant-bit", type=int, default=0, choices=(0, 8, 4), help="bits of the serving cache")
    args = parser.parse_args()

    model, tokenizer = load(args.model)
    stop = {tokenizer.eos_token_id} - {None}
    arrivals = make_arrivals([tokenizer(prompt).input_ids for prompt in PROMPTS], args.requests)
    alone = [generate_alone(model, arrival, stop) for arrival in arrivals]
    cache = make_cache(model, pages=args.pages, page_size=args.page_size, quant_bit=args.quant_bit)
    with CachedModel(model, cache) as cached:
        server = Server(cached, max_tokens=args.max_tokens)
        requests = serve(server, arrivals, stop, show=True)
    show_stats(server.stats)
    same = sum(request.tokens == tokens for request, tokens in zip(requests, alone, strict=True))
    print(f"{same} of {len(requests)} answers are those of transformers, token for token\n")
    print(tokenizer.decode(requests[1].text, skip_special_tokens=True), "...\n")

    texts = [tokenizer(line).input_ids for line in (HERE / "stories.txt").read_text().splitlines()]
    exact = exact_perplexity(model, texts)
    print(f"Perplexity of {len(texts)} stories, {sum(map(len, texts)) - len(texts)} tokens:\n")
    print("| cache | bytes a token | perplexity | more than exact |\n|---|---|---|---|")
    print(f"| none (transformers) | – | {exact:.4f} | – |")
    for row in measure_quality(model, texts, CACHES):
        more = row.perplexity / exact - 1
        print(f"| {row.cache} | {row.bytes_per_token} | {row.perplexity:.4f} | {more:+.3%} |")


if __name__ == "__main__":
    main()
