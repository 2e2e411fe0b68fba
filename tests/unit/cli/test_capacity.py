"""`batchsim capacity`: the table, the JSON, the files, and what is refused."""

from __future__ import annotations

import csv
import json

import pytest

from tests.support.tiny_scenario import batchsim, changed

SCENARIO = """\
model: llama-3.1-8b
cost: {kind: linear, base: 5ms, per_token: 20us}
kv: {tokens: 16000}
workload:
  arrivals: {kind: on_off, mean_rate: 20/s, on: 1s, off: 1s}
  lengths:
    prompt: {kind: fixed, tokens: 100}
    output: {kind: uniform, min: 2, max: 12}
  output_cap: 16
  duration: 10s
policies:
  static: {batch_size: 4, max_wait: 100ms, respond: row_end}
  continuous: {max_num_seqs: 8, max_num_batched_tokens: 512}
  twin: {kind: continuous, max_num_seqs: 8, max_num_batched_tokens: 512}
load: {mean_rate: [10/s, 20/s]}
slo: ttft<200ms & tpot<50ms @ 95%
seeds: 2
"""


def _call(folder, *options, text=SCENARIO):
    (folder / "tiny.yaml").write_text(text)
    return batchsim("capacity", folder / "tiny.yaml", "--out", folder / "out", "--jobs", 1, *options)


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """One full search: its folder, text and JSON, the second call reusing all points of the first."""
    folder = tmp_path_factory.mktemp("capacity")
    text = _call(folder, "--precision", "8%", "--max-seeds", 6)
    points = set((folder / "out/tiny/points").iterdir())
    found = _call(folder, "--precision", "8%", "--max-seeds", 6, "--json")
    assert (text.exit_code, found.exit_code) == (0, 0), (text.stderr, found.stderr)
    assert set((folder / "out/tiny/points").iterdir()) == points
    return folder, text.stdout, json.loads(found.stdout)


@pytest.mark.slow
def test_the_table_names_capacity_reasons_and_what_would_help(study):
    """A line a policy, paired differences, saturation, Poisson, changes and the cost's error; none over 100 columns."""
    text = study[1]
    assert max(map(len, text.splitlines())) <= 100
    for said in (
        "policy",
        "capacity (95 %), req/s",
        "waiting for",
        "paired: static − continuous",
        "paired: continuous − twin  0.00 ± 0.00 req/s (no difference)",
        "saturation of continuous",
        "as Poisson arrivals",
        "what would help continuous:",
        "cost-model error is not in the interval, and is unknown: step times are stated",
        "a probe: ",
    ):
        assert said in text, said


@pytest.mark.slow
def test_the_json_has_a_row_a_policy(study):
    """The intervals hold the capacities, a burst costs something, and a helping change is worth what it says."""
    found = study[2]
    rows = {row["policy"]: row for row in found["capacities"]}
    assert list(rows) == ["static", "continuous", "twin"]
    for row in rows.values():
        assert row["low"] <= row["capacity_rps"] <= row["high"] and row["probes"] >= 5 and row["seeds"] == 6
    assert rows["static"]["capacity_rps"] < rows["continuous"]["capacity_rps"] == rows["twin"]["capacity_rps"]
    assert found["poisson"]["capacity"] > 1.2 * rows["continuous"]["capacity_rps"]
    helps = {change["change"]: change["capacity"] for change in found["changes"]}
    assert helps["max_num_seqs 16"] > rows["continuous"]["capacity_rps"] and helps["max_num_seqs 4"] is None
    unknown = {"low": None, "high": None, "source": "step times are stated"}
    assert found["cost_error"] == unknown and found["compared_with_seeds"] == 4


