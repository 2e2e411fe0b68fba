"""The parts of a plan: the busiest window, what changes of the traffic mean, stretches in place of seeds, money."""

from __future__ import annotations

import json
import re
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from batchsim.base.errors import ScenarioError
from batchsim.cost.profile import TableFault
from batchsim.metrics.intervals import Interval, half_width
from batchsim.metrics.slo import parse_slo
from batchsim.report.page.plan_advice import recommendation
from batchsim.report.page.plan_sections import sections
from batchsim.report.page.plan_text import plan_text
from batchsim.report.sheet import sentence_text
from batchsim.results.failed import Failed
from batchsim.results.fleet_inputs import watts
from batchsim.scenario import Scenario, load_scenario
from batchsim.scenario.setup import Setup
from batchsim.study.planning.assumptions import assumptions
from batchsim.study.planning.batches import batch_attainments
from batchsim.study.planning.demand import Variation, demand_of
from batchsim.study.planning.fleet_search import ONE_SEED_DECIDES, headroom, smallest
from batchsim.study.planning.make import GROWN, make_plan
from batchsim.study.planning.money import (
    cost_per_month,
    energy_kwh,
    shares_by_use,
    tier_replicas,
    tokens_per_month,
)
from batchsim.study.planning.plan_tables import plan_tables
from batchsim.study.planning.probe import Ask, Book, GpuGroup, GroupProbe, Observed, drive
from batchsim.study.planning.tables import Tables, tables_of
from batchsim.study.sweep.points import Sweep
from batchsim.tables import find
from tests.unit.cost.test_profile import PROFILE as PROFILE_OF_LLAMA

REPLAY = """\
model: llama-3.1-8b
cost: {kind: linear, base: 5ms, per_sequence: 5ms}
workload:
  arrivals: {kind: trace}
  trace: {path: my.csv, columns: {arrival: ts, prompt: in, output: out}, time_unit: ms}
  output_cap: 64
  warmup: 1s
policies:
  continuous: {max_num_seqs: 4, max_num_batched_tokens: 256}
slo: ttft<1s & tpot<60ms @ 90%
seeds: 3
plan:
  target: {trace: {factor: 1, shift: 500ms}}
  window: 4s
  currency: $
  gpus: {one: {cost: {kind: linear, base: 5ms, per_sequence: 5ms}, price: 2.00/h, kv_tokens: 16000}}
  router: least_tokens
  max_replicas: 8
"""


def replayed(folder: Path) -> Scenario:
    """20 s of a request every 100 ms, five times as dense between 10 s and 14 s."""
    times = sorted([*range(0, 20_000, 100), *range(10_010, 14_000, 25)])
    rows = [f"{ms},{50 + 7 * i % 60},{2 + i % 9}" for i, ms in enumerate(times)]
    (folder / "my.csv").write_text("\n".join(["ts,in,out", *rows]) + "\n")
    (folder / "s.yaml").write_text(REPLAY)
    return load_scenario(str(folder / "s.yaml"))


@pytest.fixture
def replay(tmp_path: Path) -> Scenario:
    return replayed(tmp_path)


@pytest.fixture(scope="module")
def planned_once(tmp_path_factory: pytest.TempPathFactory) -> Tables:
    """The tables of the plan for `replayed`, made once."""
    folder = tmp_path_factory.mktemp("replay")
    return plan_tables(replayed(folder), out=folder / "results")


@pytest.fixture
def replay_tables(planned_once: Tables) -> Tables:
    """Tables of a test's own, which it may change."""
    return deepcopy(planned_once)


def with_plan(scenario: Scenario, *overrides: str) -> Scenario:
    return load_scenario(scenario.source, overrides=overrides)


def test_the_busiest_window_is_cut_out_with_its_warm_up(replay: Scenario) -> None:
    """The 4 s with the most tokens, 1 s of the trace before them; parts tell the rate against the window's."""
    demand = demand_of(replay)
    assert demand.slice_ns is not None
    start, end = demand.slice_ns
    assert 10.0e9 <= start + 1e9 <= 10.1e9 and end - start == 5e9
    assert demand.window.startswith("00:00:10 to 00:00:14 after the trace's start")
    assert [part.name for part in demand.parts] == ["00:00:00-00:00:20"]
    setup = Setup.of(
        load_scenario(replay.source, overrides=["kv.tokens=16000", *REMOVED, *demand.overrides(Variation())])
    )
    sent = setup.workload(1.0, 0).columns()["sent_ns"]
    assert len(sent) == pytest.approx(50 + 160, abs=3)


REMOVED = ["plan=null"]


