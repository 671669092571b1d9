"""Whether modules hold what they held: the kernel and its oracle in Python."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest

from attmemo.kernels import members


def dicts() -> tuple[tuple[dict[str, Any], ...], tuple[Any, ...]]:
    """Dictionaries of new objects, and these."""
    found: tuple[dict[str, Any], ...] = ({"a": [], "b": []}, {}, OrderedDict(c=[]))
    return found, tuple(value for one in found for value in one.values())


def changes() -> list[Any]:
    """What may become of dictionaries."""
    return [
        lambda own: None, lambda own: own[0].update(a=[]), lambda own: own[1].update(d=None),
        lambda own: own[2].clear(), lambda own: own[0].update(a=own[0].pop("a")), lambda own: own[0].pop("b"),
    ]  # fmt: skip


@pytest.mark.parametrize("number", range(len(changes())))
def test_another_object_another_order_and_one_less_are_noticed(number: int) -> None:
    own, values = dicts()
    changes()[number](own)
    assert members.hold(own, values) == members.hold_plain(own, values) == (number == 0)


def test_empty_dictionaries_are_told_from_others() -> None:
    for own in ((), ({},), ({}, OrderedDict()), ({}, {"a": None}), (OrderedDict(a=1),)):
        assert members.are_empty(own) == members.are_empty_plain(own)
    assert members.are_empty(({}, OrderedDict()))
    assert not members.are_empty(({}, {"a": None}))


def test_a_value_under_a_name_is_told_from_another() -> None:
    own, (value, *_) = dicts()
    for expected in ((value, None, None), ([], None, None), (None, None, None), (value, value, None)):
        assert members.have(own, "a", expected) == members.have_plain(own, "a", expected)
    assert members.have(own, "a", (value, None, None))
    assert not members.have(own, "a", ([], None, None))  # equal, and not the same


def test_bytes_that_changed_are_noticed() -> None:
    numbers = np.arange(4, dtype=np.int16)
    places = numbers.ctypes.data + 2 * np.arange(4).astype(np.uint64)
    before = numbers.tobytes()
    assert members.lie(places, 2, before)
    assert members.lie_plain(places, 2, before)
    numbers[3] = 9
    assert not members.lie(places, 2, before)
    assert not members.lie_plain(places, 2, before)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(TypeError, match="dict"):
        members.hold(([],), ())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="dict"):
        members.are_empty(([],))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="value"):
        members.have(({},), "a", ())
    with pytest.raises(ValueError, match="addresses"):
        members.lie(np.zeros(1, np.uint64), 2, b"1")
