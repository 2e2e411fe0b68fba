"""A counterfactual equals a run with that change, and says what it compares."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from batchsim.base.errors import ScenarioError
from batchsim.explain.counterfactual import LIVE, OTHER_CODE, Counterfactual, check_changes, counterfactual
from batchsim.kernel.record import Records
from batchsim.report.text.counterfactual_text import counterfactual_data, counterfactual_text
from batchsim.results.checksums import SEAL, sealed
from batchsim.results.read import Results, load_results
from batchsim.scenario import Point, load_scenario
from batchsim.scenario.point import simulate_point
from batchsim.scenario.setup import Setup
from batchsim.study.curves.run import run_scenario
from tests.support.scenarios import run_in

SCENARIO = """\
model: llama-3.1-8b
cost: {kind: linear, base: 8ms, per_token: 80us}
kv: {tokens: 1600}
workload:
  arrivals: {kind: poisson, mean_rate: 6/s}
  lengths:
    prompt: {kind: uniform, min: 50, max: 500}
    output: {kind: uniform, min: 10, max: 60}
  output_cap: 100
  requests: 40
policies:
  continuous: {max_num_seqs: {best_of: [4, 8]}, max_num_batched_tokens: 256}
  preemptive: {max_num_seqs: 8, max_num_batched_tokens: 256, by: recompute, victim: newest, watermark: 5%}
load: {mean_rate: [6/s, 9/s]}
slo: ttft<300ms & tpot<16ms @ 99%
seeds: 2
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The scenario above, run. To be read only."""
    folder = tmp_path_factory.mktemp("counterfactual")
    return run_in(folder, SCENARIO)


def _direct(results: Results, policy: str, load: float, seed: int, *overrides: str) -> Records:
    """The point run on its own with --set."""
    path = results.path.parents[1] / "s.yaml"
    scenario = load_scenario(str(path), overrides=overrides)
    (spec,) = [spec for spec in scenario.specs if spec.label == policy]
    return simulate_point(Setup.of(scenario), Point(spec, load, seed)).records


def _same(one: Records, other: Records) -> bool:
    names = ("requests", "steps", "states")
    return one.texts == other.texts and all(getattr(one, n).tobytes() == getattr(other, n).tobytes() for n in names)


@pytest.mark.parametrize(
    ("change", "override"),
    [
        ("kv.tokens=+20%", "kv.tokens=1920"),
        ("kv.tokens=1200", "kv.tokens=1200"),
        ("cost.base=-50%", "cost.base=4ms"),
        ("policies.preemptive.watermark=+100%", "policies.preemptive.watermark=10%"),
        ("policies.preemptive.max_num_seqs=+50%", "policies.preemptive.max_num_seqs=12"),
        ("workload.output_cap=70", "workload.output_cap=70"),
    ],
)
def test_it_equals_a_run_with_that_change(results, change, override):
    """Records are equal bit for bit, and the unchanged side is what the results hold."""
    found = counterfactual(results, "preemptive", 9.0, 1, [change])
    assert _same(found.changed.records, _direct(results, "preemptive", 9.0, 1, override))
    assert not found.rerun and found.base.records.requests.tobytes() == (
        results.records("preemptive", 9.0, 1).requests.tobytes()
    )


@pytest.mark.parametrize("size", ["64GB", "2TB"])
def test_a_tier_may_be_given_to_a_run_without_one(size: str, tmp_path: Path) -> None:
    """By the key of its size, as a run of a scenario that states it whole: what KV in the host's memory would do."""
    text = SCENARIO.replace("{kind: linear, base: 8ms, per_token: 80us}", "{kind: roofline, gpu: h100}")
    policies = text[text.index("policies:") : text.index("load: {")]
    text = text.replace(policies, "policies:\n  vllm: {}\n").replace("kv: {tokens: 1600}", "kv: {tokens: 4000}")
    text = text.replace("workload:", "workload:\n  sessions: {turns: {kind: fixed, tokens: 4}, think_time: 1s}")
    text = text.replace("requests: 40", "duration: 8s")
    results = run_in(tmp_path, text)
    found = counterfactual(results, "vllm", 6.0, 0, [f"kv.tiers.0.size={size}"])
    assert [(each.key, each.before, each.after) for each in found.changes] == [("kv.tiers.0.size", None, size)]
    assert _same(found.changed.records, _direct(results, "vllm", 6.0, 0, f"kv.tiers=[{{kind: host, size: {size}}}]"))
    assert not _same(found.changed.records, found.base.records)
    with pytest.raises(ScenarioError, match=r"kv\.tiers\.0\.size is not stated, or no number, so \+20% is of nothing"):
        counterfactual(results, "vllm", 6.0, 0, ["kv.tiers.0.size=+20%"])


