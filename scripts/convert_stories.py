"""Convert a llama2.c checkpoint and its tokenizer to a transformers Llama checkpoint.

A llama2.c checkpoint is 7 integers (dim, hidden dim, layers, heads, KV heads, vocabulary, context) and then float32
weights without names, in a fixed order. The rotary embedding differs from transformers' Llama: llama2.c turns
the neighbours (0, 1), (2, 3), ... of a head, transformers the halves (0, D/2), (1, D/2 + 1), ..., so the rows of the
query and key projections change places within each head. Nothing is rounded.

The tokenizer file is a byte-pair vocabulary with scores. It becomes a fast tokenizer that gives the same ids: a pair
may merge when its text is a piece, and the pair that makes the piece of the highest score goes first.

    python scripts/convert_stories.py ../shared/data/weights_stories260K stories260K
"""

from __future__ import annotations

import argparse
import math
import struct
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

UNKNOWN, BEGIN, END = "<unk>", "<s>", "</s>"
BYTES = 3  # ids 3 .. 258 are the bytes 0x00 .. 0xff
FIRST = BYTES + 256


@dataclass(frozen=True)
class Header:
    """The first 28 bytes of a checkpoint."""

    dim: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    context: int
    tied: bool  # the classifier is the embedding; the file says so by the sign of the vocabulary size


@dataclass(frozen=True)
class Piece:
    """One entry of a tokenizer file."""

    text: bytes
    score: float


def read_checkpoint(file: Path) -> tuple[Header, dict[str, torch.Tensor]]:
    """The weights of a llama2.c checkpoint (the format without a magic number), by their llama2.c names.

    Raises
    ------
    ValueError
        The header makes no sense, or the file is longer or shorter than the header says.
    """
    raw = file.read_bytes()
    if len(raw) < 28:
        raise ValueError(f"{file}: {len(raw)} bytes, too short for a llama2.c checkpoint")
    dim, hidden, layers, heads, kv_heads, vocabulary, context = struct.unpack_from("<7i", raw)
    if min(dim, hidden, layers, heads, kv_heads, abs(vocabulary), context) < 1 or dim % heads or heads % kv_heads:
        raise ValueError(f"{file}: not a llama2.c checkpoint (first format); its header is {raw[:28].hex(' ', 4)}")
    header = Header(dim, hidden, layers, heads, kv_heads, abs(vocabulary), context, tied=vocabulary > 0)
    head = dim // heads
    shapes: dict[str, tuple[int, ...]] = {
        "token_embedding": (header.vocabulary, dim),
        "rms_att": (layers, dim),
        "wq": (layers, dim, dim),
        "wk": (layers, kv_heads * head, dim),
        "wv": (layers, kv_heads * head, dim),
        "wo": (layers, dim, dim),
        "rms_ffn": (layers, dim),
        "w1": (layers, hidden, dim),
        "w2": (layers, dim, hidden),
        "w3": (layers, hidden, dim),
        "rms_final": (dim,),
        "freq_real": (context, head // 2),  # tables of the rotary embedding: theta 10000, as LlamaConfig's default
        "freq_imag": (context, head // 2),
    }
    if not header.tied:
        shapes["wcls"] = (header.vocabulary, dim)
    expected = 28 + 4 * sum(math.prod(shape) for shape in shapes.values())
    if len(raw) != expected:
        raise ValueError(f"{file}: {len(raw)} bytes, but its header asks for {expected}: cut short, or another format")
    weights, at = {}, 28
    for name, shape in shapes.items():
        count = math.prod(shape)
        weights[name] = torch.frombuffer(bytearray(raw[at : at + 4 * count]), dtype=torch.float32).view(shape)
        at += 4 * count
    return header, weights


def read_pieces(file: Path) -> list[Piece]:
    """The entries of a llama2.c tokenizer file, in the order of their ids."""
    raw = file.read_bytes()
    pieces, at = [], 4  # the longest length comes first; it is not needed here
    while at < len(raw):
        if at + 8 > len(raw):
            raise ValueError(f"{file}: ends inside entry {len(pieces)}")
        score, length = struct.unpack_from("<fi", raw, at)
        if length < 0 or at + 8 + length > len(raw):
            raise ValueError(f"{file}: entry {len(pieces)} runs past the end of the file")
        pieces.append(Piece(raw[at + 8 : at + 8 + length], score))
        at += 8 + length
    if len(pieces) < FIRST or any(pieces[BYTES + byte].text != b"<0x%02X>" % byte for byte in range(256)):
        raise ValueError(f"{file}: ids {BYTES} to {FIRST - 1} are not the 256 bytes; not a llama2.c tokenizer")
    return pieces


def halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a query or key projection, (heads * D, dim): from neighbours that rotate together to halves that do."""
    rows, dim = weight.shape
    return weight.view(heads, rows // heads // 2, 2, dim).transpose(1, 2).reshape(rows, dim).contiguous()


def make_model(header: Header, weights: dict[str, torch.Tensor]) -> LlamaForCausalLM:
    """The same network as transformers' Llama, float32."""
    config = LlamaConfig(
        vocab_size=header.vocabulary,
        hidden_size=header.dim,
        intermediate_size=header.hidden,
        num_hidden_layers=header.layers,
        num_attention_heads=header.heads,
        num_key_value_heads=header.kv_heads,
        max_position_embeddings=header.context,
        rms_norm_eps=1e-5,
        tie_word_embeddings=header.tied,
        bos_token_id=1,
        # A story ends where the next one begins: the model was trained on stories after <s>, and never saw </s>.
        eos_token_id=1,
    )
    state = {"model.embed_tokens.weight": weights["token_embedding"], "model.norm.weight": weights["rms_final"]}
    state["lm_head.weight"] = weights["token_embedding" if header.tied else "wcls"]
    for at in range(header.layers):
        layer = f"model.layers.{at}"
        state |= {
            f"{layer}.input_layernorm.weight": weights["rms_att"][at],
            f"{layer}.self_attn.q_proj.weight": halves(weights["wq"][at], header.heads),
            f"{layer}.self_attn.k_proj.weight": halves(weights["wk"][at], header.kv_heads),
            f"{layer}.self_attn.v_proj.weight": weights["wv"][at],
            f"{layer}.self_attn.o_proj.weight": weights["wo"][at],
            f"{layer}.post_attention_layernorm.weight": weights["rms_ffn"][at],
            f"{layer}.mlp.gate_proj.weight": weights["w1"][at],
            f"{layer}.mlp.down_proj.weight": weights["w2"][at],
            f"{layer}.mlp.up_proj.weight": weights["w3"][at],
        }
    model = LlamaForCausalLM(config)
    model.load_state_dict(state)
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=1, pad_token_id=0)
    return model.eval()


def make_tokenizer(pieces: list[Piece], context: int) -> PreTrainedTokenizerFast:
    """A fast tokenizer with the same ids; texts begin with <s> and a space, unknown characters become bytes.

    Raises
    ------
    ValueError
        The vocabulary cannot be written as merges in one order: a piece of two splits overlaps with itself.
    """
    texts = [UNKNOWN, BEGIN, END, *(piece.text.decode() for piece in pieces[BYTES:])]
    vocabulary = {text: number for number, text in enumerate(texts)}
    if len(vocabulary) != len(texts):
        raise ValueError("the tokenizer has two entries of the same text")
    words = set(texts[FIRST:])
    merges = []
    for text in sorted(texts[FIRST:], key=lambda text: -pieces[vocabulary[text]].score):  # stable: ties by id
        splits = [(text[:at], text[at:]) for at in range(1, len(text)) if text[:at] in words and text[at:] in words]
        # llama2.c knows pieces, not splits: of one piece's splits the leftmost in the text goes first, whichever.
        # Their order can only matter where two occurrences overlap.
        if len(splits) > 1 and any(text.startswith(text[at:]) for at in range(1, len(text))):
            raise ValueError(f"piece {text!r} can be made in {len(splits)} ways and overlaps with itself")
        merges += splits
    # Spaces stay spaces: with the usual "▁" in their place, a "▁" in a text would be taken for a space.
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=UNKNOWN, byte_fallback=True))
    tokenizer.normalizer = normalizers.Prepend(" ")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A {BEGIN} $B", special_tokens=[(BEGIN, 1)]
    )
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in (UNKNOWN, BEGIN, END)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=UNKNOWN,
        bos_token=BEGIN,
        eos_token=BEGIN,  # see make_model
        pad_token=UNKNOWN,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )


