"""The pictures: what is drawn and what is left out. How they look is for eyes."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.lines import Line2D

from batchsim.report.pictures import closeup, plots
from batchsim.report.pictures.curve_lines import label_loads
from batchsim.report.pictures.frontier_picture import draw_throughput_latency, pareto
from batchsim.report.pictures.palette import contrast_to_white, policy_styles
from batchsim.report.pictures.plots import draw_slo_share
from batchsim.report.pictures.style import (
    figure,
    frame,
    growth_notes,
    house_style,
    put_around,
    seconds_text,
    time_ticks,
)
from batchsim.report.reading import FREE_DRAFTS, GPU, STATED_DRAFTS, USER, log_ends, sweeps, systems_note
from batchsim.report.slo_shares import LatencyPanel, latency_panels, slo_bounds, slo_shares
from batchsim.results.knobs import speculation
from tests.support.report_samples import FOUR, NUM_BLOCKS, SEVEN, sample_results


def axes() -> Any:
    return Figure().subplots()


def curve(ax: Any, color: str) -> tuple[list[float], list[float]]:
    """x and y of the first solid line in `color`."""
    line = next(line for line in ax.lines if to_hex(line.get_color()).upper() == color and line.get_linestyle() == "-")
    return list(line.get_xdata()), list(line.get_ydata())


def crosses(ax: Any) -> dict[str, float]:
    """x of every cross, by colour."""
    return {to_hex(m.get_color()).upper(): float(m.get_xdata()[0]) for m in ax.lines if m.get_marker() == "x"}


def color_of(results: Any, policy: str) -> str:
    return policy_styles(sweeps(results))[policy].color


def test_unstable_points_are_no_points_of_a_curve():
    """The curve has a hole there, and a cross stands at the load from which the queue grows."""
    results, ax = sample_results(), axes()
    plots.draw_latency(ax, results, LatencyPanel("ttft"), "p99")
    x, y = curve(ax, color_of(results, "dynamic"))
    assert [load for load, value in zip(x, y, strict=True) if np.isfinite(value)] == [1.0, 2.0, 4.0]
    expected = {"static": 4.0, "dynamic": 8.0, "continuous": 20.0}
    assert crosses(ax) == {color_of(results, policy): load for policy, load in expected.items()}


def test_policy_without_the_metric_is_named_not_drawn():
    """Static has no TPOT: neither curve nor cross in its colour, but its name above the panel."""
    results, ax = sample_results(), axes()
    plots.draw_latency(ax, results, LatencyPanel("tpot"), "p99")
    assert color_of(results, "static") not in {to_hex(line.get_color()).upper() for line in ax.lines}
    assert ax.get_title(loc="right") == "no value: static (bs 16)"


def test_percentiles_of_few_observations_have_open_markers():
    """At load 1 the marker is white, at load 2 it is filled."""
    results, ax = sample_results(), axes()
    plots.draw_latency(ax, results, LatencyPanel("ttft"), "p99")
    color = color_of(results, "preemptive")
    faces = {
        float(x): to_hex(line.get_markerfacecolor()).upper()
        for line in ax.lines
        if to_hex(line.get_color()).upper() == color and line.get_marker() == "^"
        for x in line.get_xdata()
    }
    assert faces[1.0] == "#FFFFFF" and faces[2.0] == color


@pytest.mark.parametrize(
    ("slo", "metric", "lines"),
    [
        ("ttft<1s & tpot<50ms @ 99%", "ttft_p50_s", []),
        ("ttft<1s & tpot<50ms @ 99%", "ttft_p99_s", ["SLO\n1 s"]),
        ("ttft<1s @ 50%", "ttft_p50_s", ["SLO\n1 s"]),
        ("ttft<1s @ 50%", "ttft_p99_s", []),
        ("ttft<1s & tpot<50ms @ 99%", "norm_latency_p99_s", []),
        ("p99(ttft)<500ms, p50(ttft)<80ms", "ttft_p99_s", ["SLO\n500 ms"]),
        ("p90(ttft)<500ms", "ttft_p99_s", []),
    ],
)
def test_slo_is_drawn_where_it_applies(slo: str, metric: str, lines: list[str]):
    """A bound that most requests must keep is one on the tail, not on the median; one on a percentile stands there."""
    ax = axes()
    latency, _, percentile = metric.removesuffix("_s").rpartition("_")
    plots.draw_latency(ax, sample_results(slo=slo), LatencyPanel(latency), percentile)
    assert [text.get_text() for text in ax.texts] == lines


def test_throughput_picture_marks_what_an_overloaded_policy_still_delivers():
    """The cross stands at the throughput achieved at the first load at which the queue grows."""
    results, ax = sample_results(), axes()
    draw_throughput_latency(ax, results)
    assert crosses(ax)[color_of(results, "static")] == pytest.approx(3.4 * 200)


def test_pareto_keeps_what_nothing_beats():
    """A point worse in both is dropped, as is one equal in one and worse in the other."""
    assert pareto([(1, 5), (2, 4), (2, 3), (1, 1), (3, 1)]) == [(3, 1), (2, 4), (1, 5)]
    assert pareto([]) == []


@pytest.mark.parametrize(
    ("low", "high", "texts"),
    [
        (0.2, 0.9, ["200 ms", "300 ms", "500 ms", "700 ms"]),
        (5, 500, ["5 s", "10 s", "20 s", "60 s", "2 min", "5 min"]),
        (0.01, 4000, ["10 ms", "100 ms", "1 s", "10 s", "60 s", "10 min", "60 min"]),
        (3600, 86_400 * 400, ["60 min", "6 h", "24 h", "10 d", "100 d", "365 d"]),
    ],
)
def test_times_on_an_axis_are_round_in_the_unit_that_they_are_written_in(low: float, high: float, texts: list[str]):
    """500 s is no tick, since it would read 8.33 min."""
    assert [seconds_text(tick) for tick in time_ticks(low, high)] == texts


def test_a_band_wider_than_its_value_stays_above_zero():
    """On a logarithmic axis an interval reaches as far down, by factor, as up; a narrow one is that of the table."""
    low, high = log_ends(np.array([1.0, 1.0]), np.array([3.0, 0.01]))
    assert high.tolist() == [4.0, 1.01] and low[0] == 0.25 and low[1] == pytest.approx(0.99, abs=2e-4)
    values = np.random.default_rng(0).random(1000)
    low, high = log_ends(values, np.where(values < 0.5, 0.0, 1e-18))
    assert (low == values).all() and (high == values).all(), "matplotlib refuses a bar that ends beyond its value"
    results, ax = sample_results(noise=3.0), axes()
    plots.draw_latency(ax, results, LatencyPanel("ttft"), "p99")
    bottoms = [np.nanmin(path.vertices[:, 1]) for band in ax.collections for path in band.get_paths()]
    assert bottoms and min(bottoms) > 0.05 * np.nanmin(results.summary["ttft_p99_s"])


def test_the_share_within_the_slo_is_drawn_with_the_share_asked_for():
    """Every load of every policy, those at which the queue grows as crosses; the dashed line stands at the share."""
    results, ax = sample_results(), axes()
    (share,) = slo_shares(results)
    draw_slo_share(ax, results, share)
    dashed = [line for line in ax.lines if to_hex(line.get_color()) == "#000000"]
    assert [line.get_ydata()[0] for line in dashed] == [pytest.approx(2.0)]
    grows = {to_hex(m.get_color()).upper(): list(m.get_xdata()) for m in ax.lines if m.get_marker() == "x"}
    assert grows[color_of(results, "static")] == [4.0, 8.0, 12.0, 16.0, 20.0]
    _, y = curve(ax, color_of(results, "preemptive"))
    assert y == pytest.approx([-np.log10(1 - v) for v in sweeps(results)[3].values("in_slo")])


def test_only_objectives_of_single_requests_have_a_share():
    """A percentile is no share of the requests; where classes have objectives of their own each has a share."""
    assert slo_shares(sample_results(slo="p99(ttft)<500ms")) == []
    results = sample_results()
    results.manifest["objective"] = "chat: ttft<1s @ 90%"
    results.scenario["workload"]["classes"] = {"chat": {"slo": "ttft<1s @ 90%"}, "rest": {}, "none": {}}
    results.summary["in_slo[chat]"], results.summary["in_slo[rest]"] = 0.9, 0.5
    found = [(share.request_class, share.target) for share in slo_shares(results)]
    assert found == [("chat", 0.9), ("rest", 0.99)]


def test_classes_with_objectives_of_their_own_have_panels_of_their_own():
    """Each class its TTFT and TPOT, its E2E where an objective bounds that, and its own bounds; no line is of all."""
    results = sample_results()
    results.manifest["objective"] = "chat: ttft<1s @ 90%; batch: e2e<30s @ 99%"
    results.scenario["workload"]["classes"] = {"chat": {"slo": "ttft<1s @ 90%"}, "batch": {"slo": "e2e<30s @ 99%"}}
    panels = latency_panels(results)
    assert [panel.metric("p99") for panel in panels] == [
        "ttft_p99_s[chat]", "tpot_p99_s[chat]", "ttft_p99_s[batch]", "tpot_p99_s[batch]", "e2e_p99_s[batch]",
    ]  # fmt: skip
    assert [slo_bounds(results, panel, "p99") for panel in panels] == [[1.0], [], [], [], [30.0]]
    assert slo_bounds(results, LatencyPanel("ttft")) == []


def test_a_footer_explains_crosses_where_there_are_some():
    """And what is shaded below them."""
    at_rest = sample_results({"dynamic": ("dynamic", "dynamic", 60.0)})
    for results, there in ((sample_results(), True), (at_rest, False)):
        words = " ".join(text.get_text() for text in plots.p99_vs_qps_figure(results).texts)
        assert [mark in words for mark in ("× in the grey strip", "shaded: the queue grows")] == [there] * 2


def test_loads_whose_numbers_have_no_room_are_counted_in_words():
    """All that are not written; one is no plural, and where all are written nothing is said."""
    said = []
    for count in range(1, 9):
        ax, loads = axes(), tuple(2 + k / 1000 for k in range(count))
        ax.set(xlim=(0, 200), ylim=(0, 3000))
        label_loads(ax, sample_results({"continuous": FOUR["continuous"]}, loads=loads), USER, GPU)
        left = count - len(ax.texts)
        assert ax.get_title(loc="right") == (
            f"{left} load{'s have' if left > 1 else ' has'} no number: no room" if left else ""
        )
        said.append(left)
    assert {0, 1, 2} <= set(said)


def test_no_line_leads_to_a_cross_and_crosses_at_one_load_stand_apart():
    """Where queues grow there is no latency: each cross is alone in the strip at the panel's top."""
    ax = axes()
    twins = {"a": ("continuous", "continuous", 8.0), "b": ("preemptive", "preemptive", 8.0)}
    plots.draw_latency(ax, sample_results(twins), LatencyPanel("ttft"), "p99")
    marks = [line for line in ax.lines if line.get_marker() == "x"]
    assert len({float(mark.get_ydata()[0]) for mark in marks}) == len(marks) == 2
    assert all(len(mark.get_xdata()) == 1 for mark in marks)
    assert not any(
        line.get_linestyle() == ":" or len(line.get_xdata()) == 2
        for line in ax.lines
        if line not in marks and line.get_color() != "black"
    )


