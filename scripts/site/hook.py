"""Makes the site of the documents from the files as they lie in the repository.

The first page is the repository's README.md; docs/README.md gives the menu, and below "Results and records" pages
outside of it. A file outside of docs/ that a page links to becomes a page of the site too, so that no link leads away
from the site. The tutorial is a notebook too. `make docs` builds it.
"""

from __future__ import annotations

import json
import posixpath
import re
import tomllib
from pathlib import Path
from typing import Any

import http_api
from mkdocs.structure.files import File, Files
from pathspec.gitignore import GitIgnoreSpec

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FIRST, INDEX, RESULTS = "README.md", "docs/README.md", "Results and records"
TUTORIAL, NOTEBOOK = "docs/tutorial.md", "tutorial.ipynb"
LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s#]+)(#[^)\s]*)?\)")
COLUMNS = 6  # of a table: more do not fit a phone
TABLE = re.compile(r"(?m)^\|.*\|\n\|[ :|-]+\|\n(?:\|.*\|(?:\n|\Z))+")
CELL_END = re.compile(r"(?<!\\)\|")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".c": "c", ".service": "ini"}


def place(path: str) -> str:
    """Where a file of the repository lies in the site."""
    if path == FIRST:
        return "index.md"
    if path == INDEX:
        return "documents.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"repository/{path if path.endswith('.md') else path + '.md'}"


def targets(path: str, text: str) -> set[str]:
    """Files of the repository that a document links to."""
    links = {link for _, link, _ in LINK.findall(text) if not re.match(r"[a-z]+:", link)}
    return {posixpath.normpath(posixpath.join(posixpath.dirname(path), link)) for link in links}


def moved(path: str, text: str) -> str:
    """The text of a document with links that hold in the site."""

    def turn(found: re.Match[str]) -> str:
        before, link, anchor = found[1], found[2], found[3] or ""
        if re.match(r"[a-z]+:", link):
            return found[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
        return f"{before}{posixpath.relpath(place(target), posixpath.dirname(place(path)) or '.')}{anchor})"

    return LINK.sub(turn, text)


def menu(index: str) -> list[Any]:
    """The menu: each heading of docs/README.md with the titles of the documents below it; results are left out."""
    found: list[Any] = [{"First page": "index.md"}, {"All documents": "documents.md"}]
    for heading, documents in sections(index).items():
        if heading != RESULTS:
            found.append({heading: [{title: place(path)} for title, path in documents]})
    return found


def sections(index: str) -> dict[str, list[tuple[str, str]]]:
    """Titles and files of the documents below each heading of docs/README.md."""
    found = dict[str, list[tuple[str, str]]]()
    for part in re.split(r"^## ", index, flags=re.MULTILINE)[1:]:
        links = re.findall(r"\[([^\]]+)\]\(([^)\s#]+\.md)\)", part)
        found[part.splitlines()[0]] = [(title, posixpath.normpath(f"docs/{link}")) for title, link in links]
    return found


def source(path: str) -> str:
    """A page for a file that is not Markdown."""
    text = (ROOT / path).read_text(encoding="utf-8")
    return f"# {path}\n\n````{LANGUAGES.get(Path(path).suffix, 'text')}\n{text}````\n"


def narrow(text: str) -> str:
    """The text with tables of at most COLUMNS columns: a wider one becomes several, all with the first columns."""
    parts = re.split(r"(?ms)(^```.*?^```$)", text)
    return "".join(part if number % 2 else TABLE.sub(_narrow_table, part) for number, part in enumerate(parts))


def _narrow_table(found: re.Match[str]) -> str:
    head, line, *rows = ([cell.strip() for cell in CELL_END.split(row)[1:-1]] for row in found[0].splitlines())
    if len(head) <= COLUMNS or any(len(row) != len(head) for row in rows):
        return found[0]
    # The first columns stand in every part: as many as tell the rows apart, three at most.
    keys = next((count for count in (1, 2) if len({tuple(row[:count]) for row in rows}) == len(rows)), 3)
    shown = []
    for first in range(keys, len(head), COLUMNS - keys):
        places = [*range(keys), *range(first, min(first + COLUMNS - keys, len(head)))]
        shown.append("".join(f"| {' | '.join(row[at] for at in places)} |\n" for row in (head, line, *rows)))
    return "\n".join(shown)


def notebook(text: str) -> str:
    """A page as a Jupyter notebook: Python in cells of code, all else in cells of Markdown."""
    cells: list[dict[str, Any]] = []
    for number, part in enumerate(re.split(r"(?ms)^```python\n(.*?)^```\n", text)):
        kind: dict[str, Any] = {"cell_type": "code", "execution_count": None, "outputs": []}
        if not number % 2:
            kind, part = {"cell_type": "markdown"}, re.sub(r"(\]\([^)\s:]+)\.md\b", r"\1.html", part)
        cells.append(kind | {"id": f"part-{number}", "metadata": {}, "source": part.strip()})
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return json.dumps({"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}, indent=1)


def on_config(config: Any) -> Any:
    index = (ROOT / INDEX).read_text(encoding="utf-8")
    config.nav = menu(index)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    config.copyright = f"attmemo {version}, Apache 2.0"
    results = [place(path) for _, path in sections(index)[RESULTS]]
    config.not_in_nav = GitIgnoreSpec.from_lines(["/repository/", *(f"/{path}" for path in results)])
    return config


def on_files(files: Files, *, config: Any) -> Files:
    """Every document under its place, with every file that one of them links to."""
    documents = {f"docs/{file.src_uri}": file for file in files.documentation_pages()}
    ahead, texts = [FIRST, *documents], {}
    while ahead:
        path = ahead.pop()
        if path in texts or (path.startswith("docs/") and not path.endswith(".md")):
            continue
        if not (ROOT / path).is_file():
            continue  # mkdocs says where the link is
        texts[path] = text = (ROOT / path).read_text(encoding="utf-8") if path.endswith(".md") else source(path)
        if path.endswith(".md"):
            ahead.extend(targets(path, text))
    for path, text in texts.items():
        if path in documents:
            files.remove(documents[path])
        text = text.replace(http_api.MARK, http_api.markdown(http_api.document())) if http_api.MARK in text else text
        shown = narrow(moved(path, text)) if path.endswith(".md") else text
        if path == TUTORIAL:
            files.append(File.generated(config, NOTEBOOK, content=notebook(shown)))
            shown += f"\n[This page as a notebook]({NOTEBOOK})\n"
        files.append(File.generated(config, place(path), content=shown))
    for name in ("site.css", "iframe-worker.js"):
        files.append(File.generated(config, name, abs_src_path=str(HERE / name)))
    return files
