"""The batching policies. One explicit table: name -> (config, policy)."""

from sim.policies.continuous import Continuous, ContinuousConfig
from sim.policies.dynamic import Dynamic, DynamicConfig
from sim.policies.gated import Gated, GatedConfig
from sim.policies.preemptive import Preemptive, PreemptiveConfig
from sim.policies.static import Static, StaticConfig
from sim.policies.systems.vllm import Vllm, VllmConfig

POLICIES = {
    "static": (StaticConfig, Static),
    "dynamic": (DynamicConfig, Dynamic),
    "continuous": (ContinuousConfig, Continuous),
    "preemptive": (PreemptiveConfig, Preemptive),
    "gated": (GatedConfig, Gated),
    "vllm": (VllmConfig, Vllm),
}
