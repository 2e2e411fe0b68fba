"""Whether the gaps that an objective bounds are defined under every policy of a scenario."""

from __future__ import annotations

from batchsim.base.errors import ScenarioError
from batchsim.metrics.slo import parse_slo
from batchsim.scenario.setup import Setup


def check_gaps(setup: Setup) -> None:
    """ScenarioError, in one line with its place, where an objective bounds itl, and under some policy the records do
    not say which step made which token: with draft tokens, and in pipelines."""
    scenario = setup.scenario
    classes = scenario.file.workload.classes.values()
    texts = [scenario.file.slo, *(traffic.slo for traffic in classes if traffic.slo is not None)]
    bounding = [text for text in texts if any(bound.metric == "itl" for bound in parse_slo(text).bounds)]
    if not bounding:
        return
    for each in [group.setup for group in setup.groups] or [setup]:
        for spec in each.scenario.specs:
            if each.cost.stages > 1:
                why = "has a group of decodes in each stage of its pipeline"
            elif spec.config.traits.speculation is not None:
                why = "makes several tokens of a sequence in a step"
            else:
                continue
            with scenario.at("slo"):
                raise ScenarioError(
                    f"slo '{bounding[0]}': {spec.label} {why}, and which step made which token is not recorded: itl is"
                    " not defined there. Bound tpot, or leave that policy out."
                )
