"""The tables a run prints: plain text, as wide as the output (`layout.width`).

Marks: `±` half a 95 % interval over seeds; `~` a percentile with fewer than 20 observations beyond it; `–` not defined
for this policy; `unstable` the queue grows without end, so that a percentile with time in it means nothing; `*` of the
requests completed meanwhile; `failed` the simulation of a seed failed; `a…b` what the shortest and the longest steps
make that the cost's error allows, where the load lies within it of saturation, `∞` where the queue grows at that end.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from batchsim.base.units import counted
from batchsim.kernel.record import CAP_CUT
from batchsim.metrics.table import METRICS
from batchsim.report.cost_words import CANNOT_TELL, at_ends, cost_lines
from batchsim.report.decisions import decisions, open_text
from batchsim.report.drafting import draft_lines
from batchsim.report.layout import fit, listed
from batchsim.report.numbers import DASH, percent_text, rate_text, time_text
from batchsim.report.reading import (
    PolicyCurve,
    at_load,
    check_load,
    is_auto,
    load_name,
    load_text,
    load_to_show,
    num_seeds,
    seeds_text,
    sweeps,
    sweeps_at,
    systems_note,
    tested_loads,
)
from batchsim.report.sheet import Table
from batchsim.report.text.confidence import few_warning, paired_parts, precision_lines, warmup_warning
from batchsim.report.text.rollout_lines import rollout_lines
from batchsim.report.text.run_lines import offline_lines, replica_lines, task_lines
from batchsim.report.text.run_table import curve_table, policy_table, said_once, usual_columns, vary_line
from batchsim.report.text.shapes_text import shape_lines
from batchsim.results.decision import Decision
from batchsim.results.failed import Failed, grouped
from batchsim.results.read import Results

_SPARE = ("throughput_rps", "pad_share", "norm_latency_mean_s")  # left out of a table that is too wide, in turn


def opening(heading: str, kv: str, pools: Iterable[str]) -> str:
    """The lines of a run that hold before its first point: its heading, and the KV memory, of each curve its own among
    `pools` where these differ."""
    pools = dict.fromkeys(pools)
    kv = kv if len(pools) < 2 else "KV as the value has it: " + "; ".join(pools)
    return f"{fit(heading)}\n{fit(kv)}"


def report(results: Results, load: float | None = None, columns: Sequence[str] = (), *, opened: bool = False) -> str:
    """All that a run prints: its `opening`, unless it was `opened`, the policies at one load, the highest loads within
    the SLO, warnings.

    By default the table is at the load of `load_to_show`. Where each policy has loads of its own, each is shown at one
    of its own, `shown_at`. `columns` (`asked_columns`) stand in the place of the table's own.
    """
    own = load is None and is_auto(results)
    load = load_to_show(results) if load is None else load
    manifest, policies, loads, seeds = (
        results.manifest,
        len(sweeps(results)),
        len(tested_loads(results)),
        num_seeds(results),
    )
    runs = manifest["points_run"] + manifest["points_reused"] + len(manifest.get("failed", []))
    kinds = _count(policies, "curve") if "vary" in manifest else _count(policies, "policy", "policies")
    axes = f"{kinds} × {_count(loads, 'load')} × {seeds_text(results)}"
    # Policies with best_of run once a variant, so that there are more runs than the product says.
    if is_auto(results):
        most = max(len(sweep.loads) for sweep in sweeps(results))
        axes = f"{kinds} × {_count(most, 'load')} found for each"
        axes += f" × {seeds_text(results)}"
        loads = most
    if "precision" in manifest:
        axes += f", {_count(runs, 'run')}"
    elif runs == policies * loads * seeds:
        axes += f" = {_count(runs, 'run')}"
    else:
        axes += f", {_count(runs, 'run')} with best_of"
    drawn = [workload for workload in manifest["workload"] if workload["load"] == load]
    pools = [policy["kv"] for policy in manifest.get("vary", {}).get("policies", {}).values()]
    head = [] if opened else [opening(manifest["heading"], manifest["kv"], pools)]
    head += [f"{drawn[0]['text']} · {axes}"]
    head += [vary_line(results)] if "vary" in manifest else []
    head += [note] if (note := systems_note(results)) else []
    notes = [f"- {note}" for note in drawn[0]["notes"]]
    if any(workload["notes"] != drawn[0]["notes"] for workload in manifest["workload"]):
        which = at_load(load_name(results), load) if own else "of the load below"
        notes.append(f"- these are {which} and its first seed; manifest.json has all")
    if manifest["identical_seeds"]:
        notes.append(f"! nothing here is random: the {seeds} seeds are one run, and ± 0 says nothing. Set seeds: 1.")
    shown = None if own else load
    rows = _rows(results, shown)
    tables = [point_table(results, shown, columns), *by_class(results, shown), *replica_lines(results, rows)]
    tables += [*draft_lines(results, rows), *task_lines(results, rows), *rollout_lines(results, rows)]
    tables += [*offline_lines(results, rows), *shape_lines(results, rows)]
    alike = manifest.get("vary", {}).get("same_requests", True)  # else seeds do not make pairs of the same requests
    first, parts = paired_parts(results, shown) if shown is not None and alike else ("", [])
    tables += [listed(first, parts)] if parts else []
    tables += curve_table(results) if is_auto(results) else [highest_loads(results)]
    tables += least_bad(results, rows)
    lines = [*head, *notes, *tables, *precision_lines(results), *warnings(results, shown)]
    return "\n".join(fit(line) for text in lines for line in text.split("\n"))


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def point_table(results: Results, load: float | None, columns: Sequence[str] = ()) -> str:
    """The policies side by side at a tested load; ScenarioError if it was not tested. None: each at a load of its
    own. The words around `run_table` are of that load."""
    rows, table = _rows(results, load), run_table(results, load, columns)
    if not columns:
        last = max(i for i, cell in enumerate(table.rows[0]) if cell.column.endswith("_s"))
        table = said_once(table, table.headings[last])
    table = replace(table, headings=("", *table.headings[1:]))
    grid = [list(table.headings), *table.texts]
    name, seeds = load_name(results), num_seeds(results)
    counted = f"{seeds_text(results, load)}, ± = 95 %" if seeds > 1 else "1 seed"
    arrived = float(np.mean([sweep.values("offered_rps")[i] for sweep, i in rows if not sweep.failed[i]]))
    # An arrival process with a stated mean need not meet it in a few finite windows.
    came = "in these seeds" if seeds > 1 else "came"
    odd = load is not None and name == "mean_rate" and abs(arrived / load - 1) > 0.02
    but = f" ({arrived:.3g} {came})" if odd else ""
    sent = next((each for each in ("sessions", "tasks") if results.scenario["workload"].get(each)), "requests")
    same = "same draws for every user" if name == "users" else f"same {sent} for all"
    if not results.manifest.get("vary", {}).get("same_requests", True):
        same = f"each value its own {sent}, from the same draws"
    head = f"each at its highest load that{' surely' * (seeds > 1)} meets the SLO, else its lowest ({counted})"
    head = head if load is None else f"{at_load(name, load)}{but}, {same} ({counted})"
    marks = []
    if any(cell.endswith("*") for cells in grid[1:] for cell in cells):
        marks.append("* of those completed while the queue grows")
    if any("~" in cell for cells in grid for cell in cells):
        marks.append("~ fewer than 20 observations beyond the percentile")
    known = [cells for cells in grid[1:] if not {"unstable", "failed"} & set(cells)]
    if any(DASH in cells for cells in known) and columns:
        marks.append("– not defined")
    elif any(DASH in cells for cells in known):
        heading = METRICS["ttft_p50_s"].heading
        first = grid[0].index(heading) if heading in grid[0] else 0
        whole = first > 0 and any(cells[first] not in (DASH, "") and cells[first + 2] == DASH for cells in known)
        marks.append("– not defined" + (" (a response sent whole, or of one token, has no tpot)" if whole else ""))
    absent = [sweep.name for sweep in sweeps(results) if load is not None and not sweep.tested(load)]
    others = [listed("not run at this load:", absent)] if absent else []
    powered = any(METRICS[name].needs in ("known power", "idle power") for name in columns if name in METRICS)
    power = [source for source in results.manifest["sources"] if source.startswith("power")] if powered else []
    wide = not columns and (load is None or "vary" in results.manifest)
    spare = [METRICS[name].heading for name in _SPARE] if wide else []
    return "\n".join([head, *table.lines(spare=spare), *(["   ".join(marks)] if marks else []), *others, *power])


def run_table(results: Results, load: float | None, columns: Sequence[str] = ()) -> Table:
    """The table of a run at a tested load, or with None of each policy at a load of its own; with `columns` in the
    place of the usual ones."""
    rows = _rows(results, load)
    own = ["load"] if load is None else []
    table = policy_table(results, rows, [*own, *(columns or usual_columns(results, rows))], brief=not columns)
    return _with_values(rows, table) if "vary" in results.manifest else table


def _with_values(rows: list[tuple[PolicyCurve, int]], table: Table) -> Table:
    """The table with the value of the varied key in a column of its own, and the policies' labels without it."""
    done = []
    for (sweep, _), (label, *others) in zip(rows, table.rows, strict=True):
        end = sweep.policy.removeprefix(sweep.label)
        value = "" if sweep.value is None else str(sweep.value)
        done.append((replace(label, text=label.text.removesuffix(end)), replace(label, text=value), *others))
    return Table(table.name, ("policy", "value", *table.headings[1:]), tuple(done))


