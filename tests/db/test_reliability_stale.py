"""A database of another model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from db_tools import body_of, seal

from attmemo import memoize
from attmemo.db import read_manifest
from attmemo.errors import StaleDatabaseError
from attmemo.profiler.models import load_model
from attmemo.profiler.open import open_model


def test_another_mask_is_refused(bert_database: Path, tiny_bert: str, tmp_path: Path) -> None:
    """Family, mask kind and number of layers are of the model: each is named."""
    for change, words in (({"mask_kind": "window"}, "mask kind: database window, model"), ({"family": "x"}, "family")):
        path = Path(shutil.copytree(bert_database, tmp_path / next(iter(change))))
        body = body_of(path)
        body["model"].update(change)
        seal(path, body)
        with pytest.raises(StaleDatabaseError, match=words):
            memoize(load_model(tiny_bert).model, 0.5, path)


def test_another_tokenizer_is_refused(bert_database: Path, tiny_bert: str, tmp_path: Path) -> None:
    """The weights of the build beside another vocabulary: what the command line opens is refused."""
    info = read_manifest(bert_database).model
    assert open_model(info).name == info.name
    folder = Path(shutil.copytree(tiny_bert, tmp_path / "model"))
    body = json.loads((folder / "tokenizer.json").read_text())
    words = sorted(body["model"]["vocab"].items(), key=lambda item: -item[1])
    body["model"]["vocab"][words[0][0]], body["model"]["vocab"][words[1][0]] = words[1][1], words[0][1]
    (folder / "tokenizer.json").write_text(json.dumps(body))
    with pytest.raises(StaleDatabaseError, match="another tokenizer"):
        open_model(info, str(folder))
