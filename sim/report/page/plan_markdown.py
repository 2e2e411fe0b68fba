"""A plan's report as Markdown: the same sections, sentences and tables as the HTML page."""

from __future__ import annotations

from batchsim.report.markdown import escaped, markdown_table
from batchsim.report.page.cells import Cell
from batchsim.report.page.sections import NO_BREAK, Section, Sentence, TableView


def markdown(name: str, sections: list[Section], files: list[str]) -> str:
    """The whole report as Markdown text; the pictures it shows are files beside it."""
    blocks = [
        f"# Capacity plan: {escaped(name)}",
        "Simulated by batchsim. Every number is a cell of a table beside this file.",
    ]
    for section in sections:
        if not (section.sentences or section.pictures or section.views):
            continue  # charts alone, which are drawn as the page is read
        blocks.append(f"## {escaped(section.title)}")
        blocks += [escaped(sentence_text(sentence)) for sentence in section.sentences]
        blocks += [f"![{escaped(caption)}]({picture}.svg)" for picture, caption in section.pictures]
        blocks += [_table(view) for view in section.views]
    blocks.append(f"Tables as CSV and JSON: {', '.join(files)}.")
    return "\n\n".join(blocks) + "\n"


def sentence_text(sentence: Sentence) -> str:
    text = "".join(part.text if isinstance(part, Cell) else part for part in sentence)
    return text.replace(NO_BREAK, " ")


def _table(view: TableView) -> str:
    return markdown_table(view.headings, view.numeric, [[cell.shown for cell in row] for row in view.rows])
