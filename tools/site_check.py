"""What is wrong with a site of HTML pages in a folder: links and pictures that lead nowhere, and what is fetched from
elsewhere."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from batchsim.base.files import read_text

_FETCHED = {"script", "img", "iframe", "link", "source", "video", "audio", "embed", "object"}
_FROM_AFAR = re.compile(r"""(?:url\(|@import)\s*["']?\s*(https?:)?//""")
_ROOTED = "404.html"  # a server shows it at any address, so that its links begin at the root


class _Page(HTMLParser):
    """The ids of a page, and (tag, address) of all that it links to or loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[tuple[str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value is None:
                continue
            if name == "id" or (name == "name" and tag == "a"):
                self.ids.add(value)
            if name in ("href", "src", "data"):
                self.links.append((tag, value))


def faults(site: Path) -> list[str]:
    """A line for each link of a page that leads to no file of `site` or to no place in it, and for all that is loaded
    from elsewhere."""
    site = site.resolve()
    pages = {path: _Page(read_text(path)) for path in sorted(site.rglob("*.html"))}
    wrong = [f"{site}: has no pages"] if not pages else []
    for path, page in pages.items():
        where = path.relative_to(site)
        for tag, address in dict.fromkeys(page.links):
            if reason := _wrong(site, path, tag, address, pages):
                wrong.append(f"{where}: {address} {reason}")
    sheets = [path for path in sorted(site.rglob("*.css")) if _FROM_AFAR.search(read_text(path))]
    return wrong + [f"{path.relative_to(site)}: fetches from elsewhere" for path in sheets]


def _wrong(site: Path, path: Path, tag: str, address: str, pages: dict[Path, _Page]) -> str:
    """Why an address in the page at `path` is none, or must not be there; empty where it may."""
    parts = urlsplit(address)
    if parts.scheme in ("data", "mailto", "javascript"):
        return ""
    if parts.scheme or parts.netloc:
        return "is fetched from elsewhere" if tag in _FETCHED else ""
    name = unquote(parts.path)
    if name.startswith("/") and path.name != _ROOTED:
        return "begins at the root, where the site may not be"
    target = (site / name.lstrip("/") if path.name == _ROOTED else path.parent / name).resolve() if name else path
    target = target / "index.html" if target.is_dir() else target
    if not target.is_file() or not target.is_relative_to(site):
        return "is not there"
    if parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].ids:
        return "is no place of that page"
    return ""
