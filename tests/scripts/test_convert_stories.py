"""A converted llama2.c checkpoint gives the logits, token ids and text of llama2.c.

The oracle is a plain forward pass and a plain greedy encoder in numpy, written from the file's format, with the rotary
embedding on neighbouring pairs. On random files always; on the real stories260K when it is there.
"""

from __future__ import annotations

import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scripts_tools import script
from shared_data import shared
from transformers import AutoModelForCausalLM, AutoTokenizer

STORY = (
    "Once upon a time, there was a little boy named Tim. Tim liked to play in the park with his friend Lily. One day, "
    "they saw a big dog. The dog was sad because it lost its ball. Tim and Lily helped the dog look for the ball.\n"
    "At last, Lily found the ball in the grass. The dog was very happy and they all played together."
)
WORDS = ["▁", "é", "“", *"abcdehilnoprstuwy ,.", " t", "he", " a", " the", "nd", " and", "ll", "aa", "aaaa"]


def write_random(folder: Path, heads: int, kv_heads: int, tied: bool) -> Path:
    """A small random checkpoint and a tokenizer of `WORDS`."""
    pieces = [b"<unk>", b"\n<s>\n", b"\n</s>\n", *(b"<0x%02X>" % byte for byte in range(256))]
    scores = [0.0] * len(pieces) + [-float(number) for number in range(len(WORDS))]
    # Ids out of the order of the scores: the scores must decide.
    pieces += [word.encode() for word in reversed(WORDS)]
    body = b"".join(struct.pack("<fi", s, len(p)) + p for s, p in zip(scores, pieces, strict=True))
    (folder / "tok.bin").write_bytes(struct.pack("<i", 8) + body)
    dim, hidden, layers, vocabulary, context = 8 * heads, 40, 2, len(pieces), 32
    kv = dim // heads * kv_heads
    count = vocabulary * dim * (1 if tied else 2) + dim * (2 * layers + 1) + context * 8
    count += layers * (2 * dim * dim + 2 * kv * dim + 3 * hidden * dim)
    values = np.random.default_rng(0).normal(0, 0.3, count).astype("<f4")
    header = struct.pack("<7i", dim, hidden, layers, heads, kv_heads, vocabulary * (1 if tied else -1), context)
    (folder / "stories.bin").write_bytes(header + values.tobytes())
    return folder


def forward(file: Path, tokens: list[int]) -> np.ndarray:
    """Logits of llama2.c, (len(tokens), vocabulary), in float64, one position after the other."""
    raw = file.read_bytes()
    dim, hidden, layers, heads, kv_heads, vocabulary, context = struct.unpack("<7i", raw[:28])
    values = np.frombuffer(raw[28:], dtype="<f4").astype(np.float64)
    head, at = dim // heads, 0

    def take(*shape: int) -> np.ndarray:
        nonlocal at
        part = values[at : at + int(np.prod(shape))].reshape(shape)
        at += part.size
        return part

    tied, vocabulary = vocabulary > 0, abs(vocabulary)
    embedding, norm1 = take(vocabulary, dim), take(layers, dim)
    wq, wk, wv = take(layers, dim, dim), take(layers, kv_heads * head, dim), take(layers, kv_heads * head, dim)
    wo, norm2 = take(layers, dim, dim), take(layers, dim)
    w1, w2, w3 = take(layers, hidden, dim), take(layers, dim, hidden), take(layers, hidden, dim)
    last = take(dim)
    take(context, head)
    classifier = embedding if tied else take(vocabulary, dim)
    assert at == values.size

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return weight * x / np.sqrt((x * x).mean() + 1e-5)

    def turn(x: np.ndarray, position: int) -> np.ndarray:
        out = x.copy()
        for i in range(0, x.size, 2):
            angle = position * 10000.0 ** (-(i % head) / head)
            out[i] = x[i] * np.cos(angle) - x[i + 1] * np.sin(angle)
            out[i + 1] = x[i] * np.sin(angle) + x[i + 1] * np.cos(angle)
        return out

    keys: list[list[np.ndarray]] = [[] for _ in range(layers)]
    seen: list[list[np.ndarray]] = [[] for _ in range(layers)]
    logits = []
    for position, token in enumerate(tokens):
        x = embedding[token].copy()
        for layer in range(layers):
            h = norm(x, norm1[layer])
            q = turn(wq[layer] @ h, position)
            keys[layer].append(turn(wk[layer] @ h, position))
            seen[layer].append(wv[layer] @ h)
            out = np.zeros(dim)
            for i in range(heads):
                own = slice(i * head, (i + 1) * head)
                kv = i // (heads // kv_heads) * head
                scores = np.array([q[own] @ key[kv : kv + head] for key in keys[layer]]) / np.sqrt(head)
                weights = np.exp(scores - scores.max())
                weights /= weights.sum()
                out[own] = sum(w * v[kv : kv + head] for w, v in zip(weights, seen[layer], strict=True))
            x += wo[layer] @ out
            h = norm(x, norm2[layer])
            gate = w1[layer] @ h
            x += w2[layer] @ (gate / (1 + np.exp(-gate)) * (w3[layer] @ h))
        logits.append(classifier @ norm(x, last))
    return np.stack(logits)


