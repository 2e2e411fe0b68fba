"""The report on claims: a table of verdicts as plain text, and the same as JSON."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from batchsim.report.layout import fit
from batchsim.report.reading import SAME_COSTS
from tools.claims.nouns import Finding


def claims_text(findings: Sequence[Finding], heading: str) -> str:
    """All claims with their sources, readings and verdicts, wrapped to the output's width."""
    seeds = max((len(finding.values) for finding in findings), default=0)
    spread = "1 seed" if seeds == 1 else f"mean of up to {seeds} seeds (lowest–highest)"
    head = [heading, f"{SAME_COSTS} · {spread}"]
    lines = [part for line in head for part in fit(line).split("\n")]
    for claim, group in itertools.groupby(findings, key=lambda finding: finding.claim):
        found = list(group)
        holds = sum(finding.verdict == "yes" for finding in found)
        lines += ["", fit(f'{claim.name}: "{claim.said}" holds under {holds} of {len(found)} conditions')]
        lines += fit(f"  told by   {claim.source}").split("\n") + fit(f"  measured  {claim.reading}").split("\n")
        rows = [("", "", "holds?", "")]
        rows += [(f.condition.text, measured(f), f.verdict, f.note) for f in found]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines += [fit(_row(row, widths)) for row in rows]
    return "\n".join(lines)


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    text, value, verdict, note = cells
    return f"  {text:<{widths[0]}}  {value:>{widths[1]}}  {verdict:<{widths[2]}}  {note}".rstrip()


def measured(finding: Finding) -> str:
    """`24 × (23.7–24.2)`: a finding's mean over seeds, and its range where seeds differ; `–` without a value."""
    if not finding.values:
        return "–"
    unit = finding.claim.unit
    mean, low, high = np.mean(finding.values), min(finding.values), max(finding.values)
    texts = [_number(float(value), unit) for value in (mean, low, high)]
    seeds = f" ({texts[1]}–{texts[2]})" if texts[1] != texts[2] else ""
    return f"{texts[0]} {unit}{seeds}"


def _number(value: float, unit: str) -> str:
    """A ratio to two or three digits; a share in percent, never rounded up to 100."""
    if unit == "×":
        return f"{value:.0f}" if value >= 100 else f"{value:.3g}" if value >= 10 else f"{value:.2g}"
    percent = 100 * value
    return f"{min(percent, 99.9):.1f}" if 99 < percent < 100 else f"{percent:.0f}"


def claims_as_json(findings: Sequence[Finding], heading: str) -> dict[str, Any]:
    """A row for each condition of a claim, with the keys that were set and each seed's value; shares are fractions."""
    rows = [
        {
            "claim": finding.claim.name,
            "said": finding.claim.said,
            "low": finding.claim.low,
            "high": finding.claim.high,
            "condition": finding.condition.text,
            "policy": finding.condition.policy,
            "against": list(finding.condition.against),
            "load": finding.condition.load,
            "set": list(finding.condition.overrides),
            "values": list(finding.values),
            "verdict": finding.verdict,
            "note": finding.note,
        }
        for finding in findings
    ]
    return {"heading": heading, "note": SAME_COSTS, "findings": rows}
