"""A page as one HTML file: styles, scripts, charts and pictures are inside it, so that it opens without a network."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined

from batchsim.report.page.cells import Cell
from batchsim.report.page.charts import asset
from batchsim.report.page.sections import Section

HTML = "report.html"


def render(
    kind: str, name: str | Cell, sub: str, sections: Sequence[Section], images: Mapping[str, str], files: Sequence[str]
) -> str:
    """The page's text. `kind` and `name` are its title, `sub` stands below it; `images` are the pictures as data URIs,
    by name; `files` are named at its end."""
    environment = Environment(
        loader=PackageLoader("batchsim.report.page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    scripts = [asset("uPlot.iife.min.js"), asset("charts.js")] if any(each.charts for each in sections) else []
    return environment.get_template("page.html").render(
        kind=kind,
        name=name,
        title=name.text if isinstance(name, Cell) else name,
        sub=sub,
        sections=sections,
        images=images,
        files=files,
        styles=asset("uPlot.min.css"),
        licence=asset("uPlot.LICENSE"),
        scripts=scripts,
    )


def data_uri(picture: bytes, kind: str = "svg+xml") -> str:
    """The picture as a data URI: SVGs put in as elements would clash by their ids."""
    return f"data:image/{kind};base64," + base64.b64encode(picture).decode()
