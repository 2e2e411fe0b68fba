"""`Cost`, the protocol of every cost model, with the answers of one that does not say; `Lanes`, its times taken apart.

Apart are the host's part and the device's, for engines whose host works while the GPU does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from batchsim.base.later import np
from batchsim.cost.cost_error import CostError, Unknown
from batchsim.cost.work import TIME_TERMS, Columns, Terms, padded_work
from batchsim.kernel.protocols import CostModel, DecodeLine, Encodes, StepEstimator

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from batchsim.cost.profile import Hull, Profile
    from batchsim.deployment.deployment import Deployment
    from batchsim.kernel.batch import Batch


@dataclass(frozen=True, slots=True)
class HostPart:
    """ns of the host in every step, for each of its sequences and for each token of prompts."""

    base: float = 0
    per_sequence: float = 0
    per_token: float = 0

    def ns(self, batch: Batch) -> int:
        """ns of the host for the step `batch`; padding counts as sequences."""
        rows = batch.num_decode + batch.pad_decode_rows + len(batch.chunks) + batch.pad_prefill_rows
        return int(self.base + self.per_sequence * rows + self.per_token * batch.num_prefill_tokens)

    def of(self, columns: Columns) -> NDArray[np.float64]:
        """ns of the host for each recorded step: `ns`, not rounded."""
        rows = padded_work(columns).sequences
        return self.base + self.per_sequence * rows + self.per_token * columns["num_prefill_tokens"]

    def __mul__(self, factor: float) -> HostPart:
        return HostPart(self.base * factor, self.per_sequence * factor, self.per_token * factor)


class EncoderTime(Encodes, Protocol):
    """How long an encoder takes for the images, audios and videos of a step, `*` a factor."""

    def __mul__(self, factor: float) -> EncoderTime: ...


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
        """How far step times may be off, or why that is unknown."""
        return Unknown("it was not measured")

    @property
    def stages(self) -> int:
        """Stages of the pipeline of GPUs through which each step goes."""
        return 1

    @property
    def host_part(self) -> HostPart:
        """The host's part of `step_ns`, which an engine that schedules ahead does beside the GPU."""
        return HostPart()

    @property
    def encoder_time(self) -> EncoderTime | None:
        """How long encoding takes before a step that encodes images, audios or videos, beside `step_ns`; None: the
        engine has no encoder."""
        return None

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

    def experts_ns(self, tokens: int, *, decodes: bool) -> float:
        """ns of a model's experts, and of the dispatch to them, in a pass of several attention groups with `tokens`
        together, of `decodes` alone or not; 0 where `step_ns` of a group's own batch holds it."""
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


class Lanes:
    """The times of steps by `cost`, taken apart. Half of the host's part of a step comes before its launch, half after
    its end: assumed.

    With several `stages` each takes its part of the layers' time by their number, the last one the output matmul too,
    and what goes from one to the next takes its time on the links between them.
    """

    def __init__(self, cost: Cost, stages: int) -> None:
        self.cost = cost.without_host()
        self.step_ns = self.device_ns = self.cost.step_ns
        self.decode_line = self.cost.decode_line
        self._host = cost.host_part
        layers = (1,) * stages if cost.deployment is None else cost.deployment.stage_layers
        self._layers = (1,) * stages if len(set(layers)) == 1 else layers  # equal parts are equal, bit for bit
        self._all_layers = sum(self._layers)
        self._host_of_decodes: dict[int, tuple[int, int]] = {}  # by rows of a step of decodes
        self._of_decodes: dict[int, tuple[float, int]] = {}  # by rows of a step of decodes: its head, its transfer

    def host_ns(self, batch: Batch | None) -> tuple[int, int]:
        """ns of the host before the launch of `batch` and after its end; zeros for a call that scheduled nothing."""
        if batch is None:
            return 0, 0
        if batch.chunks or batch.pad_prefill_rows or batch.num_prefill_tokens:
            return _halves(self._host.ns(batch))
        rows = batch.num_decode + batch.pad_decode_rows
        halves = self._host_of_decodes.get(rows)
        if halves is None:
            halves = self._host_of_decodes[rows] = _halves(self._host.ns(batch))
        return halves

    def stages_of(self, columns: Columns) -> NDArray[np.int64]:
        """ns of each stage for recorded steps, a row a step, a column a stage: `stages_ns`, but for the rounding."""
        cost, work, terms = self.cost, padded_work(columns), self.cost.explain(columns)
        whole = sum((terms[name] for name in TIME_TERMS), np.zeros(len(work.rows)))
        head = np.array([cost.head_ns(rows) for rows in work.rows.tolist()])
        between = np.array([int(cost.transfer_ns(tokens)) for tokens in work.tokens.tolist()], np.int64)
        *before, last = [((whole - head) * count / self._all_layers).astype(np.int64) for count in self._layers]
        stages_ns = np.stack([*(each + between for each in before), (last + head).astype(np.int64)], axis=1)
        return np.maximum(stages_ns, 1)

    def stages_ns(self, batch: Batch) -> tuple[int, ...]:
        """ns of the step `batch` in each stage, the transfer to the next one included."""
        cost = self.cost
        rows = batch.num_decode_tokens + batch.pad_decode_rows
        if batch.chunks or batch.pad_prefill_tokens or batch.pad_prefill_rows:
            tokens = rows + batch.num_prefill_tokens + batch.pad_prefill_tokens
            head_ns = cost.head_ns(rows + len(batch.chunks) + batch.pad_prefill_rows)
            between = int(cost.transfer_ns(tokens))
        elif rows in self._of_decodes:
            head_ns, between = self._of_decodes[rows]
        else:
            head_ns, between = self._of_decodes[rows] = cost.head_ns(rows), int(cost.transfer_ns(rows))
        body_ns = cost.step_ns(batch) - head_ns
        *before, last = [int(body_ns * count / self._all_layers) for count in self._layers]
        return (*(each + between or 1 for each in before), int(last + head_ns) or 1)


def _halves(ns: int) -> tuple[int, int]:
    return ns // 2, ns - ns // 2
