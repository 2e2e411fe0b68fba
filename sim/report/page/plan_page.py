"""Writes a plan's report into a folder: report.html, report.md, the pictures, and every table as CSV and JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from batchsim.base.files import Kind, check_replaceable, write_text
from batchsim.report.page.plan_columns import Tables, cell, glossary
from batchsim.report.page.plan_pictures import draw_pictures
from batchsim.report.page.plan_sections import SHOWN, sections
from batchsim.report.page.render import HTML, data_uri, render
from batchsim.report.sheet import Sheet
from batchsim.results.provenance import as_json, write_csv
from batchsim.study.planning.pool_manifests import DYNAMO, LLM_D

MARKDOWN = "report.md"
FIRST = "report.json"
"""Written first: the files beside one of KIND are of a report before, and may be replaced."""
KIND = Kind("table of a plan's report", rb'\[\s*\{\s*"scenario": [^\n]*\s*"currency": ')
_NEW = Kind("file of a plan's report", b"(?!)")
MANIFEST = "manifest.yaml"
"""The recommended group for Kubernetes, where the plan is of deployments."""
MANIFESTS = {"manifest": MANIFEST, DYNAMO: "dynamo.yaml", LLM_D: "llm-d-values.yaml"}
"""The files of what starts the recommended group, by the tables that have their lines."""


def write_report(tables: Tables, name: str, currency: str, folder: Path) -> list[Path]:
    """Writes all files of a plan and returns them, the report first. OSError if `folder` cannot be written."""
    tables, manifests = without_manifests(tables)
    tables = {"report": [{"scenario": name, "currency": currency}], **tables, "glossary": glossary(SHOWN)}
    folder.mkdir(parents=True, exist_ok=True)
    pictures = draw_pictures(tables, currency)
    names = [f"{name}.{end}" for name in tables for end in ("csv", "json")] + [f"{name}.svg" for name in pictures]
    check_own(folder, [HTML, MARKDOWN, *names, *MANIFESTS.values()])
    written = []
    for table, rows in tables.items():
        write_text(folder / f"{table}.json", as_json(rows, indent=1) + "\n")
        write_csv(folder / f"{table}.csv", rows)
        written += [folder / f"{table}.csv", folder / f"{table}.json"]
    for picture, (_, svg) in pictures.items():
        write_text(folder / f"{picture}.svg", svg)
        written.append(folder / f"{picture}.svg")
    for file in {*MANIFESTS.values()} - {*manifests}:
        (folder / file).unlink(missing_ok=True)  # of an earlier plan, which recommended something else
    for file, text in manifests.items():
        write_text(folder / file, text)
        written.append(folder / file)
    sheet = plan_sheet(tables, currency, {picture: text for picture, (text, _) in pictures.items()}, [*manifests])
    images = {picture: data_uri(svg.encode()) for picture, (_, svg) in pictures.items()}
    said = "Simulated by batchsim. Every number is a cell of a table beside this page."
    write_text(folder / HTML, render(sheet, said, images))
    write_text(folder / MARKDOWN, sheet.markdown())
    return [folder / HTML, folder / MARKDOWN, *written]


def plan_sheet(tables: Tables, currency: str, pictures: dict[str, str], manifests: Sequence[str] = ()) -> Sheet:
    """The sheet of a plan; `pictures` has the caption of every picture that was drawn, by name, `manifests` are
    the files of MANIFESTS that there are."""
    files = [f"{table}.csv" for table in tables] + [*manifests]
    named = [f"Tables as CSV and JSON: {files[0]}", *files[1:]]
    title = cell(tables, "report", 0, "scenario")
    return Sheet("Capacity plan", title, sections(tables, currency, pictures), named)


def check_own(folder: Path, names: Iterable[str] = (HTML, MARKDOWN)) -> None:
    """OccupiedError where one of `names` in `folder`, which are to be written, is no file of a report before."""
    check_replaceable(folder / FIRST, KIND)
    for name in names if not (folder / FIRST).exists() else ():
        check_replaceable(folder / name, _NEW)


def without_manifests(tables: Tables) -> tuple[Tables, dict[str, str]]:
    """The tables without the lines of manifests, and these as texts by the names of their files."""
    texts = {
        file: "".join(f"{row['line']}\n" for row in tables[name]) for name, file in MANIFESTS.items() if name in tables
    }
    return {name: rows for name, rows in tables.items() if name not in MANIFESTS}, texts
