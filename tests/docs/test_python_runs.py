"""Every block of Python on the pages runs: with tiny models, in one namespace a page."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from command_line import succeed
from docs_tools import REPOSITORY, TEXTS, blocks
from generators import LINES, POSITIONS, make_model, tokenizer
from page_inputs import MORE
from services import living, tiny
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from attmemo import memoize, unmemoize
from attmemo.fastseq.ops import cache_shape, multi_head_cache_attention
from attmemo.models import Adapter

Names = dict[str, Any]
STREAM = [f"{line} {number}" for number, line in enumerate(LINES[:20])]


def with_a_classifier(models: dict[str, str]) -> Names:
    """A model, its tokenizer, texts, and these as a batch."""
    names: Names = {
        "memoize": memoize, "texts": MORE[:4], "tokenizer": AutoTokenizer.from_pretrained(models["MODEL"]),
        "model": AutoModelForSequenceClassification.from_pretrained(models["MODEL"]).eval(),
    }  # fmt: skip
    names["batch"] = names["tokenizer"](names["texts"], padding=True, truncation=True, return_tensors="pt")
    return names


def with_an_encoder(models: dict[str, str]) -> Names:
    """The same with a model that gives hidden states."""
    return with_a_classifier(models) | {"torch": torch, "model": AutoModel.from_pretrained(models["MODEL"]).eval()}


def with_a_generator(_: dict[str, str]) -> Names:
    """A model that makes texts, its tokenizer, lines, and some of these as a batch."""
    own = tokenizer()
    batch = own(LINES[:2], padding=True, truncation=True, max_length=POSITIONS // 2, return_tensors="pt")
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    return {"model": make_model("bart"), "tokenizer": own, "lines": LINES[:6], "inputs": inputs}


def with_a_cache(_: dict[str, str]) -> Names:
    """Three new tokens of one sequence, two heads, and an empty cache without pages."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 3, 2, 8, generator=generator)
    limits = torch.tensor([0, 3])
    return {
        "multi_head_cache_attention": multi_head_cache_attention, "query": query, "current_key": key,
        "current_value": value, "seqstarts": limits, "kvstarts": limits.clone(), "cachestarts": torch.tensor([0]),
        "start_pos": torch.tensor([0]), "decoding_batches": 0, "max_seqlen": 3, "max_kvlen": 3,
        "cache": torch.zeros(cache_shape(0, 8, 1, 2, 8)), "scale": None, "attn_mask": None, "num_heads": 2,
        "head_dim": 8,
    }  # fmt: skip


def with_an_adapter(_: dict[str, str]) -> Names:
    return {"Adapter": Adapter}


def with_prepared_rows(models: dict[str, str]) -> Names:
    """What the page's commands have built before."""
    succeed(
        "build-database", "--reuse", "rows", "--model", models["MODEL"], "--data", "lines.log", "--limit", "20",
        "--output", "ROWS",
    )  # fmt: skip
    return with_a_classifier(models)


PYTHON: dict[str, Callable[[dict[str, str]], Names]] = {
    "attmemo/models/README.md": with_an_adapter,
    "docs/attention-op.md": with_a_cache,
    "docs/fastseq.md": with_a_generator,
    "docs/filling.md": with_a_classifier,
    "docs/models.md": with_a_classifier,
    "docs/promise.md": with_a_classifier,
    "docs/python.md": with_an_encoder,
    "docs/rows.md": with_a_classifier,
    "docs/scale.md": with_a_classifier,
    "docs/service.md": with_a_classifier,
    "docs/troubleshooting.md": with_a_classifier,
    "docs/use.md": with_prepared_rows,
}
"""What there is before the first block of a page."""

ELSEWHERE = {
    "README.md": "docs/test_readme.py",
    "docs/own-family.md": "docs/test_pages.py",
    "docs/privacy.md": "docs/test_pages.py",
    "docs/serving.md": "fastseq/test_ops_serving.py",
    "docs/tutorial.md": "docs/test_pages.py",
}
"""Pages whose Python another test runs."""

BEFORE = {
    ("docs/troubleshooting.md", 0): "memoize(model, budget=0.01)(**batch)",
}
"""What a reader has done before a block, by its number."""

OTHER = {
    '"MODEL"': "MODEL", "max_new_tokens=140": "max_new_tokens=6", "s3://bucket/": "", "\n...": "\nmodel(**batch)",
}  # fmt: skip
"""Text of blocks that is replaced: names of models and places, lengths, and the use of a model that is left out."""