def _rows(results: Results, load: float | None) -> list[tuple[PolicyCurve, int]]:
    """The curve of each policy run at `load`, with the load's index in its arrays. None: each policy where it is
    `shown_at`."""
    if load is not None:
        check_load(results, load)
        return [(sweep, sweep.index(load)) for sweep in sweeps_at(results, load)]
    return [(sweep, sweep.shown_at) for sweep in sweeps(results)]


def by_class(results: Results, load: float | None) -> list[str]:
    """A line for each request class: its share within the SLO and its P99 TTFT under every policy."""
    lines = []
    for name in results.scenario["workload"].get("classes", {}):
        shares, tails = [], []
        for sweep, i in _rows(results, load):
            row, unstable = sweep.rows.iloc[i], sweep.unstable[i]
            tail = float(row[f"ttft_p99_s[{name}]"])
            shares.append(f"{sweep.policy} {percent_text(float(row[f'in_slo[{name}]']))}")
            text = "unstable" if unstable else time_text(tail, math.nan)
            if sweep.within_error[i]:
                shares[-1] = f"{sweep.policy} {at_ends(sweep, i, f'in_slo[{name}]')}"
                text = at_ends(sweep, i, f"ttft_p99_s[{name}]")
            tails.append(f"{sweep.policy} {text}")
        lines += [f"{name}, {METRICS['in_slo'].heading}:  {'   '.join(shares)}"]
        lines += [f"{name}, {METRICS['ttft_p99_s'].heading}:  {'   '.join(tails)}"]
    return lines


