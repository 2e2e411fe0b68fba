"""`batchsim check` on things of the user's own, as examples/ has them, and on shipped ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.tiny_scenario import batchsim

EXAMPLES = ROOT / "examples"
OWN = ["policy:ShortestFirst", "router:TenantRouterConfig", "cost:Throttled", "autoscaler:InFlightConfig"]
OWN += ["arrivals:BatchArrivals", "predictor:Classifier"]


@pytest.fixture(autouse=True)
def _on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.syspath_prepend(str(ROOT))


@pytest.mark.parametrize("name", OWN)
def test_the_examples_pass(name: str) -> None:
    """Each is recognised for what it is, and keeps what all of its kind must."""
    result = batchsim("check", f"own_{name}", "--cases", 3)
    assert result.exit_code == 0 and set(result.stdout.split()[::2]) == {"holds"}, result.output


def test_a_reader_is_checked_on_a_file(tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    log.write_text("2024-05-01T10:00:00Z POST /v1/chat 200 in=812 out=97\n", encoding="utf-8")
    assert batchsim("check", "own_reader:AccessLog", "--file", log).exit_code == 0
    result = batchsim("check", "own_reader:AccessLog")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1) and "--file LOG" in result.stderr


def test_what_fails_is_named_with_a_case_and_what_deviates_with_its_reason() -> None:
    result = batchsim("check", "tests.unit.testing.faults:Idles", "--json")
    rows = {row["check"]: row for row in json.loads(result.stdout)}
    assert result.exit_code == 1 and rows["no_idling"]["result"] == "fails"
    assert "requests wait and nothing runs" in rows["no_idling"]["why"]
    assert "cases; the smallest: Case(" in rows["no_idling"]["case"]
    assert rows["conservation"]["result"] == "holds"
    result = batchsim("check", "hf_static", "--cases", 3)
    assert result.exit_code == 0 and f"deviates  {'no_idling':<25}waits for a full batch\n" in result.stdout


WRONG = {
    "unknown": (["vlm"], "'vlm' is nothing shipped. Did you mean vllm?"),
    "kinds": (["constant"], "constant is the name of cost and of arrivals. Say which: --kind cost."),
    "nothing": (["pathlib:Path"], "pathlib:Path is none of policy, router, cost"),
    "module": (["no_such:Thing"], "no_such:Thing cannot be imported"),
    "knob": (["static", "--set", "batch_sise=3"], "--set batch_sise: StaticConfig has no such knob."),
    "value": (["static", "--set", "batch_size=x"], "--set batch_size=x: Input should be a valid integer"),
    "form": (["static", "--set", "batch_size"], "write KNOB=VALUE"),
    "file": (["static", "--file", "x.log"], "--file is for trace readers"),
    "refused": (["static", "--set", "batch_size=0"], "--set batch_size=0: is 0. It must be from 1 to"),
    "misfit": (
        ["preemptive", "--set", "max_num_seqs=8", "--set", "max_num_batched_tokens=4", "--set", "watermark=1"],
        "--set watermark=1",
    ),
}


@pytest.mark.parametrize(("args", "said"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_checked_is_one_line(args: list[str], said: str) -> None:
    result = batchsim("check", *args)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1) and said in result.stderr, result.output