def test_colours_are_fixed_by_kind_and_lines_tell_members_apart():
    """The same kind has the same colour in any run; two policies of a kind differ in tone and line."""
    few, many = policy_styles(sweeps(sample_results())), policy_styles(sweeps(sample_results(SEVEN)))
    assert {policy: few[policy].color for policy in FOUR} == {policy: many[policy].color for policy in FOUR}
    assert many["small"].color != many["continuous"].color
    assert many["small"].linestyle != many["continuous"].linestyle
    assert len({(style.color, str(style.linestyle)) for style in many.values()}) == len(SEVEN)


@pytest.mark.parametrize("count", [2, 5, 9])
def test_policies_of_one_kind_are_told_apart_with_and_without_colour(count: int):
    """Each has a colour of at least 3:1 on white and another marker, up to the markers there are."""
    kinds = {f"vllm {i}": (f"vllm {i}", "vllm", 9.0) for i in range(count)}
    styles = list(policy_styles(sweeps(sample_results(kinds))).values())
    assert min(contrast_to_white(style.color) for style in styles) >= 3
    assert len({style.color for style in styles[:7]}) == len({style.marker for style in styles[:7]}) == min(count, 7)
    assert len({(style.color, style.marker, str(style.linestyle)) for style in styles}) == count


def test_every_kind_can_be_seen_on_white():
    kinds = {f"{kind} {i}": (f"{kind} {i}", kind, 9.0) for kind in (*FOUR, *SYSTEMS) for i in range(5)}
    styles = policy_styles(sweeps(sample_results(kinds)))
    assert min(contrast_to_white(style.color) for style in styles.values()) >= 3


