"""The highest rate at which a policy can serve a scenario: what it completes when all its requests wait already."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from batchsim.base.errors import ScenarioError
from batchsim.base.units import NS_PER_S
from batchsim.kernel.record import FINISHED, Records
from batchsim.scenario.patient import patient
from batchsim.scenario.setup import Setup
from batchsim.workload.workload_config import AllAtOnce

REQUESTS, BATCHES = 1000, 10
"""The requests of an overloaded run for each engine: REQUESTS, or BATCHES times the most sequences that run at once in
any policy, whichever is more."""

_FROM, _TO = 0.2, 0.8  # of the finished requests: what fills and what drains the batch is left out


def overloaded(setup: Setup, engines: int = 1) -> Setup:
    """`setup` with requests of the same lengths and classes, all there at the start, without deadlines or patience.

    Their number grows with `engines`, between which they will be divided; where prefill and decode are apart, with
    those of the larger side, as each request is on both. ScenarioError for requests of tasks.
    """
    if setup.traffic.tasks is not None:
        raise ScenarioError(f"{setup.scenario.name}: tasks cannot be piled up: a stage needs the answers before it.")
    replicas = setup.scenario.file.replicas
    if replicas is not None and replicas.transfer is not None:
        engines = max(group.count for group in setup.groups)
    slots = [spec.config.traits.max_num_seqs or 0 for spec in setup.scenario.specs]
    busy = patient(setup.traffic, AllAtOnce(), engines * max(REQUESTS, BATCHES * max(slots, default=0)))
    groups = tuple(replace(group, setup=replace(group.setup, traffic=busy, max_waiting=None)) for group in setup.groups)
    return replace(setup, traffic=busy, load_name="", loads=(1.0,), max_waiting=None, groups=groups)


def saturation_rps(records: Records) -> float:
    """Requests completed per second in the middle of an overloaded run. ScenarioError says why too few completed."""
    done = np.sort(records.requests["delivered_ns"][records.requests["outcome"] == FINISHED])
    first, last = int(_FROM * len(done)), int(_TO * len(done))
    if len(done) < 10 or done[last] <= done[first]:
        why = "; ".join(f"{reason} ({text})" for reason, text in records.details.items())
        raise ScenarioError(
            f"only {len(done)} requests completed under overload: no saturation can be told from them."
            f"{f' Rejected: {why}. Correct what that names.' if why else ''}"
        )
    # Answers may come in whole batches: both ends are counted to the last that came at the same time.
    count = np.diff(np.searchsorted(done, [done[first], done[last]], side="right"))[0]
    return int(count) * NS_PER_S / float(done[last] - done[first])
