"""vLLM's offloading and tiering managers told again by lists that are walked: chunks of the host, and of a disk below.

Slow on purpose: to compare with the tiers on random lives of requests.
"""

from __future__ import annotations

from typing import Any


class PlainTier:
    """The same by lists that are walked: chunks with their loads, and for LRU a rank each."""

    def __init__(self, places: int, policy: str, threshold: int) -> None:
        self.places, self.policy, self.threshold = places, policy, threshold
        self.loads: dict[int, int] = {}
        self.ranks: dict[int, tuple[int, int]] = {}
        self.once: list[int] = []
        self.often: list[int] = []
        self.ghosts: tuple[list[int], list[int]] = ([], [])
        self.target: float = 0
        self.clock = 0
        self.offered: dict[int, int] = {}
        self.own: dict[str, dict[str, Any]] = {}

    def of(self, request: str) -> dict[str, Any]:
        new: dict[str, Any] = {"rank": 0, "seen": {}, "inserted": set(), "reused": set(), "missed": set()}
        return self.own.setdefault(request, new)

    def use(self, own: dict[str, Any], places: dict[int, int]) -> None:
        for key, place in places.items():
            if key in own["seen"]:
                continue
            if not own["rank"]:
                self.clock += 1
                own["rank"] = self.clock
            own["seen"][key] = place
            if key in self.ranks:
                self.ranks[key] = max(self.ranks[key], (own["rank"], -place))

    def offer(self, request: str, keys: list[int], first: int) -> tuple[list[int], list[int]] | None:
        own, place = self.of(request), {key: first + i for i, key in enumerate(keys)}
        for key in keys:
            self.offered[key] = self.offered.get(key, 0) + 1
        ready = [key for key in keys if self.loads.get(key, -1) >= 0]
        new = [key for key in keys if key not in self.loads]
        if self.threshold >= 2:
            new = [key for key in new if self.offered[key] >= self.threshold]
        for key in reversed(new):
            if key not in own["missed"]:
                own["missed"].add(key)
                self.learn(key)
        self.use(own, {key: place[key] for key in keys if key in ready or key in new})
        own["reused"] |= set(ready) - own["inserted"]
        lacking = max(len(new) + len(self.loads) - self.places, 0)
        evicted = self.evict(lacking, set(keys))
        if evicted is None:
            return None
        for key in new:
            self.loads[key] = -1
            self.ranks[key] = (own["rank"], -place[key])
            self.once.append(key)
            for ghosts in self.ghosts:
                if key in ghosts:
                    ghosts.remove(key)
        own["inserted"] |= set(new)
        return new, evicted

    def learn(self, key: int) -> None:
        for mine, other, sign in ((*self.ghosts, 1), (*self.ghosts[::-1], -1)):
            if key in mine:
                step = max(1, len(other) / len(mine))
                self.target = min(max(self.target + sign * step, 0), self.places)
                mine.remove(key)
                mine.append(key)
                return

    def evict(self, count: int, kept: set[int]) -> list[int] | None:
        free = [key for key, loads in self.loads.items() if loads == 0 and key not in kept]
        if len(free) < count:
            return None
        gone: list[int] = []
        for _ in range(count):
            if self.policy == "lru":
                key = min(free, key=lambda key: self.ranks[key])
            else:
                once = [key for key in self.once if key in free]
                often = [key for key in self.often if key in free]
                left = len([key for key in self.once if key not in gone])
                key = (once + often if left >= int(self.target) else often + once)[0]
            free.remove(key)
            gone.append(key)
        for key in gone:
            del self.loads[key], self.ranks[key]
            at = 0 if key in self.once else 1
            (self.once, self.often)[at].remove(key)
            self.ghosts[at].append(key)
        for ghosts in self.ghosts:
            del ghosts[: max(len(ghosts) - self.places, 0)]
        return gone

    def load(self, request: str, keys: list[int], first: int) -> None:
        own = self.of(request)
        for key in keys:
            self.loads[key] += 1
        self.use(own, {key: first + i for i, key in enumerate(keys)})
        own["reused"] |= set(keys) - own["inserted"]

    def end(self, request: str) -> None:
        own = self.own.pop(request, None)
        seen = {} if own is None else own["seen"]
        for key in sorted(seen, key=lambda key: -seen[key]):
            assert own is not None
            if key not in self.loads:
                continue
            self.clock += 1
            self.ranks[key] = (self.clock, 0)
            if key in own["reused"]:
                (self.once if key in self.once else self.often).remove(key)
                self.often.append(key)
            elif key in own["inserted"]:
                line = self.once if key in self.once else self.often
                line.remove(key)
                line.append(key)


class PlainDisk(PlainTier):
    """With a disk. `disk` are the keys there, `asked` the questions of this call, `answers` to those of the one before,
    `said` what was answered, `by` who asked for a key. `reads`: of this call, by request the keys fetched. `done`:
    copies that are over and not noticed, (keys, whether from the disk)."""

    def __init__(self, places: int, policy: str) -> None:
        super().__init__(places, policy, 0)
        self.disk: list[int] = []
        self.asked: list[int] = []
        self.answers: dict[int, bool] = {}
        self.said: dict[int, bool | None] = {}
        self.by: dict[int, list[str]] = {}
        self.reads: dict[str, list[int]] = {}
        self.done: list[tuple[list[int], bool]] = []
        self.polled = False
        self.gpu_loads: list[int] = []

    def new_call(self, over: list[tuple[list[int], bool]]) -> None:
        for key, answer in self.answers.items():
            if self.by[key]:
                self.said[key] = answer
            else:
                del self.said[key], self.by[key]
        self.answers = {}
        for keys, is_read in over:
            if not is_read:
                self.disk += keys
        self.done += over
        if not self.polled:
            self.poll()
        self.polled = False

    def poll(self) -> None:
        for keys, is_read in self.done:
            for key in keys:
                self.loads[key] = 0 if is_read else self.loads[key] - 1
        self.done = []

    def call_over(self) -> None:
        self.answers = {key: key in self.disk for key in self.asked}
        self.asked = []

    def find(self, request: str, keys: list[int], first: int) -> tuple[int | None, bool]:
        """(Chunks there from the first on, None: later; whether any of them is being loaded.)"""
        count, later = 0, False
        for place, key in enumerate(keys, first):
            if key in self.loads:
                later = later or self.loads[key] < 0
                count += 1
                continue
            if key not in self.said:
                self.said[key] = None
                self.by[key] = []
                self.asked.append(key)
            if request not in self.by[key]:
                self.by[key].append(request)
            if self.said[key] is None:
                later = True
                continue
            if not self.said[key]:
                break
            taken = self.offer_one(request, key, place)
            if not taken:
                break
            self.reads.setdefault(request, []).append(key)
            later = True
            count += 1
        there = keys[:count]
        return (None if later else count), any(key in self.gpu_loads for key in there)

    def offer_one(self, request: str, key: int, place: int) -> bool:
        return PlainTier.offer(self, request, [key], place) is not None

    def offer(self, request: str, keys: list[int], first: int) -> tuple[list[int], list[int]] | None:
        if not self.polled:
            self.poll()
            self.polled = True
        return super().offer(request, keys, first)

    def forget(self, request: str) -> None:
        for key in list(self.by):
            if request in self.by[key]:
                self.by[key].remove(request)
                if not self.by[key] and key not in self.answers:
                    del self.by[key], self.said[key]
