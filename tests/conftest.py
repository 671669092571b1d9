"""Shared fixtures: tiny real models with real tokenizers, a log, and a small trained database. Seeds are fixed."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
)

from attmemo.profiler.logs import generate_log
from attmemo.profiler.models import LoadedModel, load_model

# Rooms are no packages. pytest puts this folder on the path, where `import ray` would find the room `ray`.
HERE = Path(__file__).parent
sys.path.remove(str(HERE))

# Every module of tools: those of all rooms, and those that lie beside tests.
pytest.register_assert_rewrite(*(file.stem for file in HERE.glob("*/*.py") if not file.name.startswith("test_")))

from tiny_models import TINY, make_database, make_tokenizer  # noqa: E402

# Without such a device `torch.manual_seed` keeps a formatted stack for each kind of it: a millisecond, and memory.
for _device in (torch.cuda, torch.mtia, torch.xpu):
    if not _device.is_available():
        _device.manual_seed_all = lambda _seed: None  # type: ignore[attr-defined]

# GNU readline, which pytest loads, sets both for child processes: tables would be narrower there.
for _size in ("COLUMNS", "LINES"):
    os.environ.pop(_size, None)

# No test measures time: an example of a property may take as long as a slow or busy machine needs for it. Examples are
# the same in each run.
settings.register_profile("attmemo", deadline=None, derandomize=True)
settings.load_profile("attmemo")

# A forked child that takes too long dies of its own alarm, not of the time limit of tests.
os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGALRM, signal.SIG_DFL))


@pytest.fixture(scope="session", autouse=True)
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(min(2, before))
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def _never_idle() -> Iterator[None]:
    """What is owed is paid when a test says so, not whenever there is time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("attmemo.guard.idle.QUIET", 3600.0)
        yield


@pytest.fixture(scope="session", autouse=True)
def _never_faster() -> Iterator[None]:
    """8-bit layers are taken to be as fast as exact ones: what a budget chooses must not depend on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("attmemo.handle.stack.speed_of", lambda *_: 1.0)
        yield


@pytest.fixture(scope="session", autouse=True)
def _never_slow() -> Iterator[None]:
    """What is stored beside a forward does not depend on how long that took: what is left out is no chance."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("attmemo.rows.throttle.EACH", float("inf"))
        yield


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's cache directory."""
    monkeypatch.setenv("ATTMEMO_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def log_lines() -> list[str]:
    return list(generate_log(300, seed=1))


@pytest.fixture(scope="session")
def service_log(tmp_path_factory: pytest.TempPathFactory, log_lines: list[str]) -> Path:
    """A file of 300 log lines."""
    file = tmp_path_factory.mktemp("log") / "service.log"
    file.write_text("\n".join(log_lines) + "\n")
    return file


def _save(model: torch.nn.Module, lines: list[str], folder: Path) -> str:
    model.eval().save_pretrained(folder)  # type: ignore[operator]
    make_tokenizer(lines).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory: pytest.TempPathFactory, log_lines: list[str]) -> str:
    """Directory of a random two-layer BERT classifier."""
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(**TINY))
    return _save(model, log_lines, tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def loaded(tiny_bert: str) -> LoadedModel:
    """`tiny_bert`, for tests that do not change the model."""
    return load_model(tiny_bert)


@pytest.fixture(scope="session")
def tiny_deberta(tmp_path_factory: pytest.TempPathFactory, log_lines: list[str]) -> str:
    """Directory of a random two-layer DeBERTa-v2 classifier, shaped as v3."""
    torch.manual_seed(0)
    config = DebertaV2Config(
        **TINY,
        relative_attention=True,
        position_buckets=16,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        pos_att_type=["p2c", "c2p"],
        position_biased_input=False,
        type_vocab_size=0,
        pooler_hidden_size=32,
    )
    return _save(DebertaV2ForSequenceClassification(config), log_lines, tmp_path_factory.mktemp("deberta"))


@pytest.fixture(scope="session")
def bert_database(tmp_path_factory: pytest.TempPathFactory, tiny_bert: str, service_log: Path) -> Path:
    """A trained database of `tiny_bert` over `service_log` (float32). Read only: copy it before changing a byte."""
    return make_database(tiny_bert, service_log, tmp_path_factory.mktemp("bert-db") / "db", storage="float32")


@pytest.fixture(scope="session")
def deberta_database(tmp_path_factory: pytest.TempPathFactory, tiny_deberta: str, service_log: Path) -> Path:
    """A trained database of `tiny_deberta` over `service_log` (float32). Read only: copy it before changing a byte."""
    return make_database(tiny_deberta, service_log, tmp_path_factory.mktemp("deberta-db") / "db", storage="float32")
