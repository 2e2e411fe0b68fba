"""`Cost`, the protocol of every cost model, with the answers of one that does not say."""

from __future__ import annotations

from typing import Protocol

from batchsim.cost.cost_error import CostError, Unknown
from batchsim.cost.lanes import HostPart, Lanes
from batchsim.cost.profile import Hull, Profile
from batchsim.cost.work import Columns, Terms
from batchsim.deployment.deployment import Deployment
from batchsim.kernel.batch import Batch
from batchsim.kernel.protocols import CostModel, DecodeLine, StepEstimator


class Cost(CostModel, StepEstimator, Protocol):
    """A cost model: predicts the durations of steps. Every kind is a class that derives from this one.

    A kind has `step_ns`, the estimates `recompute_ns` and `swap_ns`, and the last three methods here; it replaces a
    property where it knows better.
    """

    def decode_line(self, batch: Batch) -> DecodeLine | None:
        """On which line `step_ns` of the steps lies that repeat the decode-only step `batch`, which has no padding,
        drafts or swaps; None where it is not known to."""
        return None

    @property
    def deployment(self) -> Deployment | None:
        """The model and GPUs whose steps are timed; None where times are stated, of no model and no GPU."""
        return None

    @property
    def profile(self) -> Profile | None:
        """The profile that the times come from, unchanged; None for any other kind."""
        return None

    @property
    def reach(self) -> Hull | None:
        """The largest steps that can be timed, beyond which ExtrapolationError is raised; None: no limit."""
        return None

    @property
    def error(self) -> CostError | Unknown:
        """How far step times may be off, or why nobody knows."""
        return Unknown("nobody measured it")

    @property
    def stages(self) -> int:
        """Stages of the pipeline of GPUs through which each step goes."""
        return 1

    @property
    def host_part(self) -> HostPart:
        """The host's part of `step_ns`, which an engine that schedules ahead does beside the GPU."""
        return HostPart()

    @property
    def overlap_known(self) -> bool:
        """Whether it was measured or is stated that the host's part lies beside the GPU's; True if there is none."""
        return self.host_part == HostPart()

    def without_host(self) -> Cost:
        """This cost without the host's part."""
        return self

    def head_ns(self, rows: int) -> float:
        """ns of the output matmul of `rows`, which only the last stage of a pipeline does."""
        return 0.0

    def transfer_ns(self, tokens: int) -> float:
        """ns in which the activations of `tokens` go from one stage of a pipeline to the next."""
        return 0.0

    def lanes(self) -> Lanes:
        """The times of steps on the GPUs and on the host, apart."""
        return Lanes(self, self.stages)

    def explain(self, columns: Columns) -> Terms:
        """What the time of recorded steps is made of: arrays of ns, an element a step, `weights, kv_reads, matmul,
        attention, host, swap, other, draft`, which sum to `step_ns`, and `flops` and `bytes` of the useful work; zero
        where not known."""
        ...

    def describe(self) -> str:
        """One line for the head of a report."""
        ...

    def sources(self) -> list[str]:
        """Lines on where the numbers come from."""
        ...
