"""Every shipped thing passes the checks that `batchsim.testing` has for things of its kind.

Acceptance of a policy, a router, an autoscaler: it is registered and this passes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from batchsim.drive.fleet.routing import ROUTERS
from batchsim.drive.fleet.scaling.autoscaler import AutoscalerConfig
from batchsim.policies.registry import POLICIES
from batchsim.policies.systems.vllm.speculative_config import SpeculativeConfig
from batchsim.testing import Check, check_autoscaler, check_policy, check_router
from batchsim.testing.fleets import SCALERS


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
OF_RECORDS = {"leap_equals_stepping", "live_equals_simulated", "lives_sum"}


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
    assert failed(check_policy(kind, cases=CASES)) == {}


def test_so_it_does_with_drafts() -> None:
    assert failed(check_policy("vllm", knobs=DRAFTS, cases=CASES)) == {}


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
