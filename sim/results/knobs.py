"""How a run's policies were set: their knobs, and how they draft tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchsim.policies.systems.sglang.speculative_args import METHODS
from batchsim.policies.systems.tensorrt_llm.decoding_config import by_names_of_vllm
from batchsim.results.read import Results, scenario_of, varied


def knobs(results: Results, policy: str) -> Mapping[str, Any]:
    """The knobs of `policy` as its scenario states them."""
    variant = varied(results, policy)
    label = policy if variant is None else variant["policy"]
    return scenario_of(results, policy)["policies"][label] or {}


def asks_for_no_tokens(scenario: Mapping[str, Any]) -> bool:
    """Whether requests of a scenario, as plain values, are of a pooling model."""
    workload = scenario.get("workload") or {}
    owners = [workload, *((workload.get("classes") or {}).values())]
    lengths = [owner.get("lengths") for owner in owners if isinstance(owner, Mapping)]
    outputs = [each.get("output") for each in lengths if isinstance(each, Mapping)]
    return any(isinstance(output, Mapping) and output.get("kind") == "none" for output in outputs)


def has_items(scenario: Mapping[str, Any]) -> bool:
    """Whether requests of a scenario, as plain values, have images, audios or videos."""
    workload = scenario.get("workload") or {}
    owners = [workload, *((workload.get("classes") or {}).values())]
    return any(owner.get("items") is not None for owner in owners if isinstance(owner, Mapping))


def speculation(results: Results, policy: str) -> Mapping[str, Any]:
    """How `policy` drafts tokens, as its scenario states it: a `speculative_config` of vLLM, or a choice of several; of
    SGLang the `method` alone; empty if it does not."""
    own = knobs(results, policy)
    if algorithm := own.get("speculative_algorithm"):
        return {"method": METHODS[algorithm]}
    speculative = own.get("speculative_config") or {}
    choices = speculative.get("best_of") or [speculative]
    if not all("decoding_type" in choice for choice in choices):
        return speculative
    named = [by_names_of_vllm(choice) for choice in choices]
    return named[0] if "best_of" not in speculative else {**speculative, "best_of": named}
