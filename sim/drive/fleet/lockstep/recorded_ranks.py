"""Ranks in lockstep that leave records as several engines behind a router do, each rank a replica.

A step of a rank is on record from when the rank alone could have begun it: first it waits for the others, to launch and
then for the slowest to end, then it takes its own time. A dummy is a step without sequences, all of it waiting. The ns
that a step waits, and those of padding to the fullest rank, are remarks at its start.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from batchsim.drive.fleet.fleet_plan import UP, ReplicaSpan
from batchsim.drive.fleet.fleet_records import EngineLife
from batchsim.drive.fleet.lockstep.iterations import Iterations
from batchsim.drive.fleet.lockstep.lockstep_config import LockstepConfig
from batchsim.drive.fleet.lockstep.passes import Launched, LockstepCost, Pass
from batchsim.drive.fleet.lockstep.rank import Others, Rank
from batchsim.drive.fleet.lockstep.rank_costs import RankCosts, Share, dummy
from batchsim.drive.fleet.lockstep.shared_queue import SharedQueue
from batchsim.drive.fleet.lockstep.simulate_ranks import Lockstep, LockstepPlan
from batchsim.drive.fleet.simulate_fleet import FleetRun, as_one
from batchsim.kernel.batch import Batch, check_end
from batchsim.kernel.core import EngineCore
from batchsim.kernel.events import AnyWorkload
from batchsim.kernel.record import MISSING, RANKS_PADDED, RANKS_WAITED
from batchsim.kernel.sim_executor import SimExecutor


class RecordedRank(Rank):
    """A rank whose records say what it waited for the others. `costs` are those of all ranks' passes."""

    def __init__(self, costs: RankCosts, number: int, core: EngineCore, others: Others) -> None:
        super().__init__(number, core, others)
        self._costs = costs
        self._free_ns = 0  # when its device was through with the pass before

    def launch(self, batch: Batch, launch_ns: int, made: Pass) -> int:
        core, begin_ns = self.core, max(launch_ns, self._free_ns)
        executor = core.executor
        assert isinstance(executor, SimExecutor) and isinstance(executor.cost, LockstepCost), executor
        executor.cost.pass_ns = made.end_ns - begin_ns
        core.in_flight.occupy(begin_ns)
        end_ns = core.execute(batch, launch_ns if core.loop.is_ahead else begin_ns)
        self._remark(begin_ns, made, self._costs.shares[self.number])
        return end_ns

    def passed(self, made: Pass, turn: Launched) -> None:
        """Writes the step of a dummy; notes until when the device is occupied."""
        if turn.batch is None:
            self._dummy(turn.launch_ns, made, self._costs.shares[self.number])
        self._free_ns = made.end_ns

    def _dummy(self, launch_ns: int, made: Pass, share: Share) -> None:
        core, begin_ns = self.core, max(launch_ns, self._free_ns)
        length_ns, lanes = made.end_ns - begin_ns, core.recorder.lanes
        check_end(made.end_ns, length_ns)
        core.journal.step(core.scheduler, dummy(share.rows), begin_ns, length_ns, 0, 0)
        core.recorder.state(begin_ns, MISSING, RANKS_WAITED, "", length_ns)
        if core.loop.is_ahead:  # nothing is in flight: a dummy comes once all results are processed
            lanes.launched(launch_ns, launch_ns)
            lanes.processed(made.end_ns, 0)  # which takes the host no time

    def _remark(self, begin_ns: int, made: Pass, share: Share) -> None:
        waited_ns = made.end_ns - begin_ns - share.own_ns
        for state, ns in ((RANKS_WAITED, waited_ns), (RANKS_PADDED, share.padding_ns)):
            if ns:
                self.core.recorder.state(begin_ns, MISSING, state, "", ns)


class RecordedRanks(Lockstep):
    """Ranks whose records say what each waited for the others."""

    def __init__(
        self, cores: Sequence[EngineCore], costs: RankCosts, config: LockstepConfig, workload: AnyWorkload
    ) -> None:
        servers = len(cores) if config.api_servers is None else config.api_servers
        plan = LockstepPlan(config.message, config.sync_interval, servers)
        super().__init__(cores, costs, plan, workload, partial(RecordedRank, costs))

    def passed(self, made: Pass, launched: Sequence[Launched]) -> None:
        for rank, turn in zip(self.ranks, launched, strict=True):
            assert isinstance(rank, RecordedRank)
            rank.passed(made, turn)


def simulate_ranks(
    cores: Sequence[EngineCore],
    costs: RankCosts,
    config: LockstepConfig,
    workload: AnyWorkload,
    *,
    until_ns: int = 0,
    join: bool = True,
) -> FleetRun:
    """Runs `workload` on ranks, each an engine of `cores` on a LockstepCost, to its end; passes cost what `costs` say.

    The result is that of a fleet whose replicas are the ranks, all up to the end or, if later, `until_ns`; `join` as of
    `simulate_fleet`. ScenarioError as of Lockstep.
    """
    return _as_fleet(cores, RecordedRanks(cores, costs, config, workload).run(), until_ns, join=join)


def simulate_iterations(
    cores: Sequence[EngineCore],
    costs: RankCosts,
    workload: AnyWorkload,
    *,
    most_active: int | None = None,
    until_ns: int = 0,
    join: bool = True,
) -> FleetRun:
    """As `simulate_ranks`, on ranks that make every iteration together; with `most_active`, the requests of each, they
    take them from one queue. ScenarioError as of Iterations."""
    if most_active is None:
        ranks = Iterations(cores, costs, workload)
    else:
        ranks = SharedQueue(cores, costs, workload, most_active)
    return _as_fleet(cores, ranks.run(), until_ns, join=join)


def _as_fleet(cores: Sequence[EngineCore], end_ns: int, until_ns: int, *, join: bool) -> FleetRun:
    """The run of a fleet whose replicas are ranks that ended at `end_ns`."""
    lives = [EngineLife(number, core.recorder.records()) for number, core in enumerate(cores)]
    last_ns = max(until_ns, end_ns)
    spans = tuple(ReplicaSpan(number, UP, 0, last_ns) for number in range(len(cores)) if last_ns)
    return as_one(lives, end_ns, spans, join=join)
