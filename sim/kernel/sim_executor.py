"""The executor of simulations: a cost model says how long a step takes, the true output lengths whom it finishes."""

from __future__ import annotations

from heapq import heappop, heappush

from batchsim.kernel.types import Batch, CostModel, Sequence, StepResult


class SimExecutor:
    """Runs batches on a cost model. Knows the true output lengths; a step is O(sequences that end or join)."""

    def __init__(self, cost: CostModel, max_model_len: int) -> None:
        self.cost = cost
        self.max_model_len = max_model_len
        self._targets: dict[Sequence, int] = {}
        self._ends: list[tuple[int, int, int, Sequence]] = []  # (group step, order, epoch, sequence)

    def begin(self, seq: Sequence, output_tokens: int | None) -> None:
        """Notes the output length at which `seq` ends: its true one, the client's cap, the policy's or the model's."""
        request = seq.request
        if output_tokens is None:
            raise ValueError(f"request {request.id} has no output length; a simulation needs one")
        self._targets[seq] = min(output_tokens, seq.max_output_tokens, self.max_model_len - request.prompt_tokens)

    def end(self, seq: Sequence) -> None:
        self._targets.pop(seq, None)

    def quiet_steps(self, batch: Batch) -> int:
        ends, group = self._ends, batch.decodes
        while ends:
            step, _, epoch, seq = ends[0]
            if epoch == seq.epoch and seq.group is group:
                return step - group.step - 1 if group is not None else 0
            heappop(ends)
        return 0

    def execute(self, batch: Batch) -> StepResult:
        group, ends = batch.decodes, self._ends
        finished: list[Sequence] = []
        if group is not None:
            for seq in batch.joined:
                if seq.group is group:
                    end = group.step + self._targets[seq] - seq.num_output_tokens
                    heappush(ends, (end, seq.order, seq.epoch, seq))
            after = group.step + 1
            while ends and ends[0][0] <= after:
                _, _, epoch, seq = heappop(ends)
                if epoch == seq.epoch and seq.group is group:
                    finished.append(seq)
        for seq, n in batch.chunks:
            if (
                seq.settled_computed_tokens + n == seq.num_tokens
                and seq.settled_output_tokens + 1 >= self._targets[seq]
            ):
                finished.append(seq)
        if len(finished) > 1:
            finished = batch.in_order(finished)
        return StepResult(self.cost.step_ns(batch), finished)
