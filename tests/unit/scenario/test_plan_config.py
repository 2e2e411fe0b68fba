"""The `plan:` block: what it takes, and what it refuses in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchsim.base.errors import ScenarioError
from batchsim.scenario import Scenario, load_scenario

PLAN = """\
model: llama-3.1-8b
cost: {kind: constant, step: 10ms}
workload:
  arrivals: {kind: poisson, mean_rate: 20/s}
  lengths: {prompt: {kind: fixed, tokens: 100}, output: {kind: uniform, min: 2, max: 12}}
  output_cap: 16
  duration: 10s
policies:
  continuous: {max_num_seqs: 8, max_num_batched_tokens: 512}
slo: ttft<1s & tpot<50ms @ 99%
plan:
  target: {rate: 300/s}
  growth: {per_month: 8%, months: 6}
  currency: $
  gpus:
    small: {cost: {kind: constant, step: 10ms}, price: 1.20/h, kv_tokens: 16000}
    big: {cost: h200, price: 3.50/h}
  router: least_tokens
  max_replicas: 8
"""
JOB = "classes: {chat: {share: 100%}, job: {offline: {requests: 9, fill_to: 4}}}"
DAY = ", ".join(["50%"] * 23 + ["100%"])


def scenario(tmp_path: Path, *overrides: str, text: str = PLAN) -> Scenario:
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return load_scenario(str(path), overrides=overrides)


def test_a_plan_is_read(tmp_path: Path) -> None:
    """Rates, prices and growth carry units; a GPU's cost may be a name; the window is 20 minutes unless said."""
    plan = scenario(tmp_path).file.plan
    assert plan is not None
    assert plan.target.rate == 300 and plan.window == 20 * 60 * 10**9
    assert plan.growth.factor == pytest.approx(1.08**6)
    assert {name: (offer.price, offer.cost.kind) for name, offer in plan.gpus.items()} == {
        "small": (1.2, "constant"),
        "big": (3.5, "roofline"),
    }
    assert scenario(tmp_path, f"plan.target={{diurnal: {{peak: 30/s, hours: [{DAY}]}}}}").file.plan is not None


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        (", price: 3.50/h", "", "mine.yaml:17: plan.gpus.big.price is missing"),
        ("3.50/h", "3.50", "mine.yaml:17: plan.gpus.big.price: 3.5 is not a price. Write a number with a unit"),
        (
            "  currency: $",
            "  currency: $\n  energy_price: 0.1",
            "mine.yaml:15: plan.energy_price: 0.1 is not a price of",
        ),
        (
            "  currency: $",
            "  currency: $\n  energy_price: 1/h",
            "mine.yaml:15: plan.energy_price: '1/h' is not a price of",
        ),
        ("3.50/h", "-3/h", "mine.yaml:17: plan.gpus.big.price: '-3/h' is not a price"),
        ("cost: h200", "cost: h20", "mine.yaml:17: cost: h20 is not in the catalog"),
        ("rate: 300/s", "", "mine.yaml:12: plan.target: target: nothing is given"),
        ("  target: {rate: 300/s}\n", "", "mine.yaml:11: plan.target is missing"),
        ("{rate: 300/s}", "{trace: {factor: 3, shift: 1min}}", "plan.target.trace needs arrivals of kind trace"),
        ("{rate: 300/s}", "{diurnal: {peak: 3/s, hours: [100%]}}", "hours has 1 shares. A day has 24"),
        ("{rate: 300/s}", f"{{diurnal: {{peak: 3/s, hours: [{DAY.replace('100', '80')}]}}}}", "has 100%"),
        ("months: 6", "months: -1", "mine.yaml:13: plan.growth: months is -1"),
        ("  router: least_tokens\n", "", "plan.router is missing"),
        ("router: least_tokens", "router: fewest", "plan.router.kind is fewest. Write one of"),
        (
            "max_replicas: 8",
            f"max_replicas: 8\n  free: {{tp: {list(range(3000))}, pp: {list(range(3000))}}}",
            "free spans 9,000,000 configurations. List values for at most 1,000.",
        ),
        ("max_replicas: 8", "max_replicas: 0", "max_replicas is 0. It must be from 1 to 10000"),
        ("poisson, mean_rate: 20/s", "closed_loop, users: 4, think_time: 1s", "arrivals are closed_loop"),
        ("output_cap:", "max_concurrency: 4\n  output_cap:", "client of workload.max_concurrency 4 keeps them back"),
        ("output_cap: 16", f"output_cap: 16\n  {JOB}", "the offline job classes.job waits for room. Drop that class"),
        ("slo: ttft", "kv: {tokens: 16000}\nslo: ttft", "kv.tokens 16000 is the memory of one kind of GPU"),
    ],
)
def test_what_is_missing_or_wrong_is_one_line(tmp_path: Path, old: str, new: str, complaint: str) -> None:
    """Prices and the target have no defaults; the line and the key are named."""
    assert PLAN.count(old) == 1
    with pytest.raises(ScenarioError) as caught:
        scenario(tmp_path, text=PLAN.replace(old, new))
    assert complaint in str(caught.value) and "\n" not in str(caught.value)
