"""What the environments of a scenario's engine have in common: its requests, its step times, its memory, the reward."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import gymnasium  # pyright: ignore[reportMissingImports]
import numpy as np
from numpy.typing import NDArray

from batchsim.gym.episode import Ends, Episode
from batchsim.gym.request_objectives import Objectives
from batchsim.kernel.core import EngineCore
from batchsim.kernel.policy_config import PolicyConfig
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.policies.families.observed import Quantity
from batchsim.scenario.config import PolicySpec
from batchsim.scenario.load import load_scenario
from batchsim.scenario.schedulers import new_scheduler
from batchsim.scenario.setup import Setup
from batchsim.scenario.tiered import check_no_tiers
from batchsim.workload.build import BuiltWorkload
from batchsim.workload.open_loop import OpenWorkload

_SEEDS = 2**31


class EngineEnv(gymnasium.Env):
    """Decisions of a policy on the engine of a scenario, whose requests are known in advance.

    An episode has the requests of the scenario at one load and a seed: that of `reset`, or else a drawn one. It begins
    with an empty engine, at the first decision, and is `truncated` once simulated time reaches `horizon_s`, by default
    the end of arrivals; it is never `terminated`. Reward: 1 for each request that ends within `objectives`, less
    `miss` for each that does not; at the horizon open ones count as misses if they are late already, else as nothing.
    `second_cost` goes off for each second. `info`: `queue` (requests that wait), `finished`, `in_slo`, `missed`,
    `preemptions`, `steps`, `seconds` since the decision before, `discount` (`discount_per_s` to their power).
    `reset(options={"load": 8.0})` changes the load of that episode and those after it.
    """

    metadata = {"render_modes": []}  # noqa: RUF012  as Gymnasium has it
    quantities: ClassVar[tuple[Quantity, ...]]
    """What an agent observes."""
    agent: ClassVar[type]
    """The policy that decides what `answered` makes it."""
    usual_config: ClassVar[PolicyConfig]
    usual_objectives: ClassVar[Objectives]

    def __init__(
        self,
        scenario: str = "bursty",
        overrides: Sequence[str] = (),
        *,
        config: PolicyConfig | None = None,
        objectives: Objectives | None = None,
        load: float | None = None,
        horizon_s: float | None = None,
        second_cost: float = 0.0,
        discount_per_s: float = 1.0,
    ) -> None:
        config = self.usual_config if config is None else config
        if not 0 < discount_per_s <= 1 or not second_cost >= 0 or (horizon_s is not None and horizon_s <= 0):
            raise ValueError(
                f"discount_per_s {discount_per_s:g} must be above 0 and at most 1, second_cost {second_cost:g} at least"
                f" 0, horizon_s {horizon_s} above 0."
            )
        if not isinstance(scenario, str):
            raise ValueError(f"scenario {scenario!r} is no path or name of a scenario. Write it as text.")
        self.objectives = self.usual_objectives if objectives is None else objectives
        self.horizon_s = horizon_s
        self.second_cost, self.discount_per_s = second_cost, discount_per_s
        spec = PolicySpec("agent", "agent", config, policy=self.agent, knobs={}, by_device={})
        loaded = load_scenario(scenario, overrides=tuple(overrides))
        setup = Setup.of(loaded)
        check_no_tiers(loaded, "are in no environment")
        if setup.groups:
            raise ValueError(f"{scenario}: an environment has one engine, and the scenario has replicas. Remove them.")
        self.setup, self.agent_spec = replace(setup, scenario=replace(loaded, specs=(spec,))), spec
        self.load = setup.loads[0] if load is None else load
        self.cost = self.setup.cost_under(config)
        if self.cost.stages > 1:
            raise ValueError(f"{scenario}: an environment has no pipeline, and this has {self.cost.stages} stages.")
        highs = np.array([one.high for one in self.quantities], np.float32)
        self.action_space = self.actions_of(config)
        self.observation_space = gymnasium.spaces.Box(np.zeros(len(highs), np.float32), highs)
        self._episode: Episode | None = None

    @abstractmethod
    def actions_of(self, config: Any) -> gymnasium.Space[Any]:
        """The actions that a config of the agent leaves."""

    @abstractmethod
    def answered(self, scheduler: Any, action: Any) -> None:
        """Makes `action` what the agent of `scheduler` says next."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """The engine at its first decision. ValueError for an option other than `load`, and for a scenario whose
        requests depend on answers or end before the horizon."""
        super().reset(seed=seed)
        if options:
            if set(options) != {"load"} or not options["load"] > 0:
                raise ValueError(f"options {options}: only load is one, and it must be above 0.")
            self.load = float(options["load"])
        drawn = int(self.np_random.integers(_SEEDS))
        self._episode = self._new_episode(drawn if seed is None else seed)
        self._episode.go_on(decided=False)
        return self._observed(), self._info(0.0, (0, 0, 0), 0, 0)

    def step(self, action: Any) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """The next decision, and the reward until then. ValueError for an action outside the space."""
        episode = self._running()
        if not self.action_space.contains(action):
            raise ValueError(f"action {action!r} is not in {self.action_space}.")
        begun_ns, steps = episode.now_ns, episode.steps
        self.answered(episode.scheduler, action)
        episode.go_on(decided=True)
        recorder = episode.core.recorder
        assert isinstance(recorder, Ends)
        rows = recorder.take()
        finished, in_slo, missed = self.objectives.count(rows)
        if episode.is_over:
            missed += self.objectives.missed_already(episode.core, episode.now_ns)
        seconds = (episode.now_ns - begun_ns) / 1e9
        reward = in_slo - self.objectives.miss * missed - self.second_cost * seconds
        preempted = sum(row["num_preemptions"] for row in rows)
        info = self._info(seconds, (finished, in_slo, missed), preempted, episode.steps - steps)
        return self._observed(), float(reward), False, episode.is_over, info

    def _running(self) -> Episode:
        if self._episode is None:
            raise ValueError("no episode has begun. Call reset() first.")
        return self._episode

    def _new_episode(self, seed: int) -> Episode:
        setup, spec = self.setup, self.agent_spec
        workload: BuiltWorkload = setup.workload(self.load, seed)
        if not isinstance(workload, OpenWorkload):
            raise ValueError(
                f"{setup.scenario.name}: requests that depend on answers are no episode yet. Give it open-loop"
                " arrivals."
            )
        end_ns = workload.window_ns[1]
        horizon_ns = end_ns if self.horizon_s is None else int(self.horizon_s * 1e9)
        if horizon_ns > end_ns:
            raise ValueError(
                f"{setup.scenario.name}: arrivals end after {end_ns / 1e9:g} s, before horizon_s {self.horizon_s:g}."
                " Lengthen workload.duration, or lower horizon_s."
            )
        kv, items = setup.new_kv(spec.config), setup.items
        scheduler: Any = new_scheduler(spec, kv, setup.max_model_len, workload, self.cost, items=items)
        core = EngineCore(
            scheduler,
            SimExecutor(self.cost, setup.max_model_len),
            Ends(),
            max_model_len=setup.max_model_len,
            max_waiting=setup.max_waiting,
            per_chunk_ns=workload.frontend.per_chunk,
            per_stream_ns=workload.frontend.per_stream,
        )
        return Episode(core, scheduler, workload.arrivals(), horizon_ns)

    def _observed(self) -> NDArray[np.float32]:
        episode = self._running()
        scheduler: Any = episode.scheduler
        return np.array(scheduler.observed(episode.now_ns), np.float32)

    def _info(self, seconds: float, counts: tuple[int, int, int], preempted: int, steps: int) -> dict[str, Any]:
        finished, in_slo, missed = counts
        return {
            "queue": self._running().scheduler.num_waiting,
            "finished": finished,
            "in_slo": in_slo,
            "missed": missed,
            "preemptions": preempted,
            "steps": steps,
            "seconds": seconds,
            "discount": self.discount_per_s**seconds,
        }
