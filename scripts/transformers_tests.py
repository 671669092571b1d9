"""Run transformers' own generation tests with fastseq in the place of `generate`, beside the same tests without.

python scripts/transformers_tests.py ../transformers --families bart t5 gpt2 --output docs/fastseq-upstream

The first argument is a checkout of transformers, of a version near the installed one: its `tests` folder and
`testing_utils.py` are used, the rest of its `src` is not. Its tests want the package `parameterized`. The tests of
`GenerationTesterMixin` run for each family three times: as they are, with `fastseq.wrap`, and with
`fastseq.accelerate`. What fails as they are is another matter (a test of another version, a file of the hub); what
fails only with fastseq counts. Tests that compile are left out, and `use_cache=False` where a test does not need
it, since fastseq hands such calls on. Written are counts, and calls by path: a call that fastseq hands to the original
code proves nothing about fastseq.
"""

from __future__ import annotations

import argparse
import collections
import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measured_at import write_record

FAMILIES = ("bart", "marian", "t5", "gpt2", "llama", "qwen2", "qwen3")
_SHAPED = ("output_attentions", "output_hidden_states")  # of other shapes with a cache
WAYS = ("stock", "wrap", "accelerate")
HERE = Path(__file__)
OTHERS = (
    "test_fsdp_mixin", "test_pipeline_mixin", "test_tensor_parallel_mixin", "test_training_mixin", "exporters",
    "exporters.test_export",
)  # fmt: skip
HELPERS = "src/transformers/testing_utils.py"