def test_changes_of_the_traffic_are_changes_of_the_scenario(replay: Scenario) -> None:
    """More traffic is more copies, denser bursts are copies that move in step."""
    demand = demand_of(with_plan(replay, "plan.target.trace.factor=6"))
    assert demand.load(Variation(traffic=1.5)) == 9 and demand.copies(Variation(dispersion=2)) == 3
    assert any("together: 2" in text for text in demand.overrides(Variation(dispersion=2)))
    assert "workload.prompt_scale=1.5" in demand.overrides(Variation(prompts=1.5))
    grown = demand_of(with_plan(replay, "plan.growth={per_month: 10%, months: 2}"))
    assert grown.peak == pytest.approx(1.21)


def test_a_window_longer_than_the_traffic_is_one_line(replay: Scenario) -> None:
    """The lengths of both are said."""
    with pytest.raises(ScenarioError, match=r"plan.window 1 min and 1 s of warm-up before it are longer than"):
        demand_of(with_plan(replay, "plan.window=1min"))


def test_one_recording_is_judged_by_its_stretches(replay: Scenario, tmp_path: Path) -> None:
    """One copy has one run and ten observations; as one stretch it has the share that the metrics have."""
    book = Book(demand_of(replay), Sweep(tmp_path / "results" / "s"))
    ask = Ask(GpuGroup("one", "continuous", 1))
    assert book.seeds(Variation()) == (0,)
    book.run([(ask, (0,))])
    probe = book.probe(ask)
    assert len(probe.observed) == 10 and probe.attainment.low is not None
    (result,) = probe.results
    folder = book.sweep.home / "points" / result["point"]
    window = (10**9, result["end_ns"])
    whole = batch_attainments(folder, {"": parse_slo(replay.file.slo)}, window, True, 1)
    assert 0 < result["values"]["in_slo"] < 1
    share, margin = result["values"]["in_slo"], result["values"]["slo_margin"]
    assert whole == [(pytest.approx(share), pytest.approx(margin), {"": whole[0][0]}, result["values"]["cohort"])]
    assert len({one.requests for one in probe.observed}) > 1
    assert (probe.attainment.mean, probe.margin.mean) == (pytest.approx(share), pytest.approx(margin))


def test_a_plan_of_one_recording_ends(replay: Scenario, tmp_path: Path) -> None:
    """The smallest group holds by its stretches, and one replica less does not."""
    planned = make_plan(replay, Sweep(tmp_path / "results" / replay.name))
    held, fails = planned.held(0), planned.smallest[0].fails
    assert held is not None and held.met and held.ask.group.replicas > 1
    assert fails is not None and not fails.met and fails.ask.group.replicas == held.ask.group.replicas - 1


def test_without_room_above_the_target_the_report_says_so(replay_tables: Tables) -> None:
    """Instead of more traffic by nothing; and what was not tried stands among the assumptions."""
    tables = replay_tables
    (chosen,) = (row for row in tables["configurations"] if row["holds"])
    for room, said in ((0.1, "hold with +10 % of traffic"), (0.0, "there is no room above the target")):
        chosen["headroom"] = room
        assert said in sentence_text(recommendation(tables, "$")[1])
    assert "too few" in [row["what"] for row in tables["assumptions"]]
    assumed = {row["what"]: row["assumed"] for row in tables["assumptions"]}
    assert all(said == "its defaults" or said[0] == "{" for what, said in assumed.items() if what.startswith("policy "))


def test_the_report_says_what_growth_would_take(replay_tables: Tables) -> None:
    """The number of replicas that holds 30 % more, at their price; nothing where no number does."""
    tables = replay_tables
    (grown,) = (row for row in tables["what_if"] if row["change"] == GROWN)
    (chosen,) = (row for row in tables["configurations"] if row["holds"])
    each = chosen["cost_per_month"] / chosen["replicas"]
    assert grown["cost_per_month_needed"] == pytest.approx(each * grown["replicas_needed"])
    grown |= {"replicas_needed": 7, "cost_per_month_needed": 7e4}
    said = [sentence_text(sentence) for sentence in recommendation(tables, "$")]
    assert said[3] == "With 30 % more traffic it would take 7 replicas, $ 70,000 a month."
    grown["replicas_needed"] = grown["replicas"]
    assert sentence_text(recommendation(tables, "$")[3]) == "With 30 % more traffic it would take no more."
    grown["replicas_needed"] = None
    assert len(recommendation(tables, "$")) == 4


def test_a_recommendation_says_for_which_traffic_it_is(replay_tables: Tables) -> None:
    """The rate at the peak, and how it grows to that where it does; of tasks no rate of requests."""
    row = replay_tables["recommendation"][0]
    row |= {"peak_rps": 27.8, "today_rps": 24.0, "growth_per_month": 0.05, "months": 3}
    grown = "the cheapest that holds 27.8 requests/s at the peak (24 today, and 5 % more each month for 3 months): $ "
    assert grown in sentence_text(recommendation(replay_tables, "$")[0])
    row["months"] = 0
    assert "the cheapest that holds 27.8 requests/s at the peak: $ " in sentence_text(
        recommendation(replay_tables, "$")[0]
    )
    row["counted"] = "tasks"
    assert ", the cheapest that holds this traffic: $ " in sentence_text(recommendation(replay_tables, "$")[0])