def code_of(page: str, models: dict[str, str]) -> list[str]:
    """The blocks of a page, with what is replaced."""
    found = []
    for number, (code, _) in enumerate(blocks(TEXTS[page])):
        named = {name: place for name, place in models.items() if "/" in name}
        for before, after in (OTHER | named).items():
            code = code.replace(before, after)
        found.append(f"{BEFORE.get((page, number), '')}\n{code}")
    return found


def execute(page: str, models: dict[str, str], names: Names, **other: str) -> Names:
    """Run the blocks of a page in one namespace, in which there are names already. `other`: more that is replaced."""
    for code in code_of(page, models):
        for before, after in other.items():
            code = code.replace(before, after)
        exec(compile(code, page, "exec"), names)
    return names


class Table:
    """Stands in for a table of Ray: one actor in this process, that is given all rows at once."""

    def __init__(self) -> None:
        self.columns: Names = {"line": np.array(STREAM, object)}
        self.written: str | None = None

    def map_batches(self, encoder: Any, *, fn_constructor_kwargs: Names, **_: Any) -> Table:
        actor = encoder(**fn_constructor_kwargs)
        self.columns = actor(self.columns)
        actor.close()
        return self

    def write_parquet(self, place: str) -> None:
        self.written = place


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stands in for Ray, which is a package of hundreds of megabytes; `tests/ray` runs with it."""
    found: Any = ModuleType("ray")
    found.data, found.serve = ModuleType("ray.data"), MagicMock()
    found.data.DataContext = MagicMock()
    found.data.ActorPoolStrategy = lambda *, min_size, max_size: SimpleNamespace(min=min_size, max=max_size)
    found.data.read_parquet = lambda _: Table()
    found.is_initialized = lambda: False
    for name, module in (("ray", found), ("ray.data", found.data), ("ray.serve", found.serve)):
        module.__spec__ = ModuleSpec(name, None)  # others may look whether it is installed
        monkeypatch.setitem(sys.modules, name, module)
    return found


@torch.no_grad()
def python_of(page: str, models: dict[str, str], **other: str) -> Names:
    """The names that there are behind the last block of a page; no model is memoized any more."""
    names = PYTHON[page](models) | {"MODEL": models["MODEL"]}
    try:
        return execute(page, models, names, **other)
    finally:
        if hasattr(names.get("model"), "attmemo"):
            unmemoize(names["model"])


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("page", sorted(PYTHON.keys() - {"docs/scale.md", "docs/service.md"}))
def test_the_python_of_a_page_runs(page: str, models: dict[str, str]) -> None:
    names = python_of(page, models)
    if page == "docs/attention-op.md":
        assert names["output"].shape == (3, 2, 8)
    if page == "docs/python.md":
        assert names["seen"].tokens == names["batch"]["attention_mask"].sum(1).tolist()
    if page == "docs/filling.md":
        assert Path("DB").is_dir()
    if page == "docs/fastseq.md":
        assert len(Path("summaries.txt").read_text(encoding="utf-8").splitlines()) == 6


@pytest.mark.usefixtures("folder")
def test_the_python_of_the_page_of_the_service_asks_and_makes_one(models: dict[str, str], tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    with living(tiny(tmp_path / "tagger", None, ("O", "B-A", "I-A"))) as live:
        names = python_of("docs/service.md", models, **{"http://localhost:3000": live.url})
        names["service"].close()
    assert names["app"].routes


@pytest.mark.usefixtures("folder")
def test_the_python_of_the_page_of_ray_makes_vectors_and_settings_of_a_service(
    models: dict[str, str], ray: Any
) -> None:
    from attmemo.serve.service import Service

    names = python_of("docs/scale.md", models)
    assert names["table"].columns["embedding"].shape == (len(STREAM), 32)
    assert names["table"].written == "out/"
    assert ray.serve.run.call_count == 1
    Service(names["settings"]).start().close()  # on the database that the table has filled


def test_every_block_of_python_is_run_here_or_by_another_test() -> None:
    fences = re.compile(r"^ *```python", re.MULTILINE)
    pages = {name for name, text in TEXTS.items() if fences.search(text)}
    assert PYTHON.keys() | ELSEWHERE.keys() == pages
    assert not PYTHON.keys() & ELSEWHERE.keys()
    for name in pages:
        assert len(fences.findall(TEXTS[name])) == len(list(blocks(TEXTS[name]))), name
    for name, test in ELSEWHERE.items():
        assert Path(name).stem in (REPOSITORY / "tests" / test).read_text(encoding="utf-8"), name


def test_what_is_replaced_or_done_before_still_has_its_block() -> None:
    code = "".join(code for page in PYTHON for code, _ in blocks(TEXTS[page]))
    assert not [text for text in OTHER if text not in code]
    assert all(len(list(blocks(TEXTS[page]))) > number for page, number in BEFORE)