@pytest.mark.slow
def test_every_probe_is_kept(study):
    """probes.csv lists loads, margins and the folders of all simulations; capacity.csv the rows."""
    folder, _, found = study
    home = folder / "out/tiny"
    (kept,) = (home / "capacity").iterdir()
    with (kept / "probes.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert sum(row["policy"] == "static" for row in rows) == found["capacities"][0]["probes"]
    assert all((home / "points" / name).is_dir() for row in rows for name in row["points"].split())
    assert {row["verdict"] for row in rows} >= {"passes", "fails"}
    assert (kept / "capacity.png").read_bytes().startswith(b"\x89PNG") and (kept / "capacity.csv").is_file()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--policy", "dynamic"], "--policy dynamic: is none of"),
        (
            ["--slo", "ttft<200 @ 95%"],
            "slo 'ttft<200 @ 95%', column 6: '200' has no known",
        ),
        (["--slo", "soon"], "ttft<500ms & tpot<50ms @ 99%"),
        (["--slo", "ttft<1s @ 100%"], "slo 'ttft<1s @ 100%': no number of requests shows that none ever misses"),
        (["--precision", "3"], "--precision: '3' is not a share"),
        (["--set", "workload.arrivals={kind: all_at_once}", "--set", "load=null"], "all requests arrive at once"),
    ],
)
def test_what_is_refused(tmp_path, options, says):
    """One line on stderr, nothing written."""
    text = SCENARIO
    if "load=null" in options:
        text = changed(SCENARIO, "  duration: 10s\n", "  requests: 50\n")
    result = _call(tmp_path, *options, text=text)
    assert result.exit_code == 2 and says in result.stderr and len(result.stderr.splitlines()) == 1, result.stderr
    assert not list(tmp_path.glob("out/*/points/*"))


def test_an_objective_that_no_load_meets_says_what_stands_in_the_way(tmp_path):
    """A prefill alone takes 7 ms: 6 ms are met by no request, and the line names the latency of an empty engine."""
    result = _call(tmp_path, "--slo", "ttft<6ms @ 95%", "--policy", "continuous", "--max-seeds", 4)
    assert result.exit_code == 0, result.stderr
    assert "met at no rate" in result.stdout and "! continuous: no load meets the SLO" in result.stdout
    assert "ttft: its own prefill, ttft p50 7 ms" in " ".join(result.stdout.split())


@pytest.mark.slow
def test_a_lower_load_that_fails_is_told(tmp_path):
    """A batch of eight without a limit on the wait fills in time at high rates only."""
    text = changed(SCENARIO, "batch_size: 4, max_wait: 100ms", "batch_size: 8, max_wait: 400ms")
    text = changed(text, "{kind: on_off, mean_rate: 20/s, on: 1s, off: 1s}", "{kind: poisson, mean_rate: 20/s}")
    result = _call(tmp_path, "--policy", "static", "--slo", "ttft<300ms @ 90%", "--only-rates", text=text)
    assert result.exit_code == 0, result.stderr
    assert "! static: misses the SLO at lower loads too" in result.stdout


@pytest.mark.slow
def test_what_is_tried_below_the_capacity_decides_its_lower_end(tmp_path):
    """The search ends in doubt after five loads; the one at 0.9 times the capacity, where the use is told, passes."""
    few = ("--policy", "continuous", "--only-rates", "--max-seeds", 3, "--max-probes", 5, "--json")
    (row,) = json.loads(_call(tmp_path, *few).stdout)["capacities"]
    assert row["probes"] == 6 and row["why_unknown"] == ""
    assert row["low"] is not None and 0.9 * row["capacity_rps"] < row["low"] < row["capacity_rps"] < row["high"]


