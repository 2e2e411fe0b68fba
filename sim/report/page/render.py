"""A sheet as one HTML file: styles, scripts, charts and pictures are inside it, so that it opens without a network."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

from jinja2 import Environment, PackageLoader, StrictUndefined

from batchsim.report.sheet import Sheet

HTML = "report.html"


def render(sheet: Sheet, sub: str, images: Mapping[str, str] | None = None) -> str:
    """The page's text. `sub` stands below the title; `images` are the pictures as data URIs, by name."""
    environment = Environment(
        loader=PackageLoader("batchsim.report.page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    drawn = any(section.charts for section in sheet.sections)
    return environment.get_template("page.html").render(
        sheet=sheet,
        sub=sub,
        images=images or {},
        styles=asset("uPlot.min.css"),
        licence=asset("uPlot.LICENSE"),
        scripts=[asset("uPlot.iife.min.js"), asset("charts.js")] if drawn else [],
    )


@cache
def asset(name: str) -> str:
    """The text of a file that a page carries: `charts.js`, and uPlot (MIT licence) as its authors released it."""
    return (files("batchsim.report.page") / "assets" / name).read_text(encoding="utf-8")


def data_uri(picture: bytes, kind: str = "svg+xml") -> str:
    """The picture as a data URI: SVGs put in as elements would clash by their ids."""
    return f"data:image/{kind};base64," + base64.b64encode(picture).decode()
