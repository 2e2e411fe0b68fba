"""The `deployment:` block of a scenario: an engine with its version, a GPU, how many of them, and the types of numbers.

At load it takes the place of `cost`, as one of kind `deployment`; `model` stays a key of its own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, get_args

from batchsim.base.errors import ScenarioError, cut
from batchsim.base.ranges import Config, Range, check_ranges
from batchsim.base.units import Bandwidth, Flops, PositiveDuration, Size, Watts, format_duration
from batchsim.cost.drafter_config import DraftersConfig
from batchsim.cost.encoder_config import EncoderConfig
from batchsim.cost.host_config import StatedHost
from batchsim.cost.shapes.config import ShapesConfig
from batchsim.workload.tagged import OrWord

if TYPE_CHECKING:
    from batchsim.cost.base import Cost
    from batchsim.cost.encoder import VisionTime
    from batchsim.cost.presets import Preset
    from batchsim.cost.roofline import Roofline
    from batchsim.deployment.deployment import Deployment
    from batchsim.deployment.model import GpuSpec, ModelSpec
    from batchsim.kernel.policy_config import PolicyConfig

Engine = Literal["vllm", "sglang", "tensorrt_llm"]
"""The engines that deployments can have. Each is the name of its policy too."""
ENGINES: tuple[str, ...] = get_args(Engine)
WeightType = Literal["bfloat16", "float16", "fp8", "fp8_block", "int8", "int4", "nvfp4", "mxfp4"]
KvType = Literal["bfloat16", "float16", "fp8", "int8", "nvfp4"]
Degree = Annotated[int, Range(1, 1024)]

_VERSION = re.compile(r"\d+(\.\d+)*((a|b|rc|\.post|\.dev)\d+)?")
_MULTIPLIED = {"fp8": "fp8", "fp8_block": "fp8", "nvfp4": "nvfp4", "int8": "int8", "float16": "float16"}
"""The type in which kernels multiply weights of a type, where that is not bfloat16; the tables time no others."""


@dataclass(frozen=True, slots=True)
class GpuSheet(Config):
    """A GPU by the user's own figures, for which there are no tables: step times are those of its roofline."""

    memory: Size
    """GPU memory, like 80GB."""
    bandwidth: Bandwidth
    """Bandwidth of the GPU's memory, like 3350GB/s."""
    bf16: Flops
    """Dense bf16 operations a second, like 989TFLOP/s."""
    fp8: Flops | None = None
    """Dense FP8 operations a second; none: it computes in bf16."""
    kind: Literal["sheet"] = "sheet"
    name: str = "own-gpu"
    """What the sheet's GPU is called in reports."""
    host_link: Bandwidth = 32e9
    """Bandwidth between GPU and host memory, like 64GB/s."""
    peer_link: Bandwidth | None = None
    """Bandwidth between GPUs, one way, like 450GB/s; several GPUs need it."""

    def spec(self) -> GpuSpec:
        """The GPU as costs and memory read it."""
        from batchsim.deployment.catalog import sheet_gpu

        return sheet_gpu(
            self.name,
            memory_bytes=self.memory,
            memory_bandwidth=self.bandwidth,
            peak_flops=self.bf16,
            host_link=self.host_link,
            peer_link=self.peer_link or self.host_link,  # one GPU has no peers
            fp8_flops=self.fp8,
        )


@dataclass(frozen=True, slots=True)
class Anchor(Config):
    """One measured point: the mean time per output token at a concurrency."""

    concurrency: Annotated[int, Range(1, 16_384)]  # simulated several times; no engine runs more at a time
    """Requests at a time in the measured point."""
    tpot: PositiveDuration
    """Its measured mean time per output token."""

    def __str__(self) -> str:
        return f"tpot {format_duration(self.tpot)} at concurrency {self.concurrency}"


