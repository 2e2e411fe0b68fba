"""The batching policies. One explicit table: name -> (config, policy)."""

from sim.policies.systems.vllm import Vllm, VllmConfig

POLICIES = {
    "vllm": (VllmConfig, Vllm),
}