SYSTEMS = (
    "vllm", "sglang", "tensorrt_llm", "tgi", "orca", "sarathi", "vllm_v0", "faster_transformer", "hf_static", "triton",
    "tf_serving", "ray_serve", "llama_cpp",
)  # fmt: skip
WHOLE_BATCH = {"faster_transformer", "hf_static", "triton", "tf_serving", "ray_serve"}


def test_systems_are_told_apart_and_whole_batches_are_dashed():
    """Beside the families no two look alike; solid lines are for those whose members join and leave at every step."""
    kinds = {kind: (kind, kind, 9.0) for kind in (*FOUR, *SYSTEMS)}
    styles = policy_styles(sweeps(sample_results(kinds)))
    assert len({(style.color, style.marker, str(style.linestyle)) for style in styles.values()}) == len(kinds)
    assert {kind for kind in SYSTEMS if styles[kind].linestyle != "-"} == WHOLE_BATCH
    assert len({styles[kind].color for kind in SYSTEMS if kind not in WHOLE_BATCH}) == len(SYSTEMS) - len(WHOLE_BATCH)


def test_systems_side_by_side_are_told_to_have_the_same_costs():
    """Two of them bring the sentence into results and picture; one beside a family, or twice, does not."""
    one = {"vllm": ("vllm", "vllm", 9.0), "small": ("small", "vllm", 9.0), "continuous": FOUR["continuous"]}
    assert systems_note(sample_results(one)) == ""
    two = sample_results(one | {"orca": ("orca", "orca", 9.0)})
    same = "same step costs for all: this compares schedulers, not engines"
    assert systems_note(two) == same
    fig = figure(9.0, 6.0)
    fig.subplots()
    frame(fig, two, "title", "foot", [])
    assert any(systems_note(two) in text.get_text() for text in fig.texts)


