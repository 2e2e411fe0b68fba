"""Ranks that make every iteration of their loops together, as those of SGLang's attention data parallelism do.

1. The controller sends requests to the ranks in turn, in the order in which they arrive.
2. In an iteration each rank takes in what has come, chooses its batch by its own queue, KV memory and prefix cache, and
   gathers what the others chose. So a pass begins as the last rank has launched it.
3. If any rank has a batch, each rank without one runs an idle batch, of no request. If none has, none runs.
4. The device begins a pass when it is through with the one before, and ends it for all ranks together.
5. With overlap each rank then processes its part of the pass before, an idle one too, for which it waits until that is
   over. Without, it waits for its part of this pass, but for an idle one, and takes in at once what comes next. The
   next iteration begins for each rank when its host is free.
6. Ranks without any request go round and round; what comes is taken in at once.
Source: python/sglang/srt/managers/scheduler.py of the 0.5.23 wheel, `event_loop_normal` and `event_loop_overlap`;
scheduler_components/dp_attn.py, `prepare_mlp_sync_batch_raw`; batch_result_processor.py, `process_batch_result_idle`;
data_parallel_controller.py, `round_robin_scheduler`.
Simplifies: the gather itself takes no time, and comes with the launch; an idle iteration takes none.
"""

from __future__ import annotations

from collections.abc import Sequence

from batchsim.base.errors import ScenarioError
from batchsim.drive.fleet.lockstep.passes import Launched, LockstepCost, Pass, num_tokens
from batchsim.drive.fleet.lockstep.rank_costs import RankCosts, Share, dummy
from batchsim.drive.source import Traffic
from batchsim.kernel.batch import Batch, Idle, check_end
from batchsim.kernel.core import EngineCore
from batchsim.kernel.events import AnyWorkload, EngineEvent
from batchsim.kernel.record import MISSING, RANKS_PADDED, RANKS_WAITED
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.kernel.types import Arrival


