"""Simulated against live, on live runs that are simulations with a known distortion."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from batchsim.check.validation.comparison import MetricError
from batchsim.check.validation.live_runs import FIGURES, LivePoint, judge, void
from batchsim.check.validation.load_shift import REACH, crossing, load_shifts
from batchsim.check.validation.step_error import ALL, StepPairs
from batchsim.cost.base import HostPart
from batchsim.cost.calibrated import Calibrated
from batchsim.cost.fitted import Fitted, StepTerms
from batchsim.cost.periods import REGIONS, periods_ns, regions
from batchsim.cost.profile import HostTerm
from batchsim.cost.work import TIME_TERMS, Columns, Terms, work_columns
from batchsim.kernel.acceptance import DraftCounts
from batchsim.kernel.record import STEP_DTYPE
from batchsim.metrics.table import METRICS
from batchsim.policies.systems.vllm.speculative_config import SpeculativeConfig
from batchsim.report.pictures.validation_plots import write_pictures
from batchsim.report.text.validation_text import DRAFTS, error_grid, machine_grid, markdown, report
from batchsim.report.validation_report import Validation, to_json
from tests.support.validation_samples import LOAD, Sample, case, demo, late, played, point, validation
from tests.unit.cost.test_profile import PROFILE


def row_of(found: Validation, latency: str) -> list[str]:
    """The cells of the first row of a latency in the table of errors, [] without one."""
    return next((row for row in error_grid(found) if row[2] == latency), [])


# ---- step times


def test_steps_slower_by_two_percent_are_predicted_two_percent_short() -> None:
    """Median, 95th percentile and bias of every region are what the distortion says, and the shares add up."""
    rows = point("preemptive", 1.02).steps
    assert [row.region for row in rows[:-1]] == [name for name in REGIONS if name in {row.region for row in rows}]
    assert rows[-1].region == ALL and rows[-1].n == sum(row.n for row in rows[:-1])
    assert sum(row.share for row in rows[:-1]) == pytest.approx(1)
    for row in rows:
        assert (row.p50, row.p95, row.bias) == pytest.approx((0.02 / 1.02, 0.02 / 1.02, 1 / 1.02 - 1), abs=1e-6)


def steps_of(*rows: dict[str, int]) -> np.ndarray:
    made = np.zeros(len(rows), STEP_DTYPE)
    for i, row in enumerate(rows):
        for name, value in row.items():
            made[i][name] = value
        made[i]["num_decode_tokens"] = row.get("num_decode_tokens", row.get("num_decode", 0))
    return made


def test_a_period_reaches_to_the_next_step_unless_the_engine_rested() -> None:
    """The gap to the next step counts, but not one in which there was nothing to run, nor one after the last step."""
    steps = steps_of(
        {"start_ns": 0, "duration_ns": 10},
        {"start_ns": 13, "duration_ns": 10},
        {"start_ns": 90, "duration_ns": 10},
    )
    assert periods_ns(steps, [0, 2]).tolist() == [13, 10, 10]


def test_regions_count_rows_with_their_padding() -> None:
    """Decode steps go by rows, those of ended sequences too; chunks alone are prefill, beside decodes mixed."""
    steps = steps_of(
        {"num_decode": 8},
        {"num_decode": 8, "pad_decode_rows": 1},
        {"num_decode": 65},
        {"num_chunks": 1},
        {"num_chunks": 1, "num_decode": 1},
    )
    assert [REGIONS[code] for code in regions(steps)] == list(REGIONS)


class HostApart:
    """A step takes 80 ns of kernels and 20 ns of host."""

    def explain(self, columns: Columns) -> Terms:
        ones = np.ones(len(columns["num_decode"]))
        return {name: ones * {"matmul": 80.0, "host": 20.0}.get(name, 0.0) for name in TIME_TERMS}


def test_kernels_and_host_are_judged_apart_where_both_were_measured() -> None:
    """100 ns of kernels in a period of 130 ns: kernels a fifth short, host a third; without kernel times, neither."""
    steps = steps_of({"duration_ns": 100, "num_decode": 1}, {"start_ns": 130, "duration_ns": 130, "num_decode": 1})
    apart = StepPairs.of(steps, [], np.array([100, 100]), HostApart()).errors()[-1]
    assert (apart.kernel_bias, apart.host_bias) == pytest.approx((-0.2, -1 / 3))
    whole = StepPairs.of(steps, [], np.empty(0), HostApart()).errors()[-1]
    assert (whole.kernel_bias, whole.host_bias) == (None, None)
    assert whole.bias == pytest.approx(100 / 130 - 1)


def test_ahead_of_results_a_period_is_the_longer_of_kernels_and_host() -> None:
    """100 ns of the device beside 20 ns of the host are a period of 100 ns, beside 130 ns one of 130 ns; the two are
    not compared apart, though kernels were timed."""
    steps = steps_of({"duration_ns": 100, "num_decode": 1}, {"start_ns": 100, "duration_ns": 100, "num_decode": 1})
    for host_ns, bias in ((20, 0), (130, 0.3)):
        found = StepPairs.of(steps, [], np.array([80, 80]), HostApart(), beside=HostPart(host_ns)).errors()[-1]
        assert (found.bias, found.kernel_bias) == (pytest.approx(bias), None)


@pytest.mark.parametrize("mode", ["serial", "overlapped"])
@pytest.mark.parametrize("host_ns", [1e6, 50e6])
def test_a_period_ahead_is_the_same_of_a_host_measured_serial_or_overlapped(
    mode: Literal["serial", "overlapped"], host_ns: float
) -> None:
    """All of the host's part counts, not what of an overlapped one sticks out of the kernels: else 50 ms beside kernels
    of less would be a period shorter than themselves."""
    steps = steps_of({"duration_ns": 1, "num_decode": 4, "context_tokens": 4000})
    cost = Calibrated(PROFILE, host=HostTerm(host_ns, 0, 0, mode, assumed=True))
    (predicted,) = StepPairs.of(steps, [], np.empty(0), cost.without_host(), beside=cost.host_part).predicted
    (device_ns,) = cost.kernel_ns(work_columns(steps))
    assert 1e6 < device_ns < 50e6
    assert predicted == max(host_ns, device_ns)


# ---- figures


def test_equal_runs_agree_in_everything() -> None:
    """A live run that is the simulation has no error, no spread over its repeats, and parts nowhere."""
    same = point("preemptive", 1.0, 1.0)
    assert all(metric.error in (0.0, None) for metric in same.errors)
    assert all(metric.agrees for metric in same.errors if metric.error is not None)
    assert [run.divergence for run in same.lives] == [None, None]
    assert {metric.name for metric in same.errors} == set(FIGURES)


@pytest.mark.slow
def test_drafts_are_told_as_supposed_and_as_measured() -> None:
    """The simulation's are the scenario's; those of all live runs that count are one law, and an error like others."""
    spec = SpeculativeConfig("ngram", 2, (0.5, 0.25), 0.8)
    plain = demo().scenario.find("vllm")
    policy = replace(plain, config=replace(plain.config, speculative_config=spec))
    one = played(policy, LOAD)
    counts = {"right": [30, 10], "decodes": 100, "drafted": 50}
    runs = [replace(one, repeat=i, made=one.made | {"drafts": counts}) for i in (0, 1)]
    found = judge(case(), policy, LOAD, 0.5, [*runs, replace(runs[0], reason="interrupted")])
    assert found.drafts == DraftCounts([60, 20], 200, 100)
    length = found.error("acceptance_length")
    assert length.error == 0 and length.simulated == pytest.approx(1 + 0.8 * 0.75, abs=0.05)
    words = "live; as measured, acceptance: [0.6, 0.2], found: 0.5"
    assert f"{length.simulated:.3g} simulated, 1.4 {words}" in " ".join(report(validation(found)).split())
    page = markdown(validation(found), [])
    assert DRAFTS in page and METRICS["acceptance_length"].words in page
    (said,) = json.loads(to_json(validation(found)))["points"]
    assert said["drafts"] == {"right": [60, 20], "decodes": 200, "drafted": 100}
    without = point("continuous", 1.0)
    assert without.drafts is None and DRAFTS not in report(validation(without)) + markdown(validation(without), [])


def test_errors_are_against_the_mean_of_the_live_runs_and_spreads_half_their_range() -> None:
    """Checked by hand on mean TPOT of two live runs."""
    both = point("continuous", 1.0, 1.04).error("tpot_mean_s")
    one, other = (point("continuous", f).error("tpot_mean_s").live for f in (1.0, 1.04))
    assert one is not None and other is not None and both.simulated == one
    assert both.live == pytest.approx((one + other) / 2)
    assert both.error == pytest.approx(one / ((one + other) / 2) - 1)
    assert both.spread == pytest.approx((other - one) / (one + other))
    assert both.agrees


@pytest.mark.parametrize(
    ("error", "spread", "agrees"),
    [(0.02, 0.01, True), (-0.021, 0.01, False), (0.0, None, False), (None, 0.1, False)],
)
def test_agreement_is_an_error_within_twice_the_spread(error: float, spread: float, agrees: bool) -> None:
    """Without a spread, or an error, nothing agrees."""
    assert MetricError("e2e_mean_s", 1.0, 1.0, error, spread, few=False).agrees is agrees


# ---- the load axis


def test_a_run_at_a_higher_load_is_found_on_the_load_axis() -> None:
    """Live figures that are the simulation's own at 5 % more load give +5 %, on the grid exactly."""

    def at(load: float) -> dict[str, float | None]:
        return dict(case().measure(case().simulate(demo().scenario.find("continuous"), load)).values)

    load = 20.0
    found = load_shifts(at, load, {"e2e_mean_s": at(load * 1.05)["e2e_mean_s"]})
    assert found["e2e_mean_s"] == pytest.approx(0.05, abs=0.003)