def test_of_one_price_the_configuration_with_more_headroom_is_chosen(replay: Scenario, tmp_path: Path) -> None:
    """Two policies hold with the same replicas and no miss at all: the one that holds more traffic wins, the other is
    named, and headroom, what growth takes and the choices agree on what an overloaded group holds."""
    policies = {
        name: {"kind": "continuous", "max_num_seqs": slots, "max_num_batched_tokens": 256}
        for name, slots in (("narrow", 2), ("wide", 16))
    }
    overrides = (f"policies={json.dumps(policies)}", "slo=ttft<1s & tpot<200ms @ 90%", "seeds=2")
    tables = plan_tables(with_plan(replay, *overrides), out=tmp_path / "results")
    narrow, wide = tables["configurations"]
    assert (narrow["replicas"], narrow["margin_low"]) == (wide["replicas"], wide["margin_low"])
    assert narrow["headroom"] == 0 and wide["headroom"] == pytest.approx(0.2)
    first, *others = map(sentence_text, recommendation(tables, "$"))
    assert first.startswith("Run 2 replicas on one under wide behind least_tokens, the cheapest that holds ")
    assert first.endswith(" (one × 2 under narrow costs as much, with a headroom of 0 % where this has +20 %).")
    assert "With 30 % more traffic it would take 3 replicas, $ 4,380 a month." in others
    (grown,) = (row for row in tables["what_if"] if row["change"] == GROWN)
    assert (grown["policy"], grown["holds"], grown["shown"]) == ("wide", False, "overloaded")
    columns = ("replicas", "forecast", "grown", "lost", "slow", "choice")
    assert [tuple(row[name] for name in columns) for row in tables["choices"]] == [
        (2, True, False, False, None, "cheapest"),
        (3, True, True, True, None, "to survive 30 % more traffic and a lost replica"),
    ]
    few = plan_tables(with_plan(replay, *overrides, "plan.max_replicas=2"), out=tmp_path / "results")
    (grown,) = (row for row in few["what_if"] if row["change"] == GROWN)
    assert (grown["replicas_needed"], grown["note"]) == (None, "none of up to 2 holds")
    assert [row["grown"] for row in few["choices"]] == [False, False]


def test_a_cheaper_configuration_that_holds_the_grown_traffic_is_named(replay_tables: Tables) -> None:
    """Beside the replicas that growth takes of the recommended one; none that costs as much or does not hold it."""
    tables = replay_tables
    (grown,) = (row for row in tables["what_if"] if row["change"] == GROWN)
    other = tables["configurations"][0] | {"policy": "other", "replicas": 2, "headroom": 0.3, "cost_per_month": 3000.0}
    tables["configurations"].append(other)
    grown |= {"replicas_needed": 3, "cost_per_month_needed": 4380.0}
    said = "With 30 % more traffic it would take 3 replicas, $ 4,380 a month"
    assert sentence_text(recommendation(tables, "$")[3]) == f"{said}, or 2 on one under other, $ 3,000 a month."
    for worse in ({"headroom": 0.2}, {"cost_per_month": 4380.0}, {"holds": False}):
        tables["configurations"][-1] = other | worse
        assert sentence_text(recommendation(tables, "$")[3]) == f"{said}."


def test_the_report_says_what_a_lost_replica_leaves(replay_tables: Tables) -> None:
    """In the words of one replica less, with the replicas and the price of one to spare; of one none is left."""
    tables = replay_tables
    (chosen,) = (row for row in tables["configurations"] if row["holds"])
    assert chosen["replicas"] == 2 and chosen["one_less_shown"] == "fails"
    tail = " a month: that leaves as many as were shown to hold. The moment of the loss itself was not simulated."
    run = "; to lose one and hold, run 3 replicas, $ 4,380" + tail
    for shown, said in (
        ("fails", "those that are left fail"),
        ("not shown to hold", "those that are left are not shown to hold"),
        ("overloaded", "those that are left are overloaded"),
    ):
        chosen["one_less_shown"] = shown
        assert sentence_text(recommendation(tables, "$")[-1]) == f"If a replica is lost, {said}{run}"
    chosen |= {"replicas": 1, "one_less": None, "one_less_shown": None}
    tables["recommendation"][0] |= {"replicas_spare": 2, "cost_per_month_spare": 2920.0}
    said = sentence_text(recommendation(tables, "$")[-1])
    assert said.startswith("If a replica is lost, none is left to serve; to lose one and hold, run 2 replicas, $ 2,920")
    assert "that leaves one, which was shown to hold." in said


