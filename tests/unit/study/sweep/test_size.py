"""A sweep that would be too large is refused before its first point, in one line that says how to allow it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchsim.base.errors import ScenarioError
from batchsim.base.ranges import MAX_CHOICES, MAX_POINTS
from batchsim.scenario import load_scenario
from batchsim.scenario.setup import Setup
from batchsim.study.capacity.find import find_capacities
from batchsim.study.curves.run import run_scenario
from batchsim.study.planning.plan_tables import plan_tables
from batchsim.study.sweep.points import Sweep
from batchsim.study.sweep.size import (
    BLOCK_BYTES,
    LEAST_OF_EXPECTED,
    MOST_OF_EXPECTED,
    POINT_S,
    REQUEST_BYTES,
    REQUEST_S,
    STEP_BYTES,
    STEP_S,
    Limits,
    check_size,
    estimated_s,
    expected,
    largest_load,
)

AUTO = ["load={mean_rate: auto}", "policies={gated: {}}"]
FEW = Limits(points=5)


def setup(name: str, *overrides: str) -> Setup:
    return Setup.of(load_scenario(name, overrides=overrides))


SWEEPS: dict[str, tuple[Callable[[Path, Limits], Any], str]] = {
    "run": (lambda out, limits: run_scenario(load_scenario("chat"), out=out, limits=limits), "up to 72 simulations"),
    "capacity": (
        lambda out, limits: find_capacities(
            load_scenario("chat"), Sweep(out / "chat", limits=limits), policies=["vllm"]
        ),
        "up to 1,280 simulations",
    ),
    "plan": (lambda out, limits: plan_tables(load_scenario("plan"), out=out, limits=limits), "up to 12 simulations"),
}


@pytest.mark.parametrize(("sweep", "message"), SWEEPS.values(), ids=SWEEPS)
def test_every_sweep_is_counted_before_it_begins(tmp_path: Path, sweep: Callable[..., Any], message: str) -> None:
    """More points than allowed, or more memory, end it with nothing written."""
    with pytest.raises(ScenarioError, match=f"{message}.* 5 are allowed.* --max-points "):
        sweep(tmp_path, FEW)
    with pytest.raises(ScenarioError, match=r"GB of memory, and 0.0001 GB are allowed.* --max-memory 1GB\."):
        sweep(tmp_path, Limits(MAX_POINTS, 10**5))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("sweep", ["run", "capacity"])
def test_memory_where_loads_are_looked_for_is_that_of_the_workloads_own_rate(tmp_path: Path, sweep: str) -> None:
    """Before the first of them is found."""
    made = load_scenario("chat", overrides=AUTO)
    limits = Limits(MAX_POINTS, 10**5)
    with pytest.raises(ScenarioError, match=r"a simulation at load 8 has some .* 0\.0001 GB are allowed"):
        if sweep == "run":
            run_scenario(made, out=tmp_path, limits=limits)
        else:
            find_capacities(made, Sweep(tmp_path / "chat", limits=limits))


@pytest.mark.parametrize(
    ("changes", "load"),
    [
        (["load={mean_rate: [1/s, 2/s, 4/s]}"], 4),
        (["load={users: auto}", "workload.arrivals={kind: closed_loop, users: 7, think_time: 1s}"], 7),
        (["load={mean_rate: auto}"], 8),
        (["load=null"], 1),
    ],
)
def test_the_largest_load_is_listed_or_the_workloads_own(changes: list[str], load: float) -> None:
    """Without an axis it is the one load that there is."""
    assert largest_load(setup("chat", *changes)) == load


@pytest.mark.parametrize(
    ("more", "points"), [(["seeds=1"], 4), (["seeds=3"], 12), (["seeds=1", "vary={kv.tokens: [99999, 88888]}"], 8)]
)
def test_points_are_policies_by_loads_by_seeds_by_values(tmp_path: Path, more: list[str], points: int) -> None:
    """Two variants of one policy at two loads; three seeds make thrice as many, two values of a key twice."""
    policies = "policies={gated: {max_num_seqs: {best_of: [4, 8]}}}"
    made = load_scenario("chat", overrides=[policies, "load={mean_rate: [1/s, 2/s]}", *more])
    with pytest.raises(ScenarioError, match=f"up to {points} simulations are asked for"):
        run_scenario(made, out=tmp_path, limits=Limits(points=points - 1))


def test_precision_counts_the_seeds_it_may_add(tmp_path: Path) -> None:
    """The most seeds of --precision stand in for the scenario's where they are more."""
    from batchsim.study.curves.precision import Precision

    made = load_scenario("chat", overrides=["policies={gated: {}}", "load={mean_rate: [1/s]}"])
    with pytest.raises(ScenarioError, match="up to 2,000 simulations"):
        run_scenario(made, out=tmp_path, limits=FEW, precision=Precision(0.05, max_seeds=2000))


