"""An engine on a model whose requests arrive one by one from clients, until the stream is closed."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Any

import torch

from batchsim.calibrate.engine.executor import TorchExecutor
from batchsim.calibrate.engine.runner import ModelRunner
from batchsim.calibrate.engine.sampling import GREEDY
from batchsim.calibrate.engine.session import new_core, warm_up
from batchsim.kernel.kv_blocks import BlockTables
from batchsim.kernel.types import Sequence

if TYPE_CHECKING:
    from batchsim.calibrate.engine.prompts import Prompts
    from batchsim.kernel.protocols import StepEstimator
    from batchsim.scenario.config import PolicySpec
    from batchsim.scenario.setup import Setup
    from batchsim.workload.build import BuiltWorkload


class ServingExecutor(TorchExecutor):
    """A TorchExecutor that keeps nothing of steps and of requests that have ended, but for `outputs`.

    These are the tokens of each request by its id, growing, until the reader takes them out.
    """

    def __init__(self, runner: ModelRunner, kv: BlockTables, **options: Any) -> None:
        super().__init__(runner, kv, **options)
        self.times = deque(maxlen=0)
        self.outputs: dict[int, list[int]] = {}

    def begin(self, seq: Sequence, output_tokens: int | None) -> None:
        super().begin(seq, output_tokens)
        self.outputs[seq.request.id] = self._lives[seq].generated

    def end(self, seq: Sequence) -> None:
        super().end(seq)
        self._answers.clear()  # whoever sends the next prompt sends its tokens


class ServingEngine:
    """The engine of `policy` on the model of `runner`, which reads `prompts`. ScenarioError as `run_live`."""

    def __init__(
        self,
        setup: Setup,
        policy: PolicySpec,
        runner: ModelRunner,
        workload: BuiltWorkload,
        prompts: Prompts,
        estimator: StepEstimator,
    ) -> None:
        executor, self.core = new_core(
            ServingExecutor,
            setup,
            policy,
            runner,
            workload,
            sampling=GREEDY,
            prompts=prompts,
            estimator=estimator,
        )
        self.outputs = executor.outputs
        self.eos_token_ids: Items[int] = runner.eos_token_ids
        self._runner = runner
        warm_up(runner)

    def begin_thread(self) -> None:
        """Gives the calling thread the runner's device."""
        if self._runner.device.index is not None:
            torch.cuda.set_device(self._runner.device)