def test_a_load_within_the_cost_s_error_of_saturation_has_an_interval() -> None:
    """Of TTFT and E2E, in table, page, JSON and verdict; a cost of unknown error, and a light load, have numbers."""
    terms = StepTerms(base=2_200_000, prompt_token=80_000, sequence=330_000, context_token=600)
    known = case(Fitted(None, terms, "some steps", 0.2))
    spec = demo().scenario.find("continuous")
    busy, light = (judge(known, spec, load, 0.5, [played("continuous", load)]) for load in (20.0, 8.0))
    unknown = judge(case(), spec, 20.0, 0.5, [played("continuous", 20.0)])
    assert [found.is_within_error for found in (busy, light, unknown)] == [True, False, False]
    e2e = busy.error("e2e_mean_s")
    assert e2e.error is None and e2e.ends is not None and e2e.ends[0] < e2e.ends[1]
    assert busy.error("tpot_mean_s").ends is None and light.error("e2e_mean_s").error is not None
    found = validation(busy)
    assert "…" in row_of(found, "E2E")[5] and "within the cost's error of saturation" in report(found)
    (verdict,) = (one for one in found.verdicts if one.what == METRICS["e2e_mean_s"].words)
    assert verdict.met is None and "cannot be told without calibration" in verdict.found
    assert json.loads(to_json(found))["points"][0]["within_cost_error_of_saturation"]
    assert "…" in markdown(found, [])