def test_users_are_counted_whole(tmp_path):
    """In a closed loop the capacity is a number of users."""
    arrivals = "{kind: closed_loop, users: 4, think_time: 200ms}"
    text = changed(SCENARIO, "{kind: on_off, mean_rate: 20/s, on: 1s, off: 1s}", arrivals)
    text = changed(text, "load: {mean_rate: [10/s, 20/s]}\n", "load: {users: [4, 8]}\n")
    text = changed(text, "duration: 10s", "duration: 2s")
    result = _call(tmp_path, "--policy", "continuous", "--only-rates", "--json", "--max-seeds", 3, text=text)
    assert result.exit_code == 0, result.stderr
    (row,) = json.loads(result.stdout)["capacities"]
    assert row["low"] <= row["capacity_users"] <= row["high"] and row["capacity_users"] > 4
    assert all(row[name] == int(row[name]) for name in ("low", "capacity_users", "high"))
    assert "capacity_rps" not in row


def _traced(folder):
    """The scenario with a replayed trace, compressed, in place of drawn arrivals."""
    rows = [f"{50 * i},100,{2 + i % 11}" for i in range(400)]
    (folder / "my.csv").write_text("\n".join(["ts,in,out", *rows]))
    trace = "{path: my.csv, columns: {arrival: ts, prompt: in, output: out}, time_unit: ms"
    text = changed(SCENARIO, "{kind: on_off, mean_rate: 20/s, on: 1s, off: 1s}", "{kind: trace}")
    start, end = text.index("  lengths:"), text.index("  output_cap")
    text = f"{text[:start]}  trace: {trace}, rate_scale: {{factor: 1, by: compress}}}}\n{text[end:]}"
    return changed(changed(text, "  duration: 10s\n", ""), "load: {mean_rate: [10/s, 20/s]}\n", "")


def test_a_trace_is_searched_by_its_factor(tmp_path):
    """Compressed, without anything random: one seed, no interval, and the rate beside the factor."""
    text = _traced(tmp_path)
    result = _call(tmp_path, "--policy", "continuous", "--only-rates", text=text)
    assert result.exit_code == 0, result.stderr
    assert "trace" in result.stdout and "req/s" in result.stdout
    assert "! continuous: nothing here is random" in result.stdout
    refused = _call(tmp_path, text=text.replace(", rate_scale: {factor: 1, by: compress}", ""))
    assert refused.exit_code == 2 and "rate_scale={factor: 1, by: compress}" in refused.stderr


@pytest.mark.slow
def test_a_thinned_trace_has_seeds(tmp_path):
    """Every seed keeps other rows, though all rows are the same for each: several seeds, and an interval."""
    text = changed(changed(_traced(tmp_path), "by: compress", "by: thin"), "batch_size: 4", "batch_size: 1")
    options = ("--policy", "static", "--slo", "ttft<15ms @ 85%", "--only-rates", "--json", "--max-seeds", 3)
    result = _call(tmp_path, *options, text=text)
    assert result.exit_code == 0, result.stderr
    (row,) = json.loads(result.stdout)["capacities"]
    assert row["seeds"] == 3 and row["probes"] > 1 and row["low"] < row["capacity_rps"] < row["high"] <= 20


@pytest.mark.slow
def test_without_seeds_capacities_are_compared_all_the_same(tmp_path):
    """One seed on both sides tells a difference, what the cost's error moves, and which change helps."""
    text = changed(_traced(tmp_path), "cost: {kind: linear, base: 5ms, per_token: 20us}", "cost: h200")
    result = _call(tmp_path, "--policy", "static", "--policy", "continuous", "--json", text=text)
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    static, continuous = (row["capacity_rps"] for row in found["capacities"])
    (difference,) = found["differences"]
    assert difference["mean"] == pytest.approx(static - continuous) and difference["half_width"] is None
    assert difference["why"] and found["compared_with_seeds"] == 1
    for row in found["capacities"]:
        faster, slower = row["cost_error_share"]
        assert slower < 0 < faster
    assert max(change["capacity"] or 0.0 for change in found["changes"]) > max(static, continuous)