@pytest.mark.parametrize(
    ("kind", "knobs", "words"),
    [
        ("vllm", {"async_scheduling": False}, "vllm synchronous: not the engine's default"),
        ("vllm", {"async_scheduling": True}, ""),
        ("vllm", {"speculative_config": {"method": "eagle"}}, f"vllm, small: {FREE_DRAFTS}"),
        ("sglang", {"speculative_algorithm": "NGRAM"}, f"sglang, small: {FREE_DRAFTS}"),
        ("sglang", {"disable_overlap_schedule": True}, "sglang without overlap: not the engine's default"),
        ("sglang", {}, ""),
        ("tensorrt_llm", {}, "tensorrt_llm without partial block reuse: not the engine's default"),
        (
            "tensorrt_llm",
            {"disable_overlap_scheduler": True},
            "tensorrt_llm without overlap or partial block reuse: not the engine's default",
        ),
        ("orca", {}, ""),
    ],
)
def test_a_system_not_simulated_as_shipped_is_told(kind: str, knobs: dict[str, Any], words: str) -> None:
    """Nothing is said of the engine's own loop; the other one is told, and what no knob has, once for a kind."""
    both = {kind: (kind, kind, 9.0), "small": ("small", kind, 9.0)}
    results = sample_results(both, knobs=knobs)
    assert systems_note(results) == words
    results.manifest["live"] = {}
    assert systems_note(results) == words * (FREE_DRAFTS not in words), "a live run has drafted, and counted"