@dataclass(frozen=True, slots=True)
class DeploymentConfig(Config):
    """An engine on GPUs, whose step costs come from measured kernel tables.

    >>> batchsim.Deployment("vllm", "h100", tp=2).kind
    'deployment'
    """

    engine: Engine
    """The engine whose kernel tables are meant: vllm, sglang or tensorrt_llm."""
    gpu: Annotated[GpuSheet | str, OrWord()]
    """The GPU: a name of `batchsim catalog`, or a sheet of its numbers."""
    kind: Literal["deployment"] = "deployment"
    version: str = ""
    """Version of the engine, by which its memory and defaults go; step costs are of the nearest version with kernel
    tables. The newest with tables unless given."""
    tp: Degree = 1
    """GPUs that share each layer (tensor parallel)."""
    pp: Degree = 1
    """Stages of a pipeline, among which the layers are divided."""
    ep: Degree = 1
    """GPUs among which whole experts are divided (expert parallel), a divisor of tp × dp_attention."""
    dp_attention: Degree = 1
    """Groups of `tp` GPUs that each run the attention of their own sequences, while all share the experts."""
    weights: WeightType | None = None
    """Type of the weights; the checkpoint's unless given."""
    moe: WeightType | None = None
    """Type of the experts' weights; the checkpoint's unless given."""
    kv: KvType | None = None
    """Type of the KV cache; the checkpoint's unless given."""
    activations: Literal["bfloat16", "float16", "fp8", "int8", "nvfp4"] | None = None
    """Type in which matrices are multiplied; the one that goes with the weights unless given."""
    host: StatedHost | None = None
    """The host's time of each step, stated, in place of the profile's."""
    anchor: Anchor | None = None
    """A measured point to which step times are fitted."""
    draft: DraftersConfig | None = None
    """What drafting costs, by method."""
    encoder: EncoderConfig | None = None
    """What encoding images, audios and videos takes, beside the steps; images: by kernel tables unless given."""
    shapes: ShapesConfig | None = None
    """Compiled shapes, to which steps are padded; without it no step is."""
    extrapolate: bool = False
    """Whether the curves are continued beyond what the profile covers."""
    power_cap: Watts | None = None
    """The most W that each GPU may draw: steps that would draw more run at a lower clock."""

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.version and not _VERSION.fullmatch(self.version):
            raise ValueError(f"version is {cut(self.version)!r}. Write the engine's, like 0.24, or leave it out.")
        if self.activations and self.activations != (type_ := _MULTIPLIED.get(self.weights or "", "bfloat16")):
            weights = f"{self.weights} weights" if self.weights else "weights of which no type is stated"
            raise ValueError(
                f"activations {self.activations}: kernels multiply {weights} in {type_}. Leave activations out, or"
                " state weights that are multiplied so."
            )
        if not self.has_tables:
            self._check_sheet()

    def _check_sheet(self) -> None:
        """ValueError for what no roofline knows, which is all that there is of a sheet."""
        stated = [name for name in ("moe", "activations") if getattr(self, name) not in (None, "bfloat16")]
        stated += [name for name in ("ep", "dp_attention") if getattr(self, name) > 1]
        if stated:
            raise ValueError(
                f"{stated[0]} {getattr(self, stated[0])} has no step times on a GPU of a sheet, whose roofline is of"
                " dense models. Name a GPU with kernel tables, or write cost: {kind: linear, ...} or a"
                " profile."
            )
        if self.num_gpus > 1 and not isinstance(self.gpu, str) and self.gpu.peer_link is None:
            raise ValueError(
                f"gpu.peer_link is missing: {self.num_gpus} GPUs exchange what they computed over a link of which the"
                " sheet says nothing. State it, one way: 64GB/s for PCIe 5.0 x16, 450GB/s for NVLink 4."
            )
        if self.extrapolate:
            raise ValueError(
                "extrapolate has no effect on a GPU of a sheet: a roofline goes on beyond any size. Leave it out."
            )
        if self.version:
            raise ValueError(
                f"version {self.version} means kernel tables, and a GPU of a sheet has none. Leave it out."
            )

    @property
    def has_tables(self) -> bool:
        """Whether kernel tables may know the GPU: it has a name, and is no other accelerator."""
        from batchsim.deployment.catalog import ACCELERATORS

        return isinstance(self.gpu, str) and self.gpu not in ACCELERATORS

    @property
    def num_gpus(self) -> int:
        """GPUs of one engine; of several attention groups, each an engine, those of one."""
        return self.tp * self.pp

    def gpu_spec(self) -> GpuSpec:
        """The GPU. ScenarioError if no GPU of the catalog has that name."""
        from batchsim.deployment.catalog import load_gpu

        return load_gpu(self.gpu) if isinstance(self.gpu, str) else self.gpu.spec()

    def deployment(self, model: ModelSpec) -> Deployment:
        """`model` as this engine runs it. ScenarioError if it cannot be split so, or the GPU is not known."""
        if self.moe is not None and not any(kind.mlp.kind == "experts" for kind in model.kinds):
            raise ScenarioError(f"moe: {model.name} has no experts of type {self.moe}. Leave moe out.")
        from batchsim.deployment.deployment import Deployment

        return Deployment(
            model,
            self.gpu_spec(),
            self.engine,
            self.version,
            tp=self.tp,
            pp=self.pp,
            ep=self.ep,
            dp_attention=self.dp_attention,
            weight_dtype=self.weights or "",
            moe_dtype=self.moe or "",
            kv_dtype=self.kv or "",
        )

    def build(self, model: ModelSpec, *, block_size: int = 16, max_model_len: int | None = None) -> Cost:
        """The step times of `model`: from a profile of the kernel tables; on a GPU of a sheet, or another
        accelerator, from its roofline.

        ScenarioError or CalibrationError, in one line with the ways out, where there are none.
        """
        deployment = self.deployment(model)
        if self.has_tables:
            from batchsim.cost.calibrated import Calibrated  # readers of a deployment's keys do not need the tables
            from batchsim.tables.find import profile_of

            host = None if self.host is None else self.host.term()
            return Calibrated(
                profile_of(deployment),
                extrapolate=self.extrapolate,
                host=host,
                block_size=block_size,
                max_model_len=max_model_len,
            )
        return self._roofline(deployment, block_size)

    def vision_time(self, model: ModelSpec, largest: int) -> VisionTime:
        """The time of the model's vision tower on these GPUs, from the kernel tables. ScenarioError where it is not
        known, or for images of more than `MAX_IMAGE` embeddings, the `largest` of which is given."""
        from batchsim.cost.encoder import encoder_unknown
        from batchsim.tables.modes import NoTablesError
        from batchsim.tables.vision import MAX_IMAGE, vision_time

        if not self.has_tables:
            raise encoder_unknown("no kernel tables are of such a GPU")
        if largest > MAX_IMAGE:
            raise encoder_unknown(f"items of {largest:,} tokens are above the {MAX_IMAGE:,} of the largest image timed")
        try:
            return vision_time(self.deployment(model))
        except NoTablesError as error:
            raise encoder_unknown(error.reason) from None

    def preset(self, policy: PolicyConfig) -> Preset | None:
        """The host, and how slow kernels are in the engine, under a policy; None where that is stated or not known."""
        if self.host is not None or not self.has_tables:
            return None
        from batchsim.cost.presets import preset_of

        return preset_of(self.engine, policy.traits.loop.over(self.pp).is_ahead)

    def _roofline(self, deployment: Deployment, block_size: int) -> Roofline:
        from batchsim.cost.roofline import HostCost, Roofline

        assert deployment.gpu is not None, "a sheet is a GPU"
        stated = self.host
        if stated is not None and stated.mode != "serial":
            raise ScenarioError("deployment.host.mode: a roofline's host is serial. Leave mode out.")
        host = None if stated is None else HostCost(stated.base, stated.per_sequence, stated.per_token)
        return Roofline(deployment.model, deployment.gpu, host=host, block_size=block_size, deployment=deployment)
