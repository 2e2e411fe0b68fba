"""What is asked of any cost, and what holds of one that does not say."""

from __future__ import annotations

from typing import Protocol

from batchsim.cost.cost_error import CostError, Unknown
from batchsim.cost.profile import Hull, Profile
from batchsim.cost.work import Columns, Terms
from batchsim.deployment.deployment import Deployment
from batchsim.kernel.types import CostModel, StepEstimator


class Cost(CostModel, StepEstimator, Protocol):
    """What steps cost: a class of its own for each kind, which derives from this one.

    It has `step_ns`, the estimates `recompute_ns` and `swap_ns`, and the last three methods here; a property it
    replaces where it knows better.
    """

    @property
    def deployment(self) -> Deployment | None:
        """The model and GPUs whose steps it times; None where times are stated, of no model and no GPU."""
        return None

    @property
    def profile(self) -> Profile | None:
        """The profile whose times these are, unchanged; None for any other cost."""
        return None

    @property
    def reach(self) -> Hull | None:
        """How large steps may be, beyond which ExtrapolationError is raised; None: as large as one likes."""
        return None

    @property
    def error(self) -> CostError | Unknown:
        """How far step times may be off, or why nobody knows."""
        return Unknown("nobody measured it")

    def explain(self, columns: Columns) -> Terms:
        """What the time of recorded steps is made of: ns arrays `weights, kv_reads, matmul, attention, host, swap,
        other`, which sum to `step_ns`, and `flops` and `bytes` of the useful work; zero where not known."""
        ...

    def describe(self) -> str:
        """One line for the head of a report."""
        ...

    def sources(self) -> list[str]:
        """Lines on where the numbers come from."""
        ...
