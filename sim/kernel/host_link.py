"""The links between a GPU and its host, and copies that a step waits for.

`LayerLoad`: each layer of a step waits for its own part of what is copied onto the GPU beside it. `StepCopies`: a step
begins once all copies, both ways at once, are over. `LayerCopies`: loads as `LayerLoad`, and each layer is stored once
it is computed.

Source: python/sglang/srt/managers/cache_controller.py (LayerDoneCounter, start_loading) and mem_cache/l2_transfer.py of
the 0.5.23 wheel; cpp/tensorrt_llm/batch_manager/kvCacheTransferManager.cpp, 2025;
lmcache/v1/gpu_connector/gpu_connectors.py (VLLMPagedMemLayerwiseGPUConnector) of the 0.5.6 wheel.
Simplifies: all layers of a step take equally long, what comes before and behind them included, and so do all parts of a
copy, which begins with the step, of stores with the end of its first layer.
"""

from __future__ import annotations

from dataclasses import dataclass

from batchsim.kernel.types import Sequence


@dataclass(slots=True)
class OffloadLink:
    """One direction: a copy takes `fixed_ns` and `chunk_ns` for each chunk, once those before it are over."""

    fixed_ns: int
    chunk_ns: int
    _free_ns: int = 0

    def take(self, num_chunks: int, ready_ns: int) -> tuple[int, int]:
        """Copies `num_chunks` from `ready_ns` on, or once the link is free; returns (start, end) in ns."""
        start_ns = max(ready_ns, self._free_ns)
        self._free_ns = start_ns + self.fixed_ns + self.chunk_ns * num_chunks
        return start_ns, self._free_ns


@dataclass(slots=True, eq=False)
class LayerLoad:
    """One copy of `num_pages` pages over `link`, in `num_layers` layers. `parts`: (sequence, tokens copied for it).

    Filled in as its step is launched: `first_ns`, when its first layer is there, `end_ns`, when it is over, and
    `wait_ns`, by how much that step is longer.
    """

    parts: list[tuple[Sequence, int]]
    num_pages: int
    link: OffloadLink
    num_layers: int
    first_ns: int = 0
    end_ns: int = 0
    wait_ns: int = 0

    def beside(self, start_ns: int, end_ns: int) -> int:
        """Begins the copy with the step that begins at `start_ns` and would be over at `end_ns`; returns when that step
        is over, in ns.

        The first layer waits for the first part; the last for all of the copy.
        """
        begin_ns, self.end_ns = self.link.take(self.num_pages, start_ns)
        self.first_ns = begin_ns + self.link.fixed_ns + -(-self.link.chunk_ns * self.num_pages // self.num_layers)
        last_ns = self.end_ns + -(-(end_ns - start_ns) // self.num_layers)
        until_ns = max(end_ns, self.first_ns + end_ns - start_ns, last_ns)
        self.wait_ns = until_ns - end_ns
        return until_ns


@dataclass(slots=True, eq=False)
class StepCopies:
    """Whole blocks or chunks of KV that a step waits for: `num_loaded` to the GPU over `loading`, `num_stored` to the
    host over `storing`.

    What is stored is what its own blocks held before, and goes at once with what is loaded; or, `in_turn`, what it
    computes, and goes once it is through. `parts`: (sequence, tokens) of what is loaded; `stored`: (sequence for which
    it is, tokens). Filled in as the step is launched: `end_ns`, when the copies are over, and `wait_ns`, by how much
    the step is longer.
    """

    parts: list[tuple[Sequence, int]]
    stored: list[tuple[Sequence, int]]
    num_loaded: int
    num_stored: int
    loading: OffloadLink
    storing: OffloadLink
    in_turn: bool = False
    end_ns: int = 0
    wait_ns: int = 0

    def beside(self, start_ns: int, end_ns: int) -> int:
        """Makes the copies of the step that begins at `start_ns` and would be over at `end_ns`; returns when it is
        over, in ns."""
        loaded_ns = stored_ns = start_ns
        if self.num_loaded:
            loaded_ns = self.loading.take(self.num_loaded, start_ns)[1]
        until_ns = loaded_ns + end_ns - start_ns
        if self.num_stored:
            stored_ns = self.storing.take(self.num_stored, until_ns if self.in_turn else start_ns)[1]
        self.end_ns = max(loaded_ns, stored_ns)
        until_ns = max(until_ns, stored_ns if self.in_turn else stored_ns + end_ns - start_ns)
        self.wait_ns = until_ns - end_ns
        return until_ns


@dataclass(slots=True, eq=False)
class LayerCopies:
    """As `StepCopies` of `num_layers` layers, beside the step: each layer waits for its own part of what is loaded; its
    part of what is stored goes once it is computed, and the step is over once the last one has gone."""

    parts: list[tuple[Sequence, int]]
    stored: list[tuple[Sequence, int]]
    num_loaded: int
    num_stored: int
    loading: OffloadLink
    storing: OffloadLink
    num_layers: int
    end_ns: int = 0
    wait_ns: int = 0

    def beside(self, start_ns: int, end_ns: int) -> int:
        """As that of `StepCopies`."""
        until_ns, layer_ns = end_ns, -(-(end_ns - start_ns) // self.num_layers)
        first_ns = start_ns + layer_ns  # when the first layer is computed
        if self.num_loaded:
            load = LayerLoad(self.parts, self.num_loaded, self.loading, self.num_layers)
            until_ns = load.beside(start_ns, end_ns)
            first_ns += load.first_ns - start_ns
            self.end_ns = load.end_ns
        if self.num_stored:
            last_ns = until_ns + -(-self.storing.chunk_ns * self.num_stored // self.num_layers)
            until_ns = self.end_ns = max(self.storing.take(self.num_stored, first_ns)[1], last_ns)
        self.wait_ns = until_ns - end_ns
        return until_ns
