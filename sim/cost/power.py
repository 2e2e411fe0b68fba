"""What a GPU draws while a step runs, and between steps: a law of five numbers for each, with its source and its error.

A step that computes F FLOPs and reads B bytes in the time t draws on each of its GPUs

    active + compute · (F / t) / peak + memory · (B / t) / bandwidth     W, never above the board's limit

by the sheet's peak of the type in which its matrices are multiplied, and the sheet's bandwidth; F and B are those of
the useful work. Between steps it draws `idle`. The law is linear and knows no clock: a fast link, an expert-parallel
exchange or a spinning kernel are in `active`. `tools/fit_power.py` fits it and prints its errors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchsim.base.later import np
from batchsim.base.units import NS_PER_S
from batchsim.deployment.deployment import Deployment

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from batchsim.deployment.model import GpuSpec


@dataclass(frozen=True, slots=True)
class PowerLaw:
    """The power of one GPU in W: `idle_w` between steps, `active_w` while one runs, besides `compute_w` at the sheet's
    FLOP/s and `memory_w` at its bandwidth; `limit_w` is the board's. `error_p50` and `error_p90`: by how much, as a
    share, the law missed rows held out from its fit; None where it was fitted to nothing of this GPU."""

    idle_w: float
    active_w: float
    compute_w: float
    memory_w: float
    limit_w: float
    source: str
    error_p50: float | None = None
    error_p90: float | None = None

    def watts(self, compute: NDArray[np.float64], memory: NDArray[np.float64]) -> NDArray[np.float64]:
        """W of one GPU that reaches the shares `compute` of its peak FLOP/s and `memory` of its bandwidth."""
        return np.minimum(self.active_w + self.compute_w * compute + self.memory_w * memory, self.limit_w)

    def words(self, gpu: GpuSpec) -> str:
        """The law and its error in one line, with the numbers a FLOP and a byte."""
        flop, byte = 1e12 * self.compute_w / gpu.peak_flops, 1e12 * self.memory_w / gpu.memory_bandwidth
        error = "not fitted, error unknown"
        if self.error_p50 is not None and self.error_p90 is not None:
            error = f"off by {100 * self.error_p50:.0f} % (median), {100 * self.error_p90:.0f} % (p90) on rows held out"
        return (
            f"power of {gpu.name}, an estimate: {self.active_w:.0f} W in a step + {flop:.2f} pJ a FLOP + {byte:.0f} pJ"
            f" a byte, at most {self.limit_w:.0f} W; idle {self.idle_w:.0f} W; {error}: {self.source}"
        )


_ROWS = (
    "ML.ENERGY Benchmark v3 (github.com/ml-energy/leaderboard @ 0ea52b6, vLLM 0.11.1, lm-arena-chat), batches from 8"
)
_IDLE = "idle as nvidia-smi shows boards without a process"
_FITTED = {
    "h100": PowerLaw(
        70, 447, 645, 41, 700, f"{_ROWS}, to 32 % of peak FLOP/s and 76 % of bandwidth; {_IDLE}", 0.085, 0.171
    ),
    "b200_sxm": PowerLaw(
        140, 560, 1044, 448, 1000, f"{_ROWS}, to 44 % of peak FLOP/s and 59 % of bandwidth; {_IDLE}", 0.122, 0.212
    ),
}
_LIMITS = {
    "h200": (700, "h100"),
    "h100_pcie": (350, "h100"),
    "a100": (400, "h100"),
    "a100_pcie": (300, "h100"),
    "a30": (165, "h100"),
    "l40s": (350, "h100"),
    "l4": (72, "h100"),
    "rtx4090": (450, "h100"),
    "rtx_pro_6000_server": (600, "b200_sxm"),
    "gb200": (1200, "b200_sxm"),
}
"""W of the boards that nothing was fitted to, by NVIDIA's datasheets, and the board whose shares of its limit they are
taken to draw. B300 and GB300 are sold with several limits, and of Intel's boards nothing was compared: no law."""
_TRANSFER = "h100's shares of its limit miss b200_sxm's rows by 12 % (median) and 25 % (p90)"


def scaled(limit_w: float, like: str) -> PowerLaw:
    """The law of a board with a limit of `limit_w` W that draws the shares of it that the board `like` draws."""
    law = _FITTED[like]
    source = f"the shares of its limit that {like} draws, and the limit of the datasheet; {_TRANSFER}"
    scale = limit_w / law.limit_w
    return PowerLaw(
        scale * law.idle_w, scale * law.active_w, scale * law.compute_w, scale * law.memory_w, limit_w, source
    )


POWER_LAWS = _FITTED | {name: scaled(*of) for name, of in _LIMITS.items()}
"""The law of each GPU of the catalog by its name; of those left out nothing is known."""


def power_law(deployment: Deployment | None) -> PowerLaw | None:
    """The law of a deployment's GPUs; None where it has none: a GPU outside the catalog, one without a law, or a
    pipeline, whose steps overlap on different GPUs."""
    if deployment is None or deployment.gpu is None or deployment.pp > 1:
        return None
    return POWER_LAWS.get(deployment.gpu.name)


def step_power_w(
    law: PowerLaw,
    deployment: Deployment,
    flops: NDArray[np.float64],
    moved: NDArray[np.float64],
    duration_ns: NDArray[np.float64] | NDArray[np.int64],
) -> NDArray[np.float64]:
    """W of all GPUs of `deployment` in steps that compute `flops` and read `moved` bytes on all of them together."""
    gpu = deployment.gpu
    assert gpu is not None, "a GPU with a law"
    seconds = np.maximum(duration_ns, 1) / NS_PER_S * deployment.num_gpus
    compute = flops / (seconds * _peak_flops(deployment, gpu))
    return deployment.num_gpus * law.watts(compute, moved / (seconds * gpu.memory_bandwidth))


def _peak_flops(deployment: Deployment, gpu: GpuSpec) -> float:
    """FLOP/s of the type in which most matrices are multiplied: those of experts, where there are any."""
    types = deployment.types
    dtype = types.experts if any(kind.mlp.kind == "experts" for kind in deployment.model.kinds) else types.mlp
    rates = {"fp8": gpu.fp8_flops, "fp8_block": gpu.fp8_flops, "nvfp4": gpu.fp4_flops}
    return rates.get(dtype) or gpu.peak_flops
