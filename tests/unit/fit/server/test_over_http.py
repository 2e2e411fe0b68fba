"""An engine whose step times nobody tells the calibrator, measured over HTTP in real time."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("aiohttp", reason="pip install 'batchsim[server]'")

from tests.support.over_http import judge, measure


@pytest.mark.slow
@pytest.mark.judged
def test_an_unknown_engine_behind_http_is_predicted(tmp_path: Path) -> None:
    """Loads held out within BOUNDS, unless the machine was disturbed. TTFT is of too few requests here."""
    verdict = measure("linear", tmp_path, 0.7)
    if verdict.word == "not judged":
        pytest.skip("; ".join(verdict.lines))
    assert not [line for line in verdict.lines if "ttft_mean_s" not in line]


GOOD = {
    "run": "a.csv",
    "beyond_knee": False,
    "errors": {"tpot_mean_s": 0.01, "throughput_rps": 0.0, "ttft_mean_s": 0.04},
}
CALM = {"loads": {"a": {"void": False}}, "moved": 0.01}


@pytest.mark.parametrize(
    ("fit", "measured", "word"),
    [
        ({}, {}, "met"),
        ({"held_out": []}, {}, "not judged"),
        ({}, {"moved": -0.06}, "not judged"),
        ({}, {"loads": {"a": {"void": True}}}, "not judged"),
        ({"held_out": [GOOD | {"errors": GOOD["errors"] | {"tpot_mean_s": -0.02}}]}, {}, "not met"),  # type: ignore[operator]
        ({"held_out": [GOOD | {"beyond_knee": True, "errors": GOOD["errors"] | {"load": None}}]}, {}, "not met"),  # type: ignore[operator]
        ({"known": [{"name": "base", "identified": True, "value": 13e6}]}, {}, "not met"),
        ({"known": [{"name": "base", "identified": False, "value": 13e6}]}, {}, "met"),
    ],
)
def test_what_is_met(fit: dict[str, object], measured: dict[str, object], word: str) -> None:
    assert judge("linear", {"held_out": [GOOD], "known": []} | fit, CALM | measured).word == word
