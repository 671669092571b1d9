"""No n-gram twice: the kernels ban what a brute-force search bans, and the processors give what stock's give."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import BartConfig, BartForConditionalGeneration, LogitsProcessorList, TopKLogitsWarper
from transformers.generation.logits_process import EncoderNoRepeatNGramLogitsProcessor, NoRepeatNGramLogitsProcessor

from attmemo import fastseq
from attmemo.fastseq import EncoderNoRepeatNGram, NoRepeatNGram
from attmemo.fastseq.generate.ngram import ban_ngrams, swap_ngram_processors
from attmemo.fastseq.generate.ngram_mask import banned_mask
from attmemo.fastseq.serving.ops.triton import is_interpreted
from attmemo.kernels import _ngram

INFINITY = float("inf")
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def brute_force(tokens: Tensor, source: Tensor, size: int, columns: int) -> Tensor:
    """Where scores are banned, by comparing Python lists."""
    rows = tokens.tolist()
    group = len(rows) // max(1, source.shape[0])
    mask = torch.zeros(len(rows), columns, dtype=torch.bool)
    for number, row in enumerate(rows):
        if len(row) < size - 1:
            continue
        suffix, text = row[len(row) - size + 1 :], source[number // group].tolist()
        for start in range(len(text) - size + 1):
            if text[start : start + size - 1] == suffix and 0 <= text[start + size - 1] < columns:
                mask[number, text[start + size - 1]] = True
    return mask


def ids(rows: int, columns: int) -> Tensor:
    return torch.zeros(rows, columns, dtype=torch.long)


def expected(scores: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, -INFINITY, scores)


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    """Rows with many repetitions, runs of padding at an end, ids beyond the vocabulary and below zero."""
    seed = draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    texts, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    columns, known = draw(st.integers(1, 12)), draw(st.integers(0, 40))
    length = draw(st.integers(0, 40))
    rows = texts * group
    low, high = draw(st.sampled_from([(0, columns), (0, columns + 3), (-2, columns)]))
    tokens = torch.randint(low, max(high, low + 1), (rows, known), generator=generator)
    source = torch.randint(low, max(high, low + 1), (texts, length), generator=generator)
    pad, left = draw(st.integers(0, known)), draw(st.booleans())
    tokens[::2, : pad if left else 0] = 0
    tokens[::2, known if left else known - pad :] = 0
    dtype = draw(st.sampled_from(DTYPES))
    wide = torch.randn(rows, columns + draw(st.integers(0, 3)), generator=generator).to(dtype)
    wide[:, 0] = draw(st.sampled_from([0.0, -INFINITY, float("nan")]))
    return {"scores": wide[:, :columns], "tokens": tokens, "source": source, "size": draw(st.integers(1, 6))}


def equal(left: Tensor, right: Tensor) -> bool:
    return torch.allclose(left, right, rtol=0, atol=0, equal_nan=True)


class TestAgainstBruteForce:
    @settings(max_examples=300, deadline=None)
    @given(cases())
    def test_the_kernel_bans_the_right_tokens(self, case: dict[str, Any]) -> None:
        scores, tokens, size = case["scores"], case["tokens"], case["size"]
        wanted = expected(scores, brute_force(tokens, tokens, size, scores.shape[1]))
        ban_ngrams(scores, tokens, size)
        assert equal(scores, wanted)

    @settings(max_examples=300, deadline=None)
    @given(cases())
    def test_the_kernel_bans_the_right_tokens_of_a_source(self, case: dict[str, Any]) -> None:
        scores, tokens, source, size = case["scores"], case["tokens"], case["source"], case["size"]
        wanted = expected(scores, brute_force(tokens, source, size, scores.shape[1]))
        ban_ngrams(scores, tokens, size, source)
        assert equal(scores, wanted)

    @settings(max_examples=200, deadline=None)
    @given(cases(), st.booleans())
    def test_the_oracle_bans_the_right_tokens(self, case: dict[str, Any], own: bool) -> None:
        source = None if own else case["source"]
        mask = banned_mask(case["scores"], case["tokens"], case["tokens"] if source is None else source, case["size"])
        text = case["tokens"] if source is None else source
        assert torch.equal(mask, brute_force(case["tokens"], text, case["size"], case["scores"].shape[1]))

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize(("length", "size"), [(1025, 2), (1500, 3), (4096, 3), (3000, 1), (2048, 5)])
    def test_a_long_history_is_not_blocked(self, length: int, size: int, dtype: torch.dtype) -> None:
        """FastSeq's kernel did nothing, and said nothing, beyond a thousand tokens."""
        generator = torch.Generator().manual_seed(length)
        tokens = torch.randint(0, 6, (3, length), generator=generator)
        tokens[1] = torch.arange(length)  # no repetition
        tokens[2, -8:] = tokens[2, 4:12]  # one far back, in the first block
        scores = torch.randn(3, length + 10, generator=generator).to(dtype)
        wanted = expected(scores, brute_force(tokens, tokens, size, scores.shape[1]))
        assert (wanted[0] == -INFINITY).any()
        assert (wanted[2] == -INFINITY).any()
        assert size == 1 or not (wanted[1] == -INFINITY).any()
        ban_ngrams(scores, tokens, size)
        assert equal(scores, wanted)

    def test_a_large_vocabulary(self) -> None:
        tokens = torch.tensor([[300_000, 7, 250_000, 300_000, 7]] * 2)
        scores = torch.zeros(2, 300_001)
        ban_ngrams(scores, tokens, 3)
        assert (scores == -INFINITY).nonzero().tolist() == [[0, 250_000], [1, 250_000]]

    @pytest.mark.parametrize("how", ["columns apart", "rows apart", "transposed", "expanded tokens", "sliced tokens"])
    def test_a_strided_tensor_is_read_as_if_it_were_whole(self, how: str) -> None:
        generator = torch.Generator().manual_seed(2)
        tokens = torch.randint(0, 4, (6, 20), generator=generator)
        scores = torch.randn(6, 5, generator=generator)
        if how == "columns apart":
            scores = torch.randn(6, 10, generator=generator)[:, ::2]
        elif how == "rows apart":
            scores = torch.randn(6, 3, 5, generator=generator)[:, -1]
        elif how == "transposed":
            scores = torch.randn(5, 6, generator=generator).t()
            tokens = torch.randint(0, 4, (20, 6), generator=generator).t()
        elif how == "expanded tokens":
            tokens = tokens[:1].expand(6, 20)
        else:
            tokens = torch.randint(0, 4, (6, 50), generator=generator)[:, 3:23]
        wanted = expected(scores, brute_force(tokens, tokens, 2, 5))
        ban_ngrams(scores, tokens, 2)
        assert (wanted == -INFINITY).any()
        assert equal(scores, wanted)

    def test_scores_that_require_gradients_get_them(self) -> None:
        tokens, start = torch.tensor([[1, 2, 1]]), torch.zeros(1, 4, requires_grad=True)
        NoRepeatNGram(2)(tokens, start)[0, :2].sum().backward()
        assert start.grad is not None
        assert start.grad.tolist() == [[1, 1, 0, 0]]

    def test_no_rows(self) -> None:
        ban_ngrams(torch.zeros(0, 5), torch.zeros(0, 7, dtype=torch.long), 2)


