"""Which engine a policy follows, at which version, how it differs, and how many recorded schedules it makes again.

The versions are those of the sources that the policies name. The schedules stand for policies whose `evidence` is
`recorded`; `tests/golden/test_evidence.py` counts them where the recordings are at hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Followed:
    """The engine and version that a policy follows. `schedules`: how many recorded schedules it was compared with and
    makes again; TensorRT-LLM's are of its C++ sources typed anew and compiled, the others of the engine itself.
    `differs`: how the policy differs from the engine as shipped, in words for a table; "" if in nothing. `lockstep`:
    the knob, and its value, with which the engine waits for a step's results, and words for that; None if it has none.
    `recorded_with`: a knob, and a value other than its default, with which all of the schedules are made again.
    """

    engine: str
    version: str
    schedules: int = 0
    differs: str = ""
    lockstep: tuple[str, bool, str] | None = None
    recorded_with: tuple[str, str] | None = None

    def difference(self, knobs: Mapping[str, object]) -> str:
        """How the policy with these knobs, as a scenario states them, differs from the engine as shipped; "" if in
        nothing."""
        if self.lockstep is None:
            return self.differs
        knob, value, words = self.lockstep
        return words if knobs.get(knob) is value else self.differs


FOLLOWED = {
    "vllm": Followed("vLLM", "0.33.0", 62, lockstep=("async_scheduling", False, "synchronous")),
    "sglang": Followed("SGLang", "0.5.23", 24, lockstep=("disable_overlap_schedule", True, "without overlap")),
    "tensorrt_llm": Followed(
        "TensorRT-LLM",
        "cf6abc45",
        17,
        "without partial block reuse",
        ("disable_overlap_scheduler", True, "without overlap or partial block reuse"),
        recorded_with=("backend", "tensorrt"),
    ),
    "vllm_neuron": Followed("vLLM Neuron", "a3247f5b"),
    "orca": Followed("Vidur", "7d47513a", 1),
    "sarathi": Followed("Vidur", "7d47513a", 1),
    "vllm_v0": Followed("Vidur", "7d47513a", 1),
    "faster_transformer": Followed("Vidur", "7d47513a", 1),
    "tgi": Followed("Text Generation Inference", "db931fcf"),
    "llama_cpp": Followed("llama.cpp", "001d906a", differs="without its prompt cache"),
    "triton": Followed("Triton", "73aad7c3"),
    "tf_serving": Followed("TensorFlow Serving", "9d981c5c"),
    "adaptive_shared_batch": Followed("TensorFlow", "version not recorded"),
    "serial_device_batch": Followed("TensorFlow", "version not recorded"),
    "clipper": Followed("Clipper", "9f25e3fc"),
    "clockwork": Followed("Clockwork", "fbd2f11c"),
    "nexus": Followed("Nexus", "02ec95b2"),
    "ray_serve": Followed("Ray", "2.60.0"),
    "hf_static": Followed("Transformers", "5.23.0"),
}
