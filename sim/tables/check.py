"""Whether the kernel tables' times can be: by physics, beside the same operations on other GPUs, and among themselves.

Asked are decodes and prompts of a few sizes, operation by operation. A time fails that is

    floor     below what the sheet allows: bytes that must be read over bandwidth, FLOPs over the peak of their type
    ceiling   above `TWICE` the same operation's on another GPU of the tables, scaled by the two sheets
    order     below two thirds of the same operation's with fewer sequences or tokens

and by which a step of that size is off by more than `SHARE`. A floor is certain: no kernel is faster, but one that was
timed with its weights in a cache. The other two are doubts, and so wide that few good tables fail.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import log

from batchsim.cost.profile import TableFault
from batchsim.deployment.catalog import GPUS
from batchsim.deployment.deployment import Deployment
from batchsim.deployment.layers import Experts, LatentAttention
from batchsim.deployment.model import GpuSpec
from batchsim.deployment.quantisation import ELEMENT_BYTES
from batchsim.tables.handle import Size, Tables, Times
from batchsim.tables.modes import NoTablesError
from batchsim.tables.versions import has_tables

SHARE = 0.07
"""Of a step's time: what is beyond a bound counts from here on. By so much TPOT is off where all is well, too."""
TWICE = 2.0
"""Times the scaled sibling's: kernels of two generations reach shares of their sheets that differ by less."""
LAUNCH_MS = 0.005
"""Of an operation in a layer: so much no faster GPU shortens. The shortest kernels of the tables take 2 to 5 µs."""
_SHEET = 0.95  # sheets are rounded: a B200 has 7.7 TB/s by one and 8 by another
_FALL = 2 / 3  # engines change kernels between sizes, and the tables' own noise is up to a fifth
_GENERATION = 1.5  # times the peak FLOP/s, from which on another GPU is of another generation

_CONTEXTS = (512, 2_048, 8_192)
SIZES = (
    *(Size(rows, context, 0) for context in _CONTEXTS for rows in (1, 4, 16, 64, 256)),
    *(Size(0, 0, tokens) for tokens in (256, 1_024, 2_048, 8_192)),
    Size(0, 8_192, 2_048),
)
"""Decodes and prompts that are asked, on each attention group."""


@dataclass(frozen=True)
class Asked:
    """What the tables of one GPU answer: `ms` of every operation at each size. `blocks` are the operations that grow
    with the keys; `whole`: blocks of attention and its projections."""

    gpu: GpuSpec
    version: str
    times: Times
    blocks: frozenset[str]
    whole: bool

    @classmethod
    def of(cls, tables: Tables) -> Asked:
        deployment = tables.deployment
        assert deployment.gpu is not None, "tables are of a GPU"
        longest = deployment.model.max_position_embeddings
        times = tables.operations([size for size in SIZES if size.context + size.tokens <= longest])
        return cls(deployment.gpu, tables.backend, times, tables.blocks, tables.compound)


def checked(tables: Tables) -> tuple[tuple[TableFault, ...], str]:
    """(What fails, the worst first; a note that says what the tables were held against)."""
    own, others = Asked.of(tables), [Asked.of(each) for each in siblings(tables)]
    faults = faults_of(tables.deployment, own, others)
    names = ", ".join(f"{other.gpu.name} ({tables.deployment.engine} {other.version})" for other in others)
    held = f"and {names} scaled by its sheet" if others else "alone: no sibling GPU has tables of these kernels"
    return faults, f"each operation is held against its GPU's sheet {held}"


def faults_of(deployment: Deployment, own: Asked, others: list[Asked]) -> tuple[TableFault, ...]:
    """Of each operation and bound that fail the one size at which most of a step lies beyond, the worst first."""
    worst: dict[tuple[str, str], TableFault] = {}
    for fault in (
        *_below(deployment, own),
        *(f for other in others for f in _above(deployment, own, other)),
        *_falls(own),
    ):
        best = worst.get(key := (fault.operation, fault.bound))
        if fault.share > SHARE and (best is None or fault.share > best.share):
            worst[key] = fault
    faults = sorted(worst.values(), key=lambda fault: -fault.share)
    return tuple(replace(f, ms=_short(f.ms), bound_ms=_short(f.bound_ms), share=_short(f.share)) for f in faults)


