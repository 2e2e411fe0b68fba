"""Compiled shapes as text: the programs that steps ran in, padding and compilations; the best lists of buckets."""

from __future__ import annotations

from collections.abc import Sequence

from batchsim.base.units import counted, format_duration
from batchsim.explain.shape_use import ShapeUse, shape_use, shapes_of
from batchsim.explain.step_terms import unexplained_ns
from batchsim.report.layout import aligned, fit
from batchsim.report.numbers import percent_text
from batchsim.report.reading import PolicyCurve, at_load
from batchsim.results.read import Results, scenario_of
from batchsim.scenario.config import PolicySpec, Scenario
from batchsim.study.sweep.shapes_seen import SizesSeen, shapes_of_lists

MOST_SHOWN = 6
"""Programs that the table lists for each policy; the others are one row."""
_COUNTED = {"gaudi": "combinations of programs"} | dict.fromkeys(("cuda_graphs", "sglang_graphs"), "sizes of steps")
"""What is counted, by preset: of graphs not programs, since steps beyond the largest run without one."""


def use_of(results: Results, policy: str, load: float, seed: int = 0) -> ShapeUse | None:
    """The use of compiled shapes by a policy at a load; None where the scenario states none, or no steps were kept."""
    shapes = shapes_of(scenario_of(results, policy))
    if shapes is None or results.scenario.get("replicas") or results.keeps(policy) != "all":
        return None
    records = results.records(policy, load, seed)
    return shape_use(shapes, records, unexplained_ns(results, records, policy)) if records.num_steps else None


def shape_line(use: ShapeUse) -> str:
    """A sentence on what was padding, and on compilations while requests waited, if any."""
    parts = [f"{percent_text(share)} of {name}" for name, share in use.padding.items() if share is not None]
    used = _COUNTED.get(use.preset, "programs")
    line = f"shapes {use.preset}: padding is {', '.join(parts)}; {len(use.programs):,} {used} used"
    if use.compiled:
        waited = format_duration(float(f"{use.wait_ns:.3g}"))
        line += f"; {use.compiled:,} compiled at run time, {waited} in which requests waited {use.held:,} times"
    return line


def shape_lines(results: Results, shown: Sequence[tuple[PolicyCurve, int]]) -> list[str]:
    """For each (curve, index of a load) in `shown` the line of its shapes and a table of its programs, of its first
    seed; [] without shapes."""
    lines: list[str] = []
    if results.scenario.get("replicas") and (shapes := shapes_of(results.scenario)):
        return [f"shapes {shapes['preset']}: padding and programs are shown of one engine alone, not of replicas"]
    for sweep, i in shown:
        if sweep.failed[i] or (use := use_of(results, sweep.policy, float(sweep.loads[i]))) is None:
            continue
        lines.append(f"{sweep.labels[i]}, {shape_line(use)}")
        grid = [["steps of", "program", "steps", "of their time"]]
        for program in use.programs[:MOST_SHOWN]:
            share = percent_text(program.ns / use.total_ns)
            grid.append([program.what, program.sizes, f"{program.steps:,}", share])
        if rest := use.programs[MOST_SHOWN:]:
            share = percent_text(sum(each.ns for each in rest) / use.total_ns)
            grid.append(["", f"{len(rest):,} more", f"{sum(each.steps for each in rest):,}", share])
        lines += [f"  {line}" for line in aligned(grid, left=(0, 1), close=True)]
    return lines


def best_text(scenario: Scenario, spec: PolicySpec, load: float, lists: Sequence[SizesSeen]) -> str:
    """The best lists of buckets beside the scenario's own and powers of two, and as a scenario writes them."""
    where = f" {at_load(scenario.load_name, load)}" if scenario.load_name else ""
    seeds = counted(scenario.file.seeds, "seed")
    steps = ", ".join(f"{counted(sum(each.seen.values()), 'size')} of {each.name}" for each in lists)
    lines = [fit(f"{scenario.name} · {spec.name}{where}, {seeds}: {steps}")]
    grid = [["", "buckets", "waste", ""]]
    for each in lists:
        rows = {"best": each.best, "the scenario's": each.own, "powers of two": each.powers}
        for name, choice in rows.items():
            if choice is not None:
                buckets = ", ".join(map(str, choice.buckets))
                grid.append([f"{each.name}, {name}", f"{len(choice.buckets)}", percent_text(choice.waste), buckets])
    written = ", ".join(
        f"{key}: {str(value).lower() if isinstance(value, bool) else value}"
        for key, value in shapes_of_lists(lists).items()
    )
    return "\n".join([*lines, *aligned(grid, left=(0, -1), close=True), *fit(f"shapes: {{{written}}}").split("\n")])
