"""A run's tasks in lines, one a policy: how many there were, how many were not done, what was pruned."""

from __future__ import annotations

from collections.abc import Sequence

from batchsim.report.reading import PolicyCurve
from batchsim.results.read import Results


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
            facts = f"{tasks:,.0f} tasks, {100 * undone:.3g} % not done"
            lines.append(f"{sweep.labels[i]}:  {facts}" + (f"; {pruned:,.0f} requests pruned" if pruned else ""))
    return lines
