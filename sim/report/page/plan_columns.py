"""How the values of a plan's tables are shown, what their columns are called, and what they mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from batchsim.base.units import NS_PER_S, format_duration
from batchsim.metrics.table import METRICS
from batchsim.report.numbers import DASH
from batchsim.report.sheet import Cell
from batchsim.study.planning.tables import Row, Tables

NEARLY_ALL = 0.9999


def one_seed_alone(row: Row) -> bool:
    """Whether a row of simulations rests on one seed, and has no interval: one recording's has stretches."""
    return row["seeds"] == 1 and row["attainment_low"] is None


def share(value: float) -> str:
    """`99.42 %`: a share from 0 to 1 in percent, never rounded up to 100."""
    return f">{100 * NEARLY_ALL:.2f} %" if NEARLY_ALL < value < 1 else f"{100 * value:.4g} %"


def money(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}" if value >= 1 else f"{value:.3g}"


def number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 1000 else f"{value:.3g}"


def seconds(value: float) -> str:
    return format_duration(value * NS_PER_S)


def yes_no(value: bool) -> str:
    return "yes" if value else "no"


def plain(value: Any) -> str:
    return str(value)


def is_below_all(margin_low: float) -> bool:
    """Whether the lower end of a margin lies below every share there can be: seeds differ too much for it to say
    anything."""
    return margin_low < -1


def margin(value: float) -> str:
    """A difference of shares in percentage points, the lower end of an interval; below -1 it says that seeds differ too
    much to say more."""
    return "below −100 points" if is_below_all(value) else signed(value, "points")


def signed(value: float, unit: str = "%") -> str:
    return f"{100 * value:+.3g} {unit}".replace("-", "−") if value else f"0 {unit}"


@dataclass(frozen=True)
class Column:
    """How one column is shown: its `heading`, `show` which turns a value into text, and `meaning` for the glossary,
    empty for a heading that explains itself.
    """

    heading: str
    show: Callable[[Any], str] = plain
    meaning: str = ""


