"""Every command and every block of Python of the pages runs: with tiny models, on small files, in the pages' order."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from itertools import takewhile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from command_line import succeed
from demos import make_small
from docs_tools import DOCUMENTS, REPOSITORY, blocks, calls, shell_lines
from generators import LINES, POSITIONS, make_model, save, tokenizer
from services import ask, living, tiny, until
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    M2M100Config,
    M2M100ForConditionalGeneration,
    NllbTokenizer,
)

from attmemo import memoize, unmemoize
from attmemo.fastseq.ops import cache_shape, multi_head_cache_attention
from attmemo.models import Adapter
from attmemo.profiler.logs import generate_log
from attmemo.profiler.models import collate, load_model, tokenize

Names = dict[str, Any]
TEXTS = {path.relative_to(REPOSITORY).as_posix(): path.read_text(encoding="utf-8") for path in DOCUMENTS}


class Call(NamedTuple):
    """A command of a page: what stands behind `attmemo`, and the variables that are set in front of it."""

    words: tuple[str, ...]
    variables: tuple[tuple[str, str], ...] = ()


def commands_of(text: str) -> list[Call]:
    """The commands of all blocks of shell, in their order."""
    found = []
    for line in shell_lines(text):
        for words in calls(iter([line])):
            before = takewhile(lambda word: word != "attmemo", shlex.split(line, comments=True))
            variables = [word.partition("=") for word in before if "=" in word]
            found.append(Call(tuple(words), tuple((name, value) for name, _, value in variables)))
    return found


COMMANDS = {name: found for name, text in TEXTS.items() if (found := commands_of(text))}


def is_on_another_page(name: str) -> bool:
    """Whether one other page has all commands of this one; of two equal pages the first one is run."""
    own = set(COMMANDS[name])
    return any(own < set(found) or (own == set(found) and other < name) for other, found in COMMANDS.items())


# -- what pages name: models, files and databases, and what makes a command take seconds

MORE = list(generate_log(800, seed=5))[300:]
"""Lines of the same services that come later."""

FILES: dict[str, list[str] | None] = {
    "FILE": None, "my.log": None, "today.log": None, "lines.log": None, "year.log": None, "sshd.log": None,
    "recent.log": MORE[:450], "newest.log": MORE[450:490],
    "INPUT": LINES[:6], "en.txt": LINES[:6], "prompts.txt": LINES[:6], "ro.ref": LINES[:6],
    "articles.txt": LINES[:6],
}  # fmt: skip
"""The lines of each file that a page reads; None: the 300 of the fixture."""

SHORTER: dict[tuple[str, ...], tuple[str, ...]] = {
    ("advise",): ("--seconds", "0"),
    ("evaluate",): ("--repeats", "1"),
    ("train-embedder",): ("--steps", "2"),
    ("bench", "peers", "MODEL", "FILE", "--batch"): ("--lines", "40", "--sample", "16"),
    ("bench", "peers", "MODEL", "FILE"): (
        "--lines", "40", "--sample", "16", "--batch", "4", "--paths", "stock,none",
    ),
    ("generate",): ("--max-new-tokens", "6"),
}  # fmt: skip
"""Options that are given too, by how a command begins: the first that fits. A value that comes last counts."""

NEEDS = {
    "docs/fastseq.md": ("sacrebleu",), "docs/peers.md": ("matplotlib",),
    "docs/use.md": ("jinja2", "matplotlib", "sklearn"),
}  # fmt: skip
"""Packages of extras without which a page cannot run."""


def many_languages(folder: Path) -> str:
    """A model that translates between two languages, as NLLB does; random weights."""
    letters = sorted({letter for line in LINES for letter in line if letter != " "})
    pieces = ["<s>", "<pad>", "</s>", "<unk>", "▁", *letters]
    own = NllbTokenizer(
        vocab={piece: number for number, piece in enumerate(pieces)}, merges=[],
        extra_special_tokens=["eng_Latn", "ron_Latn"], model_max_length=POSITIONS,
    )  # fmt: skip
    own.save_pretrained(folder)
    torch.manual_seed(0)
    config = M2M100Config(
        vocab_size=len(own) + 2, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=POSITIONS,
        init_std=0.4, bos_token_id=0, pad_token_id=1, eos_token_id=2, decoder_start_token_id=2,
    )  # fmt: skip
    M2M100ForConditionalGeneration(config).eval().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, tiny_bert: str) -> dict[str, str]:
    """Directories of tiny models, by the names that pages have for them."""
    make = tmp_path_factory.mktemp
    encoder = str(make("encoder"))
    AutoModel.from_pretrained(tiny_bert).save_pretrained(encoder)
    AutoTokenizer.from_pretrained(tiny_bert).save_pretrained(encoder)
    return {
        "MODEL": tiny_bert, "$MODEL": tiny_bert, "sentence-transformers/all-MiniLM-L6-v2": encoder,
        "/models/minilm": encoder, "bart": save("bart", make("bart")), "./t5": save("t5", make("t5")),
        "gpt2": save("gpt2", make("gpt2")), "facebook/nllb-200-distilled-600M": many_languages(make("nllb")),
    }  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_lines: list[str]) -> Path:
    """The working directory, with the files that pages read."""
    monkeypatch.chdir(tmp_path)
    for name, lines in FILES.items():
        place = tmp_path / ("FILE.log" if name == "FILE" else name)
        place.write_text("".join(f"{line}\n" for line in lines or log_lines), encoding="utf-8")
    return tmp_path


def fill(model: str, database: str, lines: list[str], namespace: str | None = None) -> None:
    """Have a served model begin a database that fills itself, with a namespace in it if that has a name."""
    loaded = load_model(model)
    served: Any = loaded.model
    memoize(served, database=database, budget=0.01, tokenizer=loaded.tokenizer, gate=False)
    inputs = collate(loaded, tokenize(loaded, lines, 48))
    with torch.no_grad():
        served(**inputs)
        if namespace is not None:
            with served.attmemo.namespace(namespace):
                served(**inputs)
    assert served.attmemo.flush()
    unmemoize(served)


def prepare_privacy(model: str, lines: list[str]) -> None:
    fill(model, "DB", [*lines[:20], "user jane doe logged in"], "tenant-a")
    fill(model, "OTHER", lines[10:30])


def prepare_tutorial(model: str, lines: list[str]) -> None:
    fill(model, "sshd-rows", lines[:20])


def prepare_scale(model: str, _: list[str]) -> None:
    """The other machines do what the page shows for the first one."""
    for number in (2, 3):
        succeed(
            "build-database", "--reuse", "rows", "--model", model, "--data", "year.log", "--shard", f"{number}/8",
            "--output", f"SHARD-{number}",
        )  # fmt: skip


PREPARED: dict[str, Callable[[str, list[str]], None]] = {
    "docs/privacy.md": prepare_privacy, "docs/tutorial.md": prepare_tutorial, "docs/scale.md": prepare_scale,
}  # fmt: skip
"""What is there before the first command of a page: databases that services, the page's Python, or others made."""


