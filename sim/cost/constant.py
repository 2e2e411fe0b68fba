"""Two costs made of stated times: every step the same, or linear in its work. For theory, tests and rough questions."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, ClassVar, Literal

from batchsim.base.later import np
from batchsim.base.ranges import Config
from batchsim.base.units import PartDuration, StepDuration, format_duration
from batchsim.cost.base import Cost
from batchsim.cost.cost_error import Unknown
from batchsim.cost.drafter_config import DraftersConfig
from batchsim.cost.encoder_config import EncoderConfig
from batchsim.cost.shapes.config import ShapesConfig
from batchsim.cost.work import Columns, Terms, all_terms, padded_work, swap_blocks

if TYPE_CHECKING:
    from batchsim.deployment.model import ModelSpec
    from batchsim.kernel.batch import Batch
    from batchsim.kernel.protocols import DecodeLine

STATED = Unknown("step times are stated")


@dataclass(frozen=True, slots=True)
class Constant(Cost, Config):
    """Every step takes the same time, whatever is in it. Swaps are free, so `auto` preemption always swaps."""

    step: StepDuration
    """Time of each step."""
    kind: Literal["constant"] = "constant"
    draft: DraftersConfig | None = None
    """What drafting costs beside, by method."""
    encoder: EncoderConfig | None = None
    """What encoding images, audios and videos takes, beside the steps."""
    shapes: ShapesConfig | None = None
    """Compiled shapes, to which steps are padded; without it no step is."""

    num_gpus: ClassVar[int] = 1

    def build(self, model: ModelSpec, *, block_size: int = 16, max_model_len: int | None = None) -> Constant:
        """Itself, whatever the model: it is config and cost in one."""
        return self

    def step_ns(self, batch: Batch) -> int:
        return self.step

    def decode_line(self, batch: Batch) -> DecodeLine:
        return self.step, 0, inf

    def recompute_ns(self, num_tokens: int) -> int:
        return self.step

    def swap_ns(self, num_blocks: int) -> int:
        return 0

    def explain(self, columns: Columns) -> Terms:
        """The whole time of each step under `other`; `flops` and `bytes` are zero, since nothing is known of them."""
        other = np.full(len(columns["num_decode"]), float(self.step))
        return all_terms(columns, {"other": other})

    def describe(self) -> str:
        return f"cost: constant, {format_duration(self.step)} a step"

    def sources(self) -> list[str]:
        return ["step time: as stated in the scenario"]

    @property
    def error(self) -> Unknown:
        return STATED


@dataclass(frozen=True, slots=True)
class Linear(Cost, Config):
    """A step takes `base` + a part for each token computed, sequence, context token that a decode reads, block swapped.

    Padding counts as work. All are whole nanoseconds.
    """

    base: StepDuration
    """Time of each step, whatever is in it."""
    per_token: PartDuration = 0
    """Time for each token of a step."""
    per_sequence: PartDuration = 0
    """Time for each sequence of a step."""
    per_context_token: PartDuration = 0
    """Time for each token of context that decodes read."""
    per_swapped_block: PartDuration = 0
    """Time for each KV block moved to or from host memory."""
    kind: Literal["linear"] = "linear"
    draft: DraftersConfig | None = None
    """What drafting costs beside, by method."""
    encoder: EncoderConfig | None = None
    """What encoding images, audios and videos takes, beside the steps."""
    shapes: ShapesConfig | None = None
    """Compiled shapes, to which steps are padded; without it no step is."""

    num_gpus: ClassVar[int] = 1

    def build(self, model: ModelSpec, *, block_size: int = 16, max_model_len: int | None = None) -> Linear:
        """Itself, whatever the model: it is config and cost in one."""
        return self

    def step_ns(self, batch: Batch) -> int:
        """The step's duration in ns, at least 1. O(1) without swaps."""
        rows = batch.num_decode + batch.pad_decode_rows
        tokens = batch.num_decode_tokens + batch.pad_decode_rows + batch.num_prefill_tokens + batch.pad_prefill_tokens
        context = batch.context_tokens + batch.pad_context_tokens
        ns = self.base + self.per_token * tokens + self.per_context_token * context
        ns += self.per_sequence * (rows + len(batch.chunks) + batch.pad_prefill_rows)
        if batch.swap_out or batch.swap_in:
            ns += self.swap_ns(swap_blocks(batch))
        return ns

    def decode_line(self, batch: Batch) -> DecodeLine:
        alone = self.base + (self.per_token + self.per_sequence) * batch.num_decode
        return alone, self.per_context_token, inf

    def recompute_ns(self, num_tokens: int) -> int:
        """ns of a step that computes `num_tokens` of one sequence and nothing else."""
        return self.base + self.per_token * num_tokens + self.per_sequence

    def swap_ns(self, num_blocks: int) -> int:
        return self.per_swapped_block * num_blocks

    def explain(self, columns: Columns) -> Terms:
        """ns of tokens under `matmul`, of context under `kv_reads`, the rest under `other`; no `flops` and `bytes`."""
        work = padded_work(columns)
        known = {
            "matmul": self.per_token * work.tokens * 1.0,
            "kv_reads": self.per_context_token * work.context * 1.0,
            "swap": self.per_swapped_block * columns["swap_blocks"] * 1.0,
            "other": self.base + self.per_sequence * work.sequences * 1.0,
        }
        return all_terms(columns, known)

    def describe(self) -> str:
        return (
            f"cost: linear, {format_duration(self.base)} + {format_duration(self.per_token)} a token"
            f" + {format_duration(self.per_sequence)} a sequence"
            f" + {format_duration(self.per_context_token)} a context token"
        )

    def sources(self) -> list[str]:
        return ["coefficients: as stated in the scenario"]

    @property
    def error(self) -> Unknown:
        return STATED