@pytest.mark.parametrize(
    ("stated", "read"),
    [
        (
            {"decoding_type": "MTP", "acceptance": 0.7},
            {"method": "mtp", "num_speculative_tokens": 1, "acceptance": 0.7},
        ),
        (
            {
                "best_of": [
                    {"decoding_type": "NGram", "max_draft_len": n, "acceptance": 0.5, "found": 0.3} for n in (2, 4)
                ]
            },
            {
                "best_of": [
                    {"method": "ngram", "num_speculative_tokens": n, "acceptance": 0.5, "found": 0.3} for n in (2, 4)
                ]
            },
        ),
        (None, {}),
    ],
)
def test_drafts_of_tensorrt_llm_are_read_by_the_names_of_vllm(stated: Any, read: dict[str, Any]) -> None:
    """One config or a choice of them; by these names a cost is asked for the drafter's time."""
    results = sample_results({"a": ("a", "tensorrt_llm", 9.0)}, knobs={"speculative_config": stated})
    assert speculation(results, "a") == read
    results.scenario["cost"] = {"draft": {"mtp": {"layers": 1}, "ngram": {"base": "1ms"}}}
    assert (STATED_DRAFTS in systems_note(results)) is (stated is not None)
    assert FREE_DRAFTS not in systems_note(results)


def test_drafts_that_cost_time_are_told_apart_from_those_that_are_free() -> None:
    """By what each cost of the scenario says of the method; in the head of a run."""
    results = sample_results({"a": ("a", "vllm", 9.0), "b": ("b", "vllm", 9.0)})
    for name, method in (("a", "ngram"), ("b", "mtp")):
        results.scenario["policies"][name]["speculative_config"] = {"method": method}
    results.scenario["cost"] = {"draft": {"mtp": {"layers": 1}}}
    assert systems_note(results) == f"a: {FREE_DRAFTS} · b: {STATED_DRAFTS}"
    results.scenario["replicas"] = {"groups": {"one": {}, "two": {"cost": {"kind": "constant"}}}}
    assert systems_note(results) == f"a, b: {FREE_DRAFTS}"


def test_of_two_policies_of_a_system_the_one_not_as_shipped_is_named() -> None:
    """By its label; where a run varies the knob, by the label with the value."""
    results = sample_results({"as shipped": ("a", "vllm", 9.0), "plain": ("b", "vllm", 9.0)})
    results.scenario["policies"]["plain"]["async_scheduling"] = False
    assert systems_note(results) == "plain synchronous: not the engine's default"
    names = {f"vllm, async_scheduling={value}": value for value in (True, False)}
    results = sample_results({name: (name, "vllm", 9.0) for name in names})
    results.scenario["policies"] = {"vllm": None}
    of = {name: {"policy": "vllm", "value": value} for name, value in names.items()}
    results.manifest["vary"] = {"key": "policies.vllm.async_scheduling", "policies": of}
    assert systems_note(results) == "vllm, async_scheduling=False synchronous: not the engine's default"


def test_curve_under_an_equal_one_is_wider():
    """Two policies with the same results are both seen: the first is drawn wider than the one on top of it."""
    twins = {"a": ("continuous", "continuous", 17.0), "b": ("preemptive", "preemptive", 17.0)}
    ax = axes()
    plots.draw_latency(ax, sample_results(twins), LatencyPanel("ttft"), "p99")
    widths = [line.get_linewidth() for line in ax.lines if line.get_linestyle() == "-"]
    assert widths[0] > widths[1]


