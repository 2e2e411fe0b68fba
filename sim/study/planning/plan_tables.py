"""A plan as a whole: from a scenario to tables, for Python as for the command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from batchsim.scenario import Scenario
from batchsim.study.planning.assumptions import assumptions
from batchsim.study.planning.make import make_plan
from batchsim.study.planning.manifest import manifest, manifests_of_pools
from batchsim.study.planning.tables import Tables, tables_of
from batchsim.study.sweep.points import Progress, Sweep
from batchsim.study.sweep.size import Limits


def plan_tables(
    scenario: Scenario,
    *,
    out: Path | str = "results",
    jobs: int = 1,
    ray: str | None = None,
    progress: Progress | None = None,
    tell: Callable[[str], None] | None = None,
    limits: Limits | None = None,
) -> Tables:
    """The tables of the scenario's plan by name, rows as dicts; `configurations` says which group holds, and why not.

    Simulations lie below `out` and are reused. ScenarioError where no plan can be made of the scenario. A traffic that
    no group holds is no error: there is no table `recommendation` then. `tell` is called with how much is to be
    simulated, where that is long; what is beyond `limits` is an error before.

    >>> batchsim.plan_tables(planned)["recommendation"][0]["replicas"]
    2
    """
    sweep = Sweep(Path(out) / scenario.name, jobs=jobs, ray=ray, progress=progress, limits=limits)
    planned = make_plan(scenario, sweep, tell)
    tables = tables_of(planned) | {"assumptions": assumptions(planned)}
    texts = {"manifest": manifest(planned)} | manifests_of_pools(planned)
    return tables | {name: [{"line": line} for line in text.splitlines()] for name, text in texts.items() if text}