def highest_loads(results: Results) -> str:
    """For each policy the highest tested load that meets the SLO at the lower end of the interval over seeds, or
    `never`, and the loads above it of which the interval leaves that open, with its ends. `not known` where nothing
    that the objective bounds is defined.

    A lower load that failed is named beside it: the SLO is then not met all the way up. A live run that was cut short
    is not judged.
    """
    if results.manifest.get("live", {}).get("reason"):
        return "SLO: not judged, as the run was cut"
    parts = []
    objective = results.manifest["objective"]
    if not load_name(results):
        return listed(f"meets {objective}:", [f"{each.name} {_verdict(each)}" for each in decisions(results)])
    for decision in decisions(results):
        failed = [each.load for each in decision.loads if each.failed]
        open_ = [each.load for each in decision.loads if each.by_cost]
        but = f" ({_listed(failed)} not known: failed)" if failed else ""
        but += f" (at {_listed(open_)} {CANNOT_TELL})" if open_ else ""
        if left := open_text([each for each in decision.open if not each.by_cost]):
            but = f" (open: {left}){but}"
        if decision.sure is None:
            unknown = all(each.verdict == "not known" and not each.failed for each in decision.loads)
            verdict = "not known" if unknown else "at none for sure" if open_ or left else "never"
            parts.append(f"{decision.name} {verdict}{but}")
            continue
        but = (f" (but not {_listed(decision.missed_below)})" if decision.missed_below else "") + but
        parts.append(f"{decision.name} {decision.sure:g}{but}")
    what = {"mean_rate": "rate", "users": "number of users"}.get(load_name(results), "load")
    surely = "surely meets" if num_seeds(results) > 1 else "meets"
    return listed(f"highest {what} tested that {surely} {objective}:", parts)


def _verdict(decision: Decision) -> str:
    """Whether a policy meets the objective at the only load."""
    (only,) = decision.loads
    if only.failed or only.by_cost:
        return "failed" if only.failed else CANNOT_TELL
    return {"met": "yes", "missed": "no", "open": f"open ({open_text([only])})"}.get(only.verdict, "not known")


def _listed(loads: Sequence[float]) -> str:
    return ", ".join(f"{load:g}" for load in loads)


