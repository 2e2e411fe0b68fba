"""The picture of docs/pools.md: for which answers three prefill engines and a decode engine beat four mixed engines.

    python -m tests.docs.pools_picture [RUNS]

It runs the shipped `disaggregated` at one load with answers of several lengths, on pools and on mixed engines (into
RUNS, where points that are there are reused), and writes docs/pictures/pools.png. The words beside the picture are its
title, which a test holds the page to.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from batchsim.report.pictures.palette import OKABE_ITO, PolicyStyle
from batchsim.report.pictures.style import DPI, GREY, figure, house_style
from batchsim.results.read import Results
from batchsim.scenario import load_scenario
from batchsim.study.curves.run import run_scenario
from tests.docs.page_pictures import FOLDER, small

ANSWERS = (16, 32, 64, 96, 128, 192, 256)
PROMPT, RATE, ASKED, SEEDS = 2048, 20, 0.95, 8
"""Mean tokens of a prompt, requests a second, the share that the objective asks for, and draws of the requests."""
ENGINES: dict[str, tuple[str, ...]] = {
    "3 prefill, 1 decode": (),
    "4 mixed": ("pools=null", "replicas={count: 4, router: round_robin}"),
}
STYLES = dict(zip(ENGINES, (PolicyStyle(OKABE_ITO[0], "o", "-"), PolicyStyle(OKABE_ITO[1], "s", "--")), strict=True))
Shares = NDArray[np.float64]


def compared(runs: Path) -> dict[str, tuple[Shares, Shares]]:
    """By engines, for each length of ANSWERS: the share within the SLO, and the half-width of its 95 % interval."""
    lengths = f"vary={{workload.lengths.output.tokens: [{', '.join(map(str, ANSWERS))}]}}"
    load = f"load={{mean_rate: [{RATE}/s]}}"
    found: dict[str, tuple[Shares, Shares]] = {}
    for name, engines in ENGINES.items():
        scenario = load_scenario("disaggregated", overrides=(lengths, load, f"seeds={SEEDS}", *engines))
        found[name] = shares(run_scenario(scenario, out=runs / name.replace(" ", "-")))
    return found


def shares(results: Results) -> tuple[Shares, Shares]:
    """Of a run, by length: the share within the SLO, and the half-width of its interval."""
    summary = results.summary.set_index("vary").loc[list(ANSWERS)]
    return summary["in_slo"].to_numpy(float), summary["in_slo_ci"].to_numpy(float)


def said_by_pools(found: Mapping[str, tuple[Shares, Shares]]) -> str:
    """Up to which answers pools have more within the SLO, the intervals apart, and from which on mixed engines do."""
    (pools, pools_half), (mixed, mixed_half) = found.values()
    better = [n for n, low, high in zip(ANSWERS, pools - pools_half, mixed + mixed_half, strict=True) if low > high]
    worse = [n for n, high, low in zip(ANSWERS, pools + pools_half, mixed - mixed_half, strict=True) if high < low]
    assert better and worse and max(better) < min(worse), "there is one crossing"
    return (
        f"At {RATE}/s pools are better for answers of {min(better)} to {max(better)} tokens,"
        f" four mixed engines from {min(worse)} on"
    )


def draw(found: Mapping[str, tuple[Shares, Shares]], path: Path) -> None:
    """Writes the shares against the tokens of a prompt for each of its answer, a line with its intervals each."""
    ratios = PROMPT / np.array(ANSWERS, float)
    with house_style():
        fig = figure(8.0, 4.2)
        ax = fig.subplots()
        for name, (share, half) in found.items():
            style = STYLES[name]
            low, high = np.maximum(share - half, 0), np.minimum(share + half, 1)  # shares end there, t-intervals do not
            ax.fill_between(ratios, 100 * low, 100 * high, color=style.color, alpha=0.2, lw=0)
            ax.plot(ratios, 100 * share, color=style.color, marker=style.marker, linestyle=style.linestyle, label=name)
        ax.axhline(100 * ASKED, color=GREY, linestyle=":", linewidth=1)
        ax.set_xscale("log")
        ax.set_xticks(ratios, [f"{ratio:.0f}\n({tokens})" for ratio, tokens in zip(ratios, ANSWERS, strict=True)])
        ax.minorticks_off()
        ax.set_ylim(-2, 102)
        ax.set_xlabel("tokens of a prompt for each of its answer (tokens of the answer)")
        ax.set_ylabel("% of requests within ttft<1s & tpot<10ms")
        ax.legend(frameon=False, loc="center right")
        ax.set_title(said_by_pools(found), fontsize=10)
        fig.savefig(path, dpi=DPI)


def main(runs: Path) -> None:
    """Writes the picture into FOLDER and prints what it says."""
    found = compared(runs)
    for name, (share, half) in found.items():
        print(name, *(f"{100 * one:.0f}±{100 * width:.0f}" for one, width in zip(share, half, strict=True)))
    draw(found, runs / "pools.png")
    (FOLDER / "pools.png").write_bytes(small((runs / "pools.png").read_bytes()))
    print(f"pools: {said_by_pools(found)}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            main(Path(folder))