def test_several_changes_at_once(results):
    """All of them are in the changed run."""
    found = counterfactual(results, "preemptive", 9.0, 0, ["kv.tokens=+20%", "policies.preemptive.max_num_seqs=4"])
    assert [(c.before, c.after) for c in found.changes] == [(1600, 1920), (8, 4)]
    expected = _direct(results, "preemptive", 9.0, 0, "kv.tokens=1920", "policies.preemptive.max_num_seqs=4")
    assert _same(found.changed.records, expected)


def test_the_best_variant_is_the_one_that_is_changed(results):
    """Of a knob with best_of, the value that the results chose at that load stays, and percentages are of it."""
    row = results.points[(results.points["policy"] == "continuous") & (results.points["load"] == 9.0)].iloc[0]
    best = int(str(row["variant"]).split()[-1])
    found = counterfactual(results, "continuous", 9.0, 0, ["kv.tokens=+10%"])
    expected = _direct(results, "continuous", 9.0, 0, "kv.tokens=1760", f"policies.continuous.max_num_seqs={best}")
    assert _same(found.changed.records, expected)
    doubled = counterfactual(results, "continuous", 9.0, 0, ["policies.continuous.max_num_seqs=+100%"])
    assert doubled.changes[0].after == 2 * best


def test_derived_kv_memory_is_what_a_percentage_is_of(tmp_path):
    """Without kv.tokens in the file, +20 % is of the tokens that the GPU left room for."""
    text = SCENARIO.replace("{kind: linear, base: 8ms, per_token: 80us}", "h200").replace("kv: {tokens: 1600}\n", "")
    (tmp_path / "d.yaml").write_text(text)
    scenario = load_scenario(str(tmp_path / "d.yaml"), overrides=["seeds=1", "load.mean_rate=[6/s]"])
    found = counterfactual(run_scenario(scenario, out=tmp_path), "preemptive", 6.0, 0, ["kv.tokens=+20%"])
    budget = Setup.of(scenario).kv
    tokens = budget.num_blocks * budget.block_size
    assert (found.changes[0].before, found.changes[0].after) == (tokens, round(1.2 * tokens))
    assert not found.rerun


def test_kv_memory_that_a_change_states_is_no_share_of_a_gpu(tmp_path):
    """A file that says which share of the GPU to take is changed to so many tokens all the same."""
    text = SCENARIO.replace("{kind: linear, base: 8ms, per_token: 80us}", "h200")
    (tmp_path / "d.yaml").write_text(text.replace("kv: {tokens: 1600}", "kv: {utilisation: 80%, block_size: 32}"))
    scenario = load_scenario(str(tmp_path / "d.yaml"), overrides=["seeds=1", "load.mean_rate=[6/s]"])
    found = counterfactual(run_scenario(scenario, out=tmp_path), "preemptive", 6.0, 0, ["kv.tokens=-20%"])
    tokens = Setup.of(scenario).kv.tokens
    assert (found.changes[0].before, found.changes[0].after) == (tokens, round(0.8 * tokens))


