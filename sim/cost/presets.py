"""What kernel tables do not hold, by engine and mode, fitted to measured runs: the host and the way there; and, by GPU,
types and model, how long kernels take inside the engine (`in_engine`).

Each preset says what it rests on. Engines and modes that are not here keep the host of the profile, which is assumed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from batchsim.cost.base import Cost
from batchsim.cost.calibrated import Calibrated
from batchsim.cost.in_engine import UNMEASURED, in_engine, measured_of
from batchsim.cost.profile import HostTerm, Profile
from batchsim.cost.scaled import Scaled

Form = Literal["stretch", "shift"]
"""How the steps of an engine differ from its tables: by a factor, or, where the tables time each kernel with its launch
and the engine replays a graph of them, by a constant."""


@dataclass(frozen=True)
class Preset:
    """One engine in one mode: `ahead` of results or not.

    `host`: ns of a step; None: nothing better than the profile's is known. `request_ns`, `per_prompt_token_ns` and
    `per_stream_ns`: the way between client and engine, beyond what is simulated, as in `Frontend`. `form`: how its
    steps differ from the tables. `evidence`: the measured points that these are fitted to.
    """

    engine: str
    ahead: bool
    host: HostTerm | None
    request_ns: int
    per_prompt_token_ns: int
    per_stream_ns: int
    form: Form
    evidence: str

    @property
    def name(self) -> str:
        return f"{self.engine} {'asynchronous' if self.ahead else 'synchronous'}"

    def __str__(self) -> str:
        return f"host: preset {self.name} ({self.evidence})"

    def kernels_text(self, profile: Profile) -> str:
        """A sentence on kernels inside the engine for the GPU, types and model of `profile`."""
        measured = measured_of(profile) if self.ahead else None
        if measured is None:
            return UNMEASURED if "anchor" not in profile.made else UNMEASURED.replace(":", ", then anchored:", 1)
        text = str(measured)
        return text if "anchor" not in profile.made else f"{text.partition(' (then')[0]}, then anchored"


_HIDDEN = HostTerm(600_000.0, 2_000.0, 0.0, "serial", assumed=False)
_SILICON = "aiconfigurator-core's silicon_sample.csv, half of its deployments"

PRESETS = (
    Preset(
        engine="vllm",
        ahead=True,
        host=_HIDDEN,
        request_ns=7_500_000,
        per_prompt_token_ns=4_500,
        per_stream_ns=600_000,
        form="stretch",
        evidence=f"342 points of vLLM 0.15 to 0.19 in {_SILICON}",
    ),
    Preset(
        engine="vllm",
        ahead=False,
        host=HostTerm(1_000_000.0, 17_000.0, 6_500.0, "serial", assumed=False),
        request_ns=14_000_000,
        per_prompt_token_ns=0,
        per_stream_ns=0,
        form="stretch",
        evidence="vLLM 0.11, Llama-3.1-8B on one H100: kubernetes-sigs/inference-perf, kubecon-na-2025",
    ),
    Preset(
        engine="sglang",
        ahead=True,
        host=None,
        request_ns=100_000_000,
        per_prompt_token_ns=0,
        per_stream_ns=0,
        form="stretch",
        evidence=f"54 points of DeepSeek-R1 under SGLang 0.5.9 and 0.5.10 in {_SILICON}",
    ),
    Preset(
        engine="tensorrt_llm",
        ahead=True,
        host=_HIDDEN,
        request_ns=20_000_000,
        per_prompt_token_ns=0,
        per_stream_ns=0,
        form="shift",
        evidence=f"149 points of TensorRT-LLM 1.1 and 1.2 in {_SILICON}",
    ),
)
"""In a mode that hides the host behind the GPU its time counts only where steps are shorter than it: 0.6 ms and 2 us a
sequence fit small models on fast GPUs. SGLang's way is what its receive interval, a knob of the policy, leaves."""


def preset_of(engine: str, ahead: bool) -> Preset | None:
    """The preset of an engine that schedules `ahead` of results or not; None if nothing is known of it."""
    return next((preset for preset in PRESETS if (preset.engine, preset.ahead) == (engine, ahead)), None)


def ways_there() -> dict[str, tuple[int, int, int]]:
    """`request_ns`, `per_prompt_token_ns` and `per_stream_ns` of each engine in the mode of its defaults."""
    return {p.engine: (p.request_ns, p.per_prompt_token_ns, p.per_stream_ns) for p in PRESETS if p.ahead}


def under_preset(cost: Cost, preset: Preset | None) -> Cost:
    """`cost` with the kernels and the host of `preset`, where it is of imported kernel times with an assumed host.

    Of others, measured in an engine or stated, it is as it was.
    """
    if isinstance(cost, Scaled):
        return replace(cost, cost=under_preset(cost.cost, preset))
    if preset is None or not isinstance(cost, Calibrated) or cost.profile.origin != "imported" or not cost.host.assumed:
        return cost
    profile = cost.profile
    costs, made = profile.costs if preset.host is None else replace(profile.costs, host=preset.host), profile.made
    measured = measured_of(profile) if preset.ahead else None
    if measured is not None:
        costs = in_engine(costs, decode=measured.decode, shift_ns=1_000 * measured.shift_us, prompts=measured.prompts)
        made = made | {"measured_in_engine": {"points": measured.points, "tpot_p90": measured.tpot[1]}}
    notes = (*profile.notes, str(preset), preset.kernels_text(profile))
    return cost.of(replace(profile, costs=costs, made=made, notes=notes))