def encode(file: Path, text: str) -> list[int]:
    """Token ids of llama2.c: characters, then the best pair joined until no pair makes a piece."""
    raw, at, pieces = file.read_bytes(), 4, []
    while at < len(raw):
        score, length = struct.unpack_from("<fi", raw, at)
        pieces.append((raw[at + 8 : at + 8 + length], score))
        at += 8 + length
    number = {piece: i for i, (piece, _) in enumerate(pieces)}
    ids = [1]
    for character in (" " + text) if text else "":
        code = character.encode()
        ids += [number[code]] if code in number else [byte + 3 for byte in code]
    while True:
        joined = [(pieces[a][0] + pieces[b][0], i) for i, (a, b) in enumerate(pairwise(ids))]
        known = [(-pieces[number[text]][1], i, number[text]) for text, i in joined if text in number]
        if not known:
            return ids
        _, i, token = min(known)
        ids[i : i + 2] = [token]


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """The real checkpoint: the folder it came from, the converted model, its tokenizer."""
    source = shared("data/weights_stories260K")
    target = script.convert(source, tmp_path_factory.mktemp("stories") / "model")
    return source, AutoModelForCausalLM.from_pretrained(target).eval(), AutoTokenizer.from_pretrained(target)


@pytest.mark.parametrize(("heads", "kv_heads", "tied"), [(4, 2, True), (3, 1, False), (2, 2, True)])
def test_logits_of_a_random_checkpoint_equal_llama2c(tmp_path: Path, heads: int, kv_heads: int, tied: bool) -> None:
    source = write_random(tmp_path, heads, kv_heads, tied)
    model = AutoModelForCausalLM.from_pretrained(script.convert(source, tmp_path / "model")).eval()
    tokens = [1, 270, 3, 280, 280, 261, 259, 7, 265, 275, 1, 2]
    with torch.inference_mode():
        given = model(torch.tensor([tokens])).logits[0]
    expected = forward(source / "stories.bin", tokens)
    np.testing.assert_allclose(given.numpy(), expected, atol=2e-4, rtol=1e-4)
    assert np.abs(expected).max() > 1


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = write_random(tmp_path_factory.mktemp("small"), 2, 1, True)
    return folder / "tok.bin", script.make_tokenizer(script.read_pieces(folder / "tok.bin"), 32)


@given(st.lists(st.sampled_from(["a", "aa", "the", " ", "  ", "nd", "ll", "▁", "é", "ü", "\n", "😀"])).map("".join))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_any_text_gets_the_ids_of_llama2c_and_comes_back(small: tuple[Path, Any], text: str) -> None:
    file, tokenizer = small
    ids = tokenizer(text).input_ids
    assert ids == encode(file, text)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_a_vocabulary_whose_merges_have_no_single_order_is_refused(small: tuple[Path, Any]) -> None:
    pieces = script.read_pieces(small[0])
    extra = [script.Piece(text.encode(), -100.0) for text in ("ab", "ba", "aba")]
    with pytest.raises(ValueError, match="'aba' can be made in 2 ways"):
        script.make_tokenizer([*pieces, *extra], 32)


def test_broken_files_are_refused_by_name(tmp_path: Path) -> None:
    source = write_random(tmp_path, 2, 1, True)
    whole = (source / "stories.bin").read_bytes()
    (source / "stories.bin").write_bytes(whole[:-4])
    with pytest.raises(ValueError, match="cut short"):
        script.convert(source, tmp_path / "model")
    (source / "stories.bin").write_bytes(b"ak42" + whole[4:])
    with pytest.raises(ValueError, match=r"not a llama2\.c checkpoint"):
        script.convert(source, tmp_path / "model")
    (source / "stories.bin").write_bytes(whole)
    tokens = (source / "tok.bin").read_bytes()
    (source / "tok.bin").write_bytes(tokens[:-3])
    with pytest.raises(ValueError, match="runs past the end"):
        script.convert(source, tmp_path / "model")
    (source / "tok.bin").unlink()
    with pytest.raises(FileNotFoundError, match="0 files are called tok"):
        script.convert(source, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_logits_of_stories260k_equal_llama2c(stories: tuple[Path, Any, Any]) -> None:
    source, model, tokenizer = stories
    tokens = tokenizer(STORY).input_ids
    with torch.inference_mode():
        given = model(torch.tensor([tokens])).logits[0]
    np.testing.assert_allclose(given.numpy(), forward(source / "stories260K.bin", tokens), atol=2e-4, rtol=1e-4)


def test_stories260k_tells_a_story_and_predicts_one(stories: tuple[Path, Any, Any]) -> None:
    _, model, tokenizer = stories
    asked = tokenizer("Once upon a time", return_tensors="pt").input_ids
    told = tokenizer.decode(model.generate(asked, max_new_tokens=60, do_sample=False)[0], skip_special_tokens=True)
    assert told.startswith("Once upon a time, there was a little girl named Lily. She loved to play outside")
    ids = tokenizer(STORY, return_tensors="pt").input_ids
    with torch.inference_mode():
        perplexity = model(ids, labels=ids).loss.exp().item()
    assert perplexity < 4  # 512 for a model that knows nothing


def test_ids_of_stories260k_equal_llama2c(stories: tuple[Path, Any, Any]) -> None:
    source, _, tokenizer = stories
    texts = [STORY, "", " ", "a", "  two  spaces ", "né “quoted” … — ▁ \t 😀 ü", "zzzzz pppppp llll", STORY.upper()]
    for text in texts:
        ids = tokenizer(text).input_ids
        assert ids == encode(source / "tok512.bin", text)
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
