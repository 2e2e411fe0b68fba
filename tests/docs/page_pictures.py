"""The pictures of the first page of docs and of its pages on `view`, energy and adapters, made anew into docs/pictures:

    python -m tests.docs.page_pictures [RUNS]

It runs the shipped `bursty`, `plan`, `speculative`, `energy`, `adapters` and `multimodal` (into RUNS, where points that
are there are reused), opens what these write in a headless Chromium, and draws `drafting.png`, `energy.png`,
`adapters.png` and `multimodal.png` as `run` does and `training.png` as `train`. The words beside a picture, its `alt`,
are a sentence that stands in it: what `said` gives for it, which is printed and which a test holds the pages to.
"""

from __future__ import annotations

import base64
import io
import re
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image

from batchsim.report.drafting import crossing_text, draft_curves
from batchsim.report.pictures.adapters_picture import adapters_picture, adapters_text
from batchsim.report.pictures.drafting_picture import drafting_picture
from batchsim.report.pictures.energy_picture import energy_picture, energy_text
from batchsim.report.pictures.plots import slo_share_picture
from batchsim.report.pictures.training_picture import training_picture
from batchsim.report.text.training_text import training_sentences
from batchsim.results.read import Results
from batchsim.scenario import load_scenario
from batchsim.study.curves.run import run_scenario
from batchsim.training.kpis import Run
from batchsim.training.load import load_training, run_training
from batchsim.view.page_data import PageData, Point
from batchsim.view.view_server import ViewServer
from tests.support.browser import Page, browser
from tests.support.tiny_scenario import batchsim

DOCS = Path(__file__).parents[2] / "docs"
FOLDER = DOCS / "pictures"
MOST_BYTES = 150_000
SHOWN = Point("continuous", 3.0, 0)
"""The point of `bursty` that the page on `view` looks into: requests of a burst wait there for KV memory."""
WINDOW_S = (376.0, 386.0)
WIDTH = 1000


def alt_texts(page: str) -> dict[str, str]:
    """By the name of a picture in docs/pictures the words beside it in a page of docs."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return {name: " ".join(alt.split()) for alt, name in re.findall(r"!\[([^\]]*)\]\(pictures/([\w-]+)\.png\)", text)}


def slowest(data: PageData) -> int:
    """The request of the point SHOWN that waited longest for its first token."""
    return int(data.requests(number_of(data), "ttft", None)["slowest"][0]["request_id"])


def number_of(data: PageData) -> int:
    """The number of the point SHOWN."""
    return data.points().index(SHOWN)


def said_by_view(results: Results) -> dict[str, str]:
    """Of each picture of `view` a sentence that stands in it."""
    data = PageData(results)
    return {
        "view": str(data.curves()["decision"][0]),
        "view-request": str(data.request(number_of(data), slowest(data))["sentence"]),
    }


def said_by_plan(report: Path) -> dict[str, str]:
    """The recommendation of a plan's report.md."""
    text = report.read_text(encoding="utf-8")
    return {"plan": next(line for line in text.splitlines() if line.startswith("Run "))}


def said_by_drafting(results: Results) -> dict[str, str]:
    """Up to which load each number of drafts pays."""
    notes = {curve.sweep.name: crossing_text(results, curve) for curve in draft_curves(results)}
    return {"drafting": "; ".join(f"{name}: {note}" for name, note in notes.items() if note)}


def said_by_energy(results: Results) -> dict[str, str]:
    """Which policy takes least energy a token, and which most."""
    return {"energy": energy_text(results)}


def said_by_adapters(results: Results) -> dict[str, str]:
    """Which policy has most requests overtaken for their adapters, and which fewest."""
    return {"adapters": adapters_text(results)}


def said_by_reuse(found: dict[str, Any]) -> dict[str, str]:
    """What caches find of a trace, by what `trace reuse --json` says."""
    parts = [f"{name} {100 * cache['hit_rate']:.1f} %" for name, cache in found["caches"].items()]
    most = f"{100 * found['hit_rate_without_limit']:.1f} % at most"
    return {"reuse": f"What a cache of each size finds of Mooncake's conversations: {', '.join(parts)}, {most}"}


def said_by_training(runs: Sequence[Run]) -> dict[str, str]:
    """The title of the picture of packers."""
    return {"training": training_sentences(runs)[0].rstrip(".")}