def test_misses_that_vanish_and_appear_are_told_by_request(results):
    """The sets are those of the two sides, and the text names them with the values before and after."""
    found = counterfactual(results, "preemptive", 9.0, 0, ["kv.tokens=+100%"])
    plain = counterfactual_data(found)
    before = set(found.base.misses["request_id"].tolist())
    after = set(found.changed.misses["request_id"].tolist())
    assert plain["misses"] == [len(before), len(after)] and before != after
    assert (set(plain["vanish"]), set(plain["appear"])) == (before - after, after - before)
    assert sum(row["misses"][1] for row in plain["causes"]) == len(after)
    in_slo = plain["metrics"]["in_slo"]
    assert in_slo == pytest.approx([1 - len(before) / 40, 1 - len(after) / 40])
    text = counterfactual_text(results, plain)
    assert "kv.tokens 1,600 → 3,200" in text and f"{len(before - after)} vanish" in text
    assert max(map(len, text.splitlines())) <= 100


def test_a_change_of_the_requests_compares_no_two(results):
    """Other prompts are other requests: counts alone are compared."""
    change = "workload.lengths.prompt={kind: uniform, min: 50, max: 900}"
    plain = counterfactual_data(counterfactual(results, "preemptive", 9.0, 0, [change]))
    assert plain["shared"] == 0 and plain["vanish"] is None
    assert "the requests differ" in counterfactual_text(results, plain)


def test_who_is_no_longer_judged_is_not_a_miss_that_vanished(results):
    """A longer warm-up leaves requests out: they are counted of one side alone."""
    plain = counterfactual_data(counterfactual(results, "preemptive", 9.0, 1, ["workload.warmup=2s"]))
    assert plain["misses"][0] > plain["misses"][1] and plain["requests"][0] > plain["requests"][1] == plain["shared"]
    assert plain["vanish"] == plain["appear"] == []


def test_users_who_wait_for_answers_are_compared_by_turn(tmp_path):
    """In a closed loop a request is sent when its user was answered: times differ, user and turn are the same."""
    text = SCENARIO.replace("{kind: poisson, mean_rate: 6/s}", "{kind: closed_loop, users: 6, think_time: 50ms}")
    ran = run_in(tmp_path, text.replace("load: {mean_rate: [6/s, 9/s]}\n", "").replace("seeds: 2", "seeds: 1"))
    found = counterfactual(ran, "preemptive", 1.0, 0, ["cost.base=2ms"])
    plain = counterfactual_data(found)
    assert found.closed_loop and plain["shared"] == len(found.shared) > 20
    sent = [side.records.requests["sent_ns"].tolist() for side in (found.base, found.changed)]
    assert sent[0] != sent[1]
    assert {*plain["vanish"], *plain["appear"], *plain["remain"]} <= found.shared
    more = counterfactual(ran, "preemptive", 1.0, 0, ["workload.arrivals.users=7"])
    assert not more.shared, "with other users, an id is another one's turn"


def test_turns_of_a_session_are_compared_whenever_they_were_sent(tmp_path):
    """The second turn waits for the first one's answer, and is the same request when that comes sooner."""
    text = SCENARIO.replace(
        "requests: 40", "duration: 5s\n  sessions: {turns: {kind: fixed, tokens: 3}, think_time: 100ms}"
    )
    ran = run_in(tmp_path, text.replace("load: {mean_rate: [6/s, 9/s]}\n", "").replace("seeds: 2", "seeds: 1"))
    found = counterfactual(ran, "preemptive", 1.0, 0, ["cost.base=7ms"])
    sent = [dict(zip(r["request_id"].tolist(), r["sent_ns"].tolist(), strict=True)) for r in _requests(found)]
    assert any(sent[0][i] != sent[1][i] for i in found.shared)


def _requests(found: Counterfactual):
    return [side.records.requests for side in (found.base, found.changed)]