def test_the_error_says_what_allows_it() -> None:
    """The number behind --max-points is enough, and so is the one behind --max-memory."""
    with pytest.raises(ScenarioError) as refused:
        check_size(6, [], jobs=1, limits=FEW, where="s.yaml:3")
    assert str(refused.value) == (
        "s.yaml:3: up to 6 simulations are asked for, policies times loads times seeds, and 5 are allowed. Ask for"
        " fewer, or allow them with --max-points 6."
    )
    check_size(6, [], jobs=1, limits=Limits(points=6), where="s.yaml:3")
    pile = setup("offline", "workload.requests=2000000")
    needed = 2_000_000 * REQUEST_BYTES
    check_size(1, [(pile, 1.0)], jobs=1, limits=Limits(1, needed), where="s")
    check_size(1, [(pile, 1.0)], jobs=8, limits=Limits(1, needed), where="s")  # no more than there are points
    with pytest.raises(ScenarioError, match=r"2 at a time take 4 GB .* 2 GB are allowed.* --max-memory 4GB\."):
        check_size(9, [(pile, 1.0)], jobs=2, limits=Limits(9, needed), where="s")


@pytest.mark.parametrize(
    ("name", "overrides", "load", "requests"),
    [
        ("chat", ["workload.duration=100s"], 20.0, 2000),
        ("offline", ["workload.requests=70"], 1.0, 70),
        ("closed-loop", [], 32.0, 32),
        ("bursty", ["workload={arrivals: {kind: poisson, mean_rate: 1/s}, requests: 50, output_cap: 9, lengths:"
                    " {prompt: {kind: fixed, tokens: 5}, output: {kind: fixed, tokens: 9}}}"], 2.0, 50),
    ],
)  # fmt: skip
def test_requests_are_those_of_the_heaviest_load(name: str, overrides: list[str], load: float, requests: float) -> None:
    """A rate by its duration, a stated number, or the users of a loop that is ended by time."""
    assert expected(setup(name, *overrides), load)[0] == requests


def test_steps_are_bounded_by_tokens_and_by_time() -> None:
    """A thousand tokens in a year are a thousand steps; without end of work a step follows a step."""
    lengths = "workload.lengths={prompt: {kind: fixed, tokens: 5}, output: {kind: fixed, tokens: 10}}"
    rare = setup("chat", lengths, "workload.duration=1000h")
    assert expected(rare, 1 / 36_000) == (pytest.approx(100), pytest.approx(1000))
    busy = setup("chat", lengths, "workload.duration=100s", "cost={kind: constant, step: 20ms}", "kv.tokens=99999")
    assert expected(busy, 1000.0) == (100_000, 100 / 0.02)
    assert STEP_BYTES * 5000 + REQUEST_BYTES * 100_000 < 0.2e9


def test_the_time_is_estimated_of_all_points_of_each_setup_and_load() -> None:
    """By points, requests and steps, in equal parts on as many processes as there are points for."""
    chat = setup("chat", "workload.duration=100s")
    requests, steps = expected(chat, 20.0)
    one = 6 * (POINT_S + requests * REQUEST_S + steps * STEP_S)
    assert estimated_s([(chat, 20.0, 6)], 1) == (LEAST_OF_EXPECTED * one, MOST_OF_EXPECTED * one)
    assert estimated_s([(chat, 20.0, 6)], 100) == pytest.approx(
        (LEAST_OF_EXPECTED * one / 6, MOST_OF_EXPECTED * one / 6)
    )
    two = estimated_s([(chat, 20.0, 6), (chat, 20.0, 6)], 1)
    assert two == pytest.approx((2 * LEAST_OF_EXPECTED * one, 2 * MOST_OF_EXPECTED * one))


@pytest.mark.parametrize("name", ["closed-loop", "agents"])
def test_no_time_is_estimated_where_answers_say_how_many_requests_there_are(name: str) -> None:
    """Of users until the time is up, and of sessions."""
    made = setup(name)
    assert estimated_s([(made, max(made.loads), 1)], 1) is None


def test_the_pools_of_caching_replicas_count() -> None:
    """A thousand engines that keep an id a block need memory before the first request; those that count need none."""
    policies = "policies={vllm: {}}", "policies={gated: {}}"
    caching, counting = (setup("replicas", policy, "replicas.count=1000") for policy in policies)
    limits = Limits(1, 1000 * caching.kv.num_blocks * BLOCK_BYTES)
    check_size(1, [(counting, 1.0)], jobs=1, limits=limits, where="s")
    with pytest.raises(ScenarioError, match="GB of memory"):
        check_size(1, [(caching, 1.0)], jobs=1, limits=limits, where="s")


def test_choices_that_multiply_are_bounded_before_they_are_checked() -> None:
    """Lists of best_of multiply, values of vary are a scenario each: more than a thousand are refused at once."""
    many = list(range(1, 41))
    with pytest.raises(ScenarioError, match=r"best_of asks for 64,000 variants of gated. List at most 1,000\."):
        load_scenario(
            "chat",
            overrides=[
                f"policies={{gated: {{max_num_seqs: {{best_of: {many}}}, max_num_batched_tokens: {{best_of: {many}}},"
                f" open_at: {{best_of: {many}}}}}}}"
            ],
        )
    with pytest.raises(ScenarioError, match=r"vary names kv.tokens with 1,001 values. Give at most 1,000\."):
        load_scenario("chat", overrides=[f"vary={{kv.tokens: {list(range(1, MAX_CHOICES + 2))}}}"])
