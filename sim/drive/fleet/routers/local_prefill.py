"""Which requests a decode engine computes alone, prompt and all, where prefill and decode are apart.

The decode engine is chosen first. `new` are the tokens of the prompt beyond the blocks that it is guessed to have
cached: those of prompts that were sent there.

    tensorrt_llm_threshold   some are cached, and `new` is at most max_local_prefill_length
    dynamo_isl_bounding      `new` is below `new_tokens`, and below `new_share` of the prompt; blocks count as cached
                             for `ttl`
    llm_d_prefix             `new` is below `non_cached_tokens`; with 0 always. Of a prompt at most `max_prefix_blocks`
                             are compared, with the `lru_capacity` blocks last sent there
    llm_d_always             never: the decode engine is chosen first, and no more

Source: TensorRT-LLM's trtllm-serve disaggregated, disagg_utils (conditional disaggregation); Dynamo's
lib/kv-router/src/conditional_disagg.rs @ 088ca50b; llm-d's prefix-based-pd-decider and always-disagg-pd-decider,
pkg/plugins/profilehandler/disagg @ 520af478. Where llm-d estimates tokens from characters, here they are known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from batchsim.base.ranges import INT32_MAX, Config, PositiveInt, Range
from batchsim.base.units import NS_PER_S, PositiveDuration
from batchsim.drive.fleet.routers.routed_blocks import RoutedBlocks, prompt_keys
from batchsim.kernel.types import Request

Tokens = Annotated[int, Range(0, INT32_MAX)]


@dataclass(frozen=True, kw_only=True)
class TrtllmThresholdConfig(Config):
    """TensorRT-LLM's rule: few tokens beyond what the decode engine has cached of a prompt."""

    max_local_prefill_length: Tokens = 0
    """The most tokens that are not cached."""
    block_tokens: PositiveInt = 16
    """Tokens of the blocks by which prompts are compared."""
    kind: Literal["tensorrt_llm_threshold"] = "tensorrt_llm_threshold"

    def build(self) -> TrtllmThreshold:
        return TrtllmThreshold(self)


@dataclass(frozen=True, kw_only=True)
class DynamoIslBoundingConfig(Config):
    """Dynamo's rule: few tokens that are not cached, and a small share of the prompt."""

    new_tokens: Tokens = 2048
    """Bound on the tokens that are not cached."""
    new_share: Annotated[float, Range(0, 1)] = 0.7
    """Bound on the share of the prompt that is not cached."""
    ttl: PositiveDuration = 120 * NS_PER_S
    """How long a block that was sent counts as cached."""
    block_tokens: PositiveInt = 16
    """Tokens of the blocks by which prompts are compared."""
    kind: Literal["dynamo_isl_bounding"] = "dynamo_isl_bounding"

    def build(self) -> DynamoIslBounding:
        return DynamoIslBounding(self)


@dataclass(frozen=True, kw_only=True)
class LlmDPrefixConfig(Config):
    """llm-d's rule: few tokens of the prompt that are not cached."""

    non_cached_tokens: Tokens
    """Bound on the tokens that are not cached; 0: no prompt is computed by prefill engines."""
    block_tokens: PositiveInt = 16
    """Tokens of the blocks by which prompts are compared."""
    max_prefix_blocks: PositiveInt = 256
    """Blocks of a prompt that are compared at most."""
    lru_capacity: PositiveInt = 31_250
    """Blocks remembered for each engine, those last sent."""
    kind: Literal["llm_d_prefix"] = "llm_d_prefix"

    def build(self) -> LlmDPrefix:
        return LlmDPrefix(self)


@dataclass(frozen=True, kw_only=True)
class LlmDAlwaysConfig(Config):
    """llm-d's other rule: every prompt goes to a prefill engine, once its decode engine is chosen."""

    kind: Literal["llm_d_always"] = "llm_d_always"

    def build(self) -> LlmDAlways:
        return LlmDAlways()


LocalPrefillConfig = TrtllmThresholdConfig | DynamoIslBoundingConfig | LlmDPrefixConfig | LlmDAlwaysConfig


class TrtllmThreshold:
    """See the module's text."""

    def __init__(self, config: TrtllmThresholdConfig) -> None:
        self._config = config
        self._sent = RoutedBlocks()

    def keeps(self, request: Request, decode: int) -> bool:
        """Whether engine `decode` computes the request alone. Called once, as it is dispatched."""
        keys = prompt_keys(request, self._config.block_tokens)
        match = self._sent.matched(keys, decode) * self._config.block_tokens
        self._sent.send(keys, decode, request.arrival_ns)
        return match > 0 and request.prompt_tokens - match <= self._config.max_local_prefill_length


class DynamoIslBounding:
    """See the module's text."""

    def __init__(self, config: DynamoIslBoundingConfig) -> None:
        self._config = config
        self._sent = RoutedBlocks()

    def keeps(self, request: Request, decode: int) -> bool:
        """Whether engine `decode` computes the request alone. Called once, as it is dispatched."""
        config = self._config
        self._sent.keep_since(request.arrival_ns - config.ttl)
        keys = prompt_keys(request, config.block_tokens)
        new = request.prompt_tokens - self._sent.matched(keys, decode) * config.block_tokens
        self._sent.send(keys, decode, request.arrival_ns)
        return new < config.new_tokens and new < config.new_share * request.prompt_tokens


class LlmDPrefix:
    """See the module's text."""

    def __init__(self, config: LlmDPrefixConfig) -> None:
        self._config = config
        self._sent = RoutedBlocks()

    def keeps(self, request: Request, decode: int) -> bool:
        """Whether engine `decode` computes the request alone. Called once, as it is dispatched."""
        config = self._config
        keys = prompt_keys(request, config.block_tokens, config.max_prefix_blocks)
        new = request.prompt_tokens - self._sent.matched(keys, decode) * config.block_tokens
        self._sent.send(keys, decode, request.arrival_ns)
        self._sent.keep(decode, config.lru_capacity)
        return not config.non_cached_tokens or new < config.non_cached_tokens


class LlmDAlways:
    """See the module's text."""

    def keeps(self, request: Request, decode: int) -> bool:
        """False: engine `decode` computes no request alone."""
        return False


LocalPrefill = TrtllmThreshold | DynamoIslBounding | LlmDPrefix | LlmDAlways
