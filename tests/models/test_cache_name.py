"""The argument with the key-value cache has the name that the installed transformers gives it."""

import inspect

import pytest
from transformers.models.bert.modeling_bert import BertSelfAttention
from transformers.models.llama.modeling_llama import LlamaAttention

from attmemo.models.cache_name import CACHE_NAME, NEW, OLD, cache_of


@pytest.mark.parametrize("kind", [BertSelfAttention, LlamaAttention])
def test_the_name_is_that_of_the_installed_transformers(kind: type) -> None:
    taken = inspect.signature(kind.forward).parameters
    assert CACHE_NAME in taken
    assert len({NEW, OLD} & set(taken)) == 1


@pytest.mark.parametrize("given", [{NEW: 1}, {OLD: 1}, {NEW: 1, OLD: None}, {NEW: None, OLD: 1}])
def test_a_cache_is_found_under_both_names(given: dict[str, object]) -> None:
    assert cache_of(given) == 1
    assert cache_of({}) is None
