"""The least time that the answers of a training could take: its longest alone, or all of them at the best rate."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from batchsim.cost.base import Cost
from batchsim.cost.work import TIME_TERMS, WORK_COLUMNS
from batchsim.kernel.policy_config import PolicyConfig
from batchsim.metrics.rollouts import by_training
from batchsim.results.fleet_inputs import cost_of_steps
from batchsim.scenario.setup import Setup
from batchsim.workload.rollout_log import RolloutLog

MOST_SEQUENCES = 4096
"""Sequences of a decode step beyond which none is looked at where a policy has no limit."""


def rollout_bounds_ns(setup: Setup, config: PolicyConfig, log: RolloutLog) -> NDArray[np.float64] | None:
    """Of each training the larger of two times in ns: its longest answer decoded alone, on the quickest engine; and all
    tokens at the best rate of decode steps, of all engines together, each answer with no context but its prompt.

    None for a policy with draft tokens, whose steps make more than a token of each.
    """
    if config.traits.speculation is not None:
        return None
    engines = [(group.setup, group.count) for group in setup.groups] or [(setup, 1)]
    costs = [cost_of_steps(each, config) for each, _ in engines]
    bounds = []
    for groups in by_training(log):
        answers = [(group.prompt_tokens, answer.made) for group in groups for answer in group.used]
        prompt = min(tokens for tokens, _ in answers)
        rate = sum(
            count * best_rate(cost, prompt, each, config) for cost, (each, count) in zip(costs, engines, strict=True)
        )
        prompt_of_longest, longest = max(answers, key=lambda answer: answer[1])
        alone = min(decode_ns(cost, np.ones(longest), prompt_of_longest + np.arange(longest)).sum() for cost in costs)
        bounds.append(max(float(alone), sum(tokens for _, tokens in answers) / rate))
    return np.array(bounds)


def best_rate(cost: Cost, prompt: int, setup: Setup, config: PolicyConfig) -> float:
    """The most tokens per ns that decode steps make, with `prompt` tokens of context each, as many as the KV holds."""
    blocks = -(-prompt // setup.kv.block_size)
    most = min(config.traits.max_num_seqs or MOST_SEQUENCES, max(setup.kv.num_blocks // blocks, 1))
    sequences = np.unique(np.geomspace(1, most, min(most, 64)).astype(np.int64))
    return float((sequences / decode_ns(cost, sequences, sequences * prompt)).max())


def decode_ns(cost: Cost, sequences: NDArray[np.number], context: NDArray[np.number]) -> NDArray[np.float64]:
    """ns of steps by their number of decodes and the tokens of context of all of these together."""
    columns = {name: np.zeros(len(sequences), np.int64) for name in WORK_COLUMNS}
    columns["num_decode"] = columns["num_decode_tokens"] = sequences.astype(np.int64)
    columns["context_tokens"] = context.astype(np.int64)
    terms = cost.explain(columns)
    return np.sum([terms[name] for name in TIME_TERMS if name in terms], axis=0)
