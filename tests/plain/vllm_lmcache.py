"""vLLM with LMCache in its process told again as plain loops: `NaiveVllm`, and a list of chunks on the host; or, layer
by layer, of each layer's part of each chunk.

Slow on purpose: to compare with the policy on random workloads that share tokens, each step waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from batchsim.kernel.types import Arrival
from batchsim.policies.systems.vllm.lmcache_config import VllmLmcacheConfig
from tests.plain.vllm import Call, Naive, NaiveVllm, Token

Key = tuple[Token, ...]
MOST_CANDIDATES = 64


class NaiveLmcache(NaiveVllm):
    """`host` are the keys of the chunks there, the one unused longest first; `pins` those in use, as often as they are.

    `loaded` and `stored` count the chunks of the latest call; `work` has for each request those it looked up, whether
    they are loaded, and those to be stored. `on_gpu` are the tokens of each that the prefix cache had.
    """

    config: VllmLmcacheConfig

    def __init__(self, config: VllmLmcacheConfig, num_blocks: int, block_size: int, max_model_len: int) -> None:
        super().__init__(config, num_blocks, block_size, max_model_len)
        self.host: list[Key] = []
        self.pins: list[Key] = []
        self.found: dict[Naive, list[Key]] = {}
        self.saved: dict[Naive, int] = {}
        self.decoding: set[Naive] = set()
        self.asked: Naive | None = None
        self.on_gpu: dict[Naive, int] = {}
        self.work: list[tuple[list[Key], bool, list[Key]]] = []
        self.loaded = self.stored = 0

    def chunks(self, tokens: list[Token]) -> list[Key]:
        size = self.config.chunk_size
        return [tuple(tokens[:end]) for end in range(size, len(tokens) + 1, size)]

    def lookup(self, r: Naive) -> list[int]:
        self.asked = r
        if r not in self.found:
            self.found[r] = self.find(self.chunks(r.tokens))
        return super().lookup(r)

    def find(self, keys: list[Key]) -> list[Key]:
        found: list[Key] = []
        for key in keys:
            if key not in self.host:
                break
            found.append(key)
        for key in reversed(found):
            self.host.remove(key)
            self.host.append(key)
        self.pins += found
        return found

    def placed(self, storing: list[Key]) -> list[Key]:
        """Those of `storing` that are copied."""
        return storing

    def start_of(self, hits: Any) -> int:
        assert self.asked is not None
        on_gpu, found = super().start_of(hits), self.found[self.asked]
        on_host = len(found) * self.config.chunk_size
        if on_host == len(self.asked.tokens):
            on_host -= 1
        return max(on_gpu, on_host)

    def schedule(self) -> Call:
        known = {r: list(r.tokens) for r in (*self.running, *self.waiting)}
        before = {*self.running}
        call = super().schedule()
        new = [r for r in call.items if r not in before and r not in self.saved]
        running = [r for r in call.items if r in before]
        resumed = [r for r in call.items if r not in before and r in self.saved]
        self.loaded = self.stored = 0
        size = self.config.chunk_size
        cached = {row[0]: row[1] for row in call.cached}
        for r in [*new, *running, *resumed]:
            n, found, is_load = call.items[r], list[Key](), False
            if r not in before:
                found = self.found.pop(r)
                self.saved[r] = len(found) * size
                start = cached.get(r.request.id, 0)
                on_gpu = self.on_gpu[r]
                is_load = start > on_gpu
                self.loaded += len(found) - on_gpu // size if is_load else 0
            if r not in new and n == 1:
                self.decoding.add(r)
            saved, boundary = self.saved[r], -(-(self.saved[r] + 1) // size) * size
            storing: list[Key] = []
            if r not in self.decoding and not (saved > 0 and r.computed < boundary):
                whole = self.chunks(known[r][: r.computed])
                storing = whole[saved // size :]
                self.saved[r] = len(whole) * size
                storing = self.placed(storing)
            self.stored += len(storing)
            self.work.append((found, is_load, storing))
        return call

    def allocate(self, r: Naive, base: int, n: int, hits: list[int], admission: bool) -> bool:
        if admission:
            self.on_gpu[r] = len(hits) * self.size
        return super().allocate(r, base, n, hits, admission)

    def process(self, call: Call) -> None:
        for found, is_load, _ in self.work:
            for key in found if is_load else ():
                self.pins.remove(key)
        for found, is_load, storing in self.work:
            for key in () if is_load else found:
                self.pins.remove(key)
            places = 0
            for _ in storing:
                if len(self.host) + places == self.config.cpu_chunks:
                    free = [key for key in self.host if key not in self.pins]
                    if not free:
                        break
                    self.host.remove(free[0])
                places += 1
            self.host += [key for key in storing[:places] if key not in self.host]
        self.work = []
        super().process(call)


class NaiveLayered(NaiveLmcache):
    """Layer by layer: `parts` are what the host has, each what one layer has of a chunk, the one unused longest first;
    `held` those in use. `kept` counts the places of chunks that are not entered yet."""

    def __init__(self, config: VllmLmcacheConfig, num_blocks: int, block_size: int, max_model_len: int) -> None:
        super().__init__(config, num_blocks, block_size, max_model_len)
        self.parts: list[tuple[Key, int]] = []
        self.held: list[tuple[Key, int]] = []
        self.kept = 0

    def layers(self, key: Key) -> list[tuple[Key, int]]:
        return [(key, layer) for layer in range(self.config.num_layers)]

    def find(self, keys: list[Key]) -> list[Key]:
        found: list[Key] = []
        for key in keys:
            if not all(part in self.parts for part in self.layers(key)):
                break
            found.append(key)
        for part in reversed([part for key in found for part in self.layers(key)]):
            self.parts.remove(part)
            self.parts.append(part)
        self.held += [part for key in found for part in self.layers(key)]
        return found

    def placed(self, storing: list[Key]) -> list[Key]:
        placed: list[Key] = []
        places = self.config.cpu_chunks * self.config.num_layers
        for key in storing:
            if (key, 0) in self.parts:
                continue
            if len(self.parts) + (self.kept + 1) * self.config.num_layers > places and not self.evict():
                break
            self.kept += 1
            placed.append(key)
        return placed

    def evict(self) -> bool:
        """A part that is not in use goes, with those of all other layers."""
        for key, _ in [part for part in self.parts if part not in self.held][:MOST_CANDIDATES]:
            if not any(part in self.held for part in self.layers(key)):
                self.parts = [part for part in self.parts if part[0] != key]
                return True
        return False

    def process(self, call: Call) -> None:
        for layer in range(self.config.num_layers):
            for _, _, storing in self.work:
                self.parts += [(key, layer) for key in storing if (key, layer) not in self.parts]
        for found, _, _ in self.work:
            for key in found:
                for part in self.layers(key):
                    self.held.remove(part)
        self.kept, self.work = 0, []
        NaiveVllm.process(self, call)


def layered_ns(work_ns: int, loads_ns: int, stores_ns: int, layers: int) -> int:
    """How long a step of `work_ns` takes beside which KV is loaded and stored, one layer after the other. All three
    times are multiples of `layers`."""
    stored = [0]
    now_ns = 0
    for layer in range(layers):
        loaded_ns = loads_ns // layers * (layer + 1)
        on_host_ns = stored[layer - 1] if layer > 1 else 0  # of the layer before the last: the host waits for it
        now_ns = max(now_ns, loaded_ns, on_host_ns) + work_ns // layers
        stored.append(max(stored[-1], now_ns) + stores_ns // layers)
    return stored[-1]


def steps_of(
    engine: NaiveLmcache, arrivals: list[Arrival], step_ns: Callable[[int], int]
) -> list[tuple[int, list[tuple[int, int]], list[Any], int]]:
    """Of each step of `engine` its start, tokens by request, pauses and free blocks. It waits for each step, which
    takes `step_ns` of its work: 1 a prompt token and 2 a decode."""
    left, now, steps = list(arrivals), 0, list[tuple[int, list[tuple[int, int]], list[Any], int]]()
    while left or engine.running or engine.waiting:
        if not (engine.running or engine.waiting):
            now = max(now, left[0].request.arrival_ns)
        while left and left[0].request.arrival_ns <= now:
            arrival = left.pop(0)
            engine.add(Naive(arrival.request, arrival.output_tokens or 0))
        decoding = {r for r in engine.running if not r.chunked}
        call = engine.schedule()
        steps.append((now, sorted((r.request.id, n) for r, n in call.items.items()), call.preempted, call.queues[0]))
        now += step_ns(sum(2 if r in decoding else n for r, n in call.items.items()))
        engine.process(call)
    return steps
