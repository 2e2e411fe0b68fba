"""What a server did is kept like a run, and what it received can be run again."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchsim.base.errors import ScenarioError
from batchsim.check.measured.read import read_measured
from batchsim.drive.simulate import simulate
from batchsim.scenario import changed
from batchsim.scenario.setup import Setup
from batchsim.serve.answers import Asked
from batchsim.serve.keep_served import keep_served, rows_so_far, table_so_far
from batchsim.serve.realtime import RealtimeSimulation
from tests.support.serving.served import setup_of, simulation_of

CONTINUOUS = "continuous: {max_num_seqs: 8, max_num_batched_tokens: 512}"


def served(more: str = "") -> RealtimeSimulation:
    """A server that has answered 20 requests and lost one that was given up."""
    simulation = simulation_of(setup_of(CONTINUOUS, more))
    for number in range(20):
        answer = simulation.send(Asked(100, 10, 10), number * 9_000_000, lambda answer: None)
    simulation.cancel(answer, 200_000_000)
    simulation.drain()
    while simulation.answers:
        simulation.run_to(int(simulation.next_ns))
    return simulation


@pytest.mark.parametrize("more", ["", "replicas: {count: 2, router: round_robin}"])
def test_results_hold_every_request_of_a_server(more: str, tmp_path: Path) -> None:
    """The folder reads like that of a run: each request with its end, and the metrics of those that finished."""
    simulation = served(more)
    results = keep_served(simulation, *simulation.close(simulation.now_ns), tmp_path)
    requests = results.requests("continuous", 1.0, 0)
    assert len(requests) == 20
    assert requests["outcome"].tolist() == ["finished"] * 19 + ["cancelled"]
    assert results.summary["ttft_p50_s"].notna().all()


def test_what_was_received_is_a_trace_that_runs_the_same_again(tmp_path: Path) -> None:
    """The table's sendings and lengths, replayed as the scenario's trace, end as they ended in the server."""
    simulation = served()
    records, spans = simulation.close(simulation.now_ns)
    results = keep_served(simulation, records, spans, tmp_path)
    (table,) = tmp_path.glob("*/received/*.csv")
    (run,) = read_measured(table)
    assert run.requests is not None and int(run.requests.ok.sum()) == 19
    workload = results.manifest["scenario"]["workload"]
    assert workload["trace"]["path"] == str(table)
    scenario = changed(simulation.setup.scenario, [f"workload={workload}".replace("'", '"'), "load=null"])
    setup = Setup.of(scenario)
    built = setup.workload(1.0, 0)
    core = setup.engine(scenario.specs[0], built)
    simulate(core, built)
    again = core.recorder.records().requests
    shift_ns = int(records.requests["sent_ns"][0])
    kept = records.requests[:19]
    assert (again["ended_ns"][:19] + shift_ns - kept["ended_ns"]).tolist() == [0] * 19


def test_a_text_that_cannot_be_written_loses_no_row(tmp_path: Path) -> None:
    """A tenant whose name is half a letter, and one called as its escape: all rows are there, and the text is told."""
    simulation = simulation_of(setup_of(CONTINUOUS))
    for number, tenant in enumerate(["a", "\ud800", "\\ud800"]):
        simulation.send(Asked(100, 10, 10, tenant=tenant), number * 9_000_000, lambda answer: None)
    simulation.drain()
    while simulation.answers:
        simulation.run_to(int(simulation.next_ns))
    results = keep_served(simulation, *simulation.close(simulation.now_ns), tmp_path)
    assert results.requests("continuous", 1.0, 0)["tenant"].tolist() == ["a", "\\ud800", "\\ud800"]
    assert results.manifest["served"]["escaped"] == ["\\ud800"]


def test_engines_write_on_while_somebody_has_their_rows() -> None:
    """Rows taken of what has ended hold as many as then, and another request ends meanwhile."""
    simulation = simulation_of(setup_of(CONTINUOUS))
    simulation.send(Asked(100, 10, 10), 0, lambda answer: None)
    simulation.run_to(1_000_000_000)
    rows = rows_so_far(simulation)
    simulation.send(Asked(100, 10, 10), 1_000_000_000, lambda answer: None)
    simulation.run_to(2_000_000_000)
    assert len(rows.requests) == 1 and table_so_far(simulation, rows).count(",ok\n") == 1
    assert len(rows_so_far(simulation).requests) == 2


def test_nothing_received_leaves_no_results(tmp_path: Path) -> None:
    """Without a request there is nothing to keep, and that is said."""
    simulation = simulation_of(setup_of(CONTINUOUS))
    with pytest.raises(ScenarioError, match="nothing was received"):
        keep_served(simulation, *simulation.close(5), tmp_path)
    assert not list(tmp_path.iterdir())
