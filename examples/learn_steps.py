"""An agent that learns how many tokens a step may have, is judged beside the best constants, and runs as a policy.

    pip install 'batchsim[gym]'
    python examples/learn_steps.py train mine.json     # some minutes on a CPU
    python examples/learn_steps.py judge mine.json     # on seeds and loads that it was not trained on
    batchsim run examples/learned.yaml --allow-code    # as a policy beside constants and controllers

The last one takes the weights that lie beside this file, and needs no gymnasium. The agent is a line: fifteen weights
of what it observes, squeezed into a place in the list of budgets. It is trained by the cross-entropy method
(Rubinstein, 1999): weights are drawn around a mean, each candidate plays an episode at each load, and the best make the
next mean.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence as Numbers
from dataclasses import dataclass
from math import exp
from pathlib import Path
from typing import Any

import numpy as np

from batchsim.base.errors import ScenarioError
from batchsim.kernel.protocols import PolicyContext
from batchsim.policies.families.step_agent import STEP_OBSERVED, StepAgent, StepAgentConfig

HERE = Path(__file__).parent
BUDGETS = (256, 512, 1024, 2048, 8192)
SCALES = (3, 3, 0.1, 0.1, 0.05, 8, 10, 3, 3, 0.1, 0.2, 1, 1, 1)  # what an observed quantity is divided by
TRAINED, LOADS = (8.0, 9.0, 10.0), (8.0, 8.5, 9.0, 9.5, 10.0)  # requests a second
TUNING, JUDGED = range(1, 6), range(101, 121)  # seeds; those of training are 1,000 and more
CANDIDATES, BEST, ROUNDS = 24, 6, 14


@dataclass(frozen=True)
class LearnedConfig(StepAgentConfig):
    weights: str = "learned_steps.json"
    """A file beside this one."""


class Learned(StepAgent):
    """The trained agent as a policy."""

    def __init__(self, config: LearnedConfig, context: PolicyContext) -> None:
        super().__init__(config, context)
        path = HERE / config.weights
        if not path.exists():
            raise ScenarioError(
                f"{path}: no such file of weights. Make it: python examples/learn_steps.py train {path}"
            )
        self.weights = json.loads(path.read_text())

    def decide(self, observed: tuple[float, ...]) -> Numbers[int]:
        return choice(self.weights, observed)


def choice(weights: Numbers[float], observed: Any) -> tuple[int, int]:
    """The places of a budget and of the only cap."""
    score = weights[-1] + sum(w * float(x) / s for w, x, s in zip(weights[:-1], observed, SCALES, strict=True))
    return min(int(len(BUDGETS) / (1 + exp(-max(score, -30.0)))), len(BUDGETS) - 1), 0


def environment() -> Any:
    """A minute of the bursts of `learned.yaml`; the SLO is 3 s to the first token and 35 ms between two."""
    from batchsim.gym.request_objectives import Objectives
    from batchsim.gym.steps import StepsEnv

    config = LearnedConfig(
        max_num_seqs=256, max_num_batched_tokens=8192, budgets=BUDGETS, caps=(256,), every=200_000_000
    )
    no_other = ("policies={any: {kind: static, batch_size: 1}}",)  # an environment has a policy of its own
    asked = Objectives(ttft_s=3.0, tpot_s=0.035)
    return StepsEnv(str(HERE / "learned.yaml"), no_other, config=config, objectives=asked, horizon_s=60.0)


def shares(env: Any, rule: Any, load: float, seeds: Any) -> dict[int, float]:
    """By seed the share of requests within their SLO."""
    from batchsim.gym.rules import play

    found = {}
    for seed in seeds:
        counts = play(env, rule, seed, {"load": load}).counts
        found[seed] = counts["in_slo"] / (counts["in_slo"] + counts["missed"])
    return found


def train(path: Path) -> None:
    """Trains an agent and writes its weights."""
    env, chance, begun_s = environment(), np.random.default_rng(1), time.process_time()
    mean, spread = np.zeros(len(STEP_OBSERVED) + 1), np.full(len(STEP_OBSERVED) + 1, 0.7)
    mean[-1] = -0.85  # the budget of 512 whatever is observed
    for number in range(ROUNDS):
        drawn = mean + spread * chance.normal(size=(CANDIDATES, len(mean)))
        drawn[0] = mean
        seed = int(chance.integers(1000, 10**6))
        scores = []
        for weights in drawn:
            play_one = [shares(env, lambda seen, _, w=weights: choice(w, seen), load, [seed])[seed] for load in TRAINED]
            scores.append(sum(play_one) / len(TRAINED))
        best = drawn[np.argsort(scores)[-BEST:]]
        mean, spread = 0.3 * mean + 0.7 * best.mean(0), np.maximum(0.3 * spread + 0.7 * best.std(0), 0.08)
        print(f"round {number + 1}: {max(scores):.3f} at best, {np.mean(scores):.3f} on average", flush=True)
    path.write_text(json.dumps([round(float(w), 4) for w in mean]))
    print(f"{time.process_time() - begun_s:.0f} s of CPU")


def judge(path: Path) -> None:
    """Prints the share of requests within their SLO: of the agent, of the best constant budget at each load, chosen on
    other seeds, and of the one best at all of them; and by how much the agent is ahead, seed by seed."""
    from batchsim.gym.rules import Constant
    from batchsim.metrics.intervals import paired

    env, weights = environment(), json.loads(path.read_text())
    constants = [Constant((place, 0)) for place in range(len(BUDGETS))]
    tuned = {load: [sum(shares(env, one, load, TUNING).values()) for one in constants] for load in LOADS}
    overall = constants[int(np.argmax(np.sum(list(tuned.values()), axis=0)))]
    print("load | agent | best constant here | best at all loads | ahead of the one | of the other")
    for load in LOADS:
        best = constants[int(np.argmax(tuned[load]))]
        agent = shares(env, lambda seen, _: choice(weights, seen), load, JUDGED)
        columns, ahead = [f"{100 * np.mean(list(agent.values())):.1f} %"], list[str]()
        for one in (best, overall):
            other = shares(env, one, load, JUDGED)
            columns.append(f"{100 * np.mean(list(other.values())):.1f} % ({BUDGETS[one.action[0]]})")
            difference = paired(agent, other)
            ahead.append(f"{100 * (difference.mean or 0):+.1f} ± {100 * (difference.half_width or 0):.1f} points")
        print(f"{load:g}/s | " + " | ".join([*columns, *ahead]), flush=True)


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("train", "judge"):
        sys.exit(__doc__)
    {"train": train, "judge": judge}[sys.argv[1]](Path(sys.argv[2]))