def _short(number: float) -> float:
    return float(f"{number:.4g}")


def siblings(tables: Tables) -> list[Tables]:
    """Tables of the same kernels, in the nearest version, on the GPU whose sheet is nearest, and on the nearest of
    another generation, where there are such. Boards with NVLink are compared among each other, and cards on PCIe."""
    deployment = tables.deployment
    own = deployment.gpu
    assert own is not None, "tables are of a GPU"
    gpus = {gpu.name: gpu for gpu in GPUS.values() if gpu.over_pcie == own.over_pcie and gpu.name != own.name}
    near = sorted(gpus.values(), key=lambda gpu: sum(abs(log(ratio)) for ratio in _ratios(own, gpu)[:2]))
    kin = [gpu for gpu in near if 1 / _GENERATION < gpu.peak_flops / own.peak_flops < _GENERATION]
    nearest: list[Tables] = []
    for choice in (kin, [gpu for gpu in near if gpu not in kin]):
        for gpu in (gpu for gpu in choice if has_tables(gpu, deployment.engine)):
            try:
                nearest.append(Tables(replace(deployment, gpu=gpu, version=tables.backend), tables.modes))
                break
            except NoTablesError:
                continue
    return nearest


def _ratios(own: GpuSpec, other: GpuSpec) -> tuple[float, float, float]:
    """How many times as fast `own` is by the sheets: memory, matrices, the link to its peers."""
    return (
        own.memory_bandwidth / other.memory_bandwidth,
        own.peak_flops / other.peak_flops,
        own.peer_link / other.peer_link,
    )


def _above(deployment: Deployment, own: Asked, other: Asked) -> Iterator[TableFault]:
    """Operations that take more than `TWICE` the other GPU's, scaled by that of the sheets' ratios which is kindest;
    on a faster GPU the part that is launches stays."""
    ratio = min(_ratios(own.gpu, other.gpu))
    launches = LAUNCH_MS * deployment.model.num_hidden_layers
    for size, ms, step in _each(own):
        for name, own_ms in ms.items():
            theirs = other.times.get(size, {}).get(name, 0.0)
            fixed = min(theirs, launches) if ratio > 1 else 0.0
            scaled = TWICE * (fixed + (theirs - fixed) / ratio)
            if theirs and own_ms > scaled:
                basis = f"twice {other.gpu.name}'s scaled by its sheet"
                yield TableFault(name, str(size), own_ms, "ceiling", scaled, basis, (own_ms - scaled) / step)


def _falls(own: Asked) -> Iterator[TableFault]:
    """Operations that take less than two thirds of their time with fewer sequences of that context, or tokens of a
    prompt."""
    longest: dict[tuple[int, bool, str], tuple[float, Size, float]] = {}
    for size, ms, step in _each(own):
        for name, own_ms in ms.items():
            key = (size.context, size.rows > 0, name)
            most, smaller, step_of_most = longest.get(key, (0.0, size, step))
            if own_ms < _FALL * most:
                share = (most - own_ms) / step_of_most
                yield TableFault(name, str(size), own_ms, "order", most, str(smaller), share)
            if own_ms > most:
                longest[key] = own_ms, size, step


def _below(deployment: Deployment, own: Asked) -> Iterator[TableFault]:
    """Parts of a step that take less than their sheet allows."""
    for size, ms, step in _each(own):
        for part, least in floors(deployment, size, own.whole).items():
            took = sum(each for name, each in ms.items() if _part_of(name, own) == part)
            if took and took < _SHEET * least:
                basis = f"the sheet of {own.gpu.name}"
                yield TableFault(part, str(size), took, "floor", least, basis, (least - took) / max(step, least))


def _each(own: Asked) -> Iterator[tuple[Size, Mapping[str, float], float]]:
    """(size, ms of each operation, ms of all) from small to large."""
    for size in sorted(own.times, key=lambda size: (size.context, size.rows, size.tokens)):
        yield size, own.times[size], sum(own.times[size].values())


