"""vLLM with LMCache in its process told again as plain loops: `NaiveVllm`, and a list of chunks on the host.

Slow on purpose: to compare with the policy on random workloads that share tokens, each step waited for.
"""

from __future__ import annotations

from typing import Any

from batchsim.policies.systems.vllm.lmcache_config import VllmLmcacheConfig
from tests.plain.vllm import Call, Naive, NaiveVllm, Token

Key = tuple[Token, ...]


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
            found: list[Key] = []
            for key in self.chunks(r.tokens):
                if key not in self.host:
                    break
                found.append(key)
            for key in reversed(found):
                self.host.remove(key)
                self.host.append(key)
            self.pins += found
            self.found[r] = found
        return super().lookup(r)

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
