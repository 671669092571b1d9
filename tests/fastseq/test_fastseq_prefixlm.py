"""The prefix language model against one plain BERT pass over source, target and blank with the mask written out."""

from __future__ import annotations

import pytest
import torch
from fastseq_models import VOCAB, make
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM, BertModel

from attmemo import UnsupportedModelError, fastseq
from attmemo.models.cache_name import CACHE_NAME

BLANK = 3


def body(seed: int = 0) -> BertForMaskedLM:
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=64,
        initializer_range=0.4,
    )
    return BertForMaskedLM(config).eval()


def whole_pass(model: BertForMaskedLM, source: Tensor, target: Tensor) -> Tensor:
    """Logits `[V]` of the word behind the target, `[S]` and `[t]` being token ids: nothing cached, nothing shared."""
    ids = torch.cat([source, target, torch.tensor([BLANK])])
    total, first = len(ids), len(source)
    sees = torch.zeros(total, total, dtype=torch.bool)
    sees[:, :first] = True  # everything sees the source, the source sees itself in both directions
    sees[first:, first:] = torch.ones(total - first, total - first).tril().bool()
    types = (torch.arange(total) >= first).long()
    with torch.no_grad():
        return model(ids[None], attention_mask=sees[None, None], token_type_ids=types[None]).logits[0, -1]


def test_each_step_is_a_pass_over_everything() -> None:
    bert = body()
    model = fastseq.PrefixLM.from_bert(bert, mask_token_id=BLANK)
    generator = torch.Generator().manual_seed(1)
    sources = [torch.randint(4, VOCAB, (length,), generator=generator) for length in (11, 7)]
    ids = torch.stack([torch.nn.functional.pad(source, (11 - len(source), 0)) for source in sources])
    mask = torch.stack([torch.nn.functional.pad(torch.ones_like(s), (11 - len(s), 0)) for s in sources])
    for path in (model, fastseq.wrap(model)):
        out = path.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=6,
            min_new_tokens=6,
            do_sample=False,
            num_beams=1,
            return_dict_in_generate=True,
            output_logits=True,
        )
        for step, logits in enumerate(out.logits):
            for row, source in enumerate(sources):
                expected = whole_pass(bert, source, out.sequences[row, 11 : 11 + step])
                torch.testing.assert_close(logits[row], expected, rtol=1e-4, atol=1e-4)


def test_the_words_depend_on_the_end_of_the_source_and_on_its_beginning() -> None:
    model = make("unilm")
    ids = torch.arange(10, 20)[None]
    changed = ids.clone()
    changed[0, 0] = 50
    first, other = (model.generate(input_ids=one, max_new_tokens=8, num_beams=2)[0, 10:] for one in (ids, changed))
    assert not torch.equal(first, other)


def test_what_cannot_be_one_is_refused_with_what_to_do() -> None:
    config = BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    with pytest.raises(UnsupportedModelError, match="mask_token_id"):
        fastseq.PrefixLM(config)
    with pytest.raises(UnsupportedModelError, match="BertForMaskedLM"):
        fastseq.PrefixLM.from_bert(BertModel(config), mask_token_id=BLANK)
    model = fastseq.PrefixLM.from_bert(body(), mask_token_id=BLANK)
    cache = model.generate(input_ids=torch.ones(1, 4).long(), max_new_tokens=2, return_dict_in_generate=True)
    with pytest.raises(UnsupportedModelError, match="one token at a time"):
        model(torch.ones(1, 3).long(), **{CACHE_NAME: cache[CACHE_NAME]})


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("by_config", [False, True])
def test_without_a_cache_it_is_refused(beams: int, by_config: bool) -> None:
    model = make("unilm")
    options: dict[str, object] = {"max_new_tokens": 4, "num_beams": beams}
    if by_config:
        model.generation_config.use_cache = False
    else:
        options["use_cache"] = False
    for path in (model, fastseq.wrap(model, check=False)):
        with pytest.raises(UnsupportedModelError, match="use_cache=False"):
            path.generate(input_ids=torch.arange(10, 20)[None], **options)
