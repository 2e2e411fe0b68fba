"""What each replica did: a row of metrics a replica, of the requests that ended with it and the steps that it ran."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from batchsim.base.units import NS_PER_S
from batchsim.drive.fleet.fleet_plan import DRAINING, HELD, STARTING, UP
from batchsim.kernel.record import FINISHED, HANDED_OVER, OUTCOME_NAMES, PRUNED, REPLICA_FAILED, Replicas
from batchsim.metrics.kpis import engine_kpis, totals_of
from batchsim.metrics.measure import latencies_ns, percentile
from batchsim.metrics.point_inputs import PointInputs, between, span_of

COLUMNS = ("replica", "group", "requests", "finished", "lost", "held_s", "starting_s", "up_s", "num_blocks")
COLUMNS += ("engine_busy_share", "kv_utilisation_mean", "kv_utilisation_peak", "prefix_hit_rate", "num_steps")
COLUMNS += ("ttft_p99_s", "tpot_p99_s", "e2e_p99_s")
RANK_COLUMNS = ("idle_rank_share", "pad_share")
"""Further columns of ranks that step together."""


def replica_table(inputs: PointInputs) -> list[dict[str, Any]]:
    """A row of COLUMNS for each replica; [] for one engine without a router.

    `requests` are those of the cohort that ended there or were handed over from there, `lost` the lives that the whole
    run lost there and that began again elsewhere; `held_s`, of it `starting_s`, as a replica loads its weights and
    takes no requests yet, and `up_s` are within the span that rates are taken over. `engine_busy_share` is of `up_s`.
    The rest is as in `batchsim.metrics`.
    """
    fleet = inputs.fleet
    if fleet is None:
        return []
    span_ns = span_of(inputs, between(inputs.records.requests["sent_ns"], inputs.window_ns))
    held_ns, up_ns = fleet.replica_ns(span_ns, HELD), fleet.replica_ns(span_ns, (UP, DRAINING))
    starting_ns = fleet.replica_ns(span_ns, (STARTING,))
    everyone = inputs.records.requests
    counted = between(everyone["sent_ns"], inputs.window_ns) & (everyone["outcome"] != PRUNED)
    rows, digest, ids = [], inputs.digest, everyone["request_id"][counted]
    for replica, group in enumerate(fleet.group):
        replica_inputs = _of_replica(inputs, replica)
        requests = replica_inputs.records.requests
        cohort = between(requests["sent_ns"], inputs.window_ns) & (requests["outcome"] != PRUNED)
        done = cohort & (requests["outcome"] == FINISHED)
        gone_on = replica_inputs.records.stays(OUTCOME_NAMES[HANDED_OVER])
        steps = totals_of(replica_inputs, span_ns) if digest is None else digest.of_replica(replica)
        kpis = engine_kpis(replica_inputs, steps, cohort, span_ns)
        row: dict[str, Any] = {
            "replica": replica,
            "group": group,
            "requests": int(cohort.sum()) + int(np.isin(gone_on["request_id"], ids).sum()),
            "finished": int(done.sum()),
            "lost": len(replica_inputs.records.stays(REPLICA_FAILED)),
            "held_s": int(held_ns[replica]) / NS_PER_S,
            "starting_s": int(starting_ns[replica]) / NS_PER_S,
            "up_s": int(up_ns[replica]) / NS_PER_S,
            "num_blocks": int(fleet.num_blocks[replica]),
        }
        row |= {name: kpis[name] for name in COLUMNS if name in kpis}
        if fleet.are_ranks:
            row |= {name: kpis[name] for name in RANK_COLUMNS}
        latencies = latencies_ns(replica_inputs)
        for name in ("ttft", "tpot", "e2e"):
            observed = latencies[name][done]
            observed = observed[~np.isnan(observed)]
            row[f"{name}_p99_s"] = percentile(observed, 99)[0] / NS_PER_S if len(observed) else None
        rows.append(row)
    return rows


def _of_replica(inputs: PointInputs, replica: int) -> PointInputs:
    """`inputs` with the requests, steps and states of one replica alone."""
    records, fleet = inputs.records, inputs.fleet
    assert records.replicas is not None and fleet is not None, "asked of several replicas"
    tables = records.replicas
    requests, steps, states = (of == replica for of in (tables.requests, tables.steps, tables.states))
    stays = tables.stays[tables.stays["replica"] == replica]
    of = Replicas(tables.requests[requests], tables.steps[steps], tables.states[states], stays)
    terms = inputs.cost_terms
    return replace(
        inputs,
        records=replace(
            records,
            requests=records.requests[requests],
            step_rows=records.steps[steps],
            lanes=records.lanes_of(steps),
            states=records.states[states],
            replicas=of,
        ),
        cost_terms=None if terms is None else {name: values[steps] for name, values in terms.items()},
        step_watts=None if inputs.step_watts is None else inputs.step_watts[steps],
        fleet=replace(fleet, spans=tuple(span for span in fleet.spans if span.replica == replica)),
        num_offered=None,
        turn=None if inputs.turn is None else inputs.turn[requests],
    )
