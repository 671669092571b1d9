"""Every extension module says in its .pyi what it holds, all of that and nothing else."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

import attmemo

EXTENSIONS = [
    "kernels._cache_attention",
    "kernels._chain",
    "kernels._decode",
    "kernels._embed",
    "kernels._linear",
    "kernels._map_product",
    "kernels._members",
    "kernels._ngram",
    "kernels._plan",
    "kernels._row_attention",
    "kernels._rows",
    "kernels._sketch",
    "mmap._window",
]


def told(body: list[ast.stmt]) -> dict[str, dict[str, object] | None]:
    """Names of functions, properties and objects in a stub; of a class, what it has in turn."""
    names: dict[str, dict[str, object] | None] = {}
    for node in body:
        if isinstance(node, ast.ClassDef):
            names[node.name] = dict(told(node.body))
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("__"):
            names[node.name] = None
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names[node.target.id] = None
    return names


def held(thing: object) -> dict[str, dict[str, object] | None]:
    """The same of a module or class as it was built."""
    public = {name: value for name, value in vars(thing).items() if not name.startswith("__")}
    return {name: dict(held(value)) if isinstance(value, type) else None for name, value in public.items()}


@pytest.mark.parametrize("name", EXTENSIONS)
def test_a_stub_names_what_its_extension_holds_and_nothing_else(name: str) -> None:
    stub = Path(attmemo.__path__[0], *name.split(".")).with_suffix(".pyi")
    assert told(ast.parse(stub.read_text()).body) == held(importlib.import_module(f"attmemo.{name}"))


def test_every_extension_has_a_stub() -> None:
    stubs = Path(attmemo.__path__[0]).glob("*/_*.pyi")
    assert sorted(f"{stub.parent.name}.{stub.stem}" for stub in stubs) == EXTENSIONS
