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
from batchsim.cost import CostError
from batchsim.report.cost_words import HOW, between, off_by
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
    lines += _within_error(found)
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


def _within_error(found: Sequence[Comparison]) -> list[str]:
    """Lines on the runs whose load lies within the cost's error of saturation, and on those of which that is not known
    and whose simulated queue grows; how to tell comes last."""
    lines: list[str] = []
    for one in found:
        where, off = (f"{one.policy}, {one.part}" if one.part else one.policy), off_by(one.cost_error)
        if one.is_within_error:
            beyond = [title for title, latency in _ROWS if _is_beyond(one.error(f"{latency}_mean_s"))]
            but = f"; the measured {' and '.join(beyond)} is beyond them: the cost errs by more here" if beyond else ""
            lines.append(
                f"! {where}: the load lies within the cost's error of saturation ({off}): TTFT and E2E are those of the"
                f" shortest and of the longest steps{but}"
            )
        elif one.grows and not isinstance(one.cost_error, CostError):
            lines.append(
                f"! {where}: in simulation the queue grows, and the error of step times is {off}: TTFT and E2E may be"
                " anything"
            )
    return [*lines, f"! which they are {HOW}"] if lines else []


def _is_beyond(error: MetricError) -> bool:
    """Whether what was measured lies outside of what both ends of the cost's error make."""
    return error.ends is not None and error.live is not None and not error.ends[0] <= error.live <= error.ends[1]


def grid(found: Sequence[Comparison]) -> Grid:
    """Rows of each comparison: a latency each with its errors, then the rates."""
    rows: Grid = [["policy", "run", "", "measured", "simulated", "mean", "P50", "P90", "P99", "shift"]]
    for one in found:
        name = [one.policy, one.part]
        for title, latency in _ROWS:
            errors = [one.error(f"{latency}_{of}_s") for of in _OF]
            mean = errors[0]
            simulated = _ms(mean.simulated) if mean.ends is None else between(*map(_ms, mean.ends))
            impossible = one.runs[0].impossible.get(mean.name)
            if impossible is not None:
                rows.append([*name, title, _ms(impossible), simulated, IMPOSSIBLE, DASH, DASH, DASH, DASH])
                name = ["", ""]
                continue
            if all(error.error is None and error.ends is None for error in errors):
                continue
            rows.append([*name, title, _ms(mean.live), simulated, *map(_cell, errors), _shift(one, mean.name)])
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
    if error.error_ends is not None:
        return "…".join(f"{100 * end:+.0f}" for end in error.error_ends)
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
    parts += ["\n".join(f"- {escaped(line)}" for line in lines)] if (lines := _within_error(found)) else []
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
            "errors": [asdict(error) | {"error_ends": error.error_ends} for error in one.errors],
            "within_cost_error_of_saturation": one.is_within_error,
            "cost_error": asdict(one.cost_error),
            "queue_grows": one.grows,
            "impossible": dict(one.runs[0].impossible),
            "load_equivalent": one.shifts,
            "first_request_that_parts": None if one.parting is None else asdict(one.parting),
        }
        for one in found
    ]
    whole = {"name": name, "heading": heading, "made": dict(made), "figures": list(FIGURES), "points": points}
    return as_json(whole, indent=1) + "\n"
