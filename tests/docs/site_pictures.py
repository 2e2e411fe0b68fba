"""Pictures of every page of the built site, to be looked at, and what is wider than its page.

    make docs && python -m tests.docs.site_pictures build/site FOLDER

Takes each page at 1280 and 390 pixels, in light and dark, in a headless Chromium.
"""

from __future__ import annotations

import base64
import sys
import tempfile
from itertools import product
from pathlib import Path

from tests.support.browser import Page, browser

WIDTHS = (1280, 390)
_WIDE = """[...document.querySelectorAll('article *')].filter((e) => {
    for (let p = e; p && p.tagName !== 'ARTICLE'; p = p.parentElement)
        if (['auto', 'scroll', 'hidden'].includes(getComputedStyle(p).overflowX)) return false;
    return e.getBoundingClientRect().right > innerWidth + 1;
}).map((e) => `${e.tagName} ${e.textContent.trim().slice(0, 60)}`)"""
_BROKEN = "[...document.images].filter((e) => !e.naturalWidth).map((e) => `broken picture ${e.src}`)"


def take(page: Page, path: Path, width: int, *, dark: bool) -> tuple[bytes, list[str]]:
    """A PNG of the whole page, and a line for each of its elements that leaves it or is broken."""
    page.open(path.resolve().as_uri(), width, dark=dark)
    height = min(int(page.run("document.documentElement.scrollHeight")), 16_000)  # Chromium draws no more
    clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
    found = page.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
    return base64.b64decode(found["data"]), page.run(_WIDE) + page.run(_BROKEN)


def main(site: Path, out: Path) -> int:
    """Writes the pictures; prints what is wrong, and returns 1 if anything is."""
    out.mkdir(parents=True, exist_ok=True)
    pages = [path for path in sorted(site.rglob("*.html")) if path.name != "404.html"]  # for servers alone
    wrong = 0
    for scheme in ("light", "dark"):
        # A profile keeps its scheme; Chromium may write to it still as it ends.
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, browser(Path(profile)) as page:
            for path, width in product(pages, WIDTHS):
                picture, faults = take(page, path, width, dark=scheme == "dark")
                name = "-".join((*path.relative_to(site).with_suffix("").parts, str(width), scheme))
                (out / f"{name}.png").write_bytes(picture)
                wrong += len(faults)
                for fault in faults:
                    print(f"{name}: {fault}")
    return 1 if wrong else 0


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("python -m tests.docs.site_pictures SITE FOLDER")
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