class TestRefusals:
    @pytest.mark.parametrize(
        ("scores", "tokens", "size", "source", "said"),
        [
            ((2, 5), (3, 4), 2, None, "expected"), ((2, 5), (2, 4), 0, None, "at least one"),
            ((5,), (2, 4), 2, None, "expected"), ((5, 9), (5, 4), 2, (2, 6), "not a multiple"),
            ((2, 9), (2, 4), 2, (0, 6), "not a multiple"),
        ],
    )  # fmt: skip
    def test_shapes_that_do_not_fit(
        self, scores: Sequence[int], tokens: Sequence[int], size: int, source: Sequence[int] | None, said: str
    ) -> None:
        text = None if source is None else torch.zeros(*source, dtype=torch.long)
        with pytest.raises(ValueError, match=said):
            ban_ngrams(torch.zeros(*scores), torch.zeros(*tokens, dtype=torch.long), size, text)

    def test_types_that_do_not_fit(self) -> None:
        with pytest.raises(ValueError, match="int64"):
            ban_ngrams(torch.zeros(1, 4), torch.zeros(1, 4, dtype=torch.int32), 2)
        with pytest.raises(ValueError, match="floating"):
            ban_ngrams(torch.zeros(1, 4, dtype=torch.int32), torch.zeros(1, 4, dtype=torch.long), 2)

    @pytest.mark.parametrize(
        ("scores", "tokens", "text", "size", "form"),
        [
            (torch.zeros(1, 4), torch.zeros(1, 4), ids(1, 4), 2, "float32"),
            (torch.zeros(1, 4), ids(2, 4), ids(1, 4), 2, "float32"),
            (torch.zeros(1, 4), ids(1, 4), ids(1, 4), 0, "float32"),
            (torch.zeros(1, 4), ids(1, 4), ids(1, 4), 2, "float16"),
            (torch.zeros(1, 4), ids(1, 4), ids(1, 4), 2, "int8"),
            (torch.zeros(3, 4), ids(3, 4), ids(2, 4), 2, "float32"),
            (torch.zeros(4, 3).t(), ids(3, 4), ids(3, 4), 2, "float32"),
            (torch.zeros(1, 4).expand(3, 4), ids(3, 4), ids(3, 4), 2, "float32"),
        ],
    )  # fmt: skip
    def test_the_kernel_itself_refuses_to_write_where_it_must_not(
        self, scores: Tensor, tokens: Tensor, text: Tensor, size: int, form: str
    ) -> None:
        before = scores.clone()
        with pytest.raises(ValueError, match=r"must|there is no|at least"):
            _ngram.ban_ngrams(scores.numpy(), tokens.numpy(), text.numpy(), size, form)
        assert torch.equal(scores, before)

    def test_read_only_scores_are_never_written(self) -> None:
        array = torch.zeros(1, 4).numpy()
        array.flags.writeable = False
        tokens = torch.zeros(1, 4, dtype=torch.long).numpy()
        with pytest.raises(ValueError, match="read-only"):
            _ngram.ban_ngrams(array, tokens, tokens, 2, "float32")

    @pytest.mark.parametrize("size", [0, -1, 2.0])
    def test_a_size_that_stock_refuses(self, size: Any) -> None:
        with pytest.raises(ValueError, match="strictly positive integer"):
            NoRepeatNGram(size)
        with pytest.raises(ValueError, match="strictly positive integer"):
            EncoderNoRepeatNGram(size, torch.zeros(1, 1, dtype=torch.long))


