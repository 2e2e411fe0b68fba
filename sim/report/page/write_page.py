"""Writes a plan's report into a folder: report.html, report.md, the pictures, and every table as CSV and JSON."""

from __future__ import annotations

import base64
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from batchsim.base.files import write_text
from batchsim.report.page.cells import Tables, cell, glossary
from batchsim.report.page.plan_markdown import markdown
from batchsim.report.page.plan_pictures import draw_pictures
from batchsim.report.page.sections import SHOWN, sections
from batchsim.results.provenance import as_json, write_csv

HTML, MARKDOWN = "report.html", "report.md"


def write_report(tables: Tables, name: str, currency: str, folder: Path) -> list[Path]:
    """Writes all files of a plan and returns them, the report first. OSError if `folder` cannot be written."""
    tables = {"report": [{"scenario": name, "currency": currency}], **tables, "glossary": glossary(SHOWN)}
    folder.mkdir(parents=True, exist_ok=True)
    pictures = draw_pictures(tables, currency)
    written = []
    for table, rows in tables.items():
        write_csv(folder / f"{table}.csv", rows)
        write_text(folder / f"{table}.json", as_json(rows, indent=1) + "\n")
        written += [folder / f"{table}.csv", folder / f"{table}.json"]
    for picture, (_, svg) in pictures.items():
        write_text(folder / f"{picture}.svg", svg)
        written.append(folder / f"{picture}.svg")
    captions = {picture: text for picture, (text, _) in pictures.items()}
    parts = sections(tables, currency, captions)
    files = [f"{table}.csv" for table in tables]
    images = {picture: _data_uri(svg) for picture, (_, svg) in pictures.items()}
    title = cell(tables, "report", 0, "scenario")
    write_text(folder / HTML, _template().render(name=title, sections=parts, images=images, files=files))
    write_text(folder / MARKDOWN, markdown(name, parts, files))
    return [folder / HTML, folder / MARKDOWN, *written]


def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("batchsim.report.page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("report.html")


def _data_uri(svg: str) -> str:
    """The SVG as a data URI for the HTML page: inlined, its ids would clash with those of the other pictures."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()
