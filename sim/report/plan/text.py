"""What `batchsim plan` prints: a line a configuration, the three sentences, what would break them."""

from __future__ import annotations

from sim.report.plan.cells import COLUMNS, Tables
from sim.report.plan.markdown import sentence_text
from sim.report.plan.sections import recommendation
from sim.report.tables import fit


def plan_text(tables: Tables, currency: str) -> str:
    """At most 100 columns."""
    lines = [f"{'GPU':10} {'policy':22} {'replicas':>8} {'within SLO':>12} {'one less':>9} {currency + ' a month':>12}"]
    for row in tables["configurations"]:
        head = f"{row['gpu'][:10]:10} {row['policy'][:22]:22} "
        if row["holds"]:
            less = "–" if row["one_less"] is None else COLUMNS["one_less"].show(row["one_less"])
            shown = (row["replicas"], COLUMNS["attainment"].show(row["attainment"]), less)
            month = COLUMNS["cost_per_month"].show(row["cost_per_month"])
            lines.append(f"{head}{shown[0]:>8} {shown[1]:>12} {shown[2]:>9} {month:>12}")
        else:
            lines.append(f"{head}none: {row['why_not']}")
    for row in tables.get("what_if", []):
        if row["holds"] is False:
            needed = f"; {row['note']}" if row["note"] else ""
            needed = needed if row["replicas_needed"] is None else f"; it would take {row['replicas_needed']}"
            share = COLUMNS["attainment"].show(row["attainment"])
            told = f"not held, {share} within the SLO{needed}"
            lines.append(f"! {row['gpu']} × {row['replicas']}, {row['change']}: {told}")
        elif row["holds"] is None:
            lines.append(f"! {row['gpu']} × {row['replicas']}, {row['change']}: not simulated: {row['note']}")
    lines += [sentence_text(sentence) for sentence in recommendation(tables, currency)]
    return "\n".join(fit(line) for line in lines)


def plan_json(tables: Tables, currency: str) -> dict[str, object]:
    """The tables and the sentences, for other programs."""
    sentences = [sentence_text(sentence) for sentence in recommendation(tables, currency)]
    return {"currency": currency, "recommendation": sentences, "tables": tables}