class Replaced:
    """`GenerationMixin.generate` by way of `fastseq`, made anew where a model has other weights now."""

    def __init__(self, make: Callable[[Any], Any], original: Callable[..., Any]) -> None:
        self.make, self.original = make, original
        self.known: weakref.WeakKeyDictionary[Any, tuple[Any, Any]] = weakref.WeakKeyDictionary()
        self.within = threading.local()
        self.calls: collections.Counter[str] = collections.Counter()

    def __call__(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """As the original: fastseq calls it for parts of its own work."""
        if getattr(self.within, "depth", 0):
            return self.original(model, *args, **kwargs)
        self.within.depth = 1
        try:
            fast = self._fast(model)
            if fast is None:
                self.calls["refused"] += 1
                return self.original(model, *args, **kwargs)
            without = kwargs | {"use_cache": None}
            if kwargs.get("use_cache") is False and not any(map(kwargs.get, _SHAPED)) and not fast._why_stock(without):
                kwargs = without  # most tests have it, and none of these sees the difference
            before = fast.stats()
            try:
                return fast.generate(*args, **kwargs)
            finally:
                self._count(before, fast.stats())
        finally:
            self.within.depth = 0

    def _fast(self, model: Any) -> Any:
        from attmemo import UnsupportedModelError

        state = tuple((id(part), part._version) for part in model.parameters()), model.training
        kept, fast = self.known.get(model, (None, None))
        if kept != state:
            try:
                fast = self.make(model)
            except UnsupportedModelError:
                fast = None
            self.known[model] = state, fast
        return fast

    def _count(self, before: dict[str, Any], after: dict[str, Any]) -> None:
        self.calls["fast"] += after["calls"]["fast"] - before["calls"]["fast"]
        self.calls["packed"] += after["counts"].get("packed_steps", 0) > before["counts"].get("packed_steps", 0)
        for reason, count in after["stock_reasons"].items():
            self.calls[f"stock: {reason}"] += count - before["stock_reasons"].get(reason, 0)


class Plugin:
    """Of pytest, in a process of its own: only tests of the mixin run, by one of the ways."""

    def __init__(self, way: str, place: Path) -> None:
        self.way, self.place = way, place
        self.outcomes: dict[str, str] = {}
        self.messages: dict[str, str] = {}
        self.replaced: Replaced | None = None

    def pytest_configure(self) -> None:
        from transformers import GenerationMixin

        if self.way == "stock":
            return
        from attmemo import fastseq

        replaced = self.replaced = Replaced(getattr(fastseq, self.way), GenerationMixin.generate)

        @functools.wraps(GenerationMixin.generate)
        def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
            return replaced(self, *args, **kwargs)

        GenerationMixin.generate = generate

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        from tests.generation.test_utils import GenerationTesterMixin

        mixed_in = {name for name in dir(GenerationTesterMixin) if name.startswith("test_")}
        # Of a parametrized test the name goes on behind that of the mixin.
        items[:] = [item for item in items if item.name.startswith(tuple(mixed_in)) and "compile" not in item.name]

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            name = report.nodeid.split("::", 1)[1]
            self.outcomes[name] = report.outcome
            if report.outcome == "failed":
                self.messages[name] = str(report.longrepr)[-600:]

    def pytest_sessionfinish(self) -> None:
        calls = {} if self.replaced is None else dict(self.replaced.calls)
        self.place.write_text(json.dumps({"outcomes": self.outcomes, "messages": self.messages, "calls": calls}))


def run_tests(checkout: Path, family: str, way: str) -> dict[str, Any]:
    """Outcomes by test, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "found.json")
        subprocess.run(
            [sys.executable, str(HERE.resolve()), str(checkout), "--one", family, way, "--output", str(place)],
            cwd=checkout, env=os.environ | {"HF_HUB_OFFLINE": "1"}, stdout=subprocess.DEVNULL, check=False,
        )  # fmt: skip
        found: dict[str, Any] = json.loads(place.read_text())
    return found


def _empty_class(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})


def run_here(checkout: Path, family: str, way: str, place: Path) -> None:
    """The tests of one family, in this process."""
    import pytest

    sys.path.insert(0, str(checkout))
    import transformers
    import transformers.testing_utils as helpers

    # Tests of another version may want helpers that the installed one has no more, or ask for packages it never uses.
    for name in set(re.findall(r"is_\w+_available", (checkout / HELPERS).read_text())):
        vars(transformers.utils).setdefault(name, lambda *_: False)
    spec = importlib.util.spec_from_file_location(f"{helpers.__name__}_of_tests", checkout / HELPERS)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    for name, value in vars(module).items():
        vars(helpers).setdefault(name, value)
    for other in OTHERS:  # they want what is not there, and nothing of them runs here
        stub = types.ModuleType(f"tests.{other}")
        stub.__getattr__ = _empty_class  # type: ignore[method-assign]
        sys.modules[stub.__name__] = stub
    path = f"tests/models/{family}/test_modeling_{family}.py"
    pytest.main(["-q", "-p", "no:cacheprovider", path], plugins=[Plugin(way, place)])


def compare(checkout: Path, family: str, tests: str) -> dict[str, Any]:
    """A record: counts by way, what fails only with fastseq, and which calls took which path."""
    import torch
    import transformers

    runs = {way: run_tests(checkout, family, way) for way in WAYS}
    stock = runs["stock"]["outcomes"]
    facts = {"torch": torch.__version__, "transformers": transformers.__version__, "tests": tests}
    row: dict[str, Any] = {"family": family, **facts, "ways": {}}
    for way, found in runs.items():
        counts = collections.Counter(found["outcomes"].values())
        only = sorted(
            name for name, outcome in found["outcomes"].items() if outcome == "failed" and stock.get(name) != "failed"
        )
        row["ways"][way] = {
            **{kind: counts[kind] for kind in ("passed", "failed", "skipped")},
            "only_here": only, "calls": found["calls"],
        }  # fmt: skip
        print(family, way, row["ways"][way], flush=True)
        for name in only:
            print(found["messages"][name], flush=True)
    return row


def table(record: dict[str, Any]) -> str:
    """The record as Markdown."""
    lines = [
        "# fastseq: transformers' own generation tests",
        "",
        "In float32 on the CPU. Tests that compile are left out. A call that runs on the original path proves nothing "
        "of fastseq.",
        "",
        "| family | transformers | its tests of | generate | passed | failed | only with fastseq | skipped "
        "| calls fast | packed | original |",
        "|---|---|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in record["rows"]:
        for way, found in row["ways"].items():
            calls = found["calls"]
            stock = sum(count for name, count in calls.items() if name not in ("fast", "packed"))
            paths = ("", "", "") if way == "stock" else (calls.get("fast", 0), calls.get("packed", 0), stock)
            outcomes = [found["passed"], found["failed"], len(found["only_here"]), found["skipped"]]
            shown = "original" if way == "stock" else way
            cells = [row["family"], row["transformers"], row["tests"], shown, *outcomes]
            lines.append("| " + " | ".join(map(str, [*cells, *paths])) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Parse, run, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a folder with `tests` of transformers")
    parser.add_argument("--families", nargs="+", default=list(FAMILIES))
    parser.add_argument("--tests", default="the same version", help="the version of the checkout")
    parser.add_argument("--output", type=Path, default=Path("docs/fastseq-upstream"), help="without an ending")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        run_here(options.checkout.resolve(), *options.one, options.output.resolve())
        return
    place = options.output.with_suffix(".json")
    record = json.loads(place.read_text()) if place.exists() else {"rows": []}
    for family in options.families:
        row = compare(options.checkout.resolve(), family, options.tests)
        record["rows"] = [known for known in record["rows"] if known["family"] != family] + [row]
        write_record(place, record)
        options.output.with_suffix(".md").write_text(table(record))
    print(table(record))


if __name__ == "__main__":
    main()