def test_a_shift_is_interpolated_and_ends_with_the_reach() -> None:
    """On a queue's curve the shift is exact to the interpolation; what lies beyond the grid is not guessed."""

    def at(load: float) -> dict[str, float | None]:
        return {"t": 1 / (10 - load)}

    targets = {"t": 1 / (10 - 7 * 1.033)}
    assert load_shifts(at, 7.0, targets)["t"] == pytest.approx(0.033, abs=1e-3)
    assert load_shifts(at, 7.0, {"t": 1 / (10 - 7 * (1 + REACH + 0.01))})["t"] is None
    assert load_shifts(at, 7.0, {"t": None})["t"] is None


def test_falling_neighbours_are_pooled_and_a_level_is_met_in_its_middle() -> None:
    """The nearest rising curve, and on its flat parts the middle."""
    assert crossing(np.array([-0.1, 0.0, 0.1, 0.2]), [1.0, 3.0, 2.0, 4.0], 2.5) == pytest.approx(0.05)
    assert crossing(np.array([-0.1, 0.1]), [1.0, None], 1.0) is None


# ---- what counts


def test_runs_that_were_cut_or_whose_source_was_late_do_not_count() -> None:
    """They are left out of every figure and named; where none is left, nothing is claimed."""
    good, cut = played("continuous", LOAD), replace(played("continuous", LOAD, 1.3, repeat=1), reason="out_of_memory")
    behind = late(played("continuous", LOAD, 1.3, repeat=2), 10**9)
    found = judge(case(), demo().scenario.find("continuous"), LOAD, 0.5, [good, cut, behind])
    assert [run.played.repeat for run in found.counted] == [0]
    assert found.error("e2e_mean_s").error == 0
    said = " ".join(validation(found).warnings())
    assert "repeat 1: VOID, left out: cut: out_of_memory" in said and "repeat 2: VOID" in said
    nothing = judge(case(), demo().scenario.find("continuous"), LOAD, 0.5, [cut, behind])
    assert nothing.pairs is None and nothing.error("e2e_mean_s").live is None
    assert "no live run counts" in " ".join(validation(nothing).warnings())
    assert {verdict.met for verdict in validation(nothing).verdicts} == {None}


