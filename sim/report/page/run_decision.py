"""The decision at the head of a run's page and of `view`: who sustains the most within the SLO, and why not more."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from batchsim.base.units import NS_PER_S, format_duration
from batchsim.report.cost_words import HOW
from batchsim.report.decisions import BY_COST, at_loads, decided, decision_text, names_text
from batchsim.report.reading import PolicyCurve, at_load, load_name, load_text, num_seeds, seeds_text, sweeps
from batchsim.report.sheet import Cell, Sentence
from batchsim.report.slo_shares import latency_panels, slo_bounds, slo_shares
from batchsim.report.text.run_table import metric_cell
from batchsim.results.decision import Decision
from batchsim.results.read import Results, curve_marks


def decision(results: Results) -> tuple[list[Sentence], list[Sentence]]:
    """Two lists of sentences: the policy that sustains the most within the SLO, what requests get there, and what keeps
    it from more; and how sure that is, of each policy."""
    sure: Sentence = [f"That is of {seeds_text(results)}; ± is half a 95 % interval over seeds. The error of the step"]
    sure += [" costs is in no interval: the assumptions say what is known of it."]
    every = [(sweep, decided(results, sweep)) for sweep in sweeps(results)]
    most = {sweep.policy: of_policy.sure for sweep, of_policy in every if of_policy.sure is not None}
    held = sorted((sweep for sweep, _ in every if sweep.policy in most), key=lambda sweep: -most[sweep.policy])
    untold = _untold(load_name(results), [of_policy for _, of_policy in every])
    each = "; ".join(f"{of_policy.name}: {decision_text(of_policy, load_name(results))}" for _, of_policy in every)
    judged: list[Sentence] = [[f"At the lower end of the interval, {each}."]] if num_seeds(results) > 1 else []
    if not held:
        surely = " whatever the error of the step costs" if untold else ""
        none = f"No policy {'surely ' * bool(judged)}meets {results.manifest['objective']} at any load tested{surely}."
        is_open = any(of_policy.open for _, of_policy in every)
        return [[none]], [*(judged if is_open else []), *untold, sure]
    at = held[0].index(most[held[0].policy])
    gets, more = _what_requests_get(results, held[0], at), _why_not_more(results, held[0], at + 1)
    return [_who_sustains(results, held, most), gets, *more], [*judged, *untold, sure]


def _untold(name: str, every: Sequence[Decision]) -> list[Sentence]:
    """Which loads the error of the step costs decides, a sentence; [] where it decides none."""
    loads = {one.name: [each.load for each in one.loads if each.by_cost] for one in every}
    each = [f"{policy} {at_loads(name, *of_policy)}" for policy, of_policy in loads.items() if of_policy]
    return [[f"Whether the SLO is met by {'; by '.join(each)} {HOW}."]] if each else []


def _who_sustains(results: Results, held: list[PolicyCurve], most: Mapping[str, float]) -> Sentence:
    """The first sentence; `held` are the policies that meet the SLO somewhere, ordered by the load that they sustain,
    `most` the highest load of each."""
    name, objective = load_name(results), results.manifest["objective"]
    level = [sweep for sweep in held if not name or most[sweep.policy] == most[held[0].policy]]
    who = names_text([sweep.name for sweep in level])
    if not name:
        verb = "meets" if len(level) == 1 else "meet"
        return [f"{who} {verb} {objective}; {len(sweeps(results))} policies were tried."]
    verb = "sustains" if len(level) == 1 else "sustain"
    said: Sentence = [f"{who} {verb} the most within {objective}: up to ", _highest(results, held[0], most)]
    said += [" of the loads tested"]
    crossing = curve_marks(results)[held[0].policy].crossing
    if crossing.load is not None and len(level) == 1 and not held[0].untold.any():  # of several each has its own
        said += [f", and on average up to some {load_text(name, float(f'{crossing.load:.3g}'))}"]
    if others := held[len(level) :]:
        said += [f"; next is {others[0].name}, up to ", _highest(results, others[0], most)]
    return [*said, "."]


def _highest(results: Results, sweep: PolicyCurve, most: Mapping[str, float]) -> Cell:
    load = most[sweep.policy]
    return replace(metric_cell(results, sweep, sweep.index(load), "load"), text=load_text(load_name(results), load))


def _what_requests_get(results: Results, sweep: PolicyCurve, i: int) -> Sentence:
    """The second sentence: latencies and the share within the SLO of a policy at its `i`-th load."""
    where = at_load(load_name(results), float(sweep.loads[i]))
    said: Sentence = [f"{where[0].upper()}{where[1:]}, {sweep.name}"]
    shown = [panel for panel in latency_panels(results) if panel.latency in ("ttft", "tpot")]
    for ttft, tpot in zip(shown[::2], shown[1::2], strict=True):
        verb = f"gives {ttft.request_class}" if ttft.request_class else "has"
        said.append(f" {verb}" if len(said) == 1 else f"; {ttft.request_class}")
        said += [" a TTFT p99 of ", metric_cell(results, sweep, i, ttft.metric("p99"))]
        said += [" and a TPOT p99 of ", metric_cell(results, sweep, i, tpot.metric("p99"))]
    return [*said, *_within(results, sweep, i, "; "), "."]


def _within(results: Results, sweep: PolicyCurve, i: int, before: str) -> Sentence:
    """The shares within the SLO at the `i`-th load, each after `before`."""
    said: Sentence = []
    for each in slo_shares(results):
        of = f" of {each.request_class}" if each.request_class else ""
        said += [before if not said else ", ", metric_cell(results, sweep, i, each.metric), of]
    return [*said, " are within the SLO"] if said else []


def _why_not_more(results: Results, sweep: PolicyCurve, i: int) -> list[Sentence]:
    """What a policy misses at its `i`-th load, the first above that which it surely sustains, and where the verdict is
    open there, also at the next load that it misses; [] where there is no such load, or nothing is known of it."""
    if i >= len(sweep.loads) or sweep.failed[i]:
        return []
    judged, name = decided(results, sweep).loads, load_name(results)
    where = f"Why not more: {at_load(name, float(sweep.loads[i]))}, the next load tested, "
    said = _missed(results, sweep, i, grows=bool(sweep.grows[i]) and not judged[i].by_cost)
    if not said or judged[i].verdict != "open":
        return [[where, *said, "."]] if said else []
    why = f"; {BY_COST} whether that is enough" if judged[i].by_cost else "; other seeds may decide otherwise"
    sentences: list[Sentence] = [[where, *said, why, "."]]
    for k in range(i + 1, len(judged)):
        if judged[k].verdict == "missed" and (missed := _missed(results, sweep, k, grows=judged[k].grows)):
            at = at_load(name, float(sweep.loads[k]))
            return [*sentences, [f"{at[0].upper()}{at[1:]} the SLO is surely missed: ", *missed, "."]]
    return sentences


def _missed(results: Results, sweep: PolicyCurve, i: int, *, grows: bool) -> Sentence:
    """A growing queue, or the share within the SLO and the P99s above their bounds, at the `i`-th load."""
    if grows:
        return ["the queue grows as long as requests come"]
    said = _within(results, sweep, i, "")
    for panel in latency_panels(results):
        metric = panel.metric("p99")
        most = sweep.ends(metric)[1][i] if sweep.within_error[i] else sweep.values(metric)[i]
        bound = min(slo_bounds(results, panel, "p99"), default=math.inf)
        if most > bound:
            asked = f" (asked: {format_duration(bound * NS_PER_S)})"
            said += ["; " if said else "", f"P99 {panel.title} is ", metric_cell(results, sweep, i, metric), asked]
    return said
