"""Simulation beside measured runs, as text: what `batchsim validate --against` prints, and the Markdown page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from batchsim.base.files import Kind
from batchsim.check.measured.run import FIGURES
from batchsim.check.validation.against import PARTED, SHIFTED, Comparison
from batchsim.check.validation.compare_runs import MetricError
from batchsim.check.validation.load_shift import REACH
from batchsim.report.layout import Grid, aligned, fit
from batchsim.report.markdown import escaped, markdown_table
from batchsim.results.provenance import as_json

JSON = Kind("comparison", rb'\{\n "name": "against-')
PAGE = Kind("page of a comparison", b"# Simulated against measured: ")
DASH = "–"
IMPOSSIBLE = "cannot be"
_ROWS = (("TTFT", "ttft"), ("TPOT", "tpot"), ("E2E", "e2e"))
_OF = ("mean", "p50", "p90", "p99")
_RATES = (("requests/s", "throughput_rps"), ("tokens/s", "output_tokens_per_s"))
LEGEND = (
    "errors in %: simulated / measured − 1, ± half the range of the measured repeats · ~ fewer than 20 observations"
    " beyond the percentile · shift: the load (of a closed loop its users) at which the simulation has the measured"
    f" mean / that of the run − 1; >{100 * REACH:.0f}: beyond ±"
)


def report(heading: str, found: Sequence[Comparison]) -> str:
    """The comparison in brief for a terminal: the files and their faults, where they part, the table of errors last."""
    lines = [heading, *_files(found)]
    if parted := _parted(found):
        lines += [f"first request whose TTFT or TPOT parts by {100 * PARTED:.0f} %:", *parted]
    text = "\n".join(map(fit, [*lines, "", LEGEND]))
    return "\n".join([text, *aligned(grid(found), left=(0, 1, 2), close=True)])


def _files(found: Sequence[Comparison]) -> list[str]:
    """A line for each file, and for each of its runs how its client sent and what is to be known of it."""
    lines: list[str] = []
    for one in {tuple(map(id, each.runs)): each for each in found}.values():
        run = one.runs[0]
        files = ", ".join(each.source for each in one.runs)
        head = f"{files}: {run.form}{f' {run.version}' if run.version else ''}"
        lines += [] if head in lines else [head]
        count = "aggregates" if run.requests is None else f"{len(run.requests):,} requests"
        about = f"{run.part + ': ' if run.part else ''}{count}, {run.client}"
        lines.append("".join([f"- {about}", *(f" · ! {note}" for note in one.notes)]))
    return lines


def _parted(found: Sequence[Comparison]) -> list[str]:
    """Where each comparison parts; [] where no file has its requests."""
    known = [one for one in found if one.runs[0].requests is not None]
    where = [f"{one.policy}, {one.part}" if one.part else one.policy for one in known]
    return [f"- {name}: {one.parting.text if one.parting else 'none'}" for name, one in zip(where, known, strict=True)]


def grid(found: Sequence[Comparison]) -> Grid:
    """Rows of each comparison: a latency each with its errors, then the rates."""
    rows: Grid = [["policy", "run", "", "measured", "simulated", "mean", "P50", "P90", "P99", "shift"]]
    for one in found:
        name = [one.policy, one.part]
        for title, latency in _ROWS:
            errors = [one.error(f"{latency}_{of}_s") for of in _OF]
            impossible = one.runs[0].impossible.get(errors[0].name)
            if impossible is not None:
                values = [_ms(impossible), _ms(errors[0].simulated)]
                rows.append([*name, title, *values, IMPOSSIBLE, DASH, DASH, DASH, DASH])
                name = ["", ""]
                continue
            if all(error.error is None for error in errors):
                continue
            mean = errors[0]
            values = [_ms(mean.live), _ms(mean.simulated)]
            rows.append([*name, title, *values, *map(_cell, errors), _shift(one, mean.name)])
            name = ["", ""]
        for title, rate in _RATES:
            error, impossible = one.error(rate), one.runs[0].impossible.get(rate)
            if impossible is not None:
                rows.append(
                    [*name, title, f"{impossible:.4g}", f"{error.simulated or 0:.4g}", IMPOSSIBLE, "", "", "", ""]
                )
                name = ["", ""]
            if error.error is not None:
                rows.append([*name, title, f"{error.live:.4g}", f"{error.simulated:.4g}", _cell(error), "", "", "", ""])
                name = ["", ""]
        if name[0]:
            rows.append([*name, "nothing to compare", *[DASH] * 7])
    return rows


def _ms(value: float | None) -> str:
    return DASH if value is None else f"{value:.4g} s" if value >= 1 else f"{1e3 * value:.4g} ms"


def _cell(error: MetricError) -> str:
    """An error and the spread of the measured repeats in %, like `~-3.1±2.0`."""
    if error.error is None:
        return DASH
    spread = "" if error.spread is None else f"±{100 * error.spread:.1f}"
    return f"{'~' if error.few else ''}{100 * error.error:+.1f}{spread}"


def _shift(one: Comparison, name: str) -> str:
    if name not in SHIFTED or name not in one.shifts:
        return DASH
    shift = one.shifts[name]
    return f">{100 * REACH:.0f}" if shift is None else f"{100 * shift:+.1f}"


# ---- files


def markdown(name: str, heading: str, found: Sequence[Comparison], made: Mapping[str, Any], picture: str) -> str:
    """The comparison as a Markdown page."""
    table = grid(found)
    parts = [f"# Simulated against measured: {escaped(name)}", escaped(heading)]
    parts.append(
        "\n".join(escaped(line) if line.startswith("- ") else f"\n{escaped(line)}\n" for line in _files(found))
    )
    parts += [markdown_table(table[0], [False] * 3 + [True] * 7, table[1:]), LEGEND, f"![{picture}]({picture})"]
    if parted := _parted(found):
        parts.append("## Where they part\n\n" + "\n".join(map(escaped, parted)))
    parts.append("## How it was made\n\n```json\n" + json.dumps(made, indent=1, ensure_ascii=False) + "\n```")
    return "\n\n".join(parts) + "\n"


def to_json(name: str, heading: str, found: Sequence[Comparison], made: Mapping[str, Any]) -> str:
    """The comparison as JSON: seconds, rates and shares; latencies of each request where they are known."""
    points = [
        {
            "policy": one.policy,
            "part": one.part,
            "files": [run.source for run in one.runs],
            "form": one.runs[0].form,
            "client": str(one.runs[0].client),
            "notes": one.notes,
            "errors": [asdict(error) for error in one.errors],
            "impossible": dict(one.runs[0].impossible),
            "load_equivalent": one.shifts,
            "first_request_that_parts": None if one.parting is None else asdict(one.parting),
        }
        for one in found
    ]
    whole = {"name": name, "heading": heading, "made": dict(made), "figures": list(FIGURES), "points": points}
    return as_json(whole, indent=1) + "\n"
