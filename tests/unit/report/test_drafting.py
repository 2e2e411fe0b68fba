"""Whether draft tokens pay: what reports say of policies beside the same ones without drafts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from batchsim.report.drafting import crossing_text, draft_curves, draft_lines
from batchsim.report.pictures import plots
from batchsim.report.pictures.drafting_picture import draw_latency, draw_speedup
from batchsim.report.pictures.style import figure, house_style
from batchsim.report.reading import sweeps
from tests.support.report_samples import SampleResults, sample_results

LOADS = (1.0, 2.0, 4.0)
SPEC = {"method": "eagle", "num_speculative_tokens": 2, "acceptance": 0.5}


def with_drafts(plain: list[float], drafts: list[float], unstable: tuple[str, ...] = ()) -> SampleResults:
    """A run of `plain` and `drafts` with these s/token at loads 1, 2 and 4, and of `other` of other knobs; `unstable`
    are those whose queue grows at the last load."""
    results = sample_results({name: (name, "vllm", 99.0) for name in ("other", "plain", "drafts")}, LOADS)
    summary, policies = results.summary, results.scenario["policies"]
    policies["drafts"]["speculative_config"] = SPEC
    policies["other"]["max_num_seqs"] = 8
    for name, values in (("plain", plain), ("drafts", drafts)):
        rows = summary["policy"] == name
        summary.loc[rows, "norm_latency_mean_s"] = values
        summary.loc[rows & (summary["load"] == 4), "unstable"] = name in unstable
    drafting = summary["policy"] == "drafts"
    summary["acceptance_length"] = np.where(drafting, 1.75, np.nan)
    summary["rejected_share"] = np.where(drafting, 0.25, np.nan)
    return results


@pytest.mark.parametrize(
    ("plain", "drafts", "unstable", "speedup", "words"),
    [
        ([4.0, 4.0, 4.0], [2.0, 3.0, 5.0], (), [2.0, 4 / 3, 0.8], "faster up to 2 req/s"),
        ([4.0, 4.0, 4.0], [2.0, 2.0, 2.0], (), [2.0, 2.0, 2.0], "faster at every load tested"),
        ([2.0, 2.0, 2.0], [4.0, 4.0, 2.0], (), [0.5, 0.5, 1.0], "never faster"),
        ([2.0, 4.0, 4.0], [4.0, 2.0, 2.0], (), [0.5, 2.0, 2.0], "faster at 2, 4 alone"),
        ([4.0, 4.0, 9.0], [2.0, 2.0, 3.0], ("plain",), [2.0, 2.0, np.inf], "faster at every load tested"),
        ([4.0, 4.0, 4.0], [2.0, 2.0, 3.0], ("drafts",), [2.0, 2.0, 0.0], "faster up to 2 req/s"),
        ([4.0, 4.0, 4.0], [2.0, 5.0, 3.0], ("plain", "drafts"), [2.0, 0.8, np.nan], "faster up to 1 req/s"),
    ],
)
def test_drafts_pay_where_a_token_comes_sooner_than_without(
    plain: list[float], drafts: list[float], unstable: tuple[str, ...], speedup: list[float], words: str
) -> None:
    """A queue that grows is slower than any that does not; where both grow nothing is known."""
    results = with_drafts(plain, drafts, unstable)
    (curve,) = draft_curves(results)
    assert curve.plain is not None and (curve.sweep.policy, curve.plain.policy) == ("drafts", "plain")
    assert np.array_equal(curve.speedup, speedup, equal_nan=True)
    assert crossing_text(results, curve) == words


def test_a_policy_without_its_like_is_compared_with_none() -> None:
    """Other knobs, or another kind, make another policy; what drafts bring is told all the same."""
    results = with_drafts([4.0, 4.0, 4.0], [2.0, 3.0, 5.0])
    results.scenario["policies"]["plain"]["max_num_seqs"] = 9
    (curve,) = draft_curves(results)
    assert curve.plain is None and np.isnan(curve.speedup).all()
    shown = [(sweep, 1) for sweep in sweeps(results)]
    assert draft_lines(results, shown) == ["drafts:  1.75 tokens a decode and step, 25 % of tokens rejected"]


def test_a_line_says_what_drafts_bring_and_up_to_which_load() -> None:
    """Of the policies that verify drafts alone, at the load of the table."""
    results = with_drafts([4.0, 4.0, 4.0], [2.0, 3.2, 5.0])
    said = "drafts:  1.75 tokens a decode and step, 25 % of tokens rejected; 1.25 × as fast a token as plain"
    assert draft_lines(results, [(sweep, 1) for sweep in sweeps(results)]) == [f"{said}, faster up to 2 req/s"]


def test_the_picture_has_both_latencies_and_their_ratio() -> None:
    """Not of policies that have nothing to do with drafts; a load at which one queue grows is no point."""
    results = with_drafts([4.0, 4.0, 9.0], [2.0, 3.0, 5.0], ("plain",))
    with house_style():
        latency, speedup = figure(8, 4).subplots(1, 2)
        draw_latency(latency, results)
        draw_speedup(speedup, results)
    lines = [
        [np.asarray(line.get_ydata()).tolist() for line in ax.lines if line.get_linestyle() != "None"]
        for ax in (latency, speedup)
    ]
    assert [values[:2] for values in lines[0]] == [[4.0, 4.0], [2.0, 3.0]]
    assert lines[1][0][:2] == [2.0, 4 / 3] and np.isnan(lines[1][0][2])


@pytest.mark.slow
def test_it_is_among_the_pictures_of_a_run(tmp_path: Path) -> None:
    made = with_drafts([4.0, 4.0, 4.0], [2.0, 3.0, 5.0])
    object.__setattr__(made, "path", tmp_path)
    assert (tmp_path / "drafting.png") in plots.write_pictures(made)
    assert (tmp_path / "drafting.png").read_bytes().startswith(b"\x89PNG")