def convert(source: str | Path, target: str | Path) -> Path:
    """Write a checkpoint that `from_pretrained` of transformers reads, tokenizer included.

    Parameters
    ----------
    source : str or Path
        Folder with one ``stories*.bin`` and one ``tok*.bin``.
    target : str or Path
        Folder to write; made if absent.

    Returns
    -------
    Path
        `target`.

    Raises
    ------
    FileNotFoundError
        The folder lacks one of the files, or has several.
    ValueError
        A file is not what its name says.
    """
    found = {}
    for pattern in ("stories*.bin", "tok*.bin"):
        files = sorted(Path(source).glob(pattern))
        if len(files) != 1:
            raise FileNotFoundError(f"{source}: {len(files)} files are called {pattern}, where one is expected")
        found[pattern] = files[0]
    header, weights = read_checkpoint(found["stories*.bin"])
    pieces = read_pieces(found["tok*.bin"])
    if len(pieces) != header.vocabulary:
        raise ValueError(f"the tokenizer has {len(pieces)} pieces, the model {header.vocabulary}")
    make_model(header, weights).save_pretrained(target)
    make_tokenizer(pieces, header.context).save_pretrained(target)
    return Path(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="folder with stories*.bin and tok*.bin")
    parser.add_argument("target", type=Path, help="folder to write")
    args = parser.parse_args()
    print(f"wrote {convert(args.source, args.target)}")


if __name__ == "__main__":
    main()
