"""How vLLM keeps the KV of a model whose layers are of several kinds: in groups that draw from one pool of blocks.

A block of full attention grows until it holds one state of a linear layer, layers with smaller pages have more tokens
in a block, and layers of one kind are divided into groups as large as the least kind has layers. Source:
vllm/v1/core/kv_cache_utils.py, vllm/v1/kv_cache_interface.py and vllm/model_executor/models/config.py of 0.33.0; for
0.19 to 0.24 start-up logs (vllm-project/vllm issue 40691, configiq issue 112, and two more in the tests).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, lcm
from typing import NamedTuple

from batchsim.base.errors import ScenarioError
from batchsim.base.kv_groups import KvGroup, KvLayout
from batchsim.deployment.config_families import FAMILIES
from batchsim.deployment.layers import LatentAttention, Layers, LinearAttention
from batchsim.deployment.model import GpuSpec, ModelSpec
from batchsim.deployment.vllm_memory import release

ALIGNED = (0, 21)
"""The release from which on prefix caching of hybrids is the default: `align`. Of 0.19 logs say none, of summer 2026's
align; which release changed it is not known."""
CHECKPOINTS = (0, 33)
"""The release from whose source it is known that some layers keep a state within a prefill, and that windows keep the
tokens of all batches in flight."""


class States(NamedTuple):
    """Which states of a request an engine keeps beside the running one: one for each of `drafts` draft tokens; where
    `aligned` at ends of blocks, for prefix caching; with `checkpoint` within a step."""

    aligned: bool = False
    drafts: int = 0
    checkpoint: bool = False


def states_of(version: str, *, prefix_cache: bool | None = None, drafts: int = 0, gpu: GpuSpec | None = None) -> States:
    """What vLLM of that version keeps by default, or with prefix caching as stated, on `gpu`, by default a Hopper."""
    aligned = release(version) >= ALIGNED if prefix_cache is None else prefix_cache
    known = gpu is None or gpu.fp4_flops is not None or gpu.name.startswith(("h100", "h200", "h20", "h800", "gh200"))
    return States(aligned, drafts, aligned and known and release(version) >= CHECKPOINTS)


class _Kind(NamedTuple):
    """Layers that vLLM sees as alike."""

    kind: str
    window: int | None
    block_size: int
    page_bytes: int
    states: int
    checkpoint: int | None


@dataclass(frozen=True, slots=True)
class Grouped:
    """The groups of a model. `layers`: the numbers of each group's layers; those of a drafter follow the model's.

    `page_bytes`: bytes of one block of one layer. `chunked`: windows are chunks, of which no block is left over.
    """

    layout: KvLayout
    layers: tuple[tuple[int, ...], ...]
    page_bytes: int
    chunked: bool = False

    def block_bytes(self, first: int, last: int) -> int:
        """Bytes of a block on a GPU that has the layers from `first` to before `last`: as many pages as the greatest
        group has of these."""
        return max(sum(first <= i < last for i in group) for group in self.layers) * self.page_bytes

    def request_blocks(self, num_tokens: int, in_flight_tokens: int) -> int:
        """As `request_blocks` of its layout."""
        return request_blocks(self.layout, num_tokens, in_flight_tokens, chunked=self.chunked)


def request_blocks(layout: KvLayout, num_tokens: int, in_flight_tokens: int, *, chunked: bool = False) -> int:
    """Blocks that a request of `num_tokens` tokens holds at most, of which steps in flight compute `in_flight_tokens`:
    vLLM divides its pool by them to say how many requests fit. `chunked`: windows are chunks."""
    blocks = 0
    for group in layout.groups:
        if group.window is not None:
            reach = min(group.window - (0 if chunked else 1) + in_flight_tokens, num_tokens)
            blocks += ceil(reach / group.block_size) + (0 if chunked else 1)
        else:
            blocks += group.states if group.kind == "state" else ceil(num_tokens / group.block_size)
    return blocks


def batches_in_flight(version: str, pp: int) -> int:
    """Batches whose tokens a window keeps beside: one, from 0.33 on one more than there are stages of a pipeline."""
    return pp + 1 if release(version) >= CHECKPOINTS else 1


def has_states(model: ModelSpec) -> bool:
    """Whether any layer keeps a state in the place of tokens."""
    return any(isinstance(each.attention, LinearAttention) for each in model.kinds)


def in_groups(model: ModelSpec) -> bool:
    """Whether layers keep unlike numbers of tokens, so that vLLM has several groups."""
    windows = {each.attention.window for each in model.kinds if each.attention.kv_elements()}
    return has_states(model) or len(windows) > 1


def has_layout(model: ModelSpec) -> bool:
    """Whether the model is simulated in groups alone: with states, or windows of other sizes than its full layers."""
    return has_states(model) or (in_groups(model) and model.model_type in FAMILIES)


def may_have_layout(model: ModelSpec) -> bool:
    """Whether the model can be simulated in groups. Chunks of Llama 4 end all at once, as no window does."""
    return in_groups(model) and not _is_chunked(model)


def _is_chunked(model: ModelSpec) -> bool:
    return model.model_type.startswith("llama4")


def group_layers(
    model: ModelSpec, tp: int, element: float, states: States, *, block_size: int = 16, draft_layers: int = 0
) -> Grouped:
    """The groups of `model` on `tp` GPUs with `element` bytes an element of KV.

    `block_size`: the tokens of a block as asked for. `draft_layers`: layers of a drafter, taken as more of full
    attention. ScenarioError where sizes of the model make blocks out of range.
    """
    try:
        return _group_layers(model, _sizes(model, tp, element, states, block_size), draft_layers)
    except ValueError as error:
        raise ScenarioError(f"{model.name}: in groups of layers {error} Correct the model's sizes.") from None


def _group_layers(model: ModelSpec, sizes: _Sizes, draft_layers: int) -> Grouped:
    """The groups of `model` with blocks of those sizes; ValueError where these are out of range."""
    each = [kind for kind in model.kinds for _ in range(kind.count)]
    pages = [sizes.of(layer) for layer in each]
    greatest = max(page.page_bytes for page in pages if page is not None)
    buckets: dict[_Kind, list[int]] = {}
    for i, page in enumerate(pages):
        if page is not None:
            buckets.setdefault(_as_large(page, greatest), []).append(i)
    if draft_layers:
        full = next(kind for kind in buckets if kind.kind == "full")
        buckets[full] += range(len(each), len(each) + draft_layers)
    counts = [len(layers) for layers in buckets.values()]
    size = max(counts) if max(counts) < 1.5 * min(counts) else min(counts)
    groups: list[KvGroup] = []
    numbers: list[tuple[int, ...]] = []
    for kind, layers in buckets.items():
        copies = ceil(len(layers) / size)
        numbers += [tuple(layers[i::copies]) for i in range(copies)]
        groups += [_group(kind, sizes.states)] * copies
    largest = max(map(len, numbers)) * greatest
    return Grouped(KvLayout(tuple(groups), largest), tuple(numbers), greatest, _is_chunked(model))


def _group(kind: _Kind, states: States) -> KvGroup:
    if kind.kind == "state":
        return KvGroup("state", kind.block_size, states=kind.states, aligned=states.aligned, checkpoint=kind.checkpoint)
    return KvGroup("full" if kind.window is None else "window", kind.block_size, kind.window)


def _as_large(page: _Kind, greatest: int) -> _Kind:
    """`page` with more tokens in a block, where a whole number of its pages make the greatest one; else padded."""
    if page.kind == "state" or greatest % page.page_bytes:
        return page._replace(page_bytes=greatest)
    return page._replace(page_bytes=greatest, block_size=page.block_size * (greatest // page.page_bytes))


class _Sizes(NamedTuple):
    tp: int
    element: float
    model_element: int
    states: States
    block_size: int

    def of(self, layer: Layers) -> _Kind | None:
        """The pages of a layer; None where it keeps nothing."""
        attention, states = layer.attention, self.states
        if isinstance(attention, LinearAttention):
            size = attention.state_bytes(self.tp, self.model_element, states.drafts)
            checkpoint = attention.checkpoint_grid if states.checkpoint else None
            count = 1 + states.drafts + states.aligned + states.checkpoint
            return _Kind("state", None, self.block_size, size, count, checkpoint)
        page = int(self.block_size * attention.kv_bytes(self.tp, self.element))
        return _Kind("full", attention.window, self.block_size, page, 0, None) if page else None


def _sizes(model: ModelSpec, tp: int, element: float, states: States, block_size: int) -> _Sizes:
    """The tokens of a block: with states as many steps as one of them needs."""
    kept = [each.attention for each in model.kinds]
    own = _Sizes(tp, element, model.dtype_bytes, states, block_size)
    linear = [each for each in kept if isinstance(each, LinearAttention)]
    if not linear:
        return own
    tokens = [size for each in kept if each.window is None and (size := each.kv_bytes(tp, element))]
    step = lcm(block_size, 128 if any(isinstance(each, LatentAttention) for each in kept) else 1)
    if states.checkpoint:
        step = lcm(step, *(each.checkpoint_grid for each in linear))
    state = max(each.state_bytes(tp, model.dtype_bytes, states.drafts) for each in linear)
    return own._replace(block_size=step * ceil(state / (step * max(tokens))))
