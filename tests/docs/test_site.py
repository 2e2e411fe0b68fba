"""The documentation site as it is built: it needs nothing from elsewhere, and its search works from the disk."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.browser import CHROMIUM, browser
from tools.docs_site import CONFIG, faults

ROOT = Path(__file__).parents[2]
_SEARCH = "[...document.querySelectorAll('*')].find((e) => e.shadowRoot)?.shadowRoot"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("zensical", reason="zensical is not installed")
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "tools.docs_site", "build", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, timeout=280, capture_output=True)
    return folder / "site"


@pytest.mark.slow
def test_the_site_is_whole(site: Path) -> None:
    """Every page of the nav is there, with links to the ones before and after it; no page loads from elsewhere."""
    pages = [path for path in site.rglob("*.html") if path.name != "404.html"]
    names = re.findall(r'"([\w/-]+)\.md"', (ROOT / "zensical.toml").read_text(encoding="utf-8"))
    assert sorted(f"{name}.html" for name in names) == sorted(path.relative_to(site).as_posix() for path in pages)
    ends = {names[0]: "next", names[-1]: "prev"}
    for name in names:
        text = (site / f"{name}.html").read_text(encoding="utf-8")
        linked = re.findall(r'class="md-footer__link md-footer__link--(prev|next)"', text)
        assert linked == [ends[name]] if name in ends else linked == ["prev", "next"], name
    assert len(pages) > 40 and faults(site) == []


LINKS = {"no_page": "[b](gone.md)", "no_place": "[b](b.md#gone)", "no_place_here": "[b](#gone)"}


@pytest.mark.slow
@pytest.mark.parametrize("name", LINKS)
def test_a_link_of_a_page_that_leads_nowhere_ends_the_build(name: str, tmp_path: Path) -> None:
    """Zensical's strict mode, by which the site is built; without the link the same folder builds."""
    pytest.importorskip("zensical", reason="zensical is not installed")
    (tmp_path / "docs").mkdir()
    (tmp_path / CONFIG).write_text('[project]\nsite_name = "s"\nnav = ["a.md", "b.md"]\n')
    (tmp_path / "docs/b.md").write_text("# Place\n\n[a](a.md#place)\n")
    codes: list[int] = []
    for text in ("", LINKS[name]):
        (tmp_path / "docs/a.md").write_text(f"# Place\n\n{text}\n")
        command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "-f", str(tmp_path / CONFIG)]
        codes.append(subprocess.run(command, capture_output=True, check=False).returncode)
    assert codes == [0, 1]


WRONG = {
    "no_picture": ('<img src="gone.png">', "gone.png is not there"),
    "script": ('<script src="https://cdn.example/x.js">', "https://cdn.example/x.js is fetched from elsewhere"),
    "font": ('<link href="//cdn.example/font.css">', "//cdn.example/font.css is fetched from elsewhere"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_in_a_page_is_named(name: str, tmp_path: Path) -> None:
    """Beside what is right: a picture that is there, one in the page, addresses elsewhere that are only linked to."""
    wrong, said = WRONG[name]
    (tmp_path / "own.png").write_bytes(b"")
    (tmp_path / "a.html").write_text(f'<a href="https://example.org"><img alt="" src="own.png">{wrong}')
    (tmp_path / "b.html").write_text('<img src="data:,"><link href="own.css">')
    (tmp_path / "own.css").write_text("p { background: url(data:,) }")
    assert faults(tmp_path) == [f"a.html: {said}"]


def test_what_a_sheet_of_style_fetches_is_named(tmp_path: Path) -> None:
    """And a folder without pages is no site."""
    (tmp_path / "a.css").write_text('@import "https://cdn.example/a.css";')
    assert faults(tmp_path) == [f"{tmp_path}: has no pages", "a.css: fetches from elsewhere"]


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
@pytest.mark.parametrize("name", ["index.html", "tutorials/a-log.html"])
def test_the_search_of_a_page_opened_from_the_disk_finds_others(site: Path, name: str, tmp_path: Path) -> None:
    with browser(tmp_path) as page:
        page.open((site / name).resolve().as_uri(), 1280)
        page.until(f"{_SEARCH} && document.querySelector('.md-search__button')")
        page.run("document.querySelector('.md-search__button').click()")
        page.until(f"{_SEARCH}.activeElement?.tagName === 'INPUT'")
        page.call("Input.insertText", text="preemption")
        page.until(f"{_SEARCH}.querySelectorAll('a[href*=\"html\"]').length > 2")
