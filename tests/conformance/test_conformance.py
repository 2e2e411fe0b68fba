"""Every shipped thing passes the checks that `batchsim.testing` has for things of its kind.

Acceptance of any of them: it is registered and this passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, settings

from batchsim.base.reading import Later
from batchsim.cost.kinds import COSTS
from batchsim.drive.fleet.routing import ROUTERS
from batchsim.drive.fleet.scaling.autoscaler import AutoscalerConfig
from batchsim.kernel.record import MISSING
from batchsim.kernel.types import Arrival, Request, Sequence
from batchsim.policies.registry import POLICIES
from batchsim.policies.systems.vllm.speculative_config import SpeculativeConfig
from batchsim.testing import (
    Check,
    check_arrivals,
    check_autoscaler,
    check_cost,
    check_policy,
    check_predictor,
    check_reader,
    check_router,
)
from batchsim.testing.check import Cases
from batchsim.testing.fleets import SCALERS
from batchsim.testing.policy_checks import built_cases, reachable
from batchsim.testing.random_configs import MS
from batchsim.testing.random_engines import Case, Listed
from batchsim.workload.predictors import PredictorConfig
from batchsim.workload.processes import OwnArrivals, Process
from batchsim.workload.traces.read_trace import read_trace
from batchsim.workload.traces.trace_config import TraceConfig
from tests.support.paths import ROOT


def random_cases(examples: int | None = None) -> settings:
    """As many as asked, else as tests/conftest.py says."""
    return settings(
        max_examples=settings.default.max_examples if examples is None else examples,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow, HealthCheck.data_too_large],
    )


RANDOM, MANY = random_cases(), random_cases(60)
CASES = 2 * settings.default.max_examples
every_policy = pytest.mark.parametrize("kind", POLICIES)
DRAFTS = {"speculative_config": SpeculativeConfig("eagle", 3, (0.8, 0.6, 0.45))}
ON_MODEL = "model_equals_simulated"  # which loads torch
OF_RECORDS = {"leap_equals_stepping", "live_equals_simulated", "lives_sum", ON_MODEL}


def failed(checks: Iterable[Check]) -> dict[str, str]:
    """What the checks that fail say, by their names."""
    found = {}
    for check in checks:
        try:
            check()
        except Exception as error:
            found[check.name] = f"{type(error).__name__}: {error} {getattr(error, '__notes__', '')}"
    return found


@every_policy
def test_a_shipped_policy_keeps_what_every_policy_must(kind: str) -> None:
    """But on the model, which the slow test below has."""
    assert failed(check for check in check_policy(kind, cases=CASES) if check.name != ON_MODEL) == {}


def test_so_it_does_with_drafts() -> None:
    checks = check_policy("vllm", knobs=DRAFTS, cases=CASES // 2)
    assert failed(check for check in checks if check.name != ON_MODEL) == {}


CROWD = tuple(
    Arrival(
        Request(i, i // 8 * MS, 10 + i % 30, 5 + i % 17, priority=i % 3),
        5 + i % 17 - (i % 3 == 0),
        None if i % 4 else (20 + i + i // 8) * MS,
    )
    for i in range(40)
)
CALM = tuple(Arrival(Request(40 + i, (4000 + 200 * i) * MS, 10 + i, 5 + i % 17), 5 + i % 17) for i in range(30))


@every_policy
def test_a_crowd_is_forgotten_once_it_has_gone(kind: str) -> None:
    """Requests that crowd an engine wait, are preempted, give up; behind 30 that come one after the other an engine
    holds hardly any of them, unless it refused all of these and made no batch since."""
    for case in Cases(built_cases(kind), 10, kind).drawn:
        for drive in (Case.simulate, partial(Case.live, ids=True)):
            core = drive(replace(case, workload=Listed((*CROWD, *CALM)), stop_ns=None))
            requests = core.recorder.records().requests
            if (requests["scheduled_ns"][requests["request_id"] >= len(CROWD)] == MISSING).all():
                continue
            held = sorted(one.request.id for one in reachable(core) if type(one) is Sequence)
            assert len([i for i in held if i < len(CROWD)]) < 5, (case, held)


@pytest.mark.slow
@every_policy
def test_records_are_equal_in_many_more_cases(kind: str) -> None:
    """The records of both drivers and both KV managers, and what they sum to, far more often; and what is declared as
    a deviation is seen."""
    checks = check_policy(kind, cases=100)
    assert failed(check for check in checks if check.name in OF_RECORDS or check.deviation) == {}


@pytest.mark.parametrize("config", ROUTERS.values(), ids=ROUTERS)
def test_a_shipped_router_keeps_what_every_router_must(config: Any) -> None:
    assert failed(check_router(config, cases=CASES)) == {}


@pytest.mark.parametrize("config", SCALERS)
def test_a_shipped_autoscaler_keeps_what_every_autoscaler_must(config: type[AutoscalerConfig]) -> None:
    assert failed(check_autoscaler(config, cases=CASES)) == {}


KNOBS: dict[str, dict[str, Any]] = {
    "roofline": {"gpu": "h100"},
    "profile": {"profile": str(ROOT / "sim/tables/profiles/llama-3.1-8b-h100-vllm-0.24.0-fp8.json")},
}


@pytest.mark.parametrize("kind", [kind for kind in COSTS if kind != "free"])  # which refuses every question
def test_a_shipped_cost_keeps_what_every_cost_must(kind: str) -> None:
    assert failed(check_cost(Later(COSTS[kind]).config(), knobs=KNOBS.get(kind), cases=CASES)) == {}


@pytest.mark.parametrize("config", [config for config in get_args(Process) if config is not OwnArrivals])
def test_shipped_arrivals_keep_what_all_arrivals_must(config: Any) -> None:
    assert failed(check_arrivals(config, cases=20)) == {}


@pytest.mark.parametrize("config", get_args(get_args(PredictorConfig)[0]))
def test_a_shipped_predictor_keeps_what_every_predictor_must(config: Any) -> None:
    assert failed(check_predictor(config, cases=CASES)) == {}


WITHOUT_READER = ("aiperf_multiturn", "blis", "llmservingsim", "servegen_chunk", "sharegpt", "splitwise", "vllm_custom")
SAMPLES = sorted(path for path in (ROOT / "tests/data/traces").iterdir() if not path.name.startswith(WITHOUT_READER))


class Recognised:
    """A reader of any trace whose format is recognised, each row with its time in ns and its lengths."""

    def records(self, path: Path) -> Iterator[dict[str, object]]:
        rows = read_trace(TraceConfig(str(path), time_unit="s" if "guidellm" in path.name else None), Path())
        for number, (prompt, output) in enumerate(zip(rows.prompt_tokens, rows.output_tokens, strict=True)):
            at_ns = None if rows.arrival_ns is None else int(rows.arrival_ns[number])
            yield {"at": at_ns, "prompt": int(prompt), "output": int(output)}


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.name)
def test_a_shipped_trace_reader_keeps_what_every_reader_must(path: Path) -> None:
    """On a sample of each format that is read."""
    assert failed(check_reader(Recognised, path)) == {}
