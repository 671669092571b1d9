"""Loading by a name: what is silent meanwhile, and what an error says."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError
from transformers import AutoConfig

from attmemo.errors import DataError
from attmemo.loading import load_config, quiet

HUB = logging.getLogger("huggingface_hub.utils._http")  # of the notices about tries to reach the hub


def test_a_hub_that_cannot_be_reached_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: Any, **__: Any) -> None:
        assert not HUB.isEnabledFor(logging.WARNING), "each try would be told"
        try:
            raise LocalEntryNotFoundError("cannot find the requested files in the local cache")
        except LocalEntryNotFoundError as error:
            raise OSError("We couldn't connect to load the files\nand more lines") from error

    monkeypatch.setattr(AutoConfig, "from_pretrained", unreachable)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(DataError) as caught:
        load_config("bert-nope")
    assert caught.value.what.startswith("cannot read the configuration of bert-nope: there is no such directory")
    assert "the hub cannot be reached" in caught.value.what
    assert "HF_HUB_OFFLINE=1" in str(caught.value.hint)


def test_where_the_hub_may_not_be_asked_the_error_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="HF_HUB_OFFLINE is set") as caught:
        load_config("no-organisation/no-model")
    assert "unset HF_HUB_OFFLINE" in str(caught.value.hint)


def test_notices_are_as_before_afterwards() -> None:
    root = logging.getLogger("huggingface_hub")
    before = root.level
    with quiet():
        assert not HUB.isEnabledFor(logging.WARNING)
    assert root.level == before
