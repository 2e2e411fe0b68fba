"""Keeps what a server did in the layout of simulated runs, so that every table, picture and `batchsim explain` works.

results/<scenario>-served/received/<hash>.csv   a row a request, by sending: a trace to run again, and a measured run
                                                for `validate --against`, latencies as the engines had them
results/<scenario>-served/...                   as `batchsim.results.read` says, of the scenario with that trace
"""

from __future__ import annotations

import csv
import io
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from batchsim.base.errors import ScenarioError
from batchsim.base.files import write_text, writing
from batchsim.check.validation.replay import simulated_requests
from batchsim.drive.fleet.fleet_plan import ReplicaSpan
from batchsim.kernel.record import Recorder, Records
from batchsim.metrics.measure import measure
from batchsim.metrics.replica_table import replica_table
from batchsim.results.frames import written
from batchsim.results.heading import heading
from batchsim.results.keep import check_cohort, keep_run, pack_point, point_inputs
from batchsim.results.live_results import real_heading, real_inputs, real_source
from batchsim.results.point_files import write_point
from batchsim.results.provenance import identity, short_hash
from batchsim.results.read import POINTS, Results
from batchsim.scenario import Point, changed
from batchsim.scenario.point import Run
from batchsim.scenario.setup import Setup
from batchsim.serve.faults import Faults
from batchsim.serve.live_engine import LiveEngine
from batchsim.serve.realtime import RealtimeSimulation
from batchsim.serve.served_workload import with_served_workload

RECEIVED = "received"
_COLUMNS = {"arrival": "sent_ns", "prompt": "prompt_tokens", "output": "max_tokens"}


def keep_served(
    backend: RealtimeSimulation | LiveEngine,
    records: Records,
    spans: tuple[ReplicaSpan, ...],
    out: Path,
    *,
    started_unix_ns: int = 0,
    speed: float = 1.0,
    faults: Faults | None = None,
    made: dict[str, Any] | None = None,
) -> Results:
    """Writes what was received and what became of it, as `backend.close` returned it; returns these results.

    The manifest's `served` says when time 0 was, in ns since 1970, how fast simulated time went, how many requests met
    which of the `faults`, one that got an error on demand being in no table, as no engine saw it, and which texts could
    not be written and stand in the tables as escapes. `made` says on what a model ran, which is the manifest's `live`;
    None: the engines were simulated. ScenarioError where `out` cannot be written, or nothing was received.
    """
    if not backend.num_sent:
        raise ScenarioError("nothing was received, so there is nothing to keep. Send a request.")
    scenario, spec = backend.setup.scenario, backend.spec
    home = out / f"{scenario.name}-served"
    name = short_hash([identity(backend.setup), spec.name, backend.seed, backend.num_sent, time.time_ns()])
    with writing(out, "Give another folder with --out."):
        (home / RECEIVED).mkdir(parents=True, exist_ok=True)
        table = home / RECEIVED / f"{name}.csv"
        run = _run(backend, records, spans)
        write_text(table, _table(run))
        check_cohort(run)
        kept = _kept(backend, table)
        inputs = point_inputs(kept, run) if made is None else real_inputs(kept, run)
        packed = pack_point(run, measure(inputs), name, replica_table(inputs))
        write_point(packed, home / POINTS / name)
        served = {
            "received": f"{RECEIVED}/{name}.csv",
            "end_ns": backend.now_ns,
            "speed": speed,
            "started_unix_ns": started_unix_ns,
            "escaped": [written(text) for text in records.texts if written(text) != text],
            "faults": {"errors": faults.num_errors, "stalls": faults.num_stalls} if faults else {},
        }
        first = heading(kept) if made is None else real_heading(kept, made)
        facts: dict[str, Any] = {"heading": f"{first} · served", "served": served}
        if made is not None:
            facts |= {"sources": [real_source(made)], "live": made}
        return keep_run(kept, home, [packed.result], reused=0, facts=facts)


def keep_table(
    backend: RealtimeSimulation | LiveEngine, records: Records, spans: tuple[ReplicaSpan, ...], out: Path
) -> Path:
    """Writes the table of `keep_served` alone, and returns where: of a pooling model, since no trace says that its
    requests ask for no tokens, and with adapters, which the trace of what was received does not name.
    ScenarioError where `out` cannot be written."""
    with writing(out, "Give another folder with --out."):
        home = out / f"{backend.setup.scenario.name}-served" / RECEIVED
        home.mkdir(parents=True, exist_ok=True)
        table = home / f"{short_hash([backend.spec.name, backend.num_sent, time.time_ns()])}.csv"
        write_text(table, _table(_run(backend, records, spans)))
    return table


def rows_so_far(backend: RealtimeSimulation | LiveEngine) -> Records:
    """The rows of the requests that have ended so far, copied: where the engines have theirs they write more. Called
    between steps."""
    return replace(Recorder().records(), requests=backend.records().requests.copy())


def table_so_far(backend: RealtimeSimulation | LiveEngine, records: Records) -> str:
    """The requests of `rows_so_far` as CSV, as in the table of `keep_served`; "" if there is none."""
    return _table(_run(backend, records, ())) if len(records.requests) else ""


def _run(backend: RealtimeSimulation | LiveEngine, records: Records, spans: tuple[ReplicaSpan, ...]) -> Run:
    workload = with_served_workload(backend.setup, records).workload(1.0, 0)
    point = Point(backend.spec, 1.0, 0)
    return Run(point, workload, records, backend.streams, backend.now_ns, (0, _last_ns(records)), spans)


def _last_ns(records: Records) -> int:
    return int(records.requests["sent_ns"].max(initial=0))


def _kept(backend: RealtimeSimulation | LiveEngine, table: Path) -> Setup:
    """The setup of the scenario whose workload is the trace `table`, under the one policy that ran."""
    spec = backend.spec
    trace = {"path": str(table), "columns": _COLUMNS, "time_unit": "ns"}
    workload = {"arrivals": {"kind": "trace"}, "trace": trace, "output_cap": "exact"}
    policy = backend.setup.scenario.plain["policies"][spec.label]
    asked = {"load": None, "seeds": 1, "workload": workload, "policies": {spec.label: policy}}
    return Setup.of(changed(backend.setup.scenario, [f"{key}={json.dumps(value)}" for key, value in asked.items()]))


def _table(run: Run) -> str:
    """The requests as CSV, by sending."""
    requests = simulated_requests(run)
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["sent_ns", "ttft_ns", "e2e_ns", "prompt_tokens", "output_tokens", "max_tokens", "status"])
    assert requests.sent_ns is not None
    caps = np.sort(run.records.requests, order="request_id")["max_output_tokens"]
    for row in zip(
        *(requests.sent_ns, requests.ttft_ns, requests.e2e_ns, requests.prompt_tokens, requests.output_tokens),
        *(caps, requests.ok),
        strict=True,
    ):
        *numbers, ok = (each.item() for each in row)
        rows.writerow([*("" if number < 0 else number for number in numbers), "ok" if ok else "error"])
    return text.getvalue()
