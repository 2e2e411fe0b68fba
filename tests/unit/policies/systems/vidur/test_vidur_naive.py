"""Vidur's paged schedulers against a model of them that walks every list and knows no group, on random workloads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchsim.kernel.types import Arrival, Request
from batchsim.policies.systems.vidur.sarathi import Sarathi, SarathiConfig
from batchsim.policies.systems.vidur.vllm_v0 import VllmV0, VllmV0Config
from tests.support.engine import STEP_NS, Constant
from tests.support.random_cases import random_cases
from tests.support.stepping import run

BLOCK = 4
Rows = list[tuple[list[tuple[int, int]], list[int], int]]
"""Of each step: (request, tokens) in batch order, the preempted, free blocks."""


@dataclass
class One:
    """A request of the model. `goal` tokens must be computed before it makes its next token."""

    arrival: Arrival
    made: int = 0
    computed: int = 0
    blocks: int = 0

    @property
    def id(self) -> int:
        return self.arrival.request.id

    @property
    def goal(self) -> int:
        return self.arrival.request.prompt_tokens + self.made

    @property
    def decodes(self) -> bool:
        return self.made > 0 and self.computed == self.goal - 1


class Model:
    """What both have in common; a subclass says what a step holds."""

    def __init__(self, arrivals: list[Arrival], blocks: int, cap: int, tokens: int, watermark: float) -> None:
        self.coming = [One(arrival) for arrival in arrivals]
        self.blocks, self.cap, self.tokens, self.watermark = blocks, cap, tokens, int(watermark * blocks)
        self.queue: list[One] = []
        self.running: list[One] = []
        self.preempted: list[int] = []

    @property
    def free(self) -> int:
        return self.blocks - sum(one.blocks for one in self.running)

    def rows(self) -> Rows:
        """All steps of a run."""
        now, rows = 0, Rows()
        while self.coming or self.queue or self.running:
            while self.coming and self.coming[0].arrival.request.arrival_ns <= now:
                self.queue.append(self.coming.pop(0))
            if not self.queue and not self.running:
                now = self.coming[0].arrival.request.arrival_ns
                continue
            self.preempted = []
            items = self.step()
            rows.append(([(one.id, n) for one, n in items], self.preempted, self.free))
            now += STEP_NS
            for one, n in items:
                one.computed += n
                one.made += one.computed == one.goal
            self.running = [one for one in self.running if one.made < (one.arrival.output_tokens or 0)]
        return rows

    def step(self) -> list[tuple[One, int]]:
        raise NotImplementedError

    def fits(self, one: One) -> bool:
        spare = self.free - -(-one.goal // BLOCK)
        return len(self.running) < self.cap and spare >= (self.watermark if self.running else 0)

    def admit(self) -> One:
        one = self.queue.pop(0)
        one.blocks = -(-one.goal // BLOCK)
        self.running.append(one)
        return one

    def decode(self) -> list[tuple[One, int]]:
        """One token for every decode that finds a free block, the latest being preempted for the others."""
        done: list[tuple[One, int]] = []
        for one in [one for one in self.running if one.decodes]:
            while one in self.running and not self.free:
                victim = self.running.pop()
                victim.blocks = victim.computed = 0
                self.queue.insert(0, victim)
                self.preempted.append(victim.id)
            if one in self.running:
                one.blocks = max(one.blocks, -(-(one.computed + 1) // BLOCK))
                done.append((one, 1))
        return done


class SarathiModel(Model):
    """Decodes, then prompts begun, then new ones, within the chunk."""

    def step(self) -> list[tuple[One, int]]:
        items = self.decode()
        for one in [one for one in self.running if not one.decodes]:
            items.append((one, min(one.goal - one.computed, self.tokens - len(items))))
        while self.queue and self.fits(self.queue[0]) and (left := self.tokens - sum(n for _, n in items)) > 0:
            one = self.admit()
            items.append((one, min(one.goal, left)))
        return items


class VllmV0Model(Model):
    """New prompts alone if any fits, else decodes."""

    def step(self) -> list[tuple[One, int]]:
        items: list[tuple[One, int]] = []
        while self.queue and self.fits(self.queue[0]):
            longest = max(n for n in [self.queue[0].goal, *(n for _, n in items)])
            if longest * (len(items) + 1) > self.tokens and self.running:
                break
            one = self.admit()
            items.append((one, one.goal))
        return items or self.decode()


@st.composite
def arrivals(draw: st.DrawFn) -> list[Arrival]:
    """Requests that end alone in 12 blocks, closer to each other than they are served."""
    at, found = 0, []
    for i in range(draw(st.integers(2, 12))):
        at += draw(st.sampled_from([0, 0, 0, 10, 13, 47]))
        prompt, output = draw(st.integers(1, 20)), draw(st.integers(1, 22))
        found.append(Arrival(Request(i, at, prompt, output), output))
    return found


@pytest.mark.parametrize(
    ("model", "policy", "config"),
    [(SarathiModel, Sarathi, SarathiConfig), (VllmV0Model, VllmV0, VllmV0Config)],
    ids=["sarathi", "vllm_v0"],
)
@random_cases(150, derandomize=True)
@given(work=arrivals(), blocks=st.integers(12, 24), cap=st.integers(1, 8), share=st.sampled_from([0.0, 0.1, 0.5]))
@pytest.mark.parametrize("tokens", [20, 64])
def test_every_step_equals_that_of_the_plain_model(
    model: type[Model],
    policy: type,
    config: Callable[[int, int, float], object],
    tokens: int,
    work: list[Arrival],
    blocks: int,
    cap: int,
    share: float,
) -> None:
    """Batch order, tokens, preemptions and free blocks are those of the rule read literally."""
    result = run(policy, config(cap, tokens, share), work, blocks=blocks, cost=Constant(), block_size=BLOCK)
    ours = [(row.items, row.preempted, row.free) for row in result.log]
    assert ours == model(work, blocks, cap, tokens, share).rows()