def serve_once(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Have `attmemo serve` end after two requests; the status of each is in what is returned, a pair for a service."""
    import uvicorn

    answered: list[tuple[int, int]] = []

    def run(server: Any, sockets: Any) -> None:
        thread = threading.Thread(target=uvicorn.Server.run, args=(server, sockets), daemon=True)
        thread.start()
        try:
            until(lambda: server.started or not thread.is_alive())
            url = f"http://127.0.0.1:{sockets[0].getsockname()[1]}"
            answered.append((ask(f"{url}/health", None).status, ask(f"{url}/", {"inputs": MORE[0]}).status))
        finally:
            server.should_exit = True
            thread.join(60)

    monkeypatch.setattr("attmemo.serve.server.Server.run", run)
    monkeypatch.setattr("attmemo.serve.logs.write_logs", lambda *_: None)  # it would stay so for other tests
    return answered


def run(call: Call, models: dict[str, str]) -> None:
    """Run a command of a page; it must succeed."""
    known = models | {"FILE": "FILE.log", "3000": "0"}
    if call.words[0] == "generate":
        known["MODEL"] = models["bart"]
    begins = (more for begin, more in SHORTER.items() if call.words[: len(begin)] == begin)
    words = [*(known.get(word, word) for word in call.words), *next(begins, ())]
    if not call.variables:
        succeed(*words)
        return
    done = subprocess.run(  # a variable may be read when a library is loaded
        [sys.executable, "-m", "attmemo", *words], env={**os.environ, **dict(call.variables)}, cwd=REPOSITORY,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", [name for name in COMMANDS if not is_on_another_page(name)])
def test_every_command_of_a_page_runs_behind_those_before_it(
    page: str, models: dict[str, str], folder: Path, log_lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in NEEDS.get(page, ()):
        pytest.importorskip(package)
    make_small(monkeypatch, models["/models/minilm"])
    answered = serve_once(monkeypatch)
    if page in PREPARED:
        PREPARED[page](models["MODEL"], log_lines)
    for call in COMMANDS[page]:
        run(call, models)
        if call.words[0] == "serve":
            assert answered.pop() == (200, 200), call
    assert not answered


def test_no_command_is_left_out() -> None:
    found = {call for name in COMMANDS if not is_on_another_page(name) for call in COMMANDS[name]}
    assert found == {call for calls_of_page in COMMANDS.values() for call in calls_of_page}
    assert len(found) >= 25
    assert Call(("doctor",), (("ATTMEMO_WITHOUT", "amx avx512"),)) in found


# -- Python

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


# -- the tables above


def test_what_is_replaced_or_added_still_stands_on_a_page(models: dict[str, str]) -> None:
    """Names that no page has any more would hide that a page names something else by now."""
    words = {word for found in COMMANDS.values() for call in found for word in call.words}
    code = "".join(code for page in PYTHON for code, _ in blocks(TEXTS[page]))
    named = {*FILES, *models} - {"bart"}
    assert not [name for name in sorted(named) if name not in words and name not in code]
    assert not [text for text in OTHER if text not in code]
    every = [call.words for found in COMMANDS.values() for call in found]
    assert not [begin for begin in SHORTER if not any(words[: len(begin)] == begin for words in every)]
    assert PREPARED.keys() | NEEDS.keys() <= COMMANDS.keys()
    assert all(len(list(blocks(TEXTS[page]))) > number for page, number in BEFORE)