COLUMNS: dict[str, Column] = {
    "scenario": Column("scenario"),
    "gpu": Column("GPU"),
    "policy": Column("policy"),
    "replicas": Column(
        "replicas", number, "engines behind the router; the smallest number that was shown to hold the busiest window"
    ),
    "gpus": Column("GPUs", number),
    "holds": Column(
        "holds",
        yes_no,
        "whether the lower end of the interval of those within the SLO meets the objective, and no queue is seen to"
        " grow",
    ),
    "cost_per_month": Column("cost a month", money, "price of all GPUs, used or not, for the hours of a month"),
    "cost_per_hour": Column("cost an hour", money),
    "cost_per_1m_output_tokens": Column(
        "cost per million output tokens", money, "cost over the output tokens that the traffic asks for"
    ),
    "attainment": Column(
        "within SLO",
        share,
        "requests, or tasks where it bounds these, within the SLO over all offered in the busiest window; lost ones are"
        " misses",
    ),
    "attainment_low": Column("interval from", share, "lower end of the interval of those within the SLO"),
    "attainment_high": Column("to", share),
    "shown": Column(
        "shown",
        meaning="holds; fails, where the mean misses an objective; overloaded, where it meets all and the queue grows"
        " as long as requests come; not shown to hold, where it meets all and the lower end of its interval does not",
    ),
    "margin_low": Column(
        "margin, lower end",
        margin,
        "lower end of the interval of what is within the SLO beyond what it asks, in percentage points; of the worst"
        " class",
    ),
    "one_less": Column("with one replica less", share, "the same traffic on one replica less"),
    "one_less_shown": Column("one less", meaning='what that shows of one replica less, in the words of "shown"'),
    "one_less_margin_low": Column(
        "margin of one less, lower end", margin, "the same with one replica less; below zero it is not shown to hold"
    ),
    "one_less_class": Column(
        "worst class of one less", meaning="of one replica less: the class with the least beyond its SLO"
    ),
    "headroom": Column(
        "headroom", signed, "the most additional traffic of the steps tried that the same replicas were shown to hold"
    ),
    "goodput_rps": Column(
        "goodput, requests/s", number, "those of the busiest window's requests that meet the SLO, per second"
    ),
    "engine_busy_share": Column(METRICS["engine_busy_share"].heading, share, METRICS["engine_busy_share"].doc),
    "energy_kwh_per_1m_output_tokens": Column(
        "kWh per million output tokens",
        number,
        "while steps run, from power measured by the profile or else estimated; idle is left out",
    ),
    "cost_per_1m_with_energy": Column(
        "cost with energy per million output tokens", money, "the same and that energy at the price of a kWh"
    ),
    "saturation_rps": Column(
        "saturation, requests/s", number, "what one replica completes when all requests wait already"
    ),
    "replicas_if_fast": Column(
        "if steps are shorter", number, "replicas needed at the short end of step times; of each GPU's cheapest"
    ),
    "replicas_if_slow": Column(
        "if steps are longer", number, "replicas needed at the long end of step times, likewise"
    ),
    "why_not": Column("why none holds"),
    "change": Column("what if"),
    "replicas_needed": Column("replicas it would take", number, "replicas that hold under the change"),
    "cost_per_month_needed": Column("cost a month then", money, "price of that many replicas"),
    "note": Column("note"),
    "ttft_p99_s_fast": Column(
        "TTFT p99, faster steps", seconds, "where the load is within the cost's error of saturation, at its short end"
    ),
    "ttft_p99_s_slow": Column("TTFT p99, slower steps", seconds, "likewise at its long end"),
    "ttft_p99_s": Column("TTFT p99", seconds, "time to first token that all but a hundredth of the requests undercut"),
    "tpot_p99_s": Column("TPOT p99", seconds, "time per output token after the first, likewise"),
    "part": Column("when"),
    "rate_rps": Column("requests/s", number),
    "peak_rps": Column("requests/s at the peak", number),
    "share_of_peak": Column("of the peak", share, "requests a second over those of the busiest window"),
    "replicas_enough": Column(
        "replicas enough",
        number,
        "as many as keep a replica's traffic at or below the most that was shown to hold; few share bursts less well",
    ),
    "month": Column("month", number),
    "how": Column("how known"),
    "class": Column("class"),
    "priority": Column("priority", number),
    "share_of_requests": Column("of requests", share),
    "slo": Column("SLO"),
    "replicas_up_to": Column(
        "replicas, with classes above",
        number,
        "fewest replicas found to hold this class and the more important ones, alone or with less important ones too",
    ),
    "cost_per_month_tiered": Column(
        "cost a month, tiered", money, "the replicas up to this class less those up to the one before; never below 0"
    ),
    "share_of_use": Column(
        "of step time",
        share,
        "share in the time of all steps: a decoded token at the mean of steps that decode alone, the rest by prompt"
        " tokens",
    ),
    "cost_per_month_by_use": Column("cost a month, by step time", money, "the bill shared by step time"),
    "error": Column("error"),
    "quantity": Column("of"),
    "low": Column("low", plain),
    "planned": Column("planned", plain),
    "high": Column("high", plain),
    "source": Column("from"),
    "what": Column("what"),
    "assumed": Column("assumed"),
    "term": Column("term"),
    "meaning": Column("meaning"),
    "rung": Column("rung"),
    "window_s": Column("of the window", seconds),
    "seeds": Column(
        "seeds", number, "seeds simulated: one alone has no interval, unless it is a recording's, and so no margin"
    ),
    "entered": Column("configurations", number),
    "looks": Column("looks", number, "simulated groups: a configuration with so many replicas"),
    "ruled_out": Column("ruled out", number),
    "why_left": Column("left, and why"),
    "waiting": Column(
        "waiting",
        number,
        "no cheaper, and of no more margin in the looks; looked at again where they may be cheaper",
    ),
    "configurations": Column("configurations", number),
    "replicas_at_least": Column("replicas at least", number, "the fewest that no look ruled out"),
    "cost_per_month_at_least": Column("cost a month at least", money, "of as many replicas"),
    "why_lost": Column("why not chosen"),
    "price_per_hour": Column("price of a GPU an hour", money),
    "decision_changes_at": Column(
        "decision changes at", money, "by arithmetic on the replicas that were found or ruled out; not searched again"
    ),
    "relative": Column("relative", signed),
    "same_decision": Column("same configuration", yes_no),
    "energy_j_per_output_token": Column(
        "J per output token", number, "while steps run, from power measured or else estimated"
    ),
    "router": Column("router"),
    "window": Column("busiest window"),
    "next_cost_per_month": Column("next", money),
    "replicas_spare": Column("replicas with one to spare", number),
    "cost_per_month_spare": Column("cost a month with one to spare", money),
    "counted": Column("judged"),
    "months": Column("months", number),
    "today_rps": Column("requests/s today", number),
    "forecast": Column("forecast", yes_no, "whether that many replicas hold the planned traffic, growth included"),
    "grown": Column(
        "more traffic", yes_no, "likewise with 30 % more than planned: from the fewest replicas on that hold it"
    ),
    "lost": Column("replica lost", yes_no, "likewise with one of them gone: one more than hold the plan"),
    "slow": Column("slower steps", yes_no, "likewise with every step as long as the error of the step times allows"),
    "choice": Column("choice"),
    "next_index": Column("next", number),
    "growth_per_month": Column("growth", share),
}

_QUANTITIES = {  # a row of table `sureness` says by its `quantity` of what kind its values are
    "attainment": ("within the SLO", share),
    "step_time": ("step times", signed),
    "replicas": ("replicas needed", number),
    "cost_per_month": ("cost a month", money),
}
_MONEY = ("cost_per_month", "cost_per_hour", "cost_per_1m_output_tokens", "cost_per_month_tiered")
_MONEY += ("cost_per_month_by_use", "cost_per_1m_with_energy", "cost_per_month_at_least", "price_per_hour")
_MONEY += ("decision_changes_at", "cost_per_month_spare")


def heading(column: str, currency: str) -> str:
    """The column's heading; for a sum of money followed by the currency in brackets."""
    name = COLUMNS[column].heading
    return f"{name} ({currency})" if column in _MONEY else name


def cell(tables: Tables, table: str, row: int, column: str) -> Cell:
    """The value of `table` at `row` (from 0) and `column` as shown; `–` where the table has none."""
    values = tables[table][row]
    value = values[column]
    show = COLUMNS[column].show
    if table == "sureness" and column in ("low", "planned", "high"):
        show = _QUANTITIES[values["quantity"]][1]
    if table == "sureness" and column == "quantity":
        return Cell(table, row, column, _QUANTITIES[value][0])
    text = DASH if value is None or value == "" else show(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return Cell(table, row, column, text, is_number)


def glossary(shown: Sequence[str]) -> list[Row]:
    """Rows of term and meaning for the columns `shown` that need explaining, in that order."""
    meanings = {COLUMNS[name].heading: COLUMNS[name].meaning for name in shown if COLUMNS[name].meaning}
    return [{"term": term, "meaning": meaning} for term, meaning in meanings.items()]
