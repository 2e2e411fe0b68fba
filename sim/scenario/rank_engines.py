"""The engines of ranks that step together, and their simulation."""

from __future__ import annotations

from batchsim.cost.shapes.lists import vllm_graph_sizes
from batchsim.drive.fleet.lockstep.lockstep_config import LockstepConfig
from batchsim.drive.fleet.lockstep.passes import LockstepCost
from batchsim.drive.fleet.lockstep.rank_costs import RankCosts
from batchsim.drive.fleet.lockstep.recorded_ranks import simulate_ranks
from batchsim.drive.fleet.simulate_fleet import FleetRun
from batchsim.kernel.core import EngineCore
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.scenario.config import PolicySpec
from batchsim.scenario.setup import Setup
from batchsim.workload.build import BuiltWorkload


def run_ranks(setup: Setup, spec: PolicySpec, workload: BuiltWorkload, until_ns: int, *, join: bool) -> FleetRun:
    """Simulates the ranks of `setup` under `spec`, as `simulate_ranks` does."""
    replicas, config = setup.scenario.file.replicas, spec.config
    assert replicas is not None and replicas.lockstep is not None and replicas.count is not None, "checked by Setup"
    one = setup.groups[0].setup
    cost, loop = one.cost_under(config), config.traits.loop
    lanes = cost.lanes()
    cores: list[EngineCore] = []
    for _ in range(replicas.count):
        executor = SimExecutor(LockstepCost(lanes), one.max_model_len, loop)
        cores.append(one.engine_on(executor, spec, workload, one.new_kv(config), cost))
    costs = RankCosts(lanes.device_ns if loop.is_ahead else cost.step_ns, graph_sizes(spec, replicas.lockstep))
    fleet = simulate_ranks(cores, costs, replicas.lockstep, workload, until_ns=until_ns, join=join)
    for core in cores:
        core.check_returned()
    return fleet


def graph_sizes(spec: PolicySpec, lockstep: LockstepConfig) -> list[int]:
    """The tokens of the CUDA graphs that each rank captures; none where it is eager."""
    config = spec.config
    return [] if lockstep.eager else vllm_graph_sizes(config.max_num_seqs, config.max_num_batched_tokens)
