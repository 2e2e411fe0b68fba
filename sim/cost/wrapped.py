"""What costs that change another one have in common: all that they leave as it is."""

from __future__ import annotations

from batchsim.cost.base import Cost, EncoderTime, HostPart
from batchsim.cost.cost_error import CostError, Unknown
from batchsim.cost.profile import Hull
from batchsim.cost.work import Columns, Terms
from batchsim.deployment.deployment import Deployment


class Wrapped(Cost):
    """A cost model made of `cost`, from which it has whatever it does not say itself; it says `step_ns` itself.

    `profile` is None unless it says so: the times are not the profile's any more.
    """

    cost: Cost

    def recompute_ns(self, num_tokens: int) -> int:
        return self.cost.recompute_ns(num_tokens)

    def swap_ns(self, num_blocks: int) -> int:
        return self.cost.swap_ns(num_blocks)

    def explain(self, columns: Columns) -> Terms:
        return self.cost.explain(columns)

    def describe(self) -> str:
        return self.cost.describe()

    def sources(self) -> list[str]:
        return self.cost.sources()

    @property
    def stages(self) -> int:
        return self.cost.stages

    @property
    def host_part(self) -> HostPart:
        return self.cost.host_part

    @property
    def encoder_time(self) -> EncoderTime | None:
        return self.cost.encoder_time

    @property
    def overlap_known(self) -> bool:
        return self.cost.overlap_known

    def head_ns(self, rows: int) -> float:
        return self.cost.head_ns(rows)

    def transfer_ns(self, tokens: int) -> float:
        return self.cost.transfer_ns(tokens)

    def experts_ns(self, tokens: int, *, decodes: bool) -> float:
        return self.cost.experts_ns(tokens, decodes=decodes)

    @property
    def deployment(self) -> Deployment | None:
        return self.cost.deployment

    @property
    def reach(self) -> Hull | None:
        return self.cost.reach

    @property
    def error(self) -> CostError | Unknown:
        return self.cost.error
