"""What `batchsim plan` prints: a line for each configuration, the changes that break the plan, the three sentences."""

from __future__ import annotations

from batchsim.base.units import counted
from batchsim.report.cost_words import CANNOT_TELL
from batchsim.report.layout import fit
from batchsim.report.page.plan_advice import recommendation, start_rows
from batchsim.report.page.plan_columns import (
    COLUMNS,
    Row,
    Tables,
    is_below_all,
    money,
    one_seed_alone,
    seconds,
    signed,
)
from batchsim.report.page.plan_sections import CHOICES, view
from batchsim.report.sheet import sentence_text
from batchsim.study.planning.assumptions import DOUBT, UNSAID

RUNNERS_UP = 3


def plan_text(tables: Tables, currency: str) -> str:
    """The plan's tables and recommendation as text, wrapped to the output's width."""
    gpu, policy = (
        max(len(head), *(len(row[head.lower()]) for row in tables["configurations"])) for head in ("GPU", "policy")
    )
    month = f"{currency} a month"
    head = f"{'GPU':{gpu}} {'policy':{policy}} {'replicas':>8} {'within SLO':>10} {month:>11}"
    lines = [f"{head}  one less (lower end of its margin)"]
    for row in tables["configurations"]:
        head = f"{row['gpu']:{gpu}} {row['policy']:{policy}} "
        if row["holds"]:
            held, month = (COLUMNS[name].show(row[name]) for name in ("attainment", "cost_per_month"))
            lines.append(f"{head}{row['replicas']:>8} {held:>10} {month:>11}  {_one_less(row)}")
        else:
            lines.append(f"{head}none: {row['why_not']}")
    doubts = [row for row in tables.get("assumptions", []) if row["what"].startswith(DOUBT)]
    lines += [f"! {row['what'].removeprefix(DOUBT).strip()}: {row['assumed']}" for row in doubts]
    for row in tables.get("what_if", []):
        if row["holds"] is False:
            needed = f"; {row['note']}" if row["note"] else ""
            needed = needed if row["replicas_needed"] is None else f"; it would take {row['replicas_needed']}"
            share = COLUMNS["attainment"].show(row["attainment"])
            seed = " in one seed" if one_seed_alone(row) else ""
            result = f"{row['shown']}, {share} within the SLO{seed}{needed}"
            lines.append(f"! {row['gpu']} × {row['replicas']}, {row['change']}: {result}")
        elif row["holds"] is None:
            lines.append(f"! {row['gpu']} × {row['replicas']}, {row['change']}: not simulated: {row['note']}")
    lines += _by_cost(tables)
    lines += search_lines(tables, currency)
    lines += [sentence_text(sentence) for sentence in recommendation(tables, currency)]
    if "choices" in tables:
        lines += ["", *view(tables, "choices", CHOICES, currency).lines(left=(-1,)), ""]
    lines += [f"! the command cannot state {tables['assumptions'][i]['assumed']}" for i in start_rows(tables, UNSAID)]
    commands = [tables["assumptions"][i]["assumed"] for i in start_rows(tables)]
    return "\n".join([*(fit(line) for line in lines), *commands])  # a command is to be copied as it is


def _by_cost(tables: Tables) -> list[str]:
    """A line for each configuration of which the cost's error decides how many replicas hold."""
    lines = []
    for row in tables["configurations"]:
        fewest, most = row["replicas_if_fast"], row["replicas_if_slow"]
        if row["holds"] and fewest is not None and fewest != most:
            slow = "more than max_replicas" if most is None else most
            lines.append(
                f"! {row['gpu']} × {row['replicas']}, {row['policy']}: the cost's error decides: {fewest} with the"
                f" shortest steps that it allows, {slow} with the longest; it {CANNOT_TELL}"
            )
    return lines


def _one_less(row: Row) -> str:
    """A configuration with one replica less: `99.33 % not shown to hold (−0.4 %)`, the requests within the SLO, the
    verdict, and the lower end of the margin, where it says anything.
    """
    if row["one_less"] is None:
        return row["one_less_shown"] or "–"
    least = row["one_less_margin_low"]
    of_margin = "" if least is None or is_below_all(least) else f" ({COLUMNS['margin_low'].show(least)})"
    return f"{COLUMNS['one_less'].show(row['one_less'])} {row['one_less_shown']}{of_margin}"


def search_lines(tables: Tables, currency: str) -> list[str]:
    """The lines of a plan that searched; none of others."""
    if "search" not in tables:
        return []
    every = len(tables["searched"])
    lines = [f"searched {every:,} configurations:"]
    lines += [_rung(row) for row in tables["search"]]
    for row in tables.get("left_out", []):
        lines.append(f"left out {row['configurations']}: {row['why_lost']}")
    lost = [row for row in tables["searched"] if row["why_lost"] and not row["twin"]]
    for row in [row for row in lost if row["cost_per_month_at_least"] is not None][:RUNNERS_UP]:
        least = "" if row["decided"] else "at least "
        cost = f"{least}{currency} {money(row['cost_per_month_at_least'])} a month"
        lines.append(
            f"runner-up: {row['gpu']} × {row['replicas_at_least']}, {row['policy']}, {cost}: {row['why_lost']}"
        )
    return [*lines, *(_change(row, currency) for row in tables.get("sensitivity", []))]


def _rung(row: Row) -> str:
    seeds = counted(row["seeds"], "seed")
    left = f"; of these {row['why_left']}" if row["why_left"] else ""
    return (
        f"  {row['rung']} ({seconds(row['window_s'])}, {seeds}): {counted(row['entered'], 'configuration')} in"
        f" {counted(row['looks'], 'look')}{left}"
    )


def _change(row: Row, currency: str) -> str:
    if row["price_per_hour"] is not None:
        if row["decision_changes_at"] is None:
            return f"if the {row['change']} changes: {row['note']}"
        at = f"{currency} {money(row['decision_changes_at'])} an hour ({signed(row['relative'])})"
        return f"{row['change']}, {currency} {money(row['price_per_hour'])}: changes at {at}: {row['note']}"
    if row["gpu"] is None:
        return f"{row['change']}: {row['note']}"
    same = "the same configuration" if row["same_decision"] else "another configuration"
    cost = COLUMNS["cost_per_month"].show(row["cost_per_month"])
    return f"{row['change']}: {same}: {row['gpu']} × {row['replicas']}, {row['policy']}, {currency} {cost} a month"


def plan_json(tables: Tables, currency: str) -> dict[str, object]:
    """The plan's tables and its recommendation in sentences as JSON values, for other programs."""
    sentences = [sentence_text(sentence) for sentence in recommendation(tables, currency)]
    return {"currency": currency, "recommendation": sentences, "tables": tables}
