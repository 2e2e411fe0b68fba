"""The time in which an encoder computes images, audios and videos: before the forward of the step that needs them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from batchsim.base.errors import ScenarioError
from batchsim.cost.base import Cost, EncoderTime
from batchsim.cost.encoder_config import EncoderConfig
from batchsim.cost.interpolation import Curve, Grid, GridReader
from batchsim.cost.profile import Profile
from batchsim.cost.work import Columns, Terms
from batchsim.cost.wrapped import Wrapped
from batchsim.kernel.batch import Batch


@dataclass(frozen=True, slots=True)
class ItemTime(EncoderTime):
    """ns in which an encoder computes an item (an image, audio or video), and for each of its embeddings; items of a
    step are computed one after another."""

    base: float
    per_token: float

    def items_ns(self, items: list[list[int]]) -> list[int]:
        return [sum(int(self.base + self.per_token * tokens) for tokens in each) for each in items]

    def __mul__(self, factor: float) -> ItemTime:
        return ItemTime(self.base * factor, self.per_token * factor)


@dataclass(frozen=True, slots=True)
class VisionTime(EncoderTime):
    """ns in which a vision tower computes the images of a step, all in one call, times `factor`.

    `dense`: of all embeddings together, without attention, which is that of the patches of each image to each other:
    `attention` over the number of images and the embeddings of each. Of a call with unlike images each has its share of
    the time of as many of its own size. `source`: the tower and the kernels that were timed, in words.
    """

    dense: Curve
    attention: Grid
    source: str
    factor: float = 1.0

    def items_ns(self, items: list[list[int]]) -> list[int]:
        tokens, images = sum(map(sum, items)), sum(map(len, items))
        per_token, reader = self.dense.at_one(tokens) / tokens, GridReader(self.attention)
        return [int(self.factor * sum(per_token * n + reader.at(images, n) / images for n in each)) for each in items]

    def __mul__(self, factor: float) -> VisionTime:
        return replace(self, factor=self.factor * factor)

    def __str__(self) -> str:
        return self.source


@dataclass(frozen=True, slots=True)
class Encoding(Wrapped):
    """The cost model `cost` of an engine with an encoder, whose times `encoder` has, stated or derived: the executor
    adds them to the steps that encode, so that `step_ns` and `explain` are of the rest."""

    cost: Cost
    encoder: EncoderConfig | VisionTime

    def step_ns(self, batch: Batch) -> int:
        return self.cost.step_ns(batch)

    @property
    def encoder_time(self) -> EncoderTime:
        encoder = self.encoder
        return encoder if isinstance(encoder, VisionTime) else ItemTime(encoder.base, encoder.per_token)

    def without_host(self) -> Cost:
        return Encoding(self.cost.without_host(), self.encoder)

    def explain(self, columns: Columns) -> Terms:
        return self.cost.explain(columns)

    @property
    def profile(self) -> Profile | None:
        return self.cost.profile

    def describe(self) -> str:
        text, mark, doubts = self.cost.describe().partition(" · ! ")
        return f"{text} · encoder: {self.encoder}{mark}{doubts}"

    def sources(self) -> list[str]:
        stated = ", as stated in the scenario" if isinstance(self.encoder, EncoderConfig) else ""
        return [*self.cost.sources(), f"encoder: {self.encoder}{stated}"]


def encoder_unknown(reason: str = "") -> ScenarioError:
    """The error of images, audios and videos whose encoder's time is not known, for a `reason` in a clause."""
    why = f": {reason}" if reason else ""
    return ScenarioError(
        f"how long encoding images, audios and videos takes is not known{why}. Write, say, encoder: {{base: 2ms,"
        " per_token: 10us} into cost or deployment."
    )


def with_encoder(cost: Cost, encoder: EncoderConfig | VisionTime | None) -> Cost:
    """`cost` of an engine with `encoder`; itself where None."""
    return cost if encoder is None else Encoding(cost, encoder)
