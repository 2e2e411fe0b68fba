"""The contract of extensions, as checks: whatever a policy, a router, a cost, an autoscaler, arrivals, a predictor or a
trace reader does, every shipped one passes these, and one of your own can be held to them.

    from batchsim.testing import check_policy

    @pytest.mark.parametrize("check", check_policy(MyPolicy))
    def test_my_policy(check):
        check()

Each function returns a list of `Check`s, each with a name. They draw random cases with hypothesis, an extra:
`pip install 'batchsim[testing]'`; the same ones in every run.
"""

from __future__ import annotations

try:
    import hypothesis  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "batchsim.testing needs hypothesis, which is not installed. Run: pip install 'batchsim[testing]'."
    ) from error

from batchsim.testing.check import Check, NotAsDeclared
from batchsim.testing.cost_checks import check_cost
from batchsim.testing.load_checks import check_arrivals, check_predictor, check_reader
from batchsim.testing.policy_checks import check_policy
from batchsim.testing.router_checks import check_autoscaler, check_router

__all__ = [
    "Check", "NotAsDeclared", "check_arrivals", "check_autoscaler", "check_cost", "check_policy", "check_predictor",
    "check_reader", "check_router",
]  # fmt: skip
