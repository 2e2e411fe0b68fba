"""What kernel tables do not hold, by engine and mode, fitted to measured runs: the host, the way there, slower kernels.

Each preset says what it rests on. Engines and modes that are not here keep the host of the profile, which is assumed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from batchsim.cost.base import Cost
from batchsim.cost.calibrated import Calibrated
from batchsim.cost.profile import HostTerm
from batchsim.cost.scaled import Scaled


@dataclass(frozen=True)
class Preset:
    """One engine in one mode: `ahead` of results or not.

    `in_situ`: the time of kernels inside the engine over that of the tables. `host`: ns of a step; None: nobody knows
    it better than the profile. `request_ns` and `per_prompt_token_ns`: from a client's sending to the engine, beyond
    what is simulated. `evidence`: the measured points that these are fitted to, and how far off they then are.
    """

    engine: str
    ahead: bool
    in_situ: float
    host: HostTerm | None
    request_ns: int
    per_prompt_token_ns: int
    evidence: str

    @property
    def name(self) -> str:
        return f"{self.engine} {'asynchronous' if self.ahead else 'synchronous'}"

    def __str__(self) -> str:
        slower = f"; kernels × {self.in_situ:g}" if self.in_situ != 1 else ""
        return f"host: preset {self.name} ({self.evidence}){slower}"


_HIDDEN = HostTerm(600_000.0, 2_000.0, 0.0, "serial", assumed=False)
_SILICON = "aiconfigurator-core's silicon_sample.csv, half of its deployments"

PRESETS = (
    Preset(
        "vllm",
        True,
        1.1,
        _HIDDEN,
        13_000_000,
        6_000,
        f"342 points of vLLM 0.15 to 0.19, TTFT ±15 % and TPOT ±8 % in the median, in {_SILICON}",
    ),
    Preset(
        "vllm",
        False,
        1.0,
        HostTerm(1_000_000.0, 17_000.0, 6_500.0, "serial", assumed=False),
        14_000_000,
        0,
        "vLLM 0.11, Llama-3.1-8B on one H100: kubernetes-sigs/inference-perf, kubecon-na-2025",
    ),
    Preset(
        "sglang",
        True,
        1.0,
        None,
        200_000_000,
        0,
        f"DeepSeek-R1 and Qwen3.5 under SGLang 0.5.9 and 0.5.10 in {_SILICON}",
    ),
    Preset(
        "tensorrt_llm",
        True,
        1.0,
        _HIDDEN,
        20_000_000,
        0,
        f"154 points of TensorRT-LLM 1.1 and 1.2, TTFT ±24 % and TPOT ±23 % in the median, in {_SILICON}",
    ),
)
"""In a mode that hides the host behind the GPU its time counts only where steps are shorter than it: 0.6 ms and 2 us a
sequence fit small models on fast GPUs."""


def preset_of(engine: str, ahead: bool) -> Preset | None:
    """The preset of an engine that schedules `ahead` of results or not; None if nothing is known of it."""
    return next((preset for preset in PRESETS if (preset.engine, preset.ahead) == (engine, ahead)), None)


def ways_there() -> dict[str, tuple[int, int]]:
    """`request_ns` and `per_prompt_token_ns` of each engine in the mode of its defaults."""
    return {p.engine: (p.request_ns, p.per_prompt_token_ns) for p in PRESETS if p.ahead}


def under_preset(cost: Cost, preset: Preset | None) -> Cost:
    """`cost` with the kernels and the host of `preset`, where it is of imported kernel times with an assumed host.

    Of others, measured in an engine or stated, it is as it was.
    """
    if isinstance(cost, Scaled):
        return replace(cost, cost=under_preset(cost.cost, preset))
    if preset is None or not isinstance(cost, Calibrated) or cost.profile.origin != "imported" or not cost.host.assumed:
        return cost
    profile = cost.profile
    host = profile.costs.host if preset.host is None else preset.host
    costs = replace(profile.costs, in_situ=profile.costs.in_situ * preset.in_situ, host=host)
    return Calibrated(
        replace(profile, costs=costs, notes=(*profile.notes, str(preset))),
        extrapolate=cost.extrapolate,
        block_size=cost.block_size,
        max_model_len=cost.max_model_len,
    )
