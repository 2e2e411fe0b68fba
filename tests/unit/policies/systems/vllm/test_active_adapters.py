"""vLLM's places for LoRA adapters: who overtakes whom, with drafts too, and when a place is free again."""

from __future__ import annotations

from typing import Any

import pytest

from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.types import MISSING, Event, Request, Sequence
from batchsim.kv.choice import new_kv
from batchsim.policies.systems.vllm.active_adapters import ActiveAdapters
from batchsim.policies.systems.vllm.speculative_config import SpeculativeConfig
from batchsim.policies.systems.vllm.vllm_config import VllmConfig
from batchsim.policies.systems.vllm.vllm_drafts import VllmWithDrafts

DRAFTS = SpeculativeConfig(method="ngram", num_speculative_tokens=2, acceptance=0.5)


def admitted(adapters: list[int], **knobs: Any) -> list[list[int]]:
    """The requests, numbered from 0, that each of three calls lets in, where none ends."""
    config = VllmConfig(async_scheduling=False, **knobs)
    kv = new_kv(config, 100, 16, ids=False)
    scheduler = VllmWithDrafts(config, PolicyContext(kv, 200))
    for i, adapter in enumerate(adapters):
        scheduler.add(Sequence(Request(i, i, 20, 9, adapter=adapter)), i)
    calls: list[list[int]] = []
    for _ in range(3):
        before = set(scheduler.running)
        scheduler.schedule(100, drain=False)
        calls.append([seq.request.id for seq in scheduler.running if seq not in before])
        assert scheduler.num_waiting + scheduler.num_running == len(adapters)
    return calls


@pytest.mark.parametrize("knobs", [{}, {"speculative_config": DRAFTS}, {"policy": "priority"}])
def test_a_request_whose_adapter_is_one_too_many_is_overtaken(knobs: dict[str, Any]) -> None:
    """By later ones of an adapter in use and of the base model; it stays where it was."""
    assert admitted([1, 2, 1, MISSING, 3], max_loras=1, **knobs) == [[0, 2, 3], [], []]
    assert admitted([1, 2, 1, MISSING, 3], max_loras=2, **knobs) == [[0, 1, 2, 3], [], []]
    assert admitted([1, 2, 1, MISSING, 3], **knobs) == admitted([1, 2, 1, MISSING, 3], max_loras=1, **knobs)


def test_slots_end_a_pass_for_all() -> None:
    """One that would be let in by its adapter waits for a slot like others."""
    assert admitted([1, 2, 1, 1], max_loras=1, max_num_seqs=2) == [[0, 2], [], []]


def test_a_place_is_free_once_its_last_request_has_left() -> None:
    """Those held back come in then, in the order in which they came."""
    config = VllmConfig(async_scheduling=False, max_loras=1)
    scheduler = VllmWithDrafts(config, PolicyContext(new_kv(config, 100, 16, ids=False), 200))
    first, *others = (Sequence(Request(i, i, 20, 9, adapter=adapter)) for i, adapter in enumerate([1, 2, 3, 2]))
    for seq in (first, *others):
        scheduler.add(seq, 0)
    scheduler.schedule(0, drain=False)
    held = [(event.kind, event.seq.request.id, event.reason) for event in scheduler.events]
    assert held == [("held_back", i, "adapter") for i in (1, 2, 3)]
    scheduler.cancel(first, 1)
    scheduler.schedule(1, drain=False)
    assert [seq.request.id for seq in scheduler.running] == [1, 3]


def test_who_is_held_back_is_recorded_once_until_it_waits_no_longer() -> None:
    """Held back by one call after another: one event. One that was forgotten in between is a new one's."""
    adapters, base = ActiveAdapters(1), Sequence(Request(2, 0, 20, 9))
    first, other = (Sequence(Request(i, 0, 20, 9, adapter=i)) for i in (0, 1))
    adapters.enter(first)
    assert not adapters.holds_back(first) and adapters.holds_back(other)
    assert [event.seq for event in adapters.tried([base, other], None)] == [other]
    assert adapters.tried([other], None) == []
    adapters.forget(other)
    assert [event.reason for event in adapters.tried([other], None)] == ["adapter"]
    adapters.leave(first)
    assert adapters.tried([], other) == [Event("held_back", other, "")] and not adapters.holds_back(other)