def test_a_plan_ends_with_the_command_of_the_deployment_that_it_recommends(replay: Scenario, tmp_path: Path) -> None:
    """So that it can be tried; the report's recommendation too, and it stands among the assumptions of every GPU. That
    the policy is none of the engine's is said beside it; of several that are it is the recommended one."""
    sheet = "{kind: sheet, memory: 80GB, bandwidth: 3350GB/s, bf16: 989TFLOP/s, peer_link: 450GB/s}"
    offer = f"{{price: 2/h, kv_tokens: 100000, deployment: {{engine: vllm, gpu: {sheet}, tp: 2}}}}"
    tables = plan_tables(
        with_plan(replay, f"plan.gpus={{one: {offer}}}", "slo=ttft<9s @ 10%"), out=tmp_path / "results"
    )
    line = "vllm serve meta-llama/Llama-3.1-8B --tensor-parallel-size 2 --num-gpu-blocks-override 6250"
    assert plan_text(tables, "$").splitlines()[-2:] == ["! the command cannot state policy continuous", line]
    said = [sentence_text(each) for each in sections(tables | {"glossary": []}, "$", {})[0].sentences[-2:]]
    assert said == [
        f"A replica is started by: {line}",
        "That command cannot state policy continuous: the assumptions have its knobs.",
    ]
    assert {"what": "command on one", "assumed": line} in tables["assumptions"]
    tables["assumptions"] = []
    assert not plan_text(tables, "$").splitlines()[-1].startswith("vllm")
    own = "policies={narrow: {kind: vllm, max_num_seqs: 1}, wide: {kind: vllm, max_num_seqs: 64}}"
    slo = "slo=ttft<200ms @ 90%"
    tables = plan_tables(with_plan(replay, f"plan.gpus={{one: {offer}}}", own, slo), out=tmp_path / "results")
    assert tables["recommendation"][0]["policy"] == "wide"
    assert plan_text(tables, "$").splitlines()[-1] == f"{line} --max-num-seqs 64"
    assert "! the command cannot state" not in plan_text(tables, "$")
    assert any(row["line"].strip() == "- '64'" for row in tables["manifest"])


