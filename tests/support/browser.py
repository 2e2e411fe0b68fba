"""A headless Chromium to click in, over its debugging pipe: what it needs is the browser alone."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_PATIENCE_S = 60


class Page:
    """One tab. AssertionError where an answer takes longer than a minute or a script of ours fails."""

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back, self._id, self._rest, self._session = to, back, 0, b"", ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """What Chromium answers to a command of its DevTools protocol."""
        self._id += 1
        message = {"id": self._id, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._rest:
                assert select.select([self._back], [], [], _PATIENCE_S)[0], f"{method}: no answer"
                more = os.read(self._back, 1 << 20)
                assert more, "Chromium has ended"
                self._rest += more
            text, _, self._rest = self._rest.partition(b"\0")
            found = json.loads(text)
            if found.get("id") == self._id:
                assert "error" not in found, found
                return found["result"]

    def run(self, script: str) -> Any:
        """The value of an expression, or of its promise, in the page."""
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, condition: str) -> None:
        """Returns once an expression is true in the page."""
        look = f"const look = () => ({condition}) ? done(true) : setTimeout(look, 10); look();"
        self.run(f"new Promise((done) => {{ {look} }})")

    def open(self, url: str, width: int, *, dark: bool = False) -> None:
        size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=features)
        self.call("Page.navigate", url=url)
        self.until(f"location.href === {json.dumps(url)} && document.readyState === 'complete'")

    def place(self, element: str) -> tuple[float, float, float, float]:
        """Left, top, width and height of an element, given as an expression, after it was scrolled to, in pixels."""
        box = f"(({element}).scrollIntoView({{block: 'center'}}), ({element}).getBoundingClientRect().toJSON())"
        found = self.run(box)
        return found["left"], found["top"], found["width"], found["height"]

    def click(self, element: str, at: tuple[float, float] = (0.5, 0.5), to: tuple[float, float] | None = None) -> None:
        """A click with the mouse at a place of an element, in shares of its size; with `to` it is dragged there."""
        left, top, width, height = self.place(element)
        end = at if to is None else to
        moves = [
            ("mouseMoved", at),
            ("mousePressed", at),
            *([("mouseMoved", end)] if to else []),
            ("mouseReleased", end),
        ]
        for k, (kind, (x, y)) in enumerate(moves):
            its = {"button": "left", "buttons": int(0 < k < len(moves) - 1), "clickCount": 1}
            self.call("Input.dispatchMouseEvent", type=kind, x=left + x * width, y=top + y * height, **its)


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """A tab of a Chromium that ends with the block; its profile is in `folder`."""
    assert CHROMIUM is not None
    theirs, to = os.pipe()
    back, ours = os.pipe()
    arguments = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    arguments += ["--remote-debugging-pipe", f"--user-data-dir={folder}", "--no-first-run", "about:blank"]
    # It reads commands from descriptor 3 and writes answers to 4.
    line = 'exec 3<&"$1" 4>&"$2"; shift 2; exec "$@"'
    process = subprocess.Popen(
        ["bash", "-c", line, "bash", str(theirs), str(ours), *arguments],
        pass_fds=(theirs, ours),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(theirs)
    os.close(ours)
    try:
        yield Page(to, back)
    finally:
        process.kill()
        process.wait()
        os.close(to)
        os.close(back)
