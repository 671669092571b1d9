"""A demo that takes seconds."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from attmemo.profiler import demo


def make_small(patch: pytest.MonkeyPatch, model: str) -> None:
    """Another model, fewer lines, and none of the other runtimes that may be installed."""
    patch.setattr(demo, "_INVENTED", 320)
    patch.setattr(demo, "model_path", lambda: model)
    patch.setattr(demo, "other_runtimes", lambda *_: nullcontext(({}, [])))