# ---- pictures


@contextmanager
def served(data: PageData) -> Iterator[str]:
    """The address of a page on `data`, while the context lasts."""
    with ViewServer(data, 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.address
        finally:
            server.shutdown()
            thread.join()


def small(data: bytes) -> bytes:
    """A PNG of few colours, WIDTH wide at most. AssertionError where it is still large."""
    with Image.open(io.BytesIO(data)) as picture:
        whole = picture.convert("RGB")
    if whole.width > WIDTH:
        whole = whole.resize((WIDTH, round(whole.height * WIDTH / whole.width)), Image.Resampling.LANCZOS)
    out = io.BytesIO()
    whole.quantize(128, dither=Image.Dither.NONE).save(out, "png", optimize=True)
    assert out.tell() < MOST_BYTES, f"{out.tell():,} bytes"
    return out.getvalue()


def between(page: Page, first: str, last: str, most: int = 2000) -> bytes:
    """A PNG of the page from the top of one element to the bottom of another, `most` pixels of it."""
    page.run("document.documentElement.style.overflow = 'hidden'")  # a picture has no bar that takes of the width
    page.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    edge = "Math.round(document.querySelector({!r}).getBoundingClientRect().{} + scrollY)"
    top, bottom = (page.run(edge.format(name, side)) for name, side in ((first, "top"), (last, "bottom")))
    top = max(top - 8, 0)
    clip = {"x": 0, "y": top, "width": WIDTH, "height": min(bottom + 8 - top, most), "scale": 1}
    found = page.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
    return base64.b64decode(found["data"])


def pictures_of_view(page: Page, results: Results) -> dict[str, bytes]:
    """PNGs of the page of a run of `bursty`, by their name."""
    data = PageData(results)
    request = slowest(data)
    looks = {  # by name: what the address says, what is drawn last, and from where to where the picture goes
        "view": ("", "#lanes canvas", "#name", "#curves", 2000),
        "view-point": ("", "#lanes canvas", "#point", "#timeline", 2000),
        "view-lanes": (f"&from={WINDOW_S[0]}&to={WINDOW_S[1]}", "#lanes canvas", "#point h3", "#lanes", 2000),
        "view-request": (f"&request={request}", "#chapters tbody tr", "#request", "#chapters", 760),
    }
    made: dict[str, bytes] = {}
    with served(data) as url:
        for name, (more, drawn, first, last, most) in looks.items():
            page.open("about:blank", WIDTH)  # else another # of the same page would not load it anew
            page.open(f"{url}#point={number_of(data)}{more}" if name != "view" else url, WIDTH)
            page.until(f"document.querySelector('{drawn}')")
            made[name] = between(page, first, last, most)
    return made


def main(runs: Path) -> None:
    """Writes all pictures into FOLDER and prints what each says. AssertionError where a plan found none."""
    FOLDER.mkdir(exist_ok=True)
    names = ("bursty", "speculative", "energy", "adapters", "multimodal")
    bursty, speculative, energy, adapters, multimodal = (run_scenario(load_scenario(name), out=runs) for name in names)
    planned = batchsim("plan", "plan", "--out", runs, "-o", runs / "report")
    assert planned.exit_code == 0, planned.stderr
    drafting_picture(speculative, runs / "drafting.png")
    energy_picture(energy, runs / "energy.png")
    adapters_picture(adapters, runs / "adapters.png")
    slo_share_picture(multimodal, runs / "multimodal.png")
    packed = run_training(load_training("packing"))
    training_picture("packing", packed, runs / "training.png")
    with browser(runs / "profile") as page:
        made = pictures_of_view(page, bursty)
        page.open((runs / "report/report.html").resolve().as_uri(), WIDTH)
        made["plan"] = between(page, "h1", "section", most=900)
    drawn = ("drafting", "energy", "adapters", "multimodal", "training")
    made |= {name: (runs / f"{name}.png").read_bytes() for name in drawn}
    for name, data in made.items():
        (FOLDER / f"{name}.png").write_bytes(small(data))
    said = said_by_view(bursty) | said_by_plan(runs / "report/report.md") | said_by_drafting(speculative)
    said |= said_by_energy(energy) | said_by_adapters(adapters) | said_by_training(packed)
    for name, text in said.items():
        print(f"{name}: {text}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            main(Path(folder))
