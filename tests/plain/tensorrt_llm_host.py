"""TensorRT-LLM with a host cache told again as plain loops: the blocks of `tensorrt_llm`, and the host's.

Slow on purpose: to compare with the policy on random workloads that share tokens. No request is cancelled, and
each fits the pool.
"""

from __future__ import annotations

from batchsim.kernel.types import Arrival
from batchsim.policies.systems.tensorrt_llm.tensorrt_llm_config import TensorrtLlmConfig
from tests.plain.systems import Row
from tests.plain.tensorrt_llm import Node, Pool, Tokens, Waiting


class HostPool(Pool):
    """Blocks from `blocks` on are the host's. `stored` and `loaded` count the copies of a step."""

    def __init__(self, blocks: int, block_size: int, host_blocks: int) -> None:
        super().__init__(blocks, block_size)
        self.blocks = blocks
        self.host = list(range(blocks, blocks + host_blocks))
        self.stored = self.loaded = 0

    def new_block(self) -> int:
        block = self.queue.pop(0)
        for parent, tokens, child in self.root.nodes():
            if child.block == block:
                if self.host:
                    self.send(child)
                else:
                    del parent.children[tokens]
                break
        self.refs[block] = 1
        return block

    def send(self, node: Node) -> None:
        """The KV of `node` goes to the host, over what its oldest block held."""
        place = self.host.pop(0)
        for parent, tokens, child in self.root.nodes():
            if child.block == place:
                del parent.children[tokens]
        node.block = place
        self.host.append(place)
        self.stored += 1

    def claim(self, node: Node) -> int:
        """The block of `node` on the GPU, for one more sequence."""
        if node.block >= self.blocks:
            place = node.block
            self.host.remove(place)
            node.block = self.new_block()
            self.host.append(place)
            self.loaded += 1
            return node.block
        if not self.refs[node.block]:
            self.queue.remove(node.block)
        self.refs[node.block] += 1
        return node.block

    def add(self, row: Row, tokens: Tokens) -> int:
        node, table = self.root, list[int]()
        parts = self.chop(tokens[:-1])
        rest = tokens[len(parts) * self.block_size : -1]
        for part in parts:
            if part not in node.children:
                break
            node = node.children[part]
            table.append(self.claim(node))
        cached = len(table) * self.block_size
        if len(table) == len(parts) and rest in node.children:
            table.append(self.claim(node.children[rest]))
            del node.children[rest]
            cached += len(rest)
        self.tables[row] = table
        while len(table) < self.ceil(len(tokens)):
            table.append(self.new_block())
        return cached


class HostWaiting(Waiting):
    """The engine, to whose host a block takes `store_ns`, and from there `load_ns`; each way `fixed_ns` more a step."""

    pool: HostPool

    def __init__(
        self,
        config: TensorrtLlmConfig,
        arrivals: list[Arrival],
        pool: HostPool,
        fixed_ns: int,
        load_ns: int,
        store_ns: int,
    ) -> None:
        super().__init__(config, arrivals, pool.blocks, pool.block_size)
        self.pool = pool
        self.fixed_ns, self.load_ns, self.store_ns = fixed_ns, load_ns, store_ns

    def waits_ns(self) -> int:
        pool = self.pool
        moved, pool.loaded, pool.stored = (pool.loaded, pool.stored), 0, 0
        return max(
            self.fixed_ns + number * each_ns if number else 0
            for number, each_ns in zip(moved, (self.load_ns, self.store_ns), strict=True)
        )