def test_a_plan_says_what_is_known_against_the_step_times_of_a_gpu(
    replay: Scenario, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a line of its own, and among the assumptions; their error is unknown."""
    fault = TableFault("qkv_gemm", "16 decodes with 2,048 tokens", 13.2, "ceiling", 4.55, "twice h200's", 0.3)
    own = find.load_profile
    monkeypatch.setattr(find, "load_profile", lambda name: replace(own(name), checks=(fault,)))
    offer = "{price: 2/h, kv_tokens: 100000, deployment: {engine: vllm, gpu: l40s}}"
    tables = plan_tables(
        with_plan(replay, f"plan.gpus={{one: {offer}}}", "slo=ttft<9s @ 10%"), out=tmp_path / "results"
    )
    said = "tables of l40s: qkv_gemm of 16 decodes with 2,048 tokens takes 13.2 ms, 2.9 times what twice h200's allows"
    assert f"! one: {said}: not to be trusted" in " ".join(plan_text(tables, "$").split())
    assumed = {row["what"]: row["assumed"] for row in tables["assumptions"]}
    assert assumed["against the step times of one"].startswith(said)
    assert assumed["their error on one"].startswith(f"unknown: {said}")


def test_headroom_does_not_go_beyond_what_is_completed_under_overload(replay: Scenario, tmp_path: Path) -> None:
    """Though all of it would hold in a window as short as this one."""
    demand = demand_of(with_plan(replay, "plan.target.trace.factor=6", "seeds=2"))
    group = GpuGroup("one", "continuous", 2)
    held = {seed: {"values": {"in_slo": 1.0, "slo_margin": 0.05, "cohort": 10_000}} for seed in range(2)}
    seen = {Ask(group, Variation(traffic=times)): held for times in (1.1, 1.2, 1.3)}
    book = Book(demand, Sweep(tmp_path / "s"), results=seen)
    found = drive(book, [headroom(book, group, most) for most in (1.05, 1.15, 1.2, 9.0)])
    assert [[probe.ask.change.traffic for probe in probes][-1:] for probes in found] == [[], [1.1], [1.2], [1.3]]
    assert all(probe.met for probes in found for probe in probes)


def test_one_seed_below_the_objective_decides() -> None:
    """Of up to four values of which one is below a bound, the t-interval of the mean always reaches below it."""
    rng = np.random.default_rng(0)
    for count in range(2, ONE_SEED_DECIDES + 1):
        for _ in range(2000):
            values = rng.random(count) * rng.choice([1e-3, 1, 1e3], count)
            values[0] = -rng.random() * 1e-6
            assert values.mean() - half_width(values) < 0
        equal = np.array([-1e-9] + [1.0] * (count - 1))
        assert equal.mean() - half_width(equal) < 0


def test_one_unlucky_seed_does_not_make_a_group_one_replica_too_large(replay: Scenario, tmp_path: Path) -> None:
    """With more seeds than one can decide for, two replicas hold though they miss the objective in the first."""
    demand = demand_of(with_plan(replay, "plan.target.trace.factor=6", f"seeds={ONE_SEED_DECIDES + 2}"))
    margins = {1: [-0.5] * 6, 2: [-0.01, *[0.05] * 5], 3: [0.05] * 6}
    seen = {
        Ask(GpuGroup("one", "continuous", replicas)): {
            seed: {"values": {"in_slo": 0.9 + margin, "slo_margin": margin, "cohort": 10_000}}
            for seed, margin in enumerate(of_seeds)
        }
        for replicas, of_seeds in margins.items()
    }
    book = Book(demand, Sweep(tmp_path / "s"), results=seen)
    for show in (False, True):
        (found,) = drive(book, [smallest(book, GpuGroup("one", "continuous", 3), 8, show=show)])
        assert found.group is not None and found.group.replicas == 2


def test_few_requests_without_a_miss_show_little() -> None:
    """Seeds that are all alike have no spread; the lower end is then that of as many requests, none of which missed."""
    few, many = (Interval.of([1.0, 1.0, 1.0], num_requests=count) for count in (100, 100_000))
    assert few.mean == 1.0 and few.low == pytest.approx(1 - 0.0362, abs=1e-4)
    assert many.low == pytest.approx(1 - 3.69e-5, abs=1e-6)
    spread = [0.99, 0.97, 0.98]
    assert Interval.of(spread, num_requests=100_000) == Interval.of(spread)


def test_a_mean_within_the_slo_does_not_fail() -> None:
    """Fails: the mean is below. Not shown to hold: only the lower end of the interval is. Holds: neither, and the queue
    of most seeds does not grow."""

    def shown(*margins: float, growing: int = 0) -> str:
        observed = tuple(Observed(0.9 + margin, margin, {}) for margin in margins)
        results = tuple({"values": {"cohort": 10_000.0}} for _ in margins)
        grows = tuple(i < growing for i in range(len(margins)))
        return GroupProbe(Ask(GpuGroup("one", "continuous", 1)), results, observed, complete=True, growing=grows).shown

    assert shown(-0.01, 0.002, -0.02) == "fails"
    assert shown(-0.001, 0.005, 0.008) == "not shown to hold"
    assert shown(0.0051, 0.005, 0.0052) == shown(0.0051, 0.005, 0.0052, growing=1) == "holds"
    assert shown(0.0051, 0.005, 0.0052, growing=2) == "overloaded"
    assert shown(-0.01, 0.002, -0.02, growing=3) == "fails"


def test_a_queue_that_grows_with_the_rate_rules_nothing_out(replay: Scenario, tmp_path: Path) -> None:
    """What waits of a recording, whose rate changes, grows while that does, however many replicas there are."""
    group = Ask(GpuGroup("one", "continuous", 2))
    grown = {
        seed: {"values": {"in_slo": 1.0, "slo_margin": 0.1, "cohort": 10_000}, "unstable": True} for seed in (0, 1)
    }
    book = Book(demand_of(with_plan(replay, "plan.target.trace.factor=6", "seeds=2")), Sweep(tmp_path), {group: grown})
    assert book.probe(group).met


def patient(folder: Path, limit: int = 4, window_s: int = 30) -> Scenario:
    """22 requests a second in the mean, of which one replica completes 20, with an objective of minutes for a window of
    one."""
    window = f"{window_s}s"
    text = REPLAY.replace("{kind: trace}", "{kind: poisson, mean_rate: 22/s}").replace(
        "warmup: 1s", f"duration: {window}"
    )
    lengths = "lengths: {prompt: {kind: fixed, tokens: 50}, output: {kind: fixed, tokens: 8}}"
    text = re.sub(r"trace: \{path.*", lengths, text).replace("{trace: {factor: 1, shift: 500ms}}", "{rate: 22/s}")
    text = text.replace("window: 4s", f"window: {window}").replace("max_replicas: 8", f"max_replicas: {limit}")
    (folder / "s.yaml").write_text(text.replace("ttft<1s & tpot<60ms", "ttft<5min"))
    return load_scenario(str(folder / "s.yaml"))


@pytest.mark.parametrize(
    "limit, shown",
    [pytest.param(4, None, marks=pytest.mark.slow), (1, "complete fewer than come: the queue grows")],
)
def test_what_completes_fewer_than_come_does_not_hold(tmp_path: Path, limit: int, shown: str | None) -> None:
    """Though all requests meet the objective."""
    planned = make_plan(patient(tmp_path, limit, 60), Sweep(tmp_path / "points"))
    (row,) = tables_of(planned)["configurations"]
    assert planned.saturation_rps[0] == pytest.approx(20, rel=0.02)
    if shown is None:
        assert (row["replicas"], row["one_less"], row["one_less_shown"]) == (2, 1.0, "overloaded")
    else:
        assert row["why_not"] == f"max_replicas 1: 100 % of requests within the SLO with 1, which {shown}"


TASKS = """\
  tasks:
    stages:
      - {prompt: {kind: fixed, tokens: 50}, output: {kind: fixed, tokens: 4}}
      - {prompt: {kind: fixed, tokens: 50}, output: {kind: fixed, tokens: 4}, fan_out: 2, wait: 1s}
"""


def test_a_plan_of_tasks_counts_tasks(tmp_path: Path) -> None:
    """A task of 3 requests takes 1 s for its tool and 8 steps of 10 to 25 ms, so that it is in time where nobody waits:
    on two replicas, and not on one, whose engine is as good as full."""
    patient(tmp_path, window_s=15)
    text = (tmp_path / "s.yaml").read_text()
    text = re.sub(r"  lengths: \{.*\n", TASKS, text).replace("ttft<5min @ 90%", "task_e2e<1200ms @ 90%")
    (tmp_path / "s.yaml").write_text(text)
    planned = make_plan(load_scenario(str(tmp_path / "s.yaml")), Sweep(tmp_path / "points"))
    tables = tables_of(planned)
    (row,), probes = tables["configurations"], tables["probes"]
    held = planned.held(0)
    assert held is not None and held.num_judged == sum(result["values"]["tasks"] for result in held.results)
    assert all(probe["tasks"] < probe["drawn_rps"] * 15 * probe["seeds"] / 2 for probe in probes)
    assert row["attainment"] == pytest.approx(np.mean([result["values"]["in_slo"] for result in held.results]))
    assert (row["replicas"], row["saturation_rps"], row["goodput_rps"]) == (2, None, None)
    assert row["one_less"] < 0.9
    assert "% of tasks meet task_e2e<1200ms @ 90%" in sentence_text(recommendation(tables, "$")[1])
    failed = Ask(GpuGroup("one", "continuous", 7))
    planned.book.failed[failed] = Failed("continuous", "continuous", 22.0, 0, "", "why")
    assert planned.book.probe(failed).counted == "tasks"


def test_a_plan_of_tasks_and_requests_counts_no_more_than_the_tasks(tmp_path: Path) -> None:
    """One class bounds its tasks, the other the requests of its own: neither are all requests judged, nor is there a
    rate of requests that meet."""
    patient(tmp_path, window_s=15)
    classes = '  classes: {a: {share: 90%, slo: "task_e2e<60s @ 90%"}, c: {share: 10%, slo: "ttft<60s @ 90%"}}\n'
    text = re.sub(r"  lengths: \{.*\n", classes + TASKS, (tmp_path / "s.yaml").read_text())
    (tmp_path / "s.yaml").write_text(text)
    planned = make_plan(load_scenario(str(tmp_path / "s.yaml"), overrides=["seeds=2"]), Sweep(tmp_path / "points"))
    held = planned.held(0)
    assert held is not None and held.num_judged == sum(result["values"]["tasks"] for result in held.results)
    tables = tables_of(planned)
    assert tables["configurations"][0]["goodput_rps"] is None
    assert "of tasks and requests meet" in sentence_text(recommendation(tables, "$")[1])


RAMP = """\
  tasks:
    stages:
      - {prompt: {kind: fixed, tokens: 5}, output: {kind: fixed, tokens: 60}}
      - {prompt: {kind: fixed, tokens: 5}, output: {kind: fixed, tokens: 60}, wait: 20s}
      - {prompt: {kind: fixed, tokens: 5}, output: {kind: fixed, tokens: 60}, wait: 20s}
"""


def test_a_queue_that_grows_while_tasks_ramp_up_is_told_with_what_to_do(tmp_path: Path) -> None:
    """Three stages 20 s apart, from an empty start and on too few replicas: nobody can tell one from the other."""
    patient(tmp_path, limit=2, window_s=60)
    text = (tmp_path / "s.yaml").read_text().replace("ttft<5min", "task_e2e<5min").replace("rate: 22/s", "rate: 12/s")
    (tmp_path / "s.yaml").write_text(re.sub(r"  lengths: \{.*\n", RAMP, text))
    planned = make_plan(load_scenario(str(tmp_path / "s.yaml")), Sweep(tmp_path / "points"))
    (row,) = tables_of(planned)["configurations"]
    told = "the queue grows, or seems to, since a task takes 83.9 s and there is no warm-up: lengthen workload.warmup"
    assert row["why_not"].endswith(told)


def test_without_tasks_in_the_workload_no_objective_bounds_them(tmp_path: Path) -> None:
    patient(tmp_path)
    text = (tmp_path / "s.yaml").read_text().replace("ttft<5min", "task_e2e<5min")
    (tmp_path / "s.yaml").write_text(text)
    with pytest.raises(ScenarioError, match=r"bounds tasks, and without workload\.tasks a plan counts requests"):
        make_plan(load_scenario(str(tmp_path / "s.yaml")), Sweep(tmp_path / "points"))


def test_one_seed_whose_queue_grows_does_not_decide(tmp_path: Path) -> None:
    """Neither with as many replicas as there may be, nor of how much more traffic they hold."""
    grown = [
        {"values": {"in_slo": 1.0, "slo_margin": 0.1, "cohort": 10_000}, "unstable": unstable}
        for unstable in (True, False, False)
    ]
    group = GpuGroup("one", "continuous", 2)
    asks = [Ask(group), Ask(replace(group, replicas=1)), *(Ask(group, Variation(traffic=t)) for t in (1.1, 1.2, 1.3))]
    seen = {ask: dict(enumerate(grown)) for ask in asks}
    seen[asks[1]] = dict.fromkeys(range(3), grown[0])
    book = Book(demand_of(patient(tmp_path)), Sweep(tmp_path / "points"), seen)
    (found,) = drive(book, [smallest(book, group, 2)])
    assert found.group == group and found.fails is not None and found.fails.shown == "overloaded"
    (probes,) = drive(book, [headroom(book, group, 9.0)])
    assert [(probe.ask.change.traffic, probe.shown) for probe in probes] == [(1.3, "holds")]


@pytest.mark.parametrize("arrivals, is_steady", [("poisson", True), ("on_off, on: 60s, off: 60s", False)])
def test_bursts_that_last_are_no_steady_rate(tmp_path: Path, arrivals: str, is_steady: bool) -> None:
    changed = with_plan(patient(tmp_path), f"workload.arrivals={{kind: {arrivals}, mean_rate: 22/s}}")
    assert demand_of(changed).is_steady is is_steady


def test_memory_is_stated_of_one_gpu_and_derived_of_another(replay: Scenario, tmp_path: Path) -> None:
    """The KV memory of the one is not asked of the plan's others, which derive theirs."""
    roofline = "{cost: {kind: roofline, gpu: h100}, price: 3/h}"
    scenario = with_plan(replay, f"plan.gpus.two={roofline}")
    book = Book(demand_of(scenario), Sweep(tmp_path))
    one, two = (book.setup(Ask(GpuGroup(gpu, "continuous", 1))).kv.num_blocks for gpu in ("one", "two"))
    assert one == 1000 and two != 1000


def test_what_a_gpu_lacks_is_said_of_the_plan(replay: Scenario, tmp_path: Path) -> None:
    """Not of the scenarios that the plan makes of it, which nobody wrote."""
    without = Path(replay.source).read_text().replace(", kv_tokens: 16000", "")
    Path(replay.source).write_text(without)
    with pytest.raises(
        ScenarioError, match=r"s\.yaml:\d+: plan\.gpus\.one: cost linear .* kv_tokens of that GPU"
    ) as caught:
        make_plan(load_scenario(replay.source), Sweep(tmp_path / replay.name))
    assert "--set" not in str(caught.value)


def test_a_prompt_beyond_a_profile_is_said_of_its_gpu_before_anything_runs(replay: Scenario, tmp_path: Path) -> None:
    """With what to write there."""
    rows = [f"{ms},17000,2" for ms in range(0, 20_000, 100)]
    (Path(replay.source).parent / "my.csv").write_text("\n".join(["ts,in,out", *rows]) + "\n")
    (Path(replay.source).parent / "near.json").write_text(PROFILE_OF_LLAMA.to_json(), encoding="utf-8")
    gpus = "plan.gpus={h: {cost: near.json, price: 2.00/h, kv_tokens: 160000}}"
    said = r"s.yaml:12: plan.gpus.h: continuous, .* 17000 tokens of one .* set extrapolate: true in plan.gpus.h.cost"
    with pytest.raises(ScenarioError, match=said):
        make_plan(with_plan(replay, gpus), Sweep(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_money_is_price_times_time(replay: Scenario) -> None:
    """730 hours a month of all GPUs; tokens by the mean rate."""
    book = Book(demand_of(replay), Sweep(Path("unused")))
    assert cost_per_month(book.offer(GpuGroup("one", "continuous", 1)), 3) == 2.0 * 3 * 730
    assert tokens_per_month(10, 0.5, 200) == 10 * 0.5 * 200 * 730 * 3600


@pytest.mark.parametrize(
    ("found", "counted"),
    [
        ([1, 2, 4], [1, 2, 4]),
        ([3, 2], [2, 2]),
        ([2, 5, 3, 4], [2, 3, 3, 4]),
        ([None, 2, 3], [2, 2, 3]),
        ([4, None, 1], [1, 1, 1]),
    ],
)
def test_what_a_class_adds_to_the_replicas_is_never_negative(found: list[int | None], counted: list[int]) -> None:
    """Where searches found more replicas for fewer classes, or none, those that hold more classes count for them."""
    assert tier_replicas(found) == counted


CLASSES = """workload={arrivals: {kind: poisson, mean_rate: 20/s}, output_cap: 16, duration: 3s, warmup: 1s,
 lengths: {prompt: {kind: fixed, tokens: 60}, output: {kind: fixed, tokens: 4}},
 classes: {chat: {share: 50%}, rest: {share: 50%, priority: 1}}}"""


def test_a_search_that_found_more_for_fewer_classes_makes_no_negative_cost(replay: Scenario, tmp_path: Path) -> None:
    """The group for all classes holds the important ones too, which then cost what it costs, and the others nothing."""
    scenario = with_plan(replay, CLASSES, "plan.target={rate: 20/s}", "plan.window=2s", "seeds=2")
    planned = make_plan(scenario, Sweep(tmp_path / "results" / scenario.name))
    ((names, found),) = planned.tiers
    assert names == ("chat",) and found.group is not None
    planned.tiers = [(names, replace(found, group=replace(found.group, replicas=7)))]
    bill = planned.month(0)
    rows = tables_of(planned)["classes"]
    assert [row["cost_per_month_tiered"] for row in rows] == [bill, 0]


DECODE, PREFILL = {"block": "A", "decode": [9], "chunks": []}, {"block": "C", "decode": [], "chunks": [[9, 0]]}
ENERGY = {"decode": {"step": DECODE, "joules": 5.0}, "prefill": {"step": PREFILL, "joules": 6.0}}
SAMPLES = (DECODE | {"ns": 10_000_000}, PREFILL | {"ns": 10_000_000})


def test_power_is_joules_over_the_time_of_the_same_step() -> None:
    """Joules over the time of the profile's own steps are watts; none without both. 3.6 J each are 1 kWh a million."""
    assert watts(ENERGY, SAMPLES) == {"decode": pytest.approx(500), "prefill": pytest.approx(600)}
    assert watts(None, SAMPLES) is None and watts(ENERGY, SAMPLES[:1]) is None
    assert energy_kwh(3.6) == 1 and energy_kwh(None) is None


@pytest.mark.parametrize("known", ["measured", "estimated", ""])
def test_a_plan_adds_the_energy_that_is_known(replay: Scenario, tmp_path: Path, known: str) -> None:
    """At 1000 a kWh the cost grows by a thousand times the kWh; power lies between that of both kinds of steps that the
    profile measured. Without a measurement it is the estimate for the H200; without a GPU all of it is unknown. The
    plan says which."""
    profile = replace(PROFILE_OF_LLAMA, gpu=PROFILE_OF_LLAMA.gpu if known else None)
    if known == "measured":
        profile = replace(profile, energy=ENERGY, samples=SAMPLES)
    (tmp_path / "mine.json").write_text(profile.to_json())
    cost = f"{{kind: profile, profile: {tmp_path / 'mine.json'}}}"
    gpus = f"plan.gpus={{one: {{cost: {cost}, price: 2.00/h, kv_tokens: 16000}}}}"
    scenario = with_plan(replay, gpus, "plan.energy_price=1000/kWh", "seeds=1")
    planned = make_plan(scenario, Sweep(tmp_path / "results" / "energy"))
    (row,), assumed = (
        tables_of(planned)["configurations"],
        {one["what"]: one["assumed"] for one in assumptions(planned)},
    )
    held = planned.held(0)
    assert held is not None and row["cost_per_1m_output_tokens"] is not None
    assert assumed["price of energy"].startswith("$ 1000 a kWh")
    if not known:
        assert row["energy_kwh_per_1m_output_tokens"] is row["cost_per_1m_with_energy"] is held.mean("power_w") is None
        assert assumed["energy of one"].startswith("power: unknown, no GPU of the catalog is meant")
        return
    power, joules = held.mean("power_w"), held.mean("energy_j_per_output_token")
    said, low, high = {
        "measured": ("measured by its profile, in a step of decodes and in one of prompts", 500, 600),
        "estimated": ("power of h200, an estimate: 447 W in a step", 447, 700),
    }[known]
    assert said in assumed["energy of one"]
    assert power is not None and low < power < high and joules is not None
    assert row["energy_kwh_per_1m_output_tokens"] == pytest.approx(joules / 3.6)
    assert row["cost_per_1m_with_energy"] == pytest.approx(row["cost_per_1m_output_tokens"] + 1000 * joules / 3.6)


def test_one_class_used_all_of_the_steps(replay: Scenario, tmp_path: Path) -> None:
    """The only class has the whole bill."""
    book = Book(demand_of(replay), Sweep(tmp_path / "results" / "s"))
    ask = Ask(GpuGroup("one", "continuous", 1))
    book.run([(ask, (0,))])
    folder = book.sweep.home / "points" / book.probe(ask).results[0]["point"]
    assert shares_by_use(folder, ("",)) == {"": 1.0}
