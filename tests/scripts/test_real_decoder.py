"""On stories260K, a language model that was really trained: text goes on as it would have after a memoized prefill.

Needs ``../shared/data/weights_stories260K``; skips without it and says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from scripts_tools import script
from shared_data import shared
from torch import Tensor

from attmemo import Database, memoize, unmemoize
from attmemo.embed.training import TrainOptions
from attmemo.profiler.answers import ask, changed, perplexity, prepare
from attmemo.profiler.build import BuildOptions, build_database
from attmemo.profiler.models import LoadedModel, load_model, tokenize
from attmemo.profiler.train import train_database

NEW = 24
STORIES = [
    f"Once upon a time, there was a little {who}. {name} liked to play in the {place} with a {thing}. One day, {name}"
    for name, who in (("Lily", "girl"), ("Tim", "boy"), ("Max", "dog"))
    for place in ("park", "garden", "sun")
    for thing in ("ball", "red kite", "friend")
]
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 0, "temperature": 1.0},
    "beam": {"do_sample": False, "num_beams": 3},
}


@pytest.fixture(scope="module", name="loaded")
def _loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    source = shared("data/weights_stories260K")
    return load_model(str(script.convert(source, tmp_path_factory.mktemp("stories260K") / "model")))


@pytest.fixture(scope="module", name="path")
def _path(loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database of the stories' own maps, float32."""
    folder = tmp_path_factory.mktemp("stories-db")
    (folder / "stories.txt").write_text("".join(f"{story}\n" for story in STORIES))
    build_database(
        loaded, [folder / "stories.txt"], folder / "db", BuildOptions(storage="float32", held_out=0.0)
    )
    train_database(folder / "db", TrainOptions(steps=20), profile=False)
    return folder / "db"


@pytest.fixture(autouse=True)
def _bare_afterwards(loaded: LoadedModel) -> Iterator[None]:
    yield
    unmemoize(loaded.model)


def go_on(loaded: LoadedModel, texts: list[str], **options: Any) -> Tensor:
    """The model's continuations of the texts, ``[B, NEW]``; a batch of several lengths is padded at the start."""
    rows = [item.ids for item in tokenize(loaded, texts, 400)]
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    torch.manual_seed(5)
    model: Any = loaded.model
    told: Tensor = model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=NEW, min_new_tokens=NEW, eos_token_id=None, pad_token_id=0,
        **options,
    )  # fmt: skip
    return told[:, longest:]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("count", [1, 9], ids=["one story", "several lengths"])
def test_text_after_a_prefill_from_own_maps_is_the_models_own(
    loaded: LoadedModel, path: Path, mode: str, count: int
) -> None:
    texts = STORIES[::3][:count]
    expected = go_on(loaded, texts, **MODES[mode])
    model: Any = memoize(loaded.model, 0.0, path, gate=False)
    assert torch.equal(go_on(loaded, texts, **MODES[mode]), expected)
    stats = model.attmemo.stats()
    assert stats["hits"] == count * MODES[mode].get("num_beams", 1) * 5
    assert set(stats["ineligible"]) == {"cached decoding"}


def test_maps_of_other_stories_change_the_answers(loaded: LoadedModel, path: Path) -> None:
    """So the identical text of the test above does not come from a prefill that was never served."""
    others = [text.replace("liked", "hated").replace("One day", "At last") for text in STORIES]
    tokens = tokenize(loaded, others, 400)
    prepared = prepare(loaded, tokens, 9)
    exact, (surprise, _) = ask(loaded, prepared), perplexity(loaded, prepared)
    with Database(path) as database:
        memoize(loaded.model, 0.0, database, gate=False)
        given, (served, _) = ask(loaded, prepared), perplexity(loaded, prepared)
        assert loaded.model.attmemo.stats()["hit_rate"] > 0.2  # type: ignore[union-attr,operator]
    assert surprise is not None
    assert served is not None
    assert served > surprise, "the maps of another text cost nothing"
    assert changed(loaded.kind, exact, given, 0.0).any()