def test_a_change_without_effect_says_so(results):
    """The objective changes no record; a knob that never binds does not either, and then that is said."""
    idle = counterfactual_data(counterfactual(results, "preemptive", 6.0, 0, ["max_waiting=1000"]))
    assert idle["no_effect"] and "no effect" in counterfactual_text(results, idle)
    looser = counterfactual(results, "preemptive", 9.0, 0, ["slo=ttft<10s & tpot<10s @ 99%"])
    assert looser.no_effect and len(looser.changed.misses) == 0 < len(looser.base.misses)
    assert "no effect" not in counterfactual_text(results, counterfactual_data(looser))


def _copy(results: Results, tmp_path: Path, **manifest: object) -> Results:
    shutil.copytree(results.path.parent, tmp_path / "s")
    path = tmp_path / "s" / results.path.name / "manifest.json"
    kept = {name: value for name, value in json.loads(path.read_text()).items() if name != SEAL}
    path.write_text(json.dumps(sealed(kept | manifest)))
    return load_results(path.parent)


def test_a_live_run_is_compared_simulation_with_simulation(results, tmp_path):
    """Its own records are measured, so both sides are simulated, and that is said."""
    found = counterfactual(_copy(results, tmp_path, live={"reason": ""}), "preemptive", 9.0, 0, ["kv.tokens=+20%"])
    assert found.rerun == LIVE and _same(found.base.records, _direct(results, "preemptive", 9.0, 0))
    assert "both sides here are simulations" in " ".join(
        counterfactual_text(results, counterfactual_data(found)).split()
    )


def test_results_of_other_code_are_simulated_again(results, tmp_path):
    """A point whose hash is not that of this code is not compared with a run of this code."""
    copy = _copy(results, tmp_path)
    copy.points["point"] = "0" * 12
    found: Counterfactual = counterfactual(copy, "preemptive", 9.0, 0, ["kv.tokens=+20%"])
    assert found.rerun == OTHER_CODE and _same(found.base.records, _direct(results, "preemptive", 9.0, 0))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("kv.tokens", "not of the form KEY=VALUE"),
        ("load.mean_rate=[3/s]", "Use batchsim run"),
        ("seeds=9", "Use batchsim run"),
        ("policies.preemptive=1", "names no knob"),
    ],
)
def test_what_is_no_change_of_a_point_is_refused(change, said):
    """One line that says what to write instead."""
    with pytest.raises(ScenarioError, match=said):
        check_changes([change])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["kv.tokens=1600", "kv.tokens=+20%"], "another change is of the same key"),
        (["kv={tokens: 1600}", "kv.tokens=+20%"], "another change is of the same key"),
        (["policies.a.x=1", "policies.b.x=1"], "changes knobs of a and b"),
    ],
)
def test_changes_that_do_not_go_together_are_refused(changes, said):
    """None of them is dropped in silence."""
    with pytest.raises(ScenarioError, match=said):
        check_changes(changes)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("max_waiting=+20%", "is not stated"),
        ("model=+20%", "is no number"),
        ("kv.tokens=8", "--counterfactual kv.tokens=8: kv: tokens 8 must hold"),
        ("kv.token=8000", "Did you mean tokens"),
        ("policies.preemptive.max_num_seq=4", "Did you mean max_num_seqs"),
        ("policies.continuous.max_num_seqs=4", "is of another policy"),
        ("policies.preemptive.max_num_seqs={best_of: [4, 8]}", "best_of is 2 points"),
        ("workload.arrivals.mean_rate=+20%", "load.mean_rate stands in its place"),
        ("kv.utilisation=80%", "kv.tokens stands in its place"),
        ("kv.tokens=[1,", "--counterfactual kv.tokens=[1,:1: not valid YAML"),
    ],
)
def test_values_that_cannot_be_are_refused_in_the_words_of_the_option(results, change, said):
    """The error of the scenario, headed by the option that asked for it."""
    with pytest.raises(ScenarioError, match="--counterfactual") as error:
        counterfactual(results, "preemptive", 9.0, 0, [change])
    assert said in str(error.value)
