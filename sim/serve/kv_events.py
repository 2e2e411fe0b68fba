"""The changes of simulated engines' prefix caches, published as vLLM's engines do.

As there a step's changes are published at its end: in synchronous engines those of the call that scheduled it, in
asynchronous ones also those of the call that scheduled the next one meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from batchsim.base.errors import ScenarioError
from batchsim.kernel.core import EngineCore
from batchsim.kernel.in_flight import LaunchedStep
from batchsim.kv.block_pool import Change
from batchsim.kv.prefix_cache import BlockHashKV
from batchsim.serve.kv_event_batches import Removed, Stored
from batchsim.serve.kv_events_config import OPTION

if TYPE_CHECKING:
    from batchsim.serve.kv_publisher import KvPublisher

Generated = Callable[[int, int, int], list[int]]
"""The ids of output tokens `start` to `end` - 1 of answer `number`."""


@dataclass
class _Engine:
    """An engine as it was last looked at: the step it ran, and changes that are published when that is over."""

    core: EngineCore
    step: LaunchedStep | None = None
    held: list[Stored | Removed] = field(default_factory=list[Stored | Removed])


class KvEvents:
    """Publishes what the caches of engines hold; the tokens of answers are those of `generated`."""

    def __init__(self, publisher: KvPublisher, generated: Generated) -> None:
        self.publisher = publisher
        self._generated = generated
        self._engines: dict[int, _Engine] = {}
        self._prompts: dict[int, Sequence[int]] = {}  # of the requests at hand
        self._gone: list[int] = []  # requests that have ended since engines were last looked at
        self._first = 0  # earlier requests share nothing with later ones: the cache was emptied

    def sent(self, number: int, prompt: Sequence[int]) -> None:
        """Notes the token ids of a request's prompt."""
        self._prompts[number] = prompt

    def ended(self, number: int) -> None:
        """Notes that a request has ended."""
        self._gone.append(number)

    def look(self, cores: Mapping[int, EngineCore]) -> None:
        """Publishes the changes of steps that are over; `cores` are the engines that are there, by replica. After each
        instant."""
        for replica, core in cores.items():
            engine = self._engines.get(replica)
            if engine is None or engine.core is not core:
                engine = self._begin(replica, core)
            self._look(replica, engine)
        if len(self._engines) > len(cores):
            for replica in [each for each in self._engines if each not in cores]:
                del self._engines[replica]
                self.publisher.publish(replica, None)
        for number in self._gone:
            self._prompts.pop(number, None)
        self._gone.clear()

    def _begin(self, replica: int, core: EngineCore) -> _Engine:
        cache = _cache(core)
        if replica not in self.publisher.endpoints:
            self.publisher.add(replica, cache.block_size)
        elif replica in self._engines:  # failed, and up again since
            self.publisher.publish(replica, None)
        engine = self._engines[replica] = _Engine(core)
        return engine

    def _look(self, replica: int, engine: _Engine) -> None:
        steps = engine.core.in_flight.steps
        step = steps[0] if steps else None
        if step is not engine.step and engine.held:
            self.publisher.publish(replica, engine.held)
            engine.held = []
        engine.step = step
        for change in _cache(engine.core).changes():
            engine.held += self._resolved(change)
        if step is None and engine.held:
            self.publisher.publish(replica, engine.held)
            engine.held = []

    def _resolved(self, change: Change) -> list[Stored | Removed]:
        keys, first, last, left = change
        if keys is None:
            return [Removed(first, last, left)]
        number = keys.request.id
        if number < self._first:
            return []
        return [Stored(keys, first, last, partial(self._tokens, self._prompts[number], number))]

    def _tokens(self, prompt: Sequence[int], number: int, start: int, end: int) -> list[int]:
        size = len(prompt)
        ids = list(prompt[start:end])
        return ids + self._generated(number, max(start - size, 0), end - size) if end > size else ids

    def clear(self, num_sent: int) -> None:
        """Publishes that caches were emptied; the first `num_sent` requests are those of before."""
        self._first = num_sent
        for replica, engine in self._engines.items():
            engine.held = []
            self.publisher.publish(replica, None)


def _cache(core: EngineCore) -> BlockHashKV:
    kv = core.scheduler.kv
    if not isinstance(kv, BlockHashKV):
        raise ScenarioError(
            f"{OPTION}: KV events come from a prefix cache of blocks, as vLLM has it of layers that all attend to all"
            " tokens. Choose policy vllm with enable_prefix_caching and such a model, or leave the option out."
        )
    return kv
