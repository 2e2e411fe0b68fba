"""Step times of a user's own: `cost: {kind: "module:Class"}` names the class, and what it returns is checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from batchsim.base.errors import ScenarioError, shown
from batchsim.base.later import np
from batchsim.base.ranges import Config, Range
from batchsim.base.units import MAX_STEP_NS
from batchsim.cost.base import Cost
from batchsim.cost.drafter_config import DraftersConfig
from batchsim.cost.encoder_config import EncoderConfig
from batchsim.cost.shapes.config import ShapesConfig
from batchsim.cost.work import Columns, StepWork, Terms, all_terms, work_of_step
from batchsim.deployment.model import ModelSpec
from batchsim.kernel.batch import Batch


@dataclass(frozen=True, kw_only=True)
class OwnCost(Config):
    """What a cost of a user's own derives from: `kind: "module:Class"` names the dataclass.

    `num_gpus`: GPUs that it stands for, which prices count. `draft`: what drafting costs beside, and `encoder`
    encoding images, audios, videos. `shapes`: the compiled shapes to which steps are padded before they are timed.
    """

    num_gpus: Annotated[int, Range(1, 1024)] = 1
    draft: DraftersConfig | None = None
    encoder: EncoderConfig | None = None
    shapes: ShapesConfig | None = None

    @property
    def kind(self) -> str:
        """Its name in tables."""
        return type(self).__name__

    def step_ns(self, step: StepWork) -> int:
        """The ns that a step of this work takes, at least 1: a whole number, and the same for the same work."""
        raise NotImplementedError

    def build(self, model: ModelSpec, *, block_size: int = 16, max_model_len: int | None = None) -> Own:
        """Its cost, whatever the model: all that it needs is among its own fields."""
        return Own(self)


@dataclass(frozen=True, slots=True)
class Own(Cost):
    """The cost of an OwnCost. ScenarioError for whatever that raises, and for what is no duration of a step."""

    config: OwnCost

    def step_ns(self, batch: Batch) -> int:
        return self._asked(work_of_step(batch))

    def recompute_ns(self, num_tokens: int) -> int:
        """ns of a step that computes `num_tokens` of one sequence and nothing else."""
        return self._asked(_chunk(num_tokens))

    def swap_ns(self, num_blocks: int) -> int:
        """ns that `num_blocks` swapped blocks add to a step of one token; 0 where they add none."""
        alone = _chunk(1)
        return max(0, self._asked(alone._replace(swap_blocks=num_blocks)) - self._asked(alone))

    def explain(self, columns: Columns) -> Terms:
        """The whole time of each step under `other`; `flops` and `bytes` are zero, since nothing is known of them."""
        rows = zip(*(columns[name].tolist() for name in StepWork._fields), strict=True)
        other = np.array([self._asked(StepWork(*row)) for row in rows], dtype=np.float64)
        return all_terms(columns, {"other": other})

    def describe(self) -> str:
        return f"cost: {self.config.kind}, code of its own"

    def sources(self) -> list[str]:
        return [f"step times: {type(self.config).__module__}:{self.config.kind}, code of its own"]

    def _asked(self, step: StepWork) -> int:
        where = f"cost: {self.config.kind}.step_ns"
        try:
            step_ns = self.config.step_ns(step)
        except (Exception, SystemExit) as error:  # a user's code may raise anything
            said = f"{type(error).__name__}: {shown(str(error))}"
            raise ScenarioError(f"{where} fails for {_words(step)}: {said}. Correct it.") from error
        if isinstance(step_ns, bool) or not isinstance(step_ns, int | np.integer) or not 1 <= step_ns <= MAX_STEP_NS:
            raise ScenarioError(
                f"{where} gives {shown(step_ns)} for {_words(step)}. Return a whole number of ns, from 1 to an hour's."
            )
        return int(step_ns)


def _chunk(tokens: int) -> StepWork:
    """A step of one prompt's `tokens` and nothing else."""
    return StepWork(num_prefill_tokens=tokens, num_chunks=1, prefill_pairs=tokens * (tokens + 1) // 2)


def _words(step: StepWork) -> str:
    """The nonzero parts of `step`, as in `a step of num_decode 3, context_tokens 90`."""
    parts = [f"{name} {value}" for name, value in zip(step._fields, step, strict=True) if value]
    return f"a step of {', '.join(parts)}" if parts else "a step of nothing"
