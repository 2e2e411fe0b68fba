"""What is said of an answer, once for all that show it: sections of sentences, tables and charts, made of cells.

A terminal shows `Table.lines`, a file `Sheet.markdown`, a browser what `batchsim.report.page.render` makes of a Sheet.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

from batchsim.report.layout import aligned
from batchsim.report.markdown import escaped, markdown_table

NO_BREAK = "\u00a0"
"""Between a currency and its amount, which are to stay in one line of a page."""


@dataclass(frozen=True)
class Cell:
    """One value of a table as shown, and its place: `row` of `table`, from 0, and `column`. `last`: that of the last
    row where it stands for several in a row."""

    table: str
    row: int
    column: str
    text: str
    is_number: bool = False
    last: Cell | None = None

    @property
    def shown(self) -> str:
        """The text, with that of the last row where the value stands for several."""
        return self.text if self.last is None else f"{self.text} to {self.last.text}"

    @property
    def source(self) -> str:
        """The cell's place in the files, like `what_if.csv#3,attainment`: file, row from 1 below the head, column."""
        return f"{self.table}.csv#{self.row + 1},{self.column}"


Sentence = list[str | Cell]


def sentence_text(sentence: Sentence) -> str:
    """The sentence as plain text, without places and no-break spaces."""
    return "".join(part if isinstance(part, str) else part.text for part in sentence).replace(NO_BREAK, " ")


@dataclass(frozen=True)
class Table:
    """Columns and rows of cells of the file `name`, in the order in which they are shown. `meanings`: pairs of a term
    of the headings and what it means, which stand below the table in a file or on a page."""

    name: str
    headings: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    meanings: tuple[tuple[Cell, Cell], ...] = ()

    @property
    def numeric(self) -> tuple[bool, ...]:
        """For each column, whether it holds numbers."""
        return tuple(any(row[i].is_number for row in self.rows) for i in range(len(self.headings)))

    @property
    def texts(self) -> list[list[str]]:
        """The cells of each row as shown."""
        return [[cell.shown for cell in row] for row in self.rows]

    def without(self, headings: Collection[str]) -> Table:
        """The table less the columns of these headings."""
        kept = [i for i, heading in enumerate(self.headings) if heading not in headings]
        rows = tuple(tuple(row[i] for i in kept) for row in self.rows)
        return Table(self.name, tuple(self.headings[i] for i in kept), rows)

    def lines(self, *, left: Sequence[int] = (0, -1), spare: Sequence[str] = ()) -> list[str]:
        """The table as lines of text; `left` and `spare` as `aligned` takes them."""
        return aligned([list(self.headings), *self.texts], left=left, spare=spare)

    def markdown(self) -> str:
        """The table as Markdown, its meanings as a list below it."""
        means = [f"- *{escaped(term.text)}*: {escaped(meaning.text)}" for term, meaning in self.meanings]
        return "\n".join([markdown_table(self.headings, self.numeric, self.texts), *([""] if means else []), *means])


def folded(shown: Table) -> Table:
    """The table with neighbouring rows that differ in the first column alone merged: this column then has the range of
    the merged rows."""
    kept: list[tuple[Cell, ...]] = []
    for row in shown.rows:
        if kept and [each.text for each in kept[-1][1:]] == [each.text for each in row[1:]]:
            kept[-1] = (replace(kept[-1][0], last=row[0]), *kept[-1][1:])
        else:
            kept.append(row)
    return replace(shown, rows=tuple(kept))


@dataclass(frozen=True)
class Section:
    """One section of a sheet; `pictures` are pairs of name and caption, `charts` stand in their place on the page.
    `folded`: an appendix, closed on the page until it is asked for."""

    title: str
    sentences: list[Sentence] = field(default_factory=list)
    pictures: list[tuple[str, str]] = field(default_factory=list)
    views: list[Table] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)
    folded: bool = False


@dataclass(frozen=True)
class Sheet:
    """What is said of one answer. `kind` and `name` are its title; `files`, the first one in words, are named at its
    end."""

    kind: str
    name: str | Cell
    sections: Sequence[Section]
    files: Sequence[str]

    @property
    def title(self) -> str:
        """The name as text."""
        return self.name if isinstance(self.name, str) else self.name.text

    def markdown(self) -> str:
        """The sheet as Markdown text; the pictures that it shows are files beside it, as `name.svg`. Sections of charts
        alone, which are drawn as a page is read, are left out."""
        blocks = [
            f"# {escaped(f'{self.kind}: {self.title}')}",
            "Simulated by batchsim. Every number is a cell of a table beside this file.",
        ]
        for section in self.sections:
            if not (section.sentences or section.pictures or section.views):
                continue
            blocks.append(f"## {escaped(section.title)}")
            blocks += [escaped(sentence_text(sentence)) for sentence in section.sentences]
            blocks += [f"![{escaped(caption)}]({picture}.svg)" for picture, caption in section.pictures]
            blocks += [view.markdown() for view in section.views]
        blocks.append(f"{', '.join(self.files)}.")
        return "\n\n".join(blocks) + "\n"


Values = Sequence[float | None]


@dataclass(frozen=True)
class ChartAxis:
    """A quantity along an axis: its label, how its values are written, and the scale that is shown first.

    `nines` spreads shares near 1: 90 %, 99 % and 99.9 % are equally far apart. `signed` spreads differences near 0, on
    either side: 0.1, 1, 10 and 100 `points` are. `names` stand in place of the numbers 0, 1, 2 of an axis of parts.
    """

    label: str
    kind: Literal["number", "seconds", "share", "points"] = "number"
    scale: Literal["linear", "log", "nines", "signed"] = "linear"
    names: Sequence[str] = ()


@dataclass(frozen=True)
class Series:
    """A line: `y` at `x`, with intervals from `low` to `high` where those are given; None where there is no value.

    `crosses`: for each point whether the queue grows there; `hollow`: whether its mark is open. `joined`: whether a
    line joins the points.
    """

    label: str
    color: str
    x: Sequence[float]
    y: Values
    low: Values = ()
    high: Values = ()
    crosses: Sequence[bool] = ()
    hollow: Sequence[bool] = ()
    dashed: bool = False
    joined: bool = True


@dataclass(frozen=True)
class Chart:
    """A chart with its caption; `target` is a value of y that is asked for, drawn as a dashed line called `asked`,
    `bands` are stretches of x that are shaded in a colour: (from, to, colour). `note` stands below it."""

    caption: str
    x: ChartAxis
    y: ChartAxis
    series: Sequence[Series]
    target: float | None = None
    bands: Sequence[tuple[float, float, str]] = field(default_factory=tuple)
    asked: str = "asked"
    note: str = ""

    @property
    def data(self) -> str:
        """The chart as JSON that may stand inside an HTML page: no text in it ends the element."""
        text = json.dumps(asdict(self), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.replace("<", "\\u003c").replace("&", "\\u0026")
