"""What is left of the steps and states of engines that are not kept, measured with all that is known of each engine."""

from __future__ import annotations

from batchsim.base.errors import ScenarioError
from batchsim.drive.fleet.fleet_records import EngineLife
from batchsim.metrics.digest import Digest, digested
from batchsim.metrics.point_inputs import PointInputs, between, span_of
from batchsim.metrics.step_totals import StepFacts
from batchsim.results.fleet_inputs import cost_terms, step_watts
from batchsim.scenario.point import Run
from batchsim.scenario.setup import Setup


def digest_of(setup: Setup, run: Run, inputs: PointInputs) -> Digest:
    """The digest of the engines of `run`, of which `inputs` has everything but the digest.

    ScenarioError for an objective that needs single gaps between the tokens of a class.
    """
    fleet = inputs.fleet
    assert fleet is not None, "only several engines leave lives apart"
    slos = [slo for slo in (inputs.slo, *inputs.class_slos.values()) if slo is not None]
    if inputs.class_slos and any(bound.metric == "itl" for slo in slos for bound in slo.bounds):
        where = setup.scenario.places.get("keep", setup.scenario.source)
        raise ScenarioError(
            f"{where}: keep {run.keep}: the slo of a class bounds itl, whose gaps are not kept by class. Write keep:"
            " all, or bound tpot."
        )

    def facts_of(life: EngineLife) -> StepFacts:
        one = setup.group_of(life.replica).setup
        config = run.point.spec.config
        peaks = fleet.peak_flops, fleet.memory_bandwidth
        terms = cost_terms(one, life.records, config)
        flops, bandwidth = (None if peak is None else float(peak[life.replica]) for peak in peaks)
        return StepFacts(
            num_blocks=int(fleet.num_blocks[life.replica]),
            block_size=inputs.block_size,
            max_num_seqs=inputs.max_num_seqs,
            terms=terms,
            watts=step_watts(one, life.records, terms),
            idle_watts=None if fleet.idle_watts is None else float(fleet.idle_watts[life.replica]),
            peak_flops=flops,
            memory_bandwidth=bandwidth,
        )

    span_ns = span_of(inputs, between(inputs.records.requests["sent_ns"], inputs.window_ns))
    streams, per_chunk_ns = inputs.streams, inputs.per_chunk_ns
    return digested(run.lives, facts_of, inputs.window_ns, span_ns, streams=streams, per_chunk_ns=per_chunk_ns)
