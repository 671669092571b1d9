"""Kernels are chosen at run time; the environment can leave out instruction sets that the processor has."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from attmemo.kernels import _linear, _row_attention
from attmemo.profiler.doctor import SETS

SHOW = """
import json
from attmemo.kernels import _linear, _row_attention
print(json.dumps([_row_attention.instruction_sets(), *(_linear.instruction_sets(kind) for kind in range(3))]))
"""


def sets_without(names: str) -> list[list[str]]:
    """Of attention, and of linear layers in float32, 8 bits and bfloat16."""
    done = subprocess.run(
        [sys.executable, "-c", SHOW], env=os.environ | {"ATTMEMO_WITHOUT": names}, capture_output=True, text=True,
        check=True, timeout=120,
    )  # fmt: skip
    found: list[list[str]] = json.loads(done.stdout)
    return found


def here() -> list[list[str]]:
    return [_row_attention.instruction_sets(), *(_linear.instruction_sets(kind) for kind in range(3))]


def test_what_the_environment_leaves_out_is_not_used() -> None:
    attention, *layers = sets_without("amx, avx512 avx2")
    assert attention == ["generic"]
    assert layers == [["generic"], ["generic"], []]


def test_only_whole_names_are_left_out_and_what_is_built_on_them() -> None:
    gone_with = {"avx512bf16": {"avx512bf16", "vnni16"}, "vnni": {"vnni", "vnni16"}, "": set(), "avx51": set()}
    for given, gone in gone_with.items():
        expected = [[name for name in names if name not in gone] for names in here()]
        assert sets_without(given) == expected, given


def test_the_names_that_doctor_knows_are_those_of_the_kernels() -> None:
    known = {name for names in here() for name in names} - {"generic"}
    assert known <= set(SETS)
