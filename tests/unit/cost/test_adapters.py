"""LoRA adapters in memory: what a step loads, who leaves for it, what steps take, and bytes by shape."""

from __future__ import annotations

import pytest

from batchsim.base.errors import ScenarioError
from batchsim.cost.adapters import AdapterTimes, AdapterWeights, adapter_bytes, adapter_times
from batchsim.cost.lora_cost import LoraCost
from batchsim.deployment.catalog import load_gpu, load_model, read_model
from batchsim.deployment.deployment import Deployment
from batchsim.kernel.batch import Batch
from batchsim.kernel.policy_config import AdapterMemory
from batchsim.kernel.types import MISSING, Request, Sequence

TIMES = AdapterTimes(step=0.1, per_adapter=0.01, load_gpu_ns=10, load_disk_ns=200)


def step(weights: AdapterWeights, *adapters: int) -> tuple[int, list[tuple[int, str, int]]]:
    """(ns of a step of 1000 ns without adapters, in which new requests have these; loads by adapter)."""
    chunks = [(Sequence(Request(i, 0, 5, 1, adapter=adapter)), 5) for i, adapter in enumerate(adapters)]
    ns, loads = weights.step(Batch(None, chunks, 5 * len(chunks)), 1000)
    return ns, [(load.seq.request.adapter, load.source, load.ns) for load in loads]


def test_a_step_is_longer_by_its_adapters_and_by_what_it_loads() -> None:
    """10 % and 1 % for each adapter, not for the base model; reads from disk and copies come one after another."""
    weights = AdapterWeights(AdapterMemory(2, in_host=3), TIMES, 5)
    assert step(weights, MISSING) == (1000, [])
    assert step(weights, 0, MISSING) == (1110, [(0, "", 0)])
    assert step(weights, 2, 0) == (1120 + 10, [(2, "host", 10), (0, "", 0)])
    assert step(weights, 4) == (1110 + 210, [(4, "disk", 200), (4, "host", 10)])


def test_what_was_used_longest_ago_leaves_both_memories() -> None:
    """Who leaves host memory leaves the GPU too, so that each return is read from disk again."""
    weights = AdapterWeights(AdapterMemory(2, in_host=2), TIMES, 3)
    step(weights, 0)
    assert step(weights, 2)[1] == [(2, "disk", 200), (2, "host", 10)]  # in the place of 1
    assert step(weights, 0)[1] == [(0, "", 0)]
    assert step(weights, 1)[1] == [(1, "disk", 200), (1, "host", 10)]  # in the place of 2
    assert step(weights, 2, 0)[1][:2] == [(2, "disk", 200), (2, "host", 10)]


def test_first_in_first_out_minds_no_use() -> None:
    """With fifo the adapter loaded first leaves, however much it is used."""
    lru, fifo = (AdapterWeights(AdapterMemory(2, eviction=kind), TIMES, 3) for kind in ("lru", "fifo"))
    for weights in (lru, fifo):
        step(weights, 1), step(weights, 0), step(weights, 1), step(weights, 2)
    assert step(lru, 1)[1] == [(1, "", 0)]
    assert step(fifo, 1)[1] == [(1, "host", 10)]


def test_a_pool_keeps_what_the_step_needs_and_the_base_model_as_long_as_it_can() -> None:
    """SGLang's: a place of its own for the base model, which costs nothing to take."""
    weights = AdapterWeights(AdapterMemory(2, pooled=True), TIMES, 4)
    assert step(weights, 0, MISSING)[1] == [(0, "", 0)]  # the base model takes the place of 1
    assert step(weights, 1)[1] == [(1, "host", 10)]  # in the place of 0
    assert step(weights, 2, 3)[1] == [(2, "host", 10), (3, "host", 10)]
    assert step(weights, 2, 3)[0] == 1120


def test_bytes_are_rank_times_the_widths_of_all_linear_layers() -> None:
    """84 MB at rank 16 of Llama-3.1-8B, whose seven matrices have 81,920 inputs and outputs in each of 32 layers."""
    model = load_model("llama-3.1-8b")
    assert adapter_bytes(model, 16) == 16 * 81_920 * 32 * 2
    assert adapter_bytes(model, 16) > adapter_bytes(model, 16, tp=4) > adapter_bytes(model, 16) / 4


@pytest.mark.parametrize(
    "model", ["Qwen/Qwen3.5-27B", "XiaomiMiMo/MiMo-V2-Flash", "Qwen/Qwen3-30B-A3B", "google/gemma-4-31B-it"]
)
def test_bytes_beside_other_matrices_are_not_known(model: str) -> None:
    """Linear attention, a gate of the output, values of a width of their own, experts, keys that are values too."""
    with pytest.raises(ScenarioError, match="no bytes of an adapter are known"):
        adapter_bytes(read_model(model), 16)


def test_loads_follow_from_bytes_where_no_time_is_stated() -> None:
    """Over the host link of the GPU, and from a disk of stated speed."""
    model, gpu = load_model("llama-3.1-8b"), load_gpu("h100")
    size = adapter_bytes(model, 16)
    times = adapter_times(LoraCost(disk=2e9), 16, model, Deployment(model, gpu))
    assert times.load_disk_ns == round(size / 2e9 * 1e9)
    assert times.load_gpu_ns == round(size / gpu.host_link * 1e9)
    with pytest.raises(ScenarioError, match="no GPU is known over whose host link"):
        adapter_times(LoraCost(disk=2e9), 16, model, None)
