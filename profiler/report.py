"""Write what an evaluation found: a page to read, and the numbers to compute with."""

from __future__ import annotations

import base64
import json
import tempfile
from importlib import resources
from pathlib import Path, PurePath

import jinja2

from attmemo.errors import AttmemoError
from attmemo.profiler.plots import draw_panel, present_panels
from attmemo.profiler.tables import FOUR, NOTHING, PERCENT, TIMES, Result, make_tables, show
from attmemo.system.json_fields import finite


def _render_page(result: Result, headline: str) -> bytes:
    time, quality = result.get("time") or {}, result.get("quality") or {}
    threshold = result.get("threshold")
    tiles = {
        "speed-up": show(time.get("speedup"), TIMES),
        "tokens recomputed": show(result.get("share_computed"), PERCENT),
        "hit rate": show(result.get("hit_rate"), PERCENT),
        "same answer": show(quality.get("agreement"), PERCENT),
        "cosine, mean": show(quality.get("cosine_mean"), FOUR),
        "threshold": "per layer" if isinstance(threshold, list) else show(threshold, "{:.4g}"),
    }
    strict = jinja2.StrictUndefined
    environment = jinja2.Environment(autoescape=True, undefined=strict, trim_blocks=True, lstrip_blocks=True)
    source = resources.files("attmemo.profiler").joinpath("report.html.j2").read_text(encoding="utf-8")
    page = environment.from_string(source).render(
        headline=headline,
        verdict=result.get("verdict") or "",
        notes=result.get("notes") or [],
        tiles={name: value for name, value in tiles.items() if value != NOTHING},
        tables=make_tables(result),
        panels=[(panel, base64.b64encode(draw_panel(panel, result)).decode()) for panel in present_panels(result)],
    )
    return page.encode()


def write_report(result: Result, directory: Path) -> list[Path]:
    """Write `report.html` and `result.json` into a directory, made if absent; gives their paths.

    The page needs no other file and no network. Files of the same names are replaced when both are written: a full
    disk leaves an older report whole. A directory that cannot be written is an `AttmemoError`.
    """
    model = PurePath((result.get("database") or {}).get("model") or "")
    short = PurePath(*model.parts[-2:])  # an id of a hub has two parts; a path would fill the line
    about = "Reuse of rows" if result.get("reuse") == "rows" else "Attention memoization"
    headline = f"{about}: {short}" if model.parts else about
    contents = {
        "report.html": _render_page(result, headline),
        "result.json": (json.dumps(finite(result), indent=2, ensure_ascii=False) + "\n").encode(),
    }
    directory = Path(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".report-", dir=directory) as beside:
            for name, content in contents.items():
                (Path(beside) / name).write_bytes(content)
            for name in contents:
                (Path(beside) / name).replace(directory / name)
    except OSError as error:
        raise AttmemoError(
            f"{directory}: the report cannot be written: {error.strerror or error}",
            "name a directory that can be written, or make room on the disk",
        ) from error
    return [directory / name for name in contents]
