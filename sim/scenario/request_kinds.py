"""What engines must be able to do for a workload's requests: encode images, or end with the prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from batchsim.base.errors import ScenarioError
from batchsim.cost.encoder import VisionTime, encoder_unknown
from batchsim.cost.encoder_config import EncoderConfig
from batchsim.deployment.model import DTYPE_BYTES, ModelSpec
from batchsim.kernel.policy_config import PolicyConfig
from batchsim.kernel.protocols import ItemsContext
from batchsim.scenario.config import Scenario, ScenarioFile
from batchsim.scenario.deployment_config import DeploymentConfig
from batchsim.workload.items import largest_item
from batchsim.workload.rollout_config import Rollout
from batchsim.workload.structured import is_structured
from batchsim.workload.workload_config import WorkloadConfig

if TYPE_CHECKING:
    from batchsim.scenario.scenario_cost import ScenarioCost


FEATURES: dict[str, Callable[[ScenarioFile], bool]] = {
    "LoRA adapters": lambda file: file.workload.lora_rank is not None,
    "images, audios and videos": lambda file: bool(file.workload.all_items),
    "models that make no tokens": lambda file: file.workload.makes_no_tokens,
    "constrained answers": lambda file: is_structured(file.workload),
    "tasks": lambda file: file.workload.tasks is not None,
    "rollouts": lambda file: isinstance(file.workload.arrivals, Rollout),
    "offline jobs": lambda file: file.workload.offline_class is not None,
    "compiled shapes": lambda file: getattr(file.cost, "shapes", None) is not None,
}
"""What a scenario may ask for that does not go with every kind of engine, and whether it does."""


def features(file: ScenarioFile, *names: str) -> dict[str, bool]:
    """Whether a scenario asks for each of these FEATURES."""
    return {name: FEATURES[name](file) for name in names}


def items_context(traffic: WorkloadConfig, model: ModelSpec) -> ItemsContext | None:
    """What the images, audios and videos of `traffic` are to an engine; None where no request has any."""
    said = traffic.all_items
    if not said:
        return None
    return ItemsContext(largest_item(said), model.hidden_size * DTYPE_BYTES.get(model.dtype, 2))


def encoder_of(cost: ScenarioCost, traffic: WorkloadConfig, model: ModelSpec) -> EncoderConfig | VisionTime | None:
    """The encoder of an engine for the items of `traffic`: as `cost` states it, else a deployment's from kernel tables;
    None where no request has any.

    ScenarioError for items of which no encoder is known, and for an encoder without items.
    """
    stated, items = cost.encoder, traffic.all_items
    if not items and stated is not None:
        what = f"encoder {stated}: no request has images, audios or videos"
        raise ScenarioError(f"{what}. Add workload.items, or drop it.")
    if stated is not None or not items:
        return stated
    if not isinstance(cost, DeploymentConfig):
        raise encoder_unknown()
    return cost.vision_time(model, largest_item(items))


ITEM_KNOBS = frozenset(
    {"max_num_encoder_input_tokens", "encoder_cache_size", "disable_chunked_mm_input", "vlm_cache_size_mb"}
)
"""Knobs of policies that only images, audios and videos ask for."""


def check_kinds(traffic: WorkloadConfig, config: PolicyConfig, stated: Iterable[str]) -> None:
    """ScenarioError where a policy's model makes tokens and no request asks for any, or the other way round; or where a
    knob is `stated` that does nothing, since no request has an item."""
    idle = next((name for name in stated if name in ITEM_KNOBS), None)
    if idle is not None and not traffic.all_items:
        raise ScenarioError(
            f"{idle} is for images, audios and videos, and no request has any. Write workload.items, or drop {idle}."
        )
    makes_none = traffic.makes_no_tokens
    if config.traits.pooling and not makes_none:
        raise ScenarioError(
            "a pooling model makes no tokens, and the requests ask for some. Write workload.lengths: {prompt: ...,"
            " output: 0}."
        )
    if makes_none and not config.traits.pooling:
        raise ScenarioError(
            "requests with output 0 are of a pooling model (embedding, reranking, classification), which this policy"
            " does not run. Write runner: pooling of vllm or is_embedding: true of sglang, or an output."
        )


def check_hash_ids(scenario: Scenario, block_tokens: int, alignment: int) -> None:
    """ScenarioError where blocks of the KV cache, of `alignment` tokens, do not fit into the `block_tokens` of those
    in which a trace states shared prompts, and a policy of `scenario` shares them."""
    caching = [spec.name for spec in scenario.specs if spec.config.traits.prefix_cache]
    if caching and block_tokens % alignment:
        raise ScenarioError(
            f"{scenario.name}: kv.block_size {alignment} does not divide the {block_tokens} tokens of"
            f" the trace's hash_ids, by which {', '.join(caching)} would share. Set another, or write trace.prefix:"
            " ignore."
        )


def check_real_requests(traffic: WorkloadConfig, where: str) -> None:
    """ScenarioError, beginning with `where`, for requests that no model here could serve, or no client here sends."""
    for what, key, there in (
        ("images, audios and videos", "items", bool(traffic.all_items)),
        ("pooling models", "output 0", traffic.makes_no_tokens),
    ):
        if there:
            raise ScenarioError(f"{where}: {what} can only be simulated: no such model runs here. Drop {key}.")
    if isinstance(traffic.arrivals, Rollout):
        raise ScenarioError(f"{where}: a rollout can only be simulated: nothing trains here. Write other arrivals.")
    if traffic.offline_class is not None:
        raise ScenarioError(
            f"{where}: offline jobs can only be simulated: a real client gives up no request for others. Drop classes"
            " with offline."
        )