@st.composite
def rows_and_scores(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, int]:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    texts, beams, columns = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 9))
    known, length = draw(st.integers(1, 30)), draw(st.integers(1, 30))
    tokens = torch.randint(0, columns, (texts * beams, known), generator=generator)
    source = torch.randint(0, columns, (texts, length), generator=generator)
    source[0, length // 2 :] = 0
    return tokens, torch.randn(texts * beams, columns, generator=generator), source, draw(st.integers(1, 5))


class TestAsStock:
    @settings(max_examples=200, deadline=None)
    @given(rows_and_scores(), st.sampled_from(DTYPES))
    def test_scores_are_stocks(self, case: tuple[Tensor, Tensor, Tensor, int], dtype: torch.dtype) -> None:
        tokens, scores, _, size = case
        scores = scores.to(dtype)
        wanted = NoRepeatNGramLogitsProcessor(size)(tokens, scores.clone())
        before = scores.clone()
        assert torch.equal(NoRepeatNGram(size)(tokens, scores), wanted)
        assert torch.equal(scores, before), "stock does not write what it was given"
        assert NoRepeatNGram(size, in_place=True)(tokens, scores) is scores
        assert torch.equal(scores, wanted)

    @settings(max_examples=200, deadline=None)
    @given(rows_and_scores())
    def test_scores_are_stocks_for_a_source(self, case: tuple[Tensor, Tensor, Tensor, int]) -> None:
        tokens, scores, source, size = case
        stock = EncoderNoRepeatNGramLogitsProcessor(size, source)
        wanted = stock(tokens, scores.clone())
        before = scores.clone()
        assert torch.equal(EncoderNoRepeatNGram(size, source)(tokens, scores), wanted)
        assert torch.equal(scores, before)
        for given_source in (None, source):
            both = LogitsProcessorList([EncoderNoRepeatNGramLogitsProcessor(size, source)])
            assert swap_ngram_processors(both, source=given_source) == 1
            assert torch.equal(both(tokens, scores), wanted)
        assert EncoderNoRepeatNGram(size, source, in_place=True)(tokens, scores) is scores
        assert torch.equal(scores, wanted)

    def test_ids_beyond_the_vocabulary(self) -> None:
        tokens, scores = torch.tensor([[5, 9, 5, 1, 5]]), torch.zeros(1, 4)
        assert torch.equal(NoRepeatNGram(2)(tokens, scores), NoRepeatNGramLogitsProcessor(2)(tokens, scores))

    def test_one_text_without_a_batch(self) -> None:
        source, tokens, scores = torch.tensor([1, 2, 3]), torch.tensor([[7, 1], [7, 2]]), torch.zeros(2, 8)
        wanted = EncoderNoRepeatNGramLogitsProcessor(2, source)(tokens, scores)
        assert torch.equal(EncoderNoRepeatNGram(2, source)(tokens, scores), wanted)
        assert (wanted == -INFINITY).sum() == 2

    def test_texts_that_left_the_batch_are_not_asked(self) -> None:
        source = torch.tensor([[1, 2], [3, 4], [5, 6]])
        processor = EncoderNoRepeatNGram(2, source)
        processor.select_rows(torch.tensor([2, 0]))
        assert processor.batch_size == 2
        tokens, scores = torch.tensor([[5], [3], [1], [5]]), torch.zeros(4, 8)
        wanted = EncoderNoRepeatNGramLogitsProcessor(2, source[[2, 0]])(tokens, scores)
        assert torch.equal(processor(tokens, scores), wanted)
        assert (wanted == -INFINITY).nonzero().tolist() == [[0, 6], [2, 2]]


class TestSwap:
    def test_order_and_others_are_kept(self) -> None:
        other = TopKLogitsWarper(3)
        processors = LogitsProcessorList(
            [NoRepeatNGramLogitsProcessor(2), other, EncoderNoRepeatNGramLogitsProcessor(3, torch.ones(2, 5).long())]
        )
        assert swap_ngram_processors(processors, in_place=True) == 2
        assert [type(p) for p in processors] == [NoRepeatNGram, TopKLogitsWarper, EncoderNoRepeatNGram]
        assert processors[1] is other
        assert processors[0].in_place
        assert processors[2].in_place
        assert processors[2].batch_size == 2
        assert swap_ngram_processors(processors) == 0, "ours are not swapped again"

    def test_no_subclass_is_taken_for_stock(self) -> None:
        class Own(NoRepeatNGramLogitsProcessor):  # type: ignore[misc]
            pass

        processors = LogitsProcessorList([Own(2)])
        assert swap_ngram_processors(processors) == 0
        assert type(processors[0]) is Own

    @pytest.mark.parametrize("options", [{"num_beams": 4}, {"do_sample": True}, {"num_beams": 1}], ids=str)
    def test_options_give_stocks_tokens(self, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        torch.manual_seed(0)
        model = BartForConditionalGeneration(
            BartConfig(
                vocab_size=23, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
                decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=64,
                init_std=0.5, forced_eos_token_id=None,
            )
        ).eval()  # fmt: skip
        source = torch.randint(4, 23, (3, 9))
        common = {"input_ids": source, "max_new_tokens": 24, "min_new_tokens": 24, **options}
        torch.manual_seed(1)
        wanted = model.generate(**common, no_repeat_ngram_size=2, encoder_no_repeat_ngram_size=3)
        torch.manual_seed(1)
        assert not torch.equal(wanted, model.generate(**common)), "a test of nothing: n-grams do not repeat"
        seen: list[int] = []
        real = _ngram.ban_ngrams

        def counted(*args: Any) -> None:
            seen.append(args[3])
            real(*args)

        monkeypatch.setattr(_ngram, "ban_ngrams", counted)
        torch.manual_seed(1)
        ours = LogitsProcessorList([NoRepeatNGram(2, in_place=True), EncoderNoRepeatNGram(3, source, in_place=True)])
        assert torch.equal(model.generate(**common, logits_processor=ours), wanted)
        assert seen.count(2) >= 20
        assert seen.count(3) >= 20


TRITON = """
import torch
from attmemo.fastseq.generate.ngram_triton import ban_ngrams
from attmemo.fastseq.generate.ngram_mask import banned_mask

generator = torch.Generator().manual_seed(0)
banned = 0
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    for texts, group, known, length, columns, size in (
        (2, 1, 20, 20, 7, 3), (1, 3, 5, 40, 9, 2), (2, 2, 2, 9, 4, 4), (1, 1, 1, 1, 3, 1), (2, 1, 600, 600, 5, 4),
        (1, 2, 1200, 1200, 3, 3), (1, 1, 4, 2, 3, 3), (3, 1, 30, 30, 1, 1),
    ):
        rows = texts * group
        source = torch.randint(-1, columns + 2, (texts, length), generator=generator)
        tokens = torch.randint(0, columns, (rows, known), generator=generator)
        wide = torch.randn(rows, columns + 2, generator=generator).to(dtype)
        for text in (source, tokens):
            scores = wide.clone()[:, :columns]
            mask = banned_mask(scores, tokens, text, size)
            wanted = scores.masked_fill(mask, -float("inf"))
            ban_ngrams(scores, tokens, text, size)
            assert torch.equal(scores, wanted), (dtype, rows, known, length, columns, size)
            banned += int(mask.sum())
print(banned)
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_the_kernel_for_gpus_bans_the_right_tokens_in_the_interpreter(tmp_path: Path) -> None:
    # A process of its own: Triton reads TRITON_INTERPRET when it is imported, which transformers may have done.
    environment = {**os.environ, "TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", TRITON], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 100


@pytest.mark.parametrize("module", ["generate/ngram_triton.py", "serving/ops/triton_kernels.py"])
def test_kernels_for_gpus_name_no_type_but_constexpr(module: str) -> None:
    """Triton's compiler refuses others, and its interpreter does not. This test needs no Triton."""
    source = (Path(fastseq.__file__).parent / module).read_text(encoding="utf-8")
    kernels = [
        node for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(one) for one in node.decorator_list)
    ]  # fmt: skip
    given = [one.annotation for kernel in kernels for one in (*kernel.args.args, *kernel.args.kwonlyargs)]
    named = {ast.unparse(one) for one in (*given, *(kernel.returns for kernel in kernels)) if one}
    assert kernels
    assert named == {"tl.constexpr"}
    assert "from __future__ import annotations" not in source


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_the_kernel_for_gpus_compiles_for_a_gpu_that_is_not_there(dtype: str) -> None:
    """The interpreter runs what a compiler refuses: names of Python's types in the signature, for one."""
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    if "nvidia" not in triton.backends.backends:
        pytest.skip("this Triton has no compiler for NVIDIA GPUs")
    if is_interpreted():
        pytest.skip("Triton is interpreting")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from attmemo.fastseq.generate.ngram_triton import BLOCK, _ban

    kinds = {"scores": f"*{dtype}", "tokens": "*i64", "text": "*i64", "SIZE": "constexpr", "BLOCK": "constexpr"}
    signature = {name: kinds.get(name, "i32") for name in _ban.arg_names}
    source = ASTSource(fn=_ban, signature=signature, constexprs={"SIZE": 3, "BLOCK": BLOCK})
    assert triton.compile(source, target=GPUTarget("cuda", 86, 32)).asm["cubin"]


def test_it_is_imported_without_triton() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch; from attmemo.fastseq import NoRepeatNGram\n"
        "print(NoRepeatNGram(2)(torch.tensor([[1, 2, 1]]), torch.zeros(1, 3)).tolist())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True)
    assert done.stdout.strip() == "[[0.0, 0.0, -inf]]"
