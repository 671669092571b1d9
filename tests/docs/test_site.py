"""The site of the documents: it is built without a network, and its pages load nothing from elsewhere."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote

import pytest

REPOSITORY = Path(__file__).parents[2]
BUILD = """
import socket, sys
def refuse(*_, **__):
    raise OSError("the site must be built without a network")
socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
from mkdocs.__main__ import cli
cli(["build", "--strict", "--site-dir", sys.argv[1]])
"""


class Page(HTMLParser):
    """What a page loads, where it links to, and which anchors it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a":
            self.links.append(given.get("href", ""))
        elif tag == "link" and given.get("rel") not in ("next", "prev", "canonical"):
            self.loads.append(given.get("href", ""))
        else:
            self.loads += [given[name] for name in ("src", "srcset", "data", "poster") if name in given]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for module in ("mkdocs", "material", "mkdocstrings_handlers"):
        if find_spec(module) is None:
            pytest.skip(f"{module} is not installed: pip install '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    run = subprocess.run(
        [sys.executable, "-c", BUILD, str(folder)], cwd=REPOSITORY, capture_output=True, text=True, timeout=300,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {file: Page(file.read_text(encoding="utf-8")) for file in site.rglob("*.html")}


def test_every_document_is_a_page(site: Path) -> None:
    for document in (REPOSITORY / "docs").glob("*.md"):
        assert (site / ("documents" if document.stem == "README" else document.stem)).with_suffix(".html").exists()
    assert (site / "index.html").exists()


def test_the_reference_has_every_route_of_the_service(site: Path) -> None:
    text = (site / "http-api.html").read_text(encoding="utf-8")
    for route in ("POST /embed", "POST /v1/embeddings", "POST /rerank", "POST /spans", "GET /metrics"):
        assert f">{route}<" in text
    assert "openapi -->" not in text
    for field in ("inputs", "entity_group", "score", "index"):
        assert f"<code>{field}</code>" in text


def test_no_page_loads_anything_from_elsewhere(site: Path, pages: dict[Path, Page]) -> None:
    loaded = {load for page in pages.values() for load in page.loads}
    assert any(load.endswith(".css") for load in loaded)
    assert any(load.endswith(".svg") for load in loaded)
    assert not [load for load in loaded if re.match(r"(?i)\w+:|//", load) and not load.startswith("data:")]
    elsewhere = re.compile(r"(?i)(?:url\(|@import)\s*['\"]?\s*(?:https?:)?//")
    for sheet in [*site.rglob("*.css"), *pages]:
        assert not elsewhere.search(sheet.read_text(encoding="utf-8")), sheet


def test_every_link_within_the_site_leads_to_a_place(site: Path, pages: dict[Path, Page]) -> None:
    followed = 0
    for file, page in pages.items():
        for link in page.links + page.loads:
            name, _, anchor = unquote(link).partition("#")
            if re.match(r"[a-z]+:", link) or link.startswith("/") or file.name == "404.html":
                continue
            target = (file.parent / name).resolve() if name else file
            assert target.exists(), f"{file.relative_to(site)}: {link}"
            assert not anchor or target.suffix != ".html" or anchor in pages[target].anchors, f"{file.name}: {link}"
            followed += 1
    assert followed > 1000


def test_lists_and_tables_are_not_shown_as_text(pages: dict[Path, Page]) -> None:
    """A renderer on the web makes a list where this one needs an empty line before it."""
    for file in pages:
        text = re.sub(r"(?s)<(pre|script|code)\b.*?</\1>", "", file.read_text(encoding="utf-8"))
        found = re.search(r"<p>(?:(?!</p>)[\s\S])*?\n(?:[*-] |\d\. |\|)", text)
        assert found is None, (file.name, found)


def test_no_table_has_more_than_six_columns(pages: dict[Path, Page]) -> None:
    rows = 0
    for file in pages:
        for row in re.findall(r"(?s)<tr>(.*?)</tr>", file.read_text(encoding="utf-8")):
            rows += 1
            assert len(re.findall(r"<t[hd]\b", row)) <= 6, (file.name, row)
    assert rows > 1000


def test_the_search_finds_documents_and_docstrings(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    places = {entry["location"]: entry["text"] for entry in index["docs"]}
    assert "share of all answers that may change" in places["api.html#attmemo.memoize"]
    assert any(place.startswith("guard.html") for place in places)
    assert (site / "search" / "search_index.js").exists()  # for pages that are opened from a disk


def test_the_tutorial_is_a_notebook_with_its_code(site: Path, pages: dict[Path, Page]) -> None:
    cells = json.loads((site / "tutorial.ipynb").read_text(encoding="utf-8"))["cells"]
    text = (REPOSITORY / "docs/tutorial.md").read_text(encoding="utf-8")
    code = [cell["source"] for cell in cells if cell["cell_type"] == "code"]
    assert code == [part.strip() for part in re.findall(r"(?ms)^```python\n(.*?)^```", text)]
    assert len(code) > 4
    compile("\n".join(code), "tutorial.ipynb", "exec")
    assert not any(re.search(r"\]\([\w/-]+\.md", cell["source"]) for cell in cells)
    assert "tutorial.ipynb" in pages[site / "tutorial.html"].links


def test_every_public_name_is_in_the_reference(pages: dict[Path, Page]) -> None:
    [reference] = [page for file, page in pages.items() if file.name == "api.html"]
    for package in ("attmemo", "attmemo.fastseq", "attmemo.ray", "attmemo.serve"):
        for name in import_module(package).__all__:
            assert {f"{package}.{name}", f"attmemo.errors.{name}"} & reference.anchors, f"{package}.{name}"
