"""Lines under a run's table: of replicas by policy and group, least to most of any; of tasks not done or pruned."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd

from batchsim.base.units import NS_PER_S, counted, format_duration, parse_price_per_h
from batchsim.metrics.table import METRICS
from batchsim.report.reading import PolicyCurve, column, rows_of, texts
from batchsim.results.read import Results, scenario_of


def replica_lines(results: Results, shown: Sequence[tuple[PolicyCurve, int]]) -> list[str]:
    """Lines for each (curve, index of a load) in `shown`, values as means over seeds; [] where there is one engine."""
    table = results.replicas()
    if table is None:
        return []
    lines = []
    for sweep, i in shown:
        own = rows_of(table, sweep, i)
        groups = np.array(texts(own, "group"))
        for group in dict.fromkeys(groups.tolist()):
            rows = own.take(np.flatnonzero(groups == group))
            lines.append(
                f"{', '.join(filter(None, (sweep.labels[i], group)))}:  {_facts(rows, timed=not sweep.within_error[i])}"
            )
        held, most = (float(sweep.values(f"num_replicas_{name}")[i]) for name in ("mean", "max"))
        if held < most:
            price = (scenario_of(results, sweep.policy).get("replicas") or {}).get("price")
            costs = _cost(held, most, price)
            lines.append(f"{sweep.labels[i]}:  {held:.3g} replicas held on average, at most {most:g}{costs}")
    return lines


def _cost(held: float, most: float, price: str | None) -> str:
    """What `held` replicas cost an hour at the price of each, and `most` all the time; "" where no price is known."""
    if price is None:
        return ""
    each = parse_price_per_h(price)
    less = f"{100 * (1 - held / most):.0f} % less than {each * most:.4g} for {most:g} all the time"
    return f": {each * held:.4g} an hour, {less}"


def _facts(rows: pd.DataFrame, *, timed: bool) -> str:
    """What replicas did; with `timed` also how long first tokens took, which is no number near saturation."""
    replicas = column(rows, "replica")
    of: dict[str, tuple[float, float]] = {}
    for name in ("requests", "engine_busy_share", "kv_utilisation_peak", "ttft_p99_s"):
        values = column(rows, name)
        means = [float(values[replicas == replica].mean()) for replica in np.unique(replicas)]
        of[name] = min(means), max(means)
    facts = [f"{_span(*of['requests'], _count)} requests a replica"]
    shown = {"engine_busy_share": percent_words, "kv_utilisation_peak": percent_words, "ttft_p99_s": time_words}
    facts += [
        f"{METRICS[name].heading} {_span(*of[name], show)}"
        for name, show in shown.items()
        if name != "ttft_p99_s" or (timed and not math.isnan(of[name][1]))
    ]
    lost = float(np.sum(column(rows, "lost"))) / len(np.unique(column(rows, "seed")))
    return ", ".join(facts) + (f", {_count(lost)} lost and sent again" if lost else "")


def _span(low: float, high: float, shown: Callable[[float], str]) -> str:
    """`70 to 80 %`: both ends as `shown` writes them, the unit once if it is the same."""
    least, most = shown(low), shown(high)
    if least == most:
        return least
    number, _, unit = least.partition(" ")
    return f"{number if unit and most.endswith(f' {unit}') else least} to {most}"


def _count(number: float) -> str:
    return f"{number:,.0f}"


def percent_words(share: float) -> str:
    """`41 %`: a share as a whole percentage; a dash for none."""
    return "–" if math.isnan(share) else f"{100 * share:.0f} %"


def time_words(seconds: float) -> str:
    """`2.4 s`: a time to two digits; a dash for none."""
    return "–" if math.isnan(seconds) else format_duration(float(f"{seconds * NS_PER_S:.2g}"))


def task_lines(results: Results, shown: Sequence[tuple[PolicyCurve, int]]) -> list[str]:
    """A line for each (curve, index of a load) in `shown`, means over seeds; [] without tasks, or where all are done
    and nothing was pruned."""
    if "tasks" not in results.summary:
        return []
    lines = []
    for sweep, i in shown:
        if sweep.failed[i]:
            continue
        tasks, undone, pruned = (float(sweep.values(name)[i]) for name in ("tasks", "tasks_undone_share", "pruned"))
        if undone > 0 or pruned > 0:
            facts = f"{sweep.labels[i]}:  {counted(round(tasks), 'task')}, {100 * undone:.3g} % not done"
            lines.append(facts + (f"; {counted(round(pruned), 'request')} pruned" if pruned else ""))
    return lines


def offline_lines(results: Results, shown: Sequence[tuple[PolicyCurve, int]]) -> list[str]:
    """A line for each (curve, index of a load) in `shown`, means over seeds; [] without offline jobs."""
    if "offline_requests" not in results.summary:
        return []
    lines = []
    for sweep, i in shown:
        if not sweep.failed[i]:
            of = {name: float(sweep.values(f"offline_{name}")[i]) for name in ("requests", "aborts")}
            of |= {name: float(sweep.values(f"offline_{name}")[i]) for name in ("done_share", "expired_share")}
            of |= {name: float(sweep.values(f"offline_{name}")[i]) for name in ("makespan_s", "tokens_per_s")}
            late = f", {percent_words(of['expired_share'])} expired" if of["expired_share"] else ""
            again = float(sweep.values("offline_prefilled_again_tokens")[i])
            done = f"{percent_words(of['done_share'])} done"
            if of["done_share"]:
                late += f" in {time_words(of['makespan_s'])}, {of['tokens_per_s']:,.0f} tokens/s"
            lines.append(
                f"{sweep.labels[i]}:  {of['requests']:,.0f} offline requests, {done}{late};"
                f" {of['aborts']:,.0f} aborts for others, {again:,.0f} tokens prefilled again"
            )
    return lines
