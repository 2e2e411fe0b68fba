"""Which requests SGLang lets in by their LoRA adapters: places, copies beside steps, draining."""

from __future__ import annotations

from typing import Any

from batchsim.kernel.types import MISSING, Request, Sequence
from batchsim.policies.systems.sglang.lora_batch import LoraBatch
from batchsim.policies.systems.sglang.sglang_config import SglangConfig
from batchsim.policies.systems.sglang.waiting_queue import Fcfs, Waiting

COPY_NS = 100


def batch(**knobs: Any) -> LoraBatch:
    return LoraBatch(SglangConfig(max_loras_per_batch=2, **knobs), COPY_NS)


def seq(adapter: int, *, output: int = 10, arrival_ns: int = 0) -> Sequence:
    return Sequence(Request(0, arrival_ns, 5, output, adapter=adapter))


def queue(*waiting: Sequence) -> Waiting:
    line = Fcfs(None)
    for each in waiting:
        line.push(each)
    return line


def test_the_base_model_takes_a_place() -> None:
    """With two, of which one is the base model's, a second adapter is one too many."""
    loras = batch()
    loras.begin([seq(MISSING), seq(0)], queue(), 0)
    assert loras.allows(seq(0)) and loras.allows(seq(MISSING)) and not loras.allows(seq(1))
    loras.begin([seq(0)], queue(), 0)
    assert loras.allows(seq(1))


def test_a_request_that_was_looked_at_counts() -> None:
    """Whether or not it came in."""
    loras = batch()
    loras.begin([seq(0)], queue(), 0)
    loras.take(seq(1))
    assert not loras.allows(seq(2))


def test_who_is_passed_over_is_noted_once_and_until_tried_in_vain_no_more() -> None:
    """An event as it begins, and one as another thing stops it."""
    loras, held = batch(), seq(2)
    for expected in ([("held_back", "adapter")], []):
        loras.begin([seq(0), seq(1)], queue(), 0)
        assert not loras.allows(held)
        passed_over, events = loras.end(None)
        assert passed_over == [held] and [(e.kind, e.reason) for e in events] == expected
    loras.begin([seq(0)], queue(), 0)
    assert loras.allows(held)
    assert [(e.kind, e.reason) for e in loras.end(held)[1]] == [("held_back", "")]


def test_copies_overlap_with_steps_one_after_another() -> None:
    """A request waits for its own; a third adapter has no room until one of the two is done and not running."""
    loras = batch(enable_lora_overlap_loading=True)
    loras.begin([], queue(), 0)
    assert not loras.allows(seq(0)) and not loras.allows(seq(1)) and not loras.allows(seq(2))
    assert loras.next_copy_ns == COPY_NS
    loras.begin([], queue(), COPY_NS)
    assert loras.allows(seq(0)) and not loras.allows(seq(1))
    assert loras.next_copy_ns == 2 * COPY_NS
    loras.begin([seq(0)], queue(), 2 * COPY_NS)
    assert loras.allows(seq(1)) and loras.allows(seq(0)) and loras.next_copy_ns is None
    loras.begin([seq(0)], queue(), 3 * COPY_NS)
    assert not loras.allows(seq(2)) and loras.next_copy_ns == 4 * COPY_NS
    loras.begin([seq(0)], queue(), 4 * COPY_NS)
    assert loras.allows(seq(2)) and not loras.allows(seq(1))  # which made room for it


def test_an_adapter_is_drained_for_one_that_waits_too_long() -> None:
    """The one with the fewest tokens to go, which then takes in only requests of at most 1.2 times as many."""
    loras = batch(lora_drain_wait_threshold=1e-6)
    running, waiting = [seq(0, output=10), seq(1, output=30)], queue(seq(2))
    loras.begin(running, waiting, 1000)
    assert loras.allows(seq(0, output=30))  # nothing has waited for longer than 1 us
    loras.begin(running, waiting, 1001)
    assert not loras.allows(seq(0, output=13)) and loras.allows(seq(0, output=12)) and loras.allows(seq(1, output=90))
    passed_over, events = loras.end(None)
    assert len(passed_over) == 1 and events[0].reason == "adapter_drains"
    loras.begin(running[1:], queue(), 1002)
    assert loras.allows(seq(0, output=30))  # none of its own runs