@pytest.mark.slow
def test_fewer_seeds_than_comparisons_take_are_enough(tmp_path):
    """With three seeds a probe the changes are compared by those three."""
    result = _call(tmp_path, "--policy", "continuous", "--max-seeds", 3, "--precision", "20%", "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["compared_with_seeds"] == 3 and any(change["capacity"] for change in found["changes"])


def _closed_loop(users, warmup):
    arrivals = f"{{kind: closed_loop, users: {users}, think_time: 10s, think_kind: exponential}}"
    text = changed(SCENARIO, "{kind: on_off, mean_rate: 20/s, on: 1s, off: 1s}", arrivals)
    text = changed(text, "load: {mean_rate: [10/s, 20/s]}\n", "")
    text = changed(text, "ttft<200ms & tpot<50ms @ 95%", "ttft<6ms @ 95%")
    return changed(text, "duration: 10s", f"duration: 4s\n  warmup: {warmup}")


def test_users_of_whom_nobody_is_left_to_measure_are_too_few_to_be_tried(tmp_path):
    """An objective that no load meets leads down to users who send nothing after the warm-up: the search goes on."""
    options = ("--policy", "continuous", "--only-rates", "--max-seeds", 3)
    found = _call(tmp_path, *options, "--json", text=_closed_loop(6, "3s"))
    assert found.exit_code == 0, found.stderr
    (row,) = json.loads(found.stdout)["capacities"]
    assert row["met"] == "never" and row["not_measured"]
    printed = _call(tmp_path, *options, text=_closed_loop(6, "3s")).stdout
    assert f"! continuous: nobody sends after the warm-up at {min(row['not_measured']):g}" in printed
    (effort,) = [line for line in printed.splitlines() if line.startswith("a probe: ")]
    assert "." not in effort.partition(" requests")[0]


def test_a_run_of_too_few_users_is_refused_with_advice_that_fits(tmp_path):
    """A closed loop has no all_at_once to use instead."""
    (tmp_path / "tiny.yaml").write_text(_closed_loop(1, "3999ms"))
    found = batchsim("run", tmp_path / "tiny.yaml", "--out", tmp_path / "out", "--jobs", 1)
    assert found.exit_code == 2
    assert "more users" in found.stderr and "all_at_once" not in found.stderr


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("", (), "Give a scenario"),
        ("bursty", ("--set", "load={mean_rate: [1e9/s]}"), "--set load={mean_rate: [1e9/s]}: "),
    ],
)
def test_what_is_no_scenario_and_no_load_is_told_where_it_stands(tmp_path, name, options, says):
    """One line, which begins with the option where an option is to blame."""
    found = batchsim("capacity", name, *options, "--out", tmp_path)
    assert found.exit_code == 2 and says in found.stderr and found.stderr.count("\n") == 1


TASKS = SCENARIO.partition("policies:")[0].replace(
    "on_off, mean_rate: 20/s, on: 1s, off: 1s", "poisson, mean_rate: 20/s"
)
TASKS = (
    TASKS.partition("  lengths:")[0]
    + """\
  tasks:
    stages:
      - {prompt: {kind: fixed, tokens: 100}, output: {kind: uniform, min: 2, max: 12}}
      - {fan_out: 3, prompt: {kind: fixed, tokens: 20}, output: {kind: uniform, min: 2, max: 12}, wait: 300ms}
  output_cap: 16
  duration: 20s
policies: {continuous: {max_num_seqs: 2, max_num_batched_tokens: 512}}
slo: task_e2e<600ms @ 90%
seeds: 2
"""
)


@pytest.mark.slow
def test_the_capacity_for_tasks_names_what_they_wait_for(tmp_path):
    """Two slots for four requests a task: beyond it tasks miss their bound since their requests queue."""
    done = _call(tmp_path, "--only-rates", "--max-seeds", 3, "--max-probes", 6, text=TASKS)
    assert done.exit_code == 0, done.stderr
    assert "objective: task_e2e<600ms @ 90%" in done.stdout and "task_e2e: queueing for a slot" in done.stdout
