"""The time in which an encoder computes images, audios and videos: before the forward of the step that needs them."""

from __future__ import annotations

from dataclasses import dataclass

from batchsim.base.errors import ScenarioError
from batchsim.cost.base import Cost, EncoderTime
from batchsim.cost.encoder_config import EncoderConfig
from batchsim.cost.profile import Profile
from batchsim.cost.work import Columns, Terms
from batchsim.cost.wrapped import Wrapped
from batchsim.kernel.batch import Batch


@dataclass(frozen=True, slots=True)
class Encoding(Wrapped):
    """The cost model `cost` of an engine with an encoder, whose times `encoder` says: the executor adds them to the
    steps that encode, so that `step_ns` and `explain` are of the rest."""

    cost: Cost
    config: EncoderConfig

    def step_ns(self, batch: Batch) -> int:
        return self.cost.step_ns(batch)

    @property
    def encoder_time(self) -> EncoderTime:
        return EncoderTime(self.config.base, self.config.per_token)

    def without_host(self) -> Cost:
        return Encoding(self.cost.without_host(), self.config)

    def explain(self, columns: Columns) -> Terms:
        return self.cost.explain(columns)

    @property
    def profile(self) -> Profile | None:
        return self.cost.profile

    def describe(self) -> str:
        text, mark, doubts = self.cost.describe().partition(" · ! ")
        return f"{text} · encoder: {self.config}{mark}{doubts}"

    def sources(self) -> list[str]:
        return [*self.cost.sources(), f"encoder: {self.config}, as stated in the scenario"]


def with_encoder(cost: Cost, config: EncoderConfig | None, *, items: bool) -> Cost:
    """`cost` of an engine with the encoder `config`, where requests have `items`; itself where they have none.

    ScenarioError for items of which no encoder is stated, and for an encoder without items.
    """
    if items and config is None:
        raise ScenarioError(
            "how long encoding images, audios and videos takes is not known. Write, say, encoder: {base: 2ms,"
            " per_token: 10us} into cost or deployment."
        )
    if config is None:
        return cost
    if not items:
        what = f"encoder {config}: no request has images, audios or videos"
        raise ScenarioError(f"{what}. Add workload.items, or drop it.")
    return Encoding(cost, config)
