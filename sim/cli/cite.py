"""`batchsim cite`: what a run rests on, to be named in a paper or a report."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from batchsim.cli import option
from batchsim.cli.common import one_line_errors, print_json, read_results


@one_line_errors
def cite(
    results: option.Results,
    bibtex: Annotated[bool, typer.Option("--bibtex", help="Print BibTeX entries instead of text.")] = False,
    as_json: option.Json = False,
) -> None:
    """Name the papers, engines, versions and data that a run rests on. Example: batchsim cite results/chat --bibtex"""
    from batchsim.report.layout import filled
    from batchsim.results.citations import citations

    cited = citations(read_results(results))
    if as_json:
        print_json([asdict(each) for each in cited])
        return
    for each in cited:
        typer.echo(each.bibtex() if bibtex else "\n".join([each.of, *filled(each.text, "  ", "  ")]))
