"""The rules of answers from records, beside a user's settings: what a guard has proven holds under them alone."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pkgutil
from collections.abc import Iterable, Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np

import attmemo
from attmemo import guard
from attmemo.forward import planning
from attmemo.guard import change_log, idle
from attmemo.kernels import align, changes, kinds, plan
from attmemo.kernels import rows as row_kernels
from attmemo.rows import index, planner, serve, sketch, token_kinds


def digest_of_rules() -> str:
    """A hash of the library's version, and of the constants of all modules that decide what is served."""
    rules = {"version": attmemo.__version__} | dict(_constants(_modules()))
    return hashlib.sha256(json.dumps(rules, sort_keys=True).encode()).hexdigest()


def _modules() -> Iterator[ModuleType]:
    yield from (planning, index, planner, serve, sketch, token_kinds, align, changes, kinds, plan, row_kernels)
    for found in pkgutil.iter_modules(guard.__path__, f"{guard.__name__}."):
        if found.name not in (idle.__name__, change_log.__name__):  # neither decides an answer
            yield import_module(found.name)


def _constants(modules: Iterable[ModuleType]) -> Iterator[tuple[str, Any]]:
    """Names in capitals, and their values as JSON has them; loggers, functions and types are no rules."""
    for module in modules:
        for name, value in vars(module).items():
            if name.strip("_").isupper():
                try:
                    yield f"{module.__name__}.{name}", json.loads(json.dumps(value, default=_plain))
                except TypeError:
                    continue


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [f"{number:.12g}" for number in value.ravel().tolist()]  # the last digits are the processor's
    if isinstance(value, set | frozenset):
        return sorted(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    raise TypeError
