"""A policy that asks for what no engine could do is named, and its numbers never become a result."""

from __future__ import annotations

import pytest

from batchsim.base.errors import PolicyError
from batchsim.cost.constant import Constant
from batchsim.drive.live import VirtualClock, live
from batchsim.kernel.batch import Batch, Idle
from batchsim.kernel.core import EngineCore
from batchsim.kernel.kv_blocks import CountingKV
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.record import Recorder
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.kernel.types import Arrival, Event, Request, Sequence
from batchsim.policies.families.gated import Gated, GatedConfig
from batchsim.testing.random_configs import MS
from batchsim.testing.random_engines import Listed


class NoMemory(Gated):
    """Schedules prompts and gives their KV blocks back at once."""

    def schedule(self, now_ns: int, drain: bool) -> Batch | Idle:
        work = super().schedule(now_ns, drain)
        if isinstance(work, Batch):
            for seq, _ in work.chunks:
                self.kv.free(seq)
        return work


class Understates(Gated):
    """Says that its prompts have no tokens."""

    def schedule(self, now_ns: int, drain: bool) -> Batch | Idle:
        work = super().schedule(now_ns, drain)
        if isinstance(work, Batch):
            work.num_prefill_tokens = 0
        return work


class TooLong(Gated):
    """Schedules more tokens than a prompt has."""

    def schedule(self, now_ns: int, drain: bool) -> Batch | Idle:
        work = super().schedule(now_ns, drain)
        if isinstance(work, Batch):
            work.chunks = [(seq, n + 1) for seq, n in work.chunks]
        return work


class Twice(Gated):
    """Schedules a prompt in two halves of one step."""

    def schedule(self, now_ns: int, drain: bool) -> Batch | Idle:
        work = super().schedule(now_ns, drain)
        if isinstance(work, Batch) and work.chunks:
            seq, n = work.chunks[0]
            work.chunks, work.num_prefill_tokens = [(seq, n // 2), (seq, n // 2)], n
        return work


class Forgets(Gated):
    """Returns nothing."""

    def schedule(self, now_ns: int, drain: bool) -> Batch | Idle:
        return None  # type: ignore[return-value]


class Leaks(Gated):
    """Keeps a block of everyone who leaves."""

    def complete(self, batch: Batch, finished: list[Sequence], now_ns: int) -> list[Sequence]:
        responses = super().complete(batch, finished, now_ns)
        self.kv.num_free -= len(finished)
        return responses


class Misspells(Gated):
    """Refuses a request in a word of its own, which would never be answered."""

    def add(self, seq: Sequence, now_ns: int) -> None:
        self.events.append(Event("refused", seq, "too_late"))


def run(policy: type[Gated]) -> EngineCore:
    context = PolicyContext(CountingKV(100, 16), 1000)
    core = EngineCore(
        policy(GatedConfig(), context), SimExecutor(Constant(step=MS), 1000), Recorder(), max_model_len=1000
    )
    live(core, Listed((Arrival(Request(0, 0, 20, 5), 5), Arrival(Request(1, 0, 30, 5), 5))), VirtualClock())
    core.check_returned()
    return core


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (NoMemory, "NoMemory: schedules up to token 20 in 0 KV blocks"),
        (Understates, "Understates: says num_prefill_tokens 0 for chunks of 50"),
        (TooLong, "TooLong: schedules 21 tokens of Sequence"),
        (Twice, "Twice: schedules a sequence twice in one step"),
        (Forgets, r"Forgets: schedule\(\) returned None"),
        (Misspells, "Misspells: emits an event of kind 'refused', of which there is none"),
        (Leaks, "Leaks: 98 of 100 KV blocks are free after the last request"),
    ],
)
def test_a_broken_policy_is_named_with_what_it_did(policy: type[Gated], message: str) -> None:
    """Tokens without memory, wrong counts, chunks beyond the prompt and lost blocks are errors, not fast results."""
    with pytest.raises(PolicyError, match=message):
        run(policy)


def test_the_policy_they_derive_from_is_sound() -> None:
    """Without the faults nothing is raised."""
    assert len(run(Gated).recorder.records().requests) == 2
