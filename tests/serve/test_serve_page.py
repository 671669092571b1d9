"""The live page in a browser: numbers, both colour schemes, a phone's width, and nothing from elsewhere."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest
from services import WORDS, Live, living, tiny, until

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")


@pytest.fixture(scope="module", name="live")
def _live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with living(tiny(tmp_path_factory.mktemp("model"), None), served_model_name="<b>tiny</b>") as found:
        for number in range(60):
            found.post("/embed", {"inputs": [f"{WORDS[number % 4]} {number} {word}" for word in WORDS]})
        found.post("/embed", {"inputs": 3})
        # The page shows whole seconds: a browser that starts quickly would see none.
        until(lambda: any(share is not None for share in found.get("/live").json["history"]["share"]))
        yield found


def browse(folder: Path, *options: str) -> str:
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += [f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=4000", "--timeout=20000"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("name", "asked"), [("page", ["live"]), ("reference", [".", "api-doc/openapi.json"])])
def test_a_page_asks_for_nothing_from_elsewhere(name: str, asked: list[str]) -> None:
    text = (files("attmemo.serve") / f"{name}.html").read_text(encoding="utf-8")
    assert not re.findall(r"(?:src|href|url|import)\s*[=(]", text)
    assert re.findall(r"""fetch\(["']([^"']+)""", text) == asked
    assert "http" not in text


@needs_browser
def test_the_page_shows_the_numbers_of_the_service(live: Live, tmp_path: Path) -> None:
    shown = browse(tmp_path, "--dump-dom", live.url + "/")
    text = " ".join(re.sub(r"<[^>]+>", " ", re.sub(r"<(script|style).*?</\1>", "", shown, flags=re.DOTALL)).split())
    assert "● " not in text
    for words in (
        "Requests a second", "60 requests so far", "reuse rows", "evidence collected: 0 of", "records, in memory",
        "healthy",
    ):  # fmt: skip
        assert words in text, text
    assert re.search(r"validation 1\b", text)
    assert re.search(r"median [\d.,]+ ms", text)
    assert "<b>tiny" not in shown, "a name is text, not a part of the page"
    assert len(re.findall(r'class="line" d="M', shown)) == 2


@needs_browser
def test_the_page_of_routes_shows_every_route_and_field(live: Live, tmp_path: Path) -> None:
    document = live.get("/api-doc/openapi.json").json
    shown = browse(tmp_path, "--dump-dom", live.url + "/docs")
    text = re.sub(r"<[^>]+>", " ", re.sub(r"<(script|style).*?</\1>", "", shown, flags=re.DOTALL))
    assert "no answer" not in text
    for path, methods in document["paths"].items():
        assert all(f"{method.upper()} {path}" in text for method in methods)
    for name, schema in document["components"]["schemas"].items():
        assert all(word in text for word in (name, *schema.get("properties", ())))


@needs_browser
@pytest.mark.parametrize(("width", "dark"), [(390, False), (390, True), (1100, True)])
def test_the_page_fits_a_phone_and_both_colours(live: Live, tmp_path: Path, width: int, dark: bool) -> None:
    picture = tmp_path / "page.png"
    scheme = ["--blink-settings=preferredColorScheme=0"] if dark else ["--blink-settings=preferredColorScheme=1"]
    browse(tmp_path, *scheme, f"--window-size={width},900", f"--screenshot={picture}", live.url + "/")
    raw = picture.read_bytes()
    assert struct.unpack(">II", raw[16:24]) == (width, 900)
    from matplotlib import image

    corner = image.imread(picture)[2, 2, :3]
    assert (corner.mean() < 0.3) == dark
