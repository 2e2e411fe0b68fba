"""The compiled shapes of one engine: with its cost, under its policy, in its memory."""

from __future__ import annotations

from dataclasses import replace

from batchsim.base.errors import ScenarioError
from batchsim.base.units import format_duration
from batchsim.cost.base import Cost
from batchsim.cost.calibrated import Calibrated
from batchsim.cost.scaled import Scaled
from batchsim.cost.shapes.config import EngineSizes, ShapesConfig
from batchsim.cost.shapes.shaped import Shaped
from batchsim.deployment.catalog import ACCELERATORS
from batchsim.deployment.memory import KvBudget
from batchsim.kernel.policy_config import Traits

_PRESETS = {
    "trainium2": "preset: neuron",
    "inferentia2": "preset: nxdi",
    "tpu_v5e": "preset: tpu",
    "tpu_v6e": "preset: tpu",
    "gaudi3": "preset: gaudi, compile: 20s",
}
"""What is written for each accelerator of the catalog."""
GAUDI_GRAPH_MEMORY = 0.1
"""Gaudi's `VLLM_GRAPH_RESERVED_MEM`: the part of the usable memory that captured graphs may take."""


def with_shapes(cost: Cost, config: ShapesConfig, engine: EngineSizes, traits: Traits) -> Shaped:
    """`cost` padded to the shapes of `config`. ScenarioError where cost, shapes and policy do not go together."""
    where = f"shapes {config.preset}"
    measured = cost.cost if isinstance(cost, Scaled) else cost
    if isinstance(measured, Calibrated):
        raise ScenarioError(
            f"{where}: the profile's steps were measured on a GPU, with the graphs that it replays, and would be padded"
            " twice. Leave shapes out, or take a roofline or linear cost."
        )
    if traits.speculation is not None:
        raise ScenarioError(f"{where}: draft tokens are not simulated in compiled shapes. Leave the drafts out.")
    if traits.splits_steps:
        raise ScenarioError(f"{where}: the policy splits its steps into passes of its own sizes. Take another policy.")
    if cost.stages > 1:
        raise ScenarioError(f"{where}: a pipeline of {cost.stages} stages is not simulated in shapes. Set pp to 1.")
    return Shaped(cost, config.build(engine), engine.block_size)


def check_needs_none(cost: Cost) -> None:
    """ScenarioError where the device of `cost` runs compiled programs alone, so that its shapes must be stated."""
    gpu = None if cost.deployment is None else cost.deployment.gpu
    if gpu is not None and gpu.name in ACCELERATORS:
        preset = _PRESETS[gpu.name]
        raise ScenarioError(
            f"{gpu.name} runs steps in compiled shapes alone, of which nothing is said. Write shapes: {{{preset}}}, or"
            " another preset."
        )


def check_cold_start(cost: Cost, cold_start_ns: int) -> None:
    """ScenarioError where a new replica would serve before its programs are there."""
    if isinstance(cost, Shaped) and cold_start_ns < cost.shapes.warmup_ns:
        raise ScenarioError(
            f"{cost.shapes}: replicas.autoscaler.cold_start {format_duration(cold_start_ns)} is shorter than that"
            " warm-up. Raise it, or lower warmup_per_program to what loading a compiled program takes."
        )


def less_programs(budget: KvBudget, config: ShapesConfig, engine: EngineSizes, block_bytes: int) -> KvBudget:
    """The KV memory that the programs leave of `budget`, which was derived from a device's memory.

    ScenarioError if they leave none."""
    share = config.graph_memory
    if share is None:
        share = GAUDI_GRAPH_MEMORY if config.preset == "gaudi" else 0.0
    programs = config.build(engine)
    lost = int(budget.num_blocks * share) + -(-programs.memory_bytes // block_bytes)
    if not lost:
        return budget
    if lost >= budget.num_blocks:
        raise ScenarioError(
            f"shapes {config.preset}: {programs.num_programs:,} programs keep {lost:,} blocks, and the KV memory has"
            f" {budget.num_blocks:,} ({budget.terms}). State shorter lists, or less memory_per_program."
        )
    terms = f"{budget.terms} − {lost:,} blocks for {programs.num_programs:,} compiled programs"
    return replace(budget, num_blocks=budget.num_blocks - lost, terms=terms)