class Iterations:
    """One simulation of `workload` on ranks, each an engine of `cores` with a LockstepCost; `costs` are those of their
    passes. A step of a rank is on record as that of `recorded_ranks`. `passes`: all of them, if `logs`.

    ScenarioError for clients that act between answers or give requests up.
    """

    def __init__(
        self, cores: Sequence[EngineCore], costs: RankCosts, workload: AnyWorkload, *, logs: bool = False
    ) -> None:
        if hasattr(workload, "called") or hasattr(workload, "pruned_by"):
            raise ScenarioError(
                "ranks in lockstep: clients that give requests up, or act between answers, are not simulated. Send"
                " requests of another kind."
            )
        self._cores, self._costs = list(cores), costs
        self._is_ahead = cores[0].loop.is_ahead
        self._traffic = Traffic(workload)
        self._num_sent = 0
        self._free_ns = 0  # when the devices are through with the latest pass
        self._num_passes = 0
        self._hosts_ns = [0] * len(cores)  # when each host is free
        self._unread: list[Batch | Pass | None] = [None] * len(cores)  # each rank's part of the pass before
        self._logs = logs
        self.passes: list[Pass] = []
        self.routes: list[tuple[int, int]] = []

    def run(self) -> int:
        """Runs the workload to its end; returns that time in ns."""
        while True:
            self._take_in()
            launched = [self._choose(rank) for rank in range(len(self._cores))]
            gathered_ns = max(turn.launch_ns for turn in launched)
            before = self._unread
            self._unread = [None for _ in self._cores]
            runs = any(turn.batch is not None for turn in launched)
            if runs:
                self._pass(launched, gathered_ns)
            self._hosts_ns = [gathered_ns] * len(self._cores)
            self._process(before if self._is_ahead else self._unread)
            if not self._is_ahead:
                self._unread = [None for _ in self._cores]
            if not (runs or any(before) or self._waits) and not self._rest():
                return max(self._hosts_ns)

    def submit(self, arrival: Arrival) -> None:
        """Sends a request that arrives to the rank whose turn it is."""
        rank = self._num_sent % len(self._cores)
        self._num_sent += 1
        if self._logs:
            self.routes.append((arrival.request.id, rank))
        self._cores[rank].submit(arrival)

    @property
    def _waits(self) -> bool:
        """Whether any request that has come is yet to be sent to a rank."""
        return False

    # ---- one iteration

    def _take_in(self) -> None:
        """Has each rank take in what is there as its host is free, and the clients answer what that ends."""
        while True:
            self._traffic.submit_due(self, max(self._hosts_ns))
            has_events = False
            for core, now_ns in zip(self._cores, self._hosts_ns, strict=True):
                if events := core.enter_due(now_ns):
                    self._traffic.tell(events, now_ns)
                    has_events = True
            if not has_events:
                return

    def _choose(self, rank: int) -> Launched:
        """What a rank is to run, None if nothing, and when its host is through with the launch."""
        core, now_ns = self._cores[rank], self._hosts_ns[rank]
        work: Batch | Idle = core.schedule(now_ns, self._drains(core))
        if core.events:
            self._traffic.tell(core.take_events(), now_ns)
        if type(work) is not Batch or (self._is_ahead and not (work.chunks or work.num_decode)):
            return Launched(None, now_ns)
        work.host_ns = core.executor.host_ns(work)
        return Launched(work, now_ns + work.host_ns[0])

    def _drains(self, core: EngineCore) -> bool:
        """Whether no request will come until this rank acts."""
        return (
            self._traffic.next_ns is None
            and not self._waits
            and not any(other.has_work or other.in_flight.steps for other in self._cores if other is not core)
        )

    def _pass(self, launched: Sequence[Launched], gathered_ns: int) -> None:
        start_ns = max(gathered_ns, self._free_ns)
        end_ns = start_ns + self._costs.pass_ns([turn.batch for turn in launched])
        tokens = tuple(num_tokens(turn.batch) for turn in launched)
        made = Pass(self._num_passes, gathered_ns, start_ns, end_ns, tokens)
        self._num_passes += 1
        if self._logs:
            self.passes.append(made)
        for rank, (turn, share) in enumerate(zip(launched, self._costs.shares, strict=True)):
            begin_ns = max(turn.launch_ns, self._free_ns)
            if turn.batch is None:
                self._idle(self._cores[rank], turn.launch_ns, begin_ns, made, share)
                self._unread[rank] = made
            else:
                self._launch(self._cores[rank], turn.batch, turn.launch_ns, begin_ns, made, share)
                self._unread[rank] = turn.batch
        self._free_ns = end_ns

    def _launch(self, core: EngineCore, batch: Batch, launch_ns: int, begin_ns: int, made: Pass, share: Share) -> None:
        executor = core.executor
        assert isinstance(executor, SimExecutor) and isinstance(executor.cost, LockstepCost), executor
        executor.cost.pass_ns = made.end_ns - begin_ns
        core.in_flight.occupy(begin_ns)
        core.execute(batch, launch_ns if self._is_ahead else begin_ns)
        waited_ns = made.end_ns - begin_ns - share.own_ns
        for state, ns in ((RANKS_WAITED, waited_ns), (RANKS_PADDED, share.padding_ns)):
            if ns:
                core.recorder.state(begin_ns, MISSING, state, "", ns)

    def _idle(self, core: EngineCore, launch_ns: int, begin_ns: int, made: Pass, share: Share) -> None:
        """Writes the step of an idle batch."""
        check_end(made.end_ns, made.end_ns - begin_ns)
        core.journal.step(core.scheduler, dummy(share.rows), begin_ns, made.end_ns - begin_ns, 0, 0)
        core.recorder.state(begin_ns, MISSING, RANKS_WAITED, "", made.end_ns - begin_ns)
        core.in_flight.occupy(made.end_ns)
        if self._is_ahead:
            core.recorder.lanes.launched(launch_ns, launch_ns)

    def _process(self, parts: Sequence[Batch | Pass | None]) -> None:
        """Has each rank process its part of a pass; clients hear of what ended in order of time."""
        ended: list[tuple[int, int, list[EngineEvent]]] = []
        for rank, (core, part) in enumerate(zip(self._cores, parts, strict=True)):
            now_ns = self._hosts_ns[rank]
            if isinstance(part, Pass):
                if self._is_ahead:
                    now_ns = max(now_ns, part.end_ns)
                    core.recorder.lanes.processed(now_ns, 0)
            elif part is not None:
                now_ns = core.in_flight.landing_ns(now_ns)
                ended.append((now_ns, rank, core.complete(now_ns)))
            self._hosts_ns[rank] = now_ns
        for now_ns, _, events in sorted(ended, key=lambda row: row[:2]):
            self._traffic.tell(events, now_ns)

    def _rest(self) -> bool:
        """Has all hosts wait for the next arrival or timer; False if none comes."""
        if any(core.has_arrivals for core in self._cores):
            return True  # to a rank whose host was free before
        times = [core.next_timer_ns for core in self._cores if core.has_work] + [self._traffic.next_ns]
        due_ns = min((ns for ns in times if ns is not None), default=None)
        if due_ns is None:
            return False
        self._hosts_ns = [max(now_ns, due_ns) for now_ns in self._hosts_ns]
        return True
