"""What LoRA adapters cost: steps that compute with some are longer, and so are steps that wait for a new one's weights.

The law. A step in which n adapters have tokens takes 1 + `step` + `per_adapter` * n times as long; one of the base
model alone takes what it takes without LoRA. Before that it loads, one after another, the adapters that it lacks: from
disk into host memory where they are not in it, then all of them into slots of GPU memory. Nothing overlaps with it, so
that all requests of the step wait. Both memories drop what was used longest ago. A run begins with the adapters of the
lowest numbers in both.

The sizes. Every linear layer of d_in inputs and d_out outputs has rank * (d_in + d_out) weights of 16 bits beside it.
Of `tp` GPUs each has a part of the matrix on the side that is split, and all of the other one.
Source: vllm/lora/worker_manager.py and model_manager.py of the 0.33.0 wheel, python/sglang/srt/lora/mem_pool.py of the
0.5.23 wheel. Simplifies: the adapters of a step are loaded in the order of their numbers, where vLLM takes that of a
set; the overhead is one of the whole step, however many of its tokens are an adapter's.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from batchsim.base.errors import ScenarioError
from batchsim.cost.lora_cost import LoraCost
from batchsim.deployment.deployment import Deployment
from batchsim.deployment.layers import DenseMlp, GroupedAttention
from batchsim.deployment.model import ModelSpec
from batchsim.kernel.batch import AdapterLoad, Batch
from batchsim.kernel.policy_config import AdapterMemory
from batchsim.kernel.types import MISSING, Sequence

WEIGHT_BYTES = 2
"""Bytes of a weight of an adapter: engines keep them in 16 bits (`lora_dtype: auto` of vLLM)."""


@dataclass(frozen=True, slots=True)
class AdapterTimes:
    """A `LoraCost` for adapters of one rank on one engine: shares of a step's time, and ns of a load."""

    step: float
    per_adapter: float
    load_gpu_ns: int
    load_disk_ns: int


def adapter_times(cost: LoraCost, rank: int, model: ModelSpec, engine: Deployment | None) -> AdapterTimes:
    """The times of adapters of `rank` beside `model` on `engine`; None: no GPU is known.

    ScenarioError where they are to follow from bytes that are not known.
    """
    size = 0
    if cost.load_gpu is None or cost.load_disk is None:
        size = adapter_bytes(model, rank, 1 if engine is None else engine.tp)
    gpu_ns = cost.load_gpu
    if gpu_ns is None:
        if engine is None or engine.gpu is None:
            raise ScenarioError("no GPU is known over whose host link adapters would go. Write load_gpu.")
        gpu_ns = round(size / engine.gpu.host_link * 1e9)
    disk_ns = cost.load_disk
    if disk_ns is None:
        assert cost.disk is not None, "checked by the config"
        disk_ns = round(adapter_bytes(model, rank) / cost.disk * 1e9)
    return AdapterTimes(cost.step, cost.per_adapter, gpu_ns, disk_ns)


def adapter_bytes(model: ModelSpec, rank: int, tp: int = 1) -> int:
    """Bytes on each of `tp` GPUs of an adapter of `rank` beside all linear layers of the attention and MLP of `model`.

    ScenarioError for all but grouped attention and gated MLPs of the usual matrices: of others engines differ in what
    they adapt.
    """
    hidden, widths = model.hidden_size, 0.0
    for each in model.kinds:
        attention, mlp = each.attention, each.mlp
        if not (isinstance(attention, GroupedAttention) and isinstance(mlp, DenseMlp)) or (
            not mlp.gated or attention.gated or attention.one_matrix or attention.value_dim
        ):
            raise ScenarioError(
                f"{model.name} has layers beside which no bytes of an adapter are known. Write load_gpu and"
                " load_disk, and kv: tokens as the engine's log has them."
            )
        heads, key_values = attention.num_heads * attention.head_dim, attention.kv_elements(tp)
        apart = 3 * hidden + heads / tp + key_values + heads / tp + hidden  # queries, keys, values; then the output
        apart += 2 * (hidden + mlp.width / tp) + mlp.width / tp + hidden  # gate, up; then down
        widths += each.count * apart
    return int(rank * widths) * WEIGHT_BYTES


class AdapterWeights:
    """Where one engine's adapters are, and what its steps take because of them. `count`: how many there are."""

    def __init__(self, memory: AdapterMemory, times: AdapterTimes, count: int) -> None:
        self._memory, self._times = memory, times
        self._most_in_host = count if memory.in_host is None else memory.in_host
        self._in_host = OrderedDict.fromkeys(reversed(range(min(self._most_in_host, count))))
        self._on_gpu = OrderedDict.fromkeys(reversed(range(min(memory.slots, count))))
        self._seen: set[Sequence] = set()  # requests whose adapter was ready once

    def step(self, batch: Batch, duration_ns: int) -> tuple[int, list[AdapterLoad]]:
        """(ns that the step `batch` takes, of which `duration_ns` without adapters; what it loads or finds, for each
        adapter that it lacks and each request that runs for the first time)."""
        users: dict[int, Sequence] = {}
        for seq, _ in batch.chunks:
            users.setdefault(seq.request.adapter, seq)
        if batch.decodes is not None:
            for seq in batch.decodes.members:
                users.setdefault(seq.request.adapter, seq)
        uses_base = users.pop(MISSING, None) is not None
        loads = self._load(users)
        for seq, _ in batch.chunks:
            if seq.request.adapter != MISSING and seq not in self._seen:
                self._seen.add(seq)
                if not any(load.seq is seq for load in loads):
                    loads.append(AdapterLoad(seq, "", 0))
        if self._memory.pooled and uses_base:
            self._place(MISSING, users)
        if users:
            duration_ns = round(duration_ns * (1 + self._times.step + self._times.per_adapter * len(users)))
        return duration_ns + sum(load.ns for load in loads), loads

    def forget(self, seq: Sequence) -> None:
        """Takes note that `seq` has ended."""
        self._seen.discard(seq)

    def _load(self, users: dict[int, Sequence]) -> list[AdapterLoad]:
        """Makes the adapters of `users` ready; returns what was read or copied for which of these."""
        loads: list[AdapterLoad] = []
        times, in_host = self._times, self._in_host
        for adapter in sorted(users):
            if adapter in in_host:
                in_host.move_to_end(adapter)
            else:
                loads.append(AdapterLoad(users[adapter], "disk", times.load_disk_ns))
                if len(in_host) >= self._most_in_host:
                    dropped, _ = in_host.popitem(last=False)
                    self._on_gpu.pop(dropped, None)
                in_host[adapter] = None
            if self._place(adapter, users):
                loads.append(AdapterLoad(users[adapter], "host", 0 if self._memory.overlaps else times.load_gpu_ns))
        return loads

    def _place(self, adapter: int, users: dict[int, Sequence]) -> bool:
        """Gives `adapter` a slot, that of the one used longest ago; returns whether it had none."""
        slots = self._on_gpu
        if adapter in slots:
            if self._memory.eviction == "lru":
                slots.move_to_end(adapter)
            return False
        if len(slots) >= self._memory.slots:
            free = [each for each in slots if each not in users] if self._memory.pooled else list(slots)
            # SGLang keeps the base model's slot as long as it can.
            victim = next((each for each in free if each != MISSING), free[0] if free else next(iter(slots)))
            del slots[victim]
        slots[adapter] = None
        return True
