"""The documentation site as it is built: it needs nothing from elsewhere, and its search works from the disk."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.browser import CHROMIUM, browser

pytest.importorskip("material", reason="mkdocs-material is not installed")

ROOT = Path(__file__).parents[2]
_TYPE = """(() => {
    const field = document.querySelector('.md-search__input');
    field.focus();
    field.value = 'preemption';
    field.dispatchEvent(new InputEvent('input', {bubbles: true}));
    field.dispatchEvent(new Event('keyup'));
})()"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, timeout=280, capture_output=True)
    return folder


@pytest.mark.slow
def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    loaded = [
        (page.name, found)
        for page in pages
        for found in re.findall(
            r"<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)=\"(https?://[^\"]+)\"", page.read_text()
        )
    ]
    assert len(pages) > 40 and loaded == []


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
@pytest.mark.parametrize("name", ["index.html", "tutorials/a-log.html"])
def test_the_search_of_a_page_opened_from_the_disk_finds_others(site: Path, name: str, tmp_path: Path) -> None:
    with browser(tmp_path) as page:
        page.open((site / name).resolve().as_uri(), 1280)
        page.until("!document.querySelector('.md-search').hidden")
        page.run(_TYPE)
        page.until("document.querySelectorAll('.md-search-result__item').length > 2")
