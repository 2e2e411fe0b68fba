"""What `batchsim plan` prints of a search: how it went, the runners-up, what would change the decision."""

from __future__ import annotations

from batchsim.report.page.cells import COLUMNS, Row, Tables, money, seconds, signed

RUNNERS_UP = 3


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
    seeds = _counted(row["seeds"], "seed")
    left = f"; of these {row['why_left']}" if row["why_left"] else ""
    return (
        f"  {row['rung']} ({seconds(row['window_s'])}, {seeds}): {_counted(row['entered'], 'configuration')} in"
        f" {_counted(row['looks'], 'look')}{left}"
    )


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


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