@pytest.mark.parametrize("ahead", [False, True])
def test_timeline_averages_equal_brute_force(ahead: bool):
    """Over each interval: running and waiting as the steps say; in a gap nobody runs and all in the system wait, but in
    an engine ahead of results who ran before goes on to, as far as still there."""
    results = sample_results({"static": ("static", "static", 1.1)}, loads=(1.0,))
    steps, requests = results.steps("static", 1.0, 0), results.requests("static", 1.0, 0)
    steps = steps.drop(index=range(40, 60))  # a gap in which requests wait
    edges = np.linspace(0, 60e9, 13)
    running, waiting, used = closeup._replica_curves(steps, requests, edges, NUM_BLOCKS, ahead=ahead)
    grid = np.arange(0, 60e9, 1e7) + 5e6
    expected = np.zeros((3, len(grid)))
    arrived, gone = (requests[name].to_numpy() for name in ("arrival_ns", "ended_ns"))
    expected[1] = [((arrived <= t) & (gone > t)).sum() for t in grid]
    for row in steps.itertuples() if ahead else ():
        since = grid >= row.start_ns
        stay = np.minimum(row.num_running, expected[:2].sum(axis=0))[since]
        used_blocks = np.where(stay > 0, NUM_BLOCKS - row.free_blocks, 0)
        expected[:, since] = np.array([stay, expected[:2].sum(axis=0)[since] - stay, used_blocks])
    for row in steps.itertuples():
        during = (grid >= row.start_ns) & (grid < row.start_ns + row.duration_ns)
        expected[:, during] = np.array([[row.num_running], [row.num_waiting], [NUM_BLOCKS - row.free_blocks]])
    means = expected.reshape(3, 12, -1).mean(axis=2)
    assert running == pytest.approx(means[0], abs=0.05)
    assert waiting == pytest.approx(means[1], abs=0.05)
    assert used == pytest.approx(means[2], rel=0.01, abs=5)
    assert means[1].max() > 1


def test_replicas_are_added_up():
    """Two replicas that do the same show twice the sequences and the same share of KV."""
    results = sample_results({"continuous": FOUR["continuous"]}, loads=(8.0,))
    steps, requests = results.steps("continuous", 8.0, 0), results.requests("continuous", 8.0, 0)
    edges = np.linspace(0, 60e9, 7)
    tops = []
    for copies in (1, 2):
        ax = axes()
        tables, blocks = (_stacked(steps, copies), _stacked(requests, copies)), [NUM_BLOCKS] * copies
        closeup.draw_timeline(ax, *tables, edges, blocks, "#000000")
        lines = [patch.get_data().values for patch in ax.patches]
        kv = [patch.get_data().values for patch in ax.figure.axes[1].patches]
        tops.append((lines[0].max(), kv[0].max()))
    assert tops[1] == pytest.approx((2 * tops[0][0], tops[0][1]))


def _stacked(table: pd.DataFrame, copies: int) -> pd.DataFrame:
    return pd.concat([table.assign(replica=i) for i in range(copies)], ignore_index=True)


def test_distribution_leaves_out_warm_up_and_unfinished_requests():
    """Only finished requests that were sent after the warm-up count, and their number shows in the curve's length."""
    results = sample_results()
    requests = results.requests("preemptive", 4.0, 0)
    after = (requests["sent_ns"] >= 10_000_000_000).sum()
    assert 0 < after < len(requests)
    assert len(closeup._latency_s(results, "preemptive", 4.0, 0, "ttft")) == after