def least_bad(results: Results, rows: list[tuple[PolicyCurve, int]]) -> list[str]:
    """A line where the queue grows in every one of several rows of the table: of which the largest share of requests
    met the SLO, and of those with the same share the ones that completed most; else none."""
    if len(rows) < 2 or not all(sweep.unstable[i] and not sweep.failed[i] for sweep, i in rows):
        return []
    scores = [(float(sweep.values("in_slo")[i]), float(sweep.values("throughput_rps")[i])) for sweep, i in rows]
    share, rate = max(scores)
    best = [sweep.name for (sweep, _), score in zip(rows, scores, strict=True) if score == (share, rate)]
    alike = "all alike" if len(best) == len(rows) else " and ".join(best)
    shown = f"{percent_text(share)} in SLO, {rate_text(rate)} requests/s done"
    return [f"the queue grows in every row of the table; least bad: {alike}, {shown}"]


def warnings(results: Results, load: float | None) -> list[str]:
    """Lines, each starting with `! `: points that failed and queues that grow at any load; requests not completed at
    `load`, or with None at the load shown for each policy.
    """
    failed = [Failed(**entry) for entry in results.manifest.get("failed", [])]
    lines = (
        [f"! {which} {reason}" for which, reason in grouped(failed)]
        + few_warning(results)
        + warmup_warning(results)
        + _busy_share_warning(results)
        + cost_lines(results)
    )
    name = load_name(results)
    rows = {sweep.policy: i for sweep, i in _rows(results, load)}
    for sweep in sweeps(results):
        grows = sweep.loads[sweep.grows]  # what the cost's error leaves open has a line of its own
        if len(grows) and not is_auto(results):  # else the queue's growth has a column of its own
            for_ever = len(grows) == (sweep.loads >= grows[0]).sum()
            where = (
                f"from {load_text(name, grows[0])} on" if for_ever else f"at load {', '.join(f'{x:g}' for x in grows)}"
            )
            where = where if name else "without end"
            lines.append(f"! {sweep.name}: the queue grows {where}; no percentiles of TTFT or E2E there")
        if sweep.policy not in rows:
            continue
        i = rows[sweep.policy]
        here = float(sweep.loads[i])
        if sweep.values("too_short")[i] > 0:
            lines.append(
                f"! {sweep.name}: a request runs for over a quarter of the arrivals' time {at_load(name, here)}:"
                " too short to tell whether the queue grows"
            )
        uncompleted = float(sweep.values("uncompleted_share")[i])
        if uncompleted > 0:
            share = percent_text(uncompleted)
            why = _why_uncompleted(results.manifest, sweep.labels[i], here)
            lines.append(f"! {sweep.name}: {share} of requests not completed {at_load(name, here)}: {why}")
        runs = results.manifest["outcomes"].get(sweep.labels[i], ())  # no outcomes where every point failed
        cut = sum(run.get(CAP_CUT, 0) for run in runs if run["load"] == here)
        if cut:
            first = results.manifest["details"].get(sweep.labels[i], {}).get(CAP_CUT, "")
            lines.append(
                f"! {sweep.name}: {counted(cut, 'request')} over all seeds ended early {at_load(name, here)}: the"
                f" engine cuts output caps to its KV memory and context ({first})"
            )
    return lines


def _busy_share_warning(results: Results) -> list[str]:
    """That an autoscaler goes by the share of time in steps, if it does."""
    scaler = (results.scenario.get("replicas") or {}).get("autoscaler") or {}
    if (scaler.get("metrics") or {}).get("busy_share") is None:
        return []
    return [
        "! autoscaler: busy_share is full as soon as one request runs, since an engine batches: replicas are added at"
        " any load. Scale by waiting or kv_utilisation."
    ]


def _why_uncompleted(manifest: dict[str, Any], label: str, load: float) -> str:
    """How many requests of all seeds were rejected, cancelled or unfinished, by reason, with one case's numbers."""
    counted: Counter[str] = Counter()
    for run in manifest["outcomes"][label]:
        for outcome in ("rejected", "cancelled", "unfinished") if run["load"] == load else ():
            for reason, count in run[f"{outcome}_by_reason"].items():
                about = ", ".join(part for part in (reason, manifest["details"].get(label, {}).get(reason, "")) if part)
                counted[f"{outcome} ({about})" if about else outcome] += count
    return ", ".join(f"{count:,} {what}" for what, count in counted.items()) + " over all seeds"