def drifted(*readings: float) -> LivePoint:
    """Runs 4 % slower than the cost says, beside these readings of the drift, by medians as by means."""
    run = played("vllm", LOAD, 1.04)
    drift = {"drift": list(readings), "drift_of_means": list(readings)}
    return judge(case(), demo().scenario.find("vllm"), LOAD, None, [replace(run, made=run.made | drift)])


def test_a_drift_is_said_beside_the_prediction_and_never_moves_it() -> None:
    """Runs 4 % slower on a machine seen to be 4 % slower keep their error; at par there is none."""
    found, still = drifted(0.03, 0.05), drifted(0.0, 0.0)
    assert found.simulation.end_ns == still.simulation.end_ns and found.unfit == ""
    assert (found.drift, found.bias) == pytest.approx((0.04, 1 / 1.04 - 1), abs=1e-6)
    assert found.bias_at_par == pytest.approx(0, abs=1e-6)
    assert (still.drift, still.bias, still.bias_at_par) == (0, found.bias, found.bias)
    assert machine_grid(validation(found))[1][2:] == ["+4.0", "-3.8", "+0.0"]
    point_json = json.loads(to_json(validation(found)))["points"][0]
    assert (
        point_json["machine_drift"],
        point_json["step_bias"],
        point_json["step_bias_at_par"],
        point_json["live_runs_calm"],
    ) == (
        found.drift,
        found.bias,
        found.bias_at_par,
        1,
    )
    (run,) = point_json["live"]
    assert (run["machine_drift"], run["machine_drift_of_means"], run["calm"]) == ([0.03, 0.05], [0.03, 0.05], True)
    assert "; drift +4.0 %" in markdown(validation(found), [])
    assert "; drift +3.0 %, not calm" in markdown(validation(drifted(0.01, 0.05)), [])


def test_a_machine_that_drifted_too_far_is_unfit() -> None:
    """Beyond 5 % either way nothing is claimed, and a new calibration is asked for."""
    assert "6.0% slower than when the profile was made (limit 5%): calibrate again" in drifted(0.06).unfit
    assert "6.0% faster" in drifted(-0.06).unfit
    assert {verdict.met for verdict in validation(drifted(0.06)).verdicts} == {None}
    assert drifted(0.049).unfit == ""


