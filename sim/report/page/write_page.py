"""Writes a plan's report into a folder: report.html, report.md, the pictures, and every table as CSV and JSON."""

from __future__ import annotations

from pathlib import Path

from batchsim.base.files import write_text
from batchsim.report.page.cells import Tables, cell, glossary
from batchsim.report.page.plan_markdown import markdown
from batchsim.report.page.plan_pictures import draw_pictures
from batchsim.report.page.render import HTML, data_uri, render
from batchsim.report.page.sections import SHOWN, sections
from batchsim.results.provenance import as_json, write_csv

MARKDOWN = "report.md"
MANIFEST = "manifest.yaml"
"""The recommended group for Kubernetes, where the plan is of deployments."""


def write_report(tables: Tables, name: str, currency: str, folder: Path) -> list[Path]:
    """Writes all files of a plan and returns them, the report first. OSError if `folder` cannot be written."""
    tables, manifest = without_manifest(tables)
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
    if manifest:
        write_text(folder / MANIFEST, manifest)
        written.append(folder / MANIFEST)
    captions = {picture: text for picture, (text, _) in pictures.items()}
    parts = sections(tables, currency, captions)
    files = [f"{table}.csv" for table in tables] + ([MANIFEST] if manifest else [])
    images = {picture: data_uri(svg.encode()) for picture, (_, svg) in pictures.items()}
    title = cell(tables, "report", 0, "scenario")
    said = "Simulated by batchsim. Every number is a cell of a table beside this page."
    named = [f"Tables as CSV and JSON: {files[0]}", *files[1:]]
    write_text(folder / HTML, render("Capacity plan", title, said, parts, images, named))
    write_text(folder / MARKDOWN, markdown(name, parts, files))
    return [folder / HTML, folder / MARKDOWN, *written]


def without_manifest(tables: Tables) -> tuple[Tables, str]:
    """The tables without the lines of the manifest, and these as a text; "" where there is none."""
    lines = [str(row["line"]) for row in tables.get("manifest", [])]
    return {name: rows for name, rows in tables.items() if name != "manifest"}, "".join(f"{line}\n" for line in lines)
