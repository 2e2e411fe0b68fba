"""Where chunks of prompts end on a model whose states are kept, and who comes in as windows slide: by hand.

Source of the rules: vllm/v1/core/sched/scheduler.py of the 0.33.0 wheel (`_mamba_block_aligned_split`).
"""

from __future__ import annotations

from typing import Any

import pytest

from batchsim.base.kv_groups import KvGroup, KvLayout
from batchsim.cost.constant import Constant
from batchsim.drive.simulate import simulate
from batchsim.kernel.batch import Batch
from batchsim.kernel.core import EngineCore
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.record import Recorder
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.kernel.tokens import TokenIds, prompt_stream
from batchsim.kernel.types import Arrival, Request
from batchsim.kv.choice import new_grouped_kv
from batchsim.policies.systems.vllm.vllm import Vllm
from batchsim.policies.systems.vllm.vllm_config import VllmConfig
from tests.support.engine import Requests

LONG = 400


class Watched(Vllm):
    """Notes (request, tokens) of each chunk of a prompt by step."""

    def __init__(self, config: VllmConfig, context: PolicyContext) -> None:
        super().__init__(config, context)
        self.chunks: list[list[tuple[int, int]]] = []

    def schedule(self, now_ns: int, drain: bool) -> Any:
        work = super().schedule(now_ns, drain)
        if isinstance(work, Batch) and work.chunks:
            self.chunks.append([(seq.request.id, n) for seq, n in work.chunks])
        return work


def arrival(id_: int, prompt: int, output: int = 2, at_ns: int = 0, shared: int = 0) -> Arrival:
    parts = [(prompt_stream(0), 0, shared), (prompt_stream(1 + id_), 0, prompt - shared)]
    tokens = TokenIds.of([part for part in parts if part[2]])
    return Arrival(Request(id_, at_ns, prompt, output, tokens=tokens), output)


def run(layout: KvLayout, *arrivals: Arrival, blocks: int = 500, **knobs: Any) -> tuple[Watched, EngineCore]:
    config = VllmConfig(**{"async_scheduling": False, "max_num_seqs": 8, "max_num_batched_tokens": 48} | knobs)
    kv = new_grouped_kv(config, layout, blocks, LONG)
    scheduler = Watched(config, PolicyContext(kv, LONG))
    core = EngineCore(scheduler, SimExecutor(Constant(10), LONG), Recorder(), max_model_len=LONG)
    simulate(core, Requests(*arrivals))
    core.check_returned()
    kv.check()
    return scheduler, core


def states(checkpoint: int | None = None) -> KvLayout:
    number = 2 + (checkpoint is not None)
    return KvLayout((KvGroup("full", 16), KvGroup("state", 16, None, number, True, checkpoint)))


@pytest.mark.parametrize(
    ("prompt", "checkpoint", "ends"),
    [
        (40, None, [32, 40]),  # a stop at the last end of a block: one step more
        (40, 16, [40]),  # kept within the step
        (40, 64, [32, 40]),  # 32 is not on the grid of the engine
        (100, None, [48, 96, 100]),
        (100, 16, [48, 96, 100]),  # the budget ends the chunks there anyway
        (32, None, [16, 32]),  # the last token of a prompt is computed: its last end of a block is 16
        (15, None, [15]),
    ],
)
def test_chunks_end_where_a_state_is_kept(prompt: int, checkpoint: int | None, ends: list[int]) -> None:
    scheduler, _ = run(states(checkpoint), arrival(0, prompt))
    sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    assert scheduler.chunks == [[(0, n)] for n in sizes]


def test_without_a_prefix_cache_chunks_end_anywhere() -> None:
    layout = KvLayout((KvGroup("full", 16), KvGroup("state", 16, states=1)))
    scheduler, _ = run(layout, arrival(0, 100), enable_prefix_caching=False)
    assert scheduler.chunks == [[(0, 48)], [(0, 48)], [(0, 4)]]


def test_a_block_longer_than_a_step_is_computed_in_parts_up_to_its_end() -> None:
    """Blocks of 64 tokens, steps of 48: 48, then to the end of the block, and on."""
    layout = KvLayout((KvGroup("full", 64), KvGroup("state", 64, None, 2, True)))
    scheduler, _ = run(layout, arrival(0, 150))
    assert scheduler.chunks == [[(0, 48)], [(0, 16)], [(0, 48)], [(0, 16)], [(0, 22)]]


def test_less_budget_than_a_block_lets_a_prompt_wait() -> None:
    """Of 48 tokens a first prompt takes 40 with its end; the 8 that are left hold no block of the next one, which is
    not admitted."""
    scheduler, _ = run(states(16), arrival(0, 40), arrival(1, 100))
    assert scheduler.chunks[:2] == [[(0, 40)], [(1, 32)]]  # of 47 beside a decode


def test_a_prompt_stops_at_its_junction() -> None:
    """The second shares 70 tokens with the first, which finds 64 in full attention and no state there: it stops at 64
    and keeps one, by which the third computes from there on."""
    first, second, third = (arrival(i, 150, at_ns=1000 * i, shared=150 if i == 0 else 70) for i in range(3))
    scheduler, core = run(states(16), first, second, third, max_num_batched_tokens=200)
    assert scheduler.chunks == [[(0, 150)], [(1, 64)], [(1, 86)], [(2, 86)]]
    assert core.recorder.records().requests["cached_tokens"].tolist() == [0, 0, 64]


def test_a_blocked_head_comes_in_as_windows_slide() -> None:
    """Of 9 blocks a decode with a window of 8 holds 3, and 2 from token 12 on: so long a head waits that asks for 7,
    ceil((8 - 1 + 16) / 4) + 1. Leaps over decodes alone end there."""
    knobs = {"enable_prefix_caching": False, "max_num_batched_tokens": 16}
    layout, arrivals = KvLayout((KvGroup("window", 4, 8),)), (arrival(0, 8, output=30), arrival(1, 32, at_ns=1))
    _, core = run(layout, *arrivals, blocks=9, **knobs)
    assert core.recorder.records().requests["scheduled_ns"].tolist() == [0, 40]
