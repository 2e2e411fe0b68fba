"""Gymnasium environments in which batching can be learned. Importing this package registers them:

- `batchsim/BatchQueue-v0`: a batch server with Poisson arrivals and service times linear in the batch, whose optimum
  `batchsim.gym.smdp` computes;
- `batchsim/WholeBatch-v0`: the size of each whole batch, of a scenario's requests on its engine;
- `batchsim/Steps-v0`: token budget and slots of continuous batching, held for a while, of a scenario.

They need gymnasium, an extra: `pip install 'batchsim[gym]'`. A decision is a step; what an agent sees of a scenario is
what it sees as a policy (`batch_agent.py` and `step_agent.py` of `batchsim.policies.families`).
"""

from __future__ import annotations

try:
    import gymnasium  # pyright: ignore[reportMissingImports]
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "batchsim.gym needs gymnasium, which is not installed. Run: pip install 'batchsim[gym]'."
    ) from error

ENVIRONMENTS = {
    "batchsim/BatchQueue-v0": "batchsim.gym.batch_queue:BatchQueueEnv",
    "batchsim/WholeBatch-v0": "batchsim.gym.whole_batch:WholeBatchEnv",
    "batchsim/Steps-v0": "batchsim.gym.steps:StepsEnv",
}
"""The environments by the names under which `gymnasium.make` knows them."""

for _name, _entry in ENVIRONMENTS.items():
    if _name not in gymnasium.registry:
        gymnasium.register(_name, entry_point=_entry)
