"""Which blocks of prompts were sent where: what a router guesses each replica's prefix cache to hold."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from batchsim.kernel.types import Request
from batchsim.kv.block_keys import BlockKeys


def prompt_keys(request: Request, block_tokens: int, most: int | None = None) -> Sequence[int]:
    """The keys of the first full blocks of a prompt, at most `most`; none where it shares no tokens."""
    if request.tokens is None:
        return ()
    count = request.prompt_tokens // block_tokens
    count = count if most is None else min(count, most)
    return BlockKeys(request, block_tokens).up_to(count)


class RoutedBlocks:
    """The blocks sent to each replica, in the order in which they were last sent, each with when (ns) and a weight."""

    def __init__(self) -> None:
        self._blocks: dict[int, OrderedDict[int, tuple[int, int]]] = {}
        self._weight: dict[int, int] = {}

    def matched(self, keys: Sequence[int], replica: int) -> int:
        """How many of the first blocks were sent to `replica` and are kept."""
        held = self._blocks.get(replica, ())
        return next((i for i, key in enumerate(keys) if key not in held), len(keys))

    def has(self, key: int, replica: int) -> bool:
        """Whether a block was sent to `replica` and is kept."""
        return key in self._blocks.get(replica, ())

    def holder(self, key: int) -> int | None:
        """The first replica that a block was sent to and is kept of."""
        return min((replica for replica, held in self._blocks.items() if key in held), default=None)

    def weight(self, replica: int) -> int:
        """The weights of the blocks kept of `replica`."""
        return self._weight.get(replica, 0)

    def send(self, keys: Iterable[int], replica: int, now_ns: int, weight: int = 1) -> None:
        """Notes that the blocks were sent to `replica`, the last of `keys` last."""
        held = self._blocks.setdefault(replica, OrderedDict())
        for key in keys:
            if key not in held:
                self._weight[replica] = self.weight(replica) + weight
            held[key] = now_ns, held.pop(key, (0, weight))[1]

    def keep(self, replica: int, most: int) -> None:
        """Drops those sent longest ago until the weights are at most `most`."""
        held = self._blocks.get(replica)
        while held and self._weight[replica] > most:
            self._weight[replica] -= held.popitem(last=False)[1][1]

    def keep_since(self, since_ns: int) -> None:
        """Drops, of every replica, the blocks last sent before `since_ns`."""
        for replica, held in self._blocks.items():
            while held and next(iter(held.values()))[0] < since_ns:
                self._weight[replica] -= held.popitem(last=False)[1][1]

    def remove(self, replica: int) -> None:
        """Forgets a replica."""
        self._blocks.pop(replica, None)
        self._weight.pop(replica, None)
