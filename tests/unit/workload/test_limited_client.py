"""A client that limits what it has in flight: who waits there, and what of it shows in results."""

from pathlib import Path

import numpy as np
import pytest

from batchsim.base.errors import ScenarioError
from batchsim.base.units import NS_PER_S
from batchsim.metrics.measure import measure
from batchsim.results.frames import INTENDED, pack_tables, to_frame
from batchsim.results.keep import point_inputs
from batchsim.scenario import load_scenario
from batchsim.scenario.point import Point, simulate_point
from batchsim.scenario.setup import Setup
from batchsim.workload.build import build_workload, intended_ns
from batchsim.workload.processes import ConstantArrivals, PoissonArrivals
from batchsim.workload.workload_config import AllAtOnce, Frontend, WorkloadConfig
from tests.support.engine import DRIVERS
from tests.unit.workload.test_closed_loop import LENGTHS, drive

SCENARIO = """
model: llama-3.1-8b
cost: {kind: constant, step: 10ms}
kv: {tokens: 100000}
workload:
  arrivals: {kind: constant, mean_rate: 20/s}
  lengths: {prompt: {kind: fixed, tokens: 10}, output: {kind: fixed, tokens: 10}}
  output_cap: 16
  duration: 5s
  max_concurrency: 1
policies: {continuous: {max_num_seqs: 8, max_num_batched_tokens: 512}}
slo: ttft<1s @ 99%
"""


def client(most, arrivals=None, **fields):
    fields.setdefault("requests", 6)
    config = WorkloadConfig(arrivals or ConstantArrivals(1.0), 1024, LENGTHS, max_concurrency=most, **fields)
    return build_workload(config, load={}, seed=1, max_model_len=32_768, base=Path())


def sent_s(workload, service_s):
    sent = drive(workload, lambda r: round(service_s(r.id) * NS_PER_S))
    return [(a.request.id, (a.request.arrival_ns if a.sent_ns is None else a.sent_ns) / NS_PER_S) for a in sent]


def test_requests_beyond_the_limit_wait_at_the_client_in_order():
    """One a second, two in flight, request 0 taking 3.5 s: request 2 goes at 2.5 s; later ones at their own times."""
    took = {0: 3.5, 1: 1.5}
    assert sent_s(client(2), lambda i: took.get(i, 0.25)) == [(0, 0), (1, 1), (2, 2.5), (3, 3), (4, 4), (5, 5)]
    assert sent_s(client(6), lambda i: 60) == [(i, i) for i in range(6)]


def test_the_window_reaches_to_the_last_sending_and_intended_times_are_kept():
    """The intended times are those of the same arrivals without a limit, by request id."""
    workload = client(1, PoissonArrivals(1.0), requests=50)
    free = client(50, PoissonArrivals(1.0), requests=50)
    meant = intended_ns(workload)
    sent = dict(sent_s(workload, lambda i: 2))
    assert meant is not None and meant.tolist() == [round(x * NS_PER_S) for _, x in sorted(sent_s(free, lambda i: 2))]
    assert workload.window_ns == (0, round(max(sent.values()) * NS_PER_S)) > (0, meant[-1])
    assert all(sent[i] * NS_PER_S >= meant[i] for i in sent)


def test_all_at_once_with_a_limit_is_a_shared_list():
    """A pile of requests from a client with two in flight: the front end's way back comes before the next sending."""
    frontend = Frontend(request=1000, per_chunk=500)
    sent = drive(client(2, AllAtOnce(), frontend=frontend), lambda r: 10_000)
    assert [a.sent_ns for a in sent] == [0, 0, 11_500, 11_500, 23_000, 23_000]


def setup_of(folder, changes):
    text = SCENARIO
    for old, new in changes.items():
        text = text.replace(old, new)
    (folder / "s.yaml").write_text(text)
    return Setup.of(load_scenario(str(folder / "s.yaml")))


def run_of(folder, most):
    setup = setup_of(folder, {"max_concurrency: 1": f"max_concurrency: {most}"})
    return setup, simulate_point(setup, Point(setup.scenario.specs[0], 1.0, 0))


LOOP = "{kind: closed_loop, users: 3, think_time: 5ms, ramp: 20ms, shared_list: true}"


@pytest.mark.parametrize("loop", [False, True])
def test_every_driver_lets_the_same_requests_wait(tmp_path, loop):
    """Simulated, in steps, live in virtual time, and behind the router of one replica: equal rows of requests."""
    changes = {"{kind: constant, mean_rate: 20/s}": LOOP, "duration: 5s": "requests: 40", "  max_concurrency: 1\n": ""}
    setup = setup_of(tmp_path, changes if loop else {})
    found = []
    for run in DRIVERS.values():
        workload = setup.workload(1.0, 0)
        core = setup.engine(setup.scenario.specs[0], workload)
        run(core, workload)
        found.append(core.recorder.records().requests)
    with (tmp_path / "s.yaml").open("a") as file:
        file.write("replicas: {count: 1, router: round_robin}\n")
    fleet = Setup.of(load_scenario(str(tmp_path / "s.yaml")))
    found.append(simulate_point(fleet, Point(fleet.scenario.specs[0], 1.0, 0)).records.requests)
    assert all(np.array_equal(rows, found[0]) for rows in found)
    assert len(found[0]) == (40 if loop else 100)


@pytest.mark.parametrize(("most", "unstable"), [(1, True), (4, False)])
def test_a_queue_that_grows_at_the_client_is_unstable(tmp_path, most, unstable):
    """20 requests/s of 100 ms each: with one in flight the client falls behind, though TTFT counts from its sending."""
    setup, run = run_of(tmp_path, most)
    measured = measure(point_inputs(setup, run))
    assert measured.unstable is unstable
    assert measured.values["ttft_p99_s"] == pytest.approx(0.015, abs=0.006)
    assert measured.values["finished"] == 100


def test_the_intended_time_is_a_column_of_its_own(tmp_path):
    """requests.parquet has intended_ns, with its meaning, where a client limits; sent_ns is later under load."""
    _, run = run_of(tmp_path, 1)
    frame = to_frame(pack_tables(run.records, intended_ns=intended_ns(run.workload))["requests.parquet"])
    assert np.array_equal(frame[INTENDED], np.arange(100) * 50_000_000)
    assert int((frame["sent_ns"] - frame[INTENDED]).max()) > NS_PER_S
    assert INTENDED not in to_frame(pack_tables(run.records)["requests.parquet"])


def test_a_policy_that_waits_for_more_than_may_be_in_flight_is_refused(tmp_path):
    """Its batch would never fill."""
    changes = {"continuous: {max_num_seqs: 8, max_num_batched_tokens: 512}": "static: {batch_size: 4}"}
    with pytest.raises(ScenarioError, match=r"static waits for 4 requests and workload.max_concurrency lets 1 be in"):
        setup_of(tmp_path, changes)
