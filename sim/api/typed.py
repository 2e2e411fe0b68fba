"""Signatures, for editors and type checkers, of the classes whose quantities may be written with a unit, `"8/s"`.

At run time `batchsim.Poisson` is the config of a scenario's Poisson arrivals itself, which reads such a text and holds
the number. A dataclass can say one type a field, though, so type checkers read these subclasses in its place; none is
ever instantiated. `tests/unit/api/test_typed.py` holds their arguments to those of the configs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from batchsim.base.kv_groups import KvGroup
from batchsim.base.kv_pools import KvPools
from batchsim.cost.drafter_config import DraftersConfig
from batchsim.cost.encoder_config import EncoderConfig
from batchsim.cost.host_config import StatedHost
from batchsim.cost.shapes.config import ShapesConfig
from batchsim.drive.fleet.admission import AdmissionConfig
from batchsim.drive.fleet.fleet_plan import Failure, Lost
from batchsim.drive.fleet.lockstep.lockstep_config import LockstepConfig
from batchsim.drive.fleet.routers.local_prefill import LocalPrefillConfig
from batchsim.drive.fleet.routing import RouterConfig
from batchsim.drive.fleet.scaling.kinds import Scaler
from batchsim.drive.fleet.sleeping import ShareConfig, SleepConfig
from batchsim.drive.fleet.transfer import TransferConfig
from batchsim.scenario.config import LoadConfig
from batchsim.scenario.deployment_config import Anchor, DeploymentConfig, Engine, GpuSheet, KvType, WeightType
from batchsim.scenario.kv_config import KvConfig
from batchsim.scenario.replicas_config import ReplicaGroup, ReplicasConfig
from batchsim.scenario.tier_config import TierConfig
from batchsim.workload import processes, workload_config
from batchsim.workload.items import Items
from batchsim.workload.lengths import AnyLengths
from batchsim.workload.loras import Loras
from batchsim.workload.popularity import Popularity
from batchsim.workload.sharing import Sessions, SharedPrefix
from batchsim.workload.task_config import Tasks
from batchsim.workload.traces.trace_config import TraceConfig

Time = int | str
"""`"50ms"`, or ns."""
Rate = float | str
"""`"8/s"`, or requests a second."""
Share = float | str
"""`"99%"`, or a fraction."""


class Constant(processes.ConstantArrivals):
    def __init__(self, mean_rate: Rate) -> None: ...


class Poisson(processes.PoissonArrivals):
    def __init__(self, mean_rate: Rate) -> None: ...


class Gamma(processes.GammaArrivals):
    def __init__(self, mean_rate: Rate, cv: float) -> None: ...


class Weibull(processes.WeibullArrivals):
    def __init__(self, mean_rate: Rate, shape: float) -> None: ...


class OnOff(processes.OnOffArrivals):
    def __init__(self, mean_rate: Rate, on: Time, off: Time) -> None: ...


class Diurnal(processes.DiurnalArrivals):
    def __init__(
        self,
        mean_rate: Rate,
        cv: float = 1.0,
        states: Sequence[processes.MmppState] | None = None,
        *,
        profile: Sequence[float],
        period: Time = ...,
        start: Time = 0,
    ) -> None: ...


class ClosedLoop(workload_config.ClosedLoop):
    def __init__(
        self,
        users: int,
        think_time: Time,
        think_kind: Literal["constant", "exponential"] = "constant",
        shared_list: bool = False,
        ramp: Time | None = None,
    ) -> None: ...


class Workload(workload_config.WorkloadConfig):
    def __init__(
        self,
        arrivals: workload_config.Arrivals,
        output_cap: int | Literal["max_model_len", "exact"],
        lengths: AnyLengths | None = None,
        trace: TraceConfig | None = None,
        duration: Time | None = None,
        requests: int | None = None,
        warmup: Time = 0,
        drain: Time | None = None,
        classes: dict[str, workload_config.TrafficClass] = ...,
        deadline: Time | None = None,
        patience: workload_config.Patience | None = None,
        frontend: workload_config.Frontend = ...,
        shared_prefix: SharedPrefix | None = None,
        sessions: Sessions | None = None,
        items: Items | None = None,
        prompt_scale: float = 1.0,
        stop: workload_config.Stop | None = None,
        max_concurrency: int | None = None,
        assign: Literal["by_row", "at_random"] | None = None,
        tasks: Tasks | None = None,
        loras: Loras | None = None,
        structured: float | None = None,
        popularity: Popularity | None = None,
    ) -> None: ...


class Load(LoadConfig):
    def __init__(
        self,
        mean_rate: Sequence[Rate] | Literal["auto"] | None = None,
        users: Sequence[int] | Literal["auto"] | None = None,
        rate_scale: Sequence[float] | Literal["auto"] | None = None,
        points: int | None = None,
    ) -> None: ...


class Deployment(DeploymentConfig):
    def __init__(
        self,
        engine: Engine,
        gpu: GpuSheet | str,
        version: str = "",
        tp: int = 1,
        pp: int = 1,
        ep: int = 1,
        dp_attention: int = 1,
        weights: WeightType | None = None,
        moe: WeightType | None = None,
        kv: KvType | None = None,
        activations: Literal["bfloat16", "float16", "fp8", "int8", "nvfp4"] | None = None,
        host: StatedHost | None = None,
        anchor: Anchor | None = None,
        draft: DraftersConfig | None = None,
        encoder: EncoderConfig | None = None,
        shapes: ShapesConfig | None = None,
        extrapolate: bool = False,
        power_cap: float | str | None = None,
    ) -> None: ...


class Kv(KvConfig):
    def __init__(
        self,
        tokens: int | None = None,
        log: str = "",
        block_size: int = 16,
        utilisation: Share | None = None,
        swap_space: int | str = 0,
        memory: int | str | None = None,
        per_token: int | str | None = None,
        per_request: int | str = 0,
        source: str = "",
        groups: Sequence[KvGroup] = (),
        num_blocks: int | None = None,
        block_bytes: int | None = None,
        pools: KvPools | None = None,
        tiers: Sequence[TierConfig] = (),
    ) -> None: ...


class Replicas(ReplicasConfig):
    def __init__(
        self,
        count: int | None = None,
        groups: dict[str, ReplicaGroup] | None = None,
        router: RouterConfig | None = None,
        failures: Sequence[Failure] = (),
        lost: Lost | None = None,
        autoscaler: Scaler | None = None,
        price: float | str | None = None,
        admission: AdmissionConfig | None = None,
        transfer: TransferConfig | None = None,
        local_prefill: LocalPrefillConfig | None = None,
        sleep: SleepConfig | None = None,
        share: ShareConfig | None = None,
        lockstep: LockstepConfig | None = None,
    ) -> None: ...
