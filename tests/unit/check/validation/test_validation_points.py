"""Which points a validation has, and which saved live runs it may judge."""

from __future__ import annotations

from dataclasses import replace

import pytest

from batchsim.base.errors import ScenarioError
from batchsim.check.validation.planned_points import (
    check_profile,
    parse_loads,
    parse_shares,
    plan,
    saturations,
    sort_saved,
)
from batchsim.cost.calibrated import Calibrated
from batchsim.cost.profile import load_profile, profile_names
from batchsim.scenario.saturation import overloaded
from tests.support.validation_samples import LOAD, Sample, case, demo, played


def test_points_are_shares_of_each_policys_own_saturation() -> None:
    """Half and four fifths unless told otherwise; stated loads get the share that they are."""
    policies = list(demo().scenario.specs)
    rates = saturations(case(), policies)
    assert rates["static"] < rates["continuous"] < rates["preemptive"]
    chosen = plan(case(), policies, rates, shares=None, loads=None)
    assert [(p.policy.name, p.share) for p in chosen[:2]] == [("static", 0.5), ("static", 0.8)]
    assert chosen[1].load == pytest.approx(0.8 * rates["static"])
    (stated,) = plan(case(), policies[:1], rates, shares=None, loads=[3.0])
    assert stated.share == pytest.approx(3 / rates["static"])


def test_saturation_is_told_from_many_times_what_a_batch_holds() -> None:
    """1,000 requests, or ten times the largest batch where that is more."""
    assert overloaded(demo()).traffic.requests == 1000
    spec = demo().scenario.find("continuous")
    wide = replace(spec, config=replace(spec.config, max_num_seqs=256))
    more = replace(demo().scenario, specs=(*demo().scenario.specs, wide))
    assert overloaded(replace(demo(), scenario=more)).traffic.requests == 2560


def test_without_a_rate_the_scenarios_own_loads_are_taken() -> None:
    """A load axis that is no rate has no saturation: no shares of it, and none may be asked for."""
    other = replace(case(), setup=replace(demo(), load_name="", loads=(1.0,)))
    policies = list(demo().scenario.specs)[:1]
    assert saturations(other, policies) == {}
    (only,) = plan(other, policies, {}, shares=None, loads=None)
    assert (only.load, only.share) == (1.0, None)
    with pytest.raises(ScenarioError, match="no saturation rate"):
        plan(other, policies, {}, shares=[0.5], loads=None)
    with pytest.raises(ScenarioError, match="both are given"):
        plan(case(), policies, {}, shares=[0.5], loads=[1.0])


@pytest.mark.parametrize("text", ["50", "1", "1.1", "0%", "x%", "50%,", "nan%", "-5%", "-0.5"])
def test_what_is_no_share_is_refused(text: str) -> None:
    """One line that shows how shares are written."""
    with pytest.raises(ScenarioError, match="50%,110%"):
        parse_shares(text)


def test_shares_and_loads_are_read() -> None:
    """Shares may exceed saturation; loads are plain numbers above 0."""
    assert parse_shares("50%, 110%, 0.8") == pytest.approx([0.5, 1.1, 0.8])
    assert parse_loads("2,4.5") == [2.0, 4.5]
    for text in ("2/s", "", "0", "inf"):
        with pytest.raises(ScenarioError, match="--loads"):
            parse_loads(text)


def test_saved_runs_are_sorted_and_those_of_others_left_out() -> None:
    """Runs of other requests are counted and dropped, the rest ordered by policy, load and repeat."""
    runs: list[Sample] = [
        played("continuous", LOAD, repeat=1),
        played("static", LOAD),
        played("continuous", LOAD),
        replace(played("continuous", LOAD), load=LOAD + 1),
        replace(played("continuous", LOAD), policy="sjf"),
    ]
    saved = sort_saved(case(), runs, [])
    assert list(saved.points) == [("static", LOAD), ("continuous", LOAD)]
    assert [run.repeat for run in saved.points["continuous", LOAD]] == [0, 1]
    assert saved.num_others == 2
    with pytest.raises(ScenarioError, match="none of which served the requests"):
        sort_saved(case(), runs[3:], [])
    with pytest.raises(ScenarioError, match="differ"):
        sort_saved(case(), [runs[1], replace(runs[2], num_blocks=7)], [])
    with pytest.raises(ScenarioError, match="on another"):
        sort_saved(case(), [runs[1], replace(runs[2], made=runs[2].made | {"hardware": {"gpu": "another"}})], [])


def test_saved_runs_of_another_model_or_other_knobs_are_refused() -> None:
    """The first value that differs is named with both sides, for a run that says too little of itself as well."""
    run = played("continuous", LOAD)
    model, knobs = run.made["model"], run.made["knobs"]
    for changed, message in [
        ({"model": model | {"hidden_size": 4096}}, "had model.hidden_size 4096, the scenario 128"),
        ({"block_size": 32}, "had block_size 32, the scenario 16"),
        (
            {"knobs": knobs | {"config": knobs["config"] | {"max_num_seqs": 8}}},
            "had knobs.config.max_num_seqs 8, the scenario 16",
        ),
        ({"max_model_len": 128}, "had max_model_len 128"),
        ({"model": {}}, "had model.model_type None"),
    ]:
        with pytest.raises(ScenarioError, match=message):
            sort_saved(case(), [replace(run, made=run.made | changed)], [])
    renamed = replace(run, made=run.made | {"model": model | {"name": "by another name"}})
    assert sort_saved(case(), [renamed], []).num_others == 0


def test_saved_runs_go_with_a_profile_of_their_machine_and_executor() -> None:
    """One measured on another processor is refused, and any that was imported."""
    run = played("continuous", LOAD)
    imported = load_profile(profile_names()[0])
    measured = replace(imported, origin="measured", gpu=None, hardware=run.made["hardware"])
    for hardware, message in [
        ({"device": "cpu", "cpu": "none"}, ""),
        ({"device": "cpu", "cpu": "Abacus 9"}, "ran on none, profile .* is of Abacus 9"),
        ({"device": "cuda", "cpu": "none", "gpu": "A Board"}, "ran on none, profile .* is of A Board"),
    ]:
        other = case(Calibrated(replace(measured, hardware=hardware)))
        if not message:
            assert sort_saved(other, [run], []).num_others == 0
            continue
        with pytest.raises(ScenarioError, match=message):
            sort_saved(other, [run], [])
    check_profile(Calibrated(measured))
    check_profile(case().setup.cost)
    with pytest.raises(ScenarioError, match="the error would not be the simulator's"):
        check_profile(Calibrated(imported))