_MATRICES, _HEAD, _ATTENTION, _REDUCE = "all matrices", "the output matrix", "attention", "all-reduce"


def _part_of(name: str, own: Asked) -> str:
    """The part of a step, as `floors` names it, that an operation of the tables counts to; "": to none."""
    if name in own.blocks and not own.whole:
        return _ATTENTION
    if name in ("ar_1", "ar_2", "tp_allreduce"):
        return _REDUCE
    if name.endswith(("_ar", "dispatch", "p2p")):
        return ""
    return _HEAD if "logits" in name else _MATRICES


def floors(deployment: Deployment, size: Size, whole: bool = False) -> dict[str, float]:
    """The least ms of each part of a step of that size on each group: what must be read over bandwidth, or computed
    over peak, if that takes longer. `whole`: what the attention of keys needs counts to the matrices."""
    gpu, model, split, groups = deployment.gpu, deployment.model, deployment.split, deployment.dp_attention
    assert gpu is not None, "tables are of a GPU"
    tokens = size.rows or size.tokens
    wide = min(
        ELEMENT_BYTES[deployment.types.attention], ELEMENT_BYTES[deployment.types.mlp]
    )  # which of both a block has is unknown
    read = flops_ms = kv_read = pairs_ms = 0.0
    for each in model.kinds:
        weights = each.weights(model.hidden_size, split)
        read += each.count * (weights.attention * wide + weights.mlp * ELEMENT_BYTES[deployment.types.mlp])
        flops_ms += each.count * 2 * tokens * (weights.attention + weights.mlp) / _peak(gpu, deployment.types.mlp)
        if isinstance(each.mlp, Experts):  # at the least all tokens go to the same ones
            one = weights.experts / (each.mlp.count // split.ep)
            read += each.count * -(-each.mlp.per_token // split.ep) * one * ELEMENT_BYTES[deployment.types.experts]
            routed = tokens * groups * each.mlp.per_token / split.ep
            flops_ms += each.count * 2 * routed * one / _peak(gpu, deployment.types.experts)
        if isinstance(each.attention, LatentAttention) and each.attention.index_heads:
            continue  # sparse attention reads and computes less than all keys
        keys, pairs = _least(size, each.attention.window)
        kv_read += (
            each.count * size.rows * keys * each.attention.kv_bytes(deployment.tp, ELEMENT_BYTES[deployment.types.kv])
        )
        pairs_ms += each.count * 2 * pairs * each.attention.pair_size / deployment.tp / _peak(gpu, deployment.types.kv)
    head = model.head_parameters / deployment.tp / groups
    sent = model.num_hidden_layers * tokens * model.hidden_size * 2 * (deployment.tp - 1) / deployment.tp
    bandwidth = gpu.memory_bandwidth / 1e3
    if whole:
        read, flops_ms = read + kv_read, flops_ms + pairs_ms
    ms = {
        _MATRICES: max(read / bandwidth, flops_ms),
        _HEAD: head * ELEMENT_BYTES[deployment.types.plain] / bandwidth if size.rows else 0.0,
        _REDUCE: sent / gpu.peer_link * 1e3,
    }
    return ms if whole else ms | {_ATTENTION: max(kv_read / bandwidth, pairs_ms)}


def _least(size: Size, window: int | None) -> tuple[int, float]:
    """(Keys that a decode reads, pairs of a prompt's tokens with keys), no more than there are within a window."""
    pairs = size.tokens * (size.context + size.tokens / 2)
    if window is None:
        return size.context, pairs
    return min(size.context, window), max(min(pairs, size.tokens * window - window**2 / 2), 0.0)


def _peak(gpu: GpuSpec, dtype: str) -> float:
    """The most FLOP/ms at which the GPU multiplies numbers of that type."""
    fp8 = gpu.fp8_flops or 2 * gpu.peak_flops
    bits = ELEMENT_BYTES[dtype] * 8
    flops = gpu.peak_flops if bits >= 16 else fp8 if bits >= 8 else gpu.fp4_flops or fp8
    return flops / 1e3