def test_a_run_that_was_disturbed_for_a_while_does_not_count() -> None:
    """Steps twice as long for a while void the run; all steps longer by as much, or a few, are no disturbance."""
    assert "its steps took 1.7 times as long" in void(played("vllm", LOAD, burst=range(200, 330)))
    assert void(played("vllm", LOAD, 2.0)) == ""
    assert void(played("vllm", LOAD, burst=range(200, 210))) == ""


def decoding(*rows_and_ms: tuple[int, int, int], swap_blocks: int = 0) -> Sample:
    """A run of nothing but 400 decode steps in a row: rows, padding rows and ms of each, repeated in turn."""
    made = [rows_and_ms[i * len(rows_and_ms) // 400] for i in range(400)]
    starts = np.cumsum([0, *(ms for _, _, ms in made)]) * 10**6
    steps = steps_of(
        *(
            {
                "start_ns": int(start),
                "duration_ns": ms * 10**6,
                "num_decode": rows,
                "pad_decode_rows": pads,
                "swap_blocks": swap_blocks if ms > 10 else 0,
            }
            for start, (rows, pads, ms) in zip(starts, made, strict=False)
        )
    )
    run = played("vllm", LOAD)
    return replace(run, records=replace(run.records, step_rows=steps), rested=np.empty(0, np.int64))


def test_a_disturbance_is_told_by_steps_of_as_many_rows() -> None:
    """Longer steps of more rows are usual; of as many rows, padding counted, they are not, but for swaps."""
    assert void(decoding((4, 0, 10), (4, 0, 10), (8, 0, 20))) == ""
    assert "took 2.0 times as long" in void(decoding((8, 0, 10), (4, 4, 10), (8, 0, 20)))
    assert void(decoding((8, 0, 10), (8, 0, 10), (8, 0, 20), swap_blocks=3)) == ""
    assert void(decoding(*[(8, 0, 10)] * 10, (8, 0, 12))) == ""
    assert void(decoding(*[(8, 0, 10)] * 39, (8, 0, 20))) == ""
    assert void(decoding(*[(8, 0, 10)] * 8, *[(8, 0, 20)] * 2)) != ""


def test_runs_that_do_not_count_stay_visible_and_more_than_half_of_them_are_too_many() -> None:
    """Two of four leave the point fit, two of three do not; both are said, listed and in the JSON."""
    good = [played("continuous", LOAD, repeat=i) for i in (0, 1)]
    cut = [replace(played("continuous", LOAD, repeat=i), reason="out_of_memory") for i in (2, 3)]
    half = judge(case(), demo().scenario.find("continuous"), LOAD, 0.5, [*good, *cut])
    most = judge(case(), demo().scenario.find("continuous"), LOAD, 0.5, [good[0], *cut])
    assert half.unfit == "" and "more than half of the live runs do not count" in most.unfit
    for found, message in ((half, "2 of 4 live runs do not count"), (most, "2 of 3 live runs do not count")):
        said = "\n".join(validation(found).warnings())
        assert message in said and said.count("VOID") == 2 and message in report(validation(found))
        (point,) = json.loads(to_json(validation(found)))["points"]
        assert (point["live_runs"], point["live_runs_not_counted"]) == (len(found.lives), 2)
        assert sum(run["void"] == "cut: out_of_memory" for run in point["live"]) == 2
    assert {verdict.met for verdict in validation(most).verdicts} == {None}


def test_a_machine_whose_runs_spread_too_far_is_unfit_and_judges_nothing() -> None:
    """Half a range above a tenth of mean TPOT is said loudly, and the point drops out of the verdicts."""
    found = point("continuous", 1.0, 1.5)
    assert "tpot" in found.unfit
    assert "UNFIT" in validation(found).warnings()[0]
    assert {verdict.met for verdict in validation(found).verdicts} == {None}
    assert point("continuous", 1.0, 1.02).unfit == ""
    assert any(metric.agrees for metric in found.errors)
    assert not any(row["agrees"] for row in json.loads(to_json(validation(found)))["points"][0]["errors"])
    assert "=" not in "".join(map("".join, error_grid(validation(found))))
    both = validation(found, point("static", 1.0))
    assert all("1 of 2 points not judged" in verdict.found for verdict in both.verdicts)


# ---- what is written


def test_the_json_holds_both_sides_arrivals_and_all_figures() -> None:
    """Intended and actual arrivals, steps, errors and spreads of every point, with lists of numbers on one line."""
    behind = late(played("continuous", LOAD), 1000)
    found = validation(judge(case(), demo().scenario.find("continuous"), LOAD, 0.5, [behind]))
    text = to_json(found)
    (point_json,) = json.loads(text)["points"]
    intended = point_json["intended_arrival_ns"]
    assert len(intended) == 60
    assert point_json["simulated"]["actual_arrival_ns"] == intended
    assert point_json["live"][0]["actual_arrival_ns"] == [ns + 1000 for ns in intended]
    assert point_json["simulated"]["num_steps"] == point_json["live"][0]["num_steps"] > 0
    assert {row["name"] for row in point_json["errors"]} == set(FIGURES)
    assert max(map(len, text.splitlines())) > 300
    assert METRICS["output_tokens_per_s"].words == "output tokens per s" and METRICS["ttft_p99_s"].words == "ttft p99"


def test_the_report_ends_with_the_error_table_and_keeps_its_width() -> None:
    """A line a point, errors with their spread; no line is wider than a terminal."""
    found = validation(point("preemptive", 1.15, 1.3, 1.4), point("continuous", 1.0, 1.02), point("static", 1.02))
    lines = report(found).splitlines()
    assert max(map(len, lines)) <= 100
    grid = error_grid(found)
    assert [row[0] for row in grid if row[0]] == ["policy", "! preemptive", "continuous", "static"]
    assert [line.split()[0] for line in lines[-3:]] == ["E2E", "requests/s", "tokens/s"]
    assert "arrived at" in report(found) or "none in" in report(found)
    cells = row_of(found, "TTFT")
    assert cells[1] == "14 50%" and "±" in cells[5]


def test_a_policy_that_streams_nothing_has_no_pace_to_compare(tmp_path: Path) -> None:
    """Without TPOT on either side its cell is a dash, its bound has no verdict, and the picture says so."""
    whole = replace(played("static", LOAD), streams=False)
    spec = demo().scenario.find("static")
    silent = replace(spec, config=replace(spec.config, respond="batch_end"))
    found = validation(judge(case(), silent, LOAD, None, [whole]))
    assert row_of(found, "TPOT") == [] and row_of(found, "E2E")
    assert [verdict.met for verdict in found.verdicts if verdict.what == "tpot mean"] == [None]
    assert write_pictures(found, tmp_path / "v")[0].stat().st_size > 10_000


@pytest.mark.slow
def test_the_page_and_the_pictures_are_written(tmp_path: Path) -> None:
    """Markdown with a section a point, and two pictures; without a live run that counts, only one."""
    found = validation(point("continuous", 1.0, 1.02), point("static", 1.02))
    pictures = write_pictures(found, tmp_path / "validation-x")
    assert [picture.name for picture in pictures] == ["validation-x.png", "validation-x-steps.png"]
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)
    page = markdown(found, [picture.name for picture in pictures])
    assert page.count("\n## ") == 4 and "| ttft mean |" in page and "validation-x-steps.png" in page
    cut = replace(played("continuous", LOAD), reason="interrupted")
    nothing = validation(judge(case(), demo().scenario.find("continuous"), LOAD, None, [cut]))
    assert len(write_pictures(nothing, tmp_path / "n")) == 1
    assert "VOID" in markdown(nothing, [])