def cases() -> dict[str, Any]:
    overloaded = sample_results({"static": FOUR["static"]}, loads=(8.0, 16.0))
    empty = sample_results()
    values = [name for name in empty.summary.columns if name.endswith(("_s", "_s_ci"))]
    empty.summary[values] = np.nan
    return {
        "four": sample_results(),
        "seven, wide intervals": sample_results(SEVEN, noise=0.8),
        "one load, one seed": sample_results(loads=(4.0,), seeds=1, load_name=""),
        "users": sample_results(loads=(1.0, 2.0, 3.0), load_name="users"),
        "nothing stable": overloaded,
        "no values": empty,
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["seven, wide intervals", "one load, one seed", "users", "nothing stable", "no values"]
)
def test_every_picture_is_drawn(case: str, tmp_path: Path):
    """Also with unstable points only, without values, with one load: no error, no warning, no empty file."""
    results = cases()[case]
    results = replace(results, path=tmp_path)
    paths = plots.write_pictures(results)
    assert [path.name for path in paths] == [
        "p99_vs_qps.png",
        "frontier.png",
        "slo_share.png",
        "timeline.png",
        "latency_cdf.png",
    ]
    assert all(imread(path).std() > 0.01 for path in paths)


@pytest.mark.slow
def test_pictures_are_the_same_bytes_again_whatever_the_users_settings(tmp_path: Path):
    """No time of day in the file, and a user's matplotlibrc changes nothing and is left as it was."""
    results = sample_results()
    plots.p99_vs_qps(results, tmp_path / "a.png")
    with matplotlib.rc_context({"font.size": 20, "axes.facecolor": "red", "savefig.dpi": 40}):
        plots.p99_vs_qps(results, tmp_path / "b.png")
        assert matplotlib.rcParams["font.size"] == 20
    first = (tmp_path / "a.png").read_bytes()
    assert first == (tmp_path / "b.png").read_bytes()
    assert b"tEXt" not in first and b"tIME" not in first


def test_a_queue_that_overflows_is_said_to_grow_at_its_load_only():
    """A bounded queue grows at 4 req/s and rejects from 8 on; one without bound grows from 4 on."""
    results = sample_results(dict.fromkeys(("bounded", "free"), FOUR["static"]))
    summary = results.summary
    summary["unstable"] = (summary["load"] >= 4) & ((summary["policy"] == "free") | (summary["load"] == 4))
    assert growth_notes(results) == {"bounded": "× at 4 req/s", "free": "× from 4 req/s"}


def test_a_heading_stays_within_its_picture() -> None:
    """Also one without a separator, of digits and capitals."""
    fig = figure(12.0, 4.0)
    fig.subplots()
    put_around(fig, "Title", f"cost: profile h100 ({'measured on NVIDIA H100 80GB HBM3, ' * 9})", "foot " * 60, [])
    fig.canvas.draw()
    assert len(fig.texts) == 3
    assert all(text.get_window_extent().x1 <= fig.bbox.x1 for text in fig.texts)


def test_a_picture_grows_where_its_legend_would_leave_no_room_for_the_axes() -> None:
    """Twelve policies with long notes, a line each, in a picture that is four inches high."""
    fig = figure(6.0, 4.0)
    (axes,) = [fig.subplots()]
    label = "vllm, structured_cost.per_request=200us, too few requests to tell whether its queue grows from 4 req/s on"
    put_around(fig, "Title", "heading", "foot", [Line2D([], [], label=f"{label} ({n})") for n in range(12)])
    fig.canvas.draw()
    assert axes.get_window_extent().height > fig.dpi * 0.8 and fig.get_size_inches()[1] > 4.0
    low = figure(6.0, 4.0)
    put_around(low, "Title", "heading", "foot", [])
    assert low.get_size_inches()[1] == 4.0


def test_what_the_plotting_library_warns_of_is_not_told() -> None:
    """Of numbers at the ends of floats or letters that a font lacks: nobody could do anything about it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with house_style():
            warnings.warn_explicit("overflow encountered in exp", RuntimeWarning, "scale.py", 1, "matplotlib.scale")
            warnings.warn_explicit("Glyph 1 missing", UserWarning, "style.py", 1, "batchsim.report.pictures.style")
            warnings.warn_explicit("of ours", UserWarning, "read.py", 1, "batchsim.results.read")
    assert [str(each.message) for each in caught] == ["of ours"]
