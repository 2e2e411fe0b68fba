"""The scheduler of an installed vLLM as a policy: the real object decides, batchsim keeps the time and the records.

Rule: that of the engine, whichever its version is. Each call of `schedule` and each result goes to the object in a
process of its own (`worker.py`); batchsim checks that both count the same tokens and ends, and stops where they part.
Source: the installed engine itself.
Simplifies: one engine without a pipeline, drafts, adapters, images or KV that is passed on; requests that could not end
in the KV pool are rejected, as by `vllm`. No leaps: a step takes some milliseconds.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from batchsim.base.errors import PolicyError, ScenarioError
from batchsim.base.units import NS_PER_S
from batchsim.engines.engine_config import WITHOUT, EngineConfig
from batchsim.engines.worker import Worker, worker_of
from batchsim.kernel.batch import IDLE, Batch, Idle
from batchsim.kernel.kv_blocks import never_fits
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.tokens import output_stream, prompt_stream
from batchsim.kernel.types import DecodeGroup, Event, Sequence

ALONE = 10**9
"""From this number on prompts have text of their own, by their requests, where they share none."""


class EngineKV:
    """What the engine says of its KV blocks."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = self.num_free = num_blocks
        self.block_size = block_size
        self.num_swap_blocks = self.num_swap_free = 0
        self.blocks: dict[Sequence, int] = {}  # as of the call that scheduled it last

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def needs_at_most(self, num_tokens: int) -> int:
        return self.blocks_for(num_tokens)

    def held(self, seq: Sequence) -> int:
        return self.blocks.get(seq, 0)

    def room(self, seq: Sequence) -> int:
        return self.held(seq) * self.block_size


class EngineScheduler:
    """The scheduler. Its process is started with the first request: what checks a scenario needs no engine."""

    evidence = "recorded"
    streams = True

    def __init__(self, config: EngineConfig, context: PolicyContext) -> None:
        if context.connector is not None or context.items is not None or context.loop.stages > 1:
            raise ScenarioError(
                "engine: pipelines, images and KV that is passed on are not given to an engine's own scheduler. Drop"
                " them."
            )
        self.config, self.max_model_len = config, context.max_model_len
        self.kv: Any = EngineKV(context.kv.num_blocks, context.kv.block_size)
        self.events: list[Event] = []
        self.num_waiting = self.num_running = 0
        self.group = DecodeGroup(context.kv.block_size)
        self.class_path = self.version = ""  # of the real scheduler, once it is there
        self._worker: Worker | None = None
        self._number = 0
        self._new: dict[Sequence, None] = {}
        self._live: dict[int, Sequence] = {}
        self._running: dict[Sequence, None] = {}
        self._decodes: set[Sequence] = set()  # running, all of their known tokens but the last computed or in flight
        self._last: Batch | None = None  # of the latest call, whose prompts that end have not begun to decode
        self._in_flight: deque[tuple[Batch, list[Sequence], set[Sequence]]] = deque()
        self._admitted = self._calls = 0

    def add(self, seq: Sequence, now_ns: int) -> None:
        refusal = never_fits(self.kv, seq, self.max_model_len, 0)
        if refusal is not None:
            self.events.append(refusal)
            return
        self._new[seq] = None
        self._live[seq.request.id] = seq
        self.num_waiting += 1

    def cancel(self, seq: Sequence, now_ns: int) -> list[Sequence]:
        if seq in self._new:
            del self._new[seq]
            self.num_waiting -= 1
        else:
            assert self._worker is not None
            self._count(self._checked(self._worker.ask({"abort": self._number, "ids": [seq.request.id]})))
        self._forget(seq)
        return []

    def schedule(self, now_ns: int, drain: bool) -> Batch | Idle:
        if self._last is not None:
            self._decodes.update(seq for seq in self._last.sampled if seq in self._running)
            self._last = None
        if not self._live:
            return IDLE
        said = self._ask()
        preempted = [self._live[i] for i in said["preempted"]]
        for seq in preempted:
            self.events.append(Event("preempted", seq, "kv_blocks"))
            self._stop(seq)
            seq.reset_computed()
        hits = dict(said["cached"])
        rows = [self._row(row, hits) for row in said["rows"]]
        scheduled = dict(rows)
        for seq in list(self.group.members):
            if seq not in scheduled:
                self.group.leave(seq)
                if seq.num_output_tokens < seq.max_output_tokens and seq.num_tokens < self.max_model_len:
                    self.events.append(Event("sat_out", seq, "token_budget"))  # else its last token is in flight
        chunks = [(seq, n) for seq, n in rows if seq not in self._decodes]
        if not (rows or preempted):
            return IDLE
        cached = [(self._live[i], n) for i, n in said["cached"]]
        batch = Batch(self.group, chunks, sum(n for _, n in chunks), preempted=preempted, cached=cached)
        self._last = batch
        if rows:
            self._in_flight.append((batch, [seq for seq, _ in rows], set(self.group.members)))
            if [seq for seq, _ in batch.items()] != list(scheduled):
                raise self._parted("has the batch in another order than that of admission")
        return batch

    def repeat(self, batch: Batch, now_ns: int) -> bool:
        return False

    def complete(self, batch: Batch, finished: list[Sequence], now_ns: int) -> list[Sequence]:
        of, rows, decodes = self._in_flight.popleft()
        assert of is batch
        samples = [seq.request.id for seq in rows if seq in decodes or seq in batch.sampled]
        ends = [seq.request.id for seq in finished]
        assert self._worker is not None
        said = self._checked(self._worker.ask({"land": self._number, "samples": samples, "ends": ends}))
        if sorted(said["ended"]) != sorted(ends):
            raise self._parted(f"ends the requests {said['ended']}, and {ends} are through")
        self._count(said)
        for seq in finished:
            self._forget(seq)
        return finished

    # ---- the rows of a step

    def _row(self, row: list[int], hits: dict[int, int]) -> tuple[Sequence, int]:
        i, tokens, computed, blocks = row
        seq = self._live[i]
        if seq not in self._running:
            seq.order = self._admitted
            self._admitted += 1
            self._running[seq] = None
            seq.start_from_cache(hits.get(i, 0))
        self.kv.blocks[seq] = blocks
        if seq in self._decodes and seq.group is None:
            self.group.join(seq)
        if seq.num_computed_tokens + tokens != computed:
            here = f"{seq.num_computed_tokens} and {tokens} more"
            raise self._parted(f"has computed {computed} tokens of request {i}, where {here} were scheduled")
        return seq, tokens

    def _stop(self, seq: Sequence) -> None:
        if seq.group is not None:
            self.group.leave(seq)
        self._running.pop(seq, None)
        self._decodes.discard(seq)
        self.kv.blocks.pop(seq, None)

    def _forget(self, seq: Sequence) -> None:
        self._stop(seq)
        self._live.pop(seq.request.id, None)

    # ---- the engine

    def _ask(self) -> dict[str, Any]:
        worker = self._started()
        add, self._new = [_request(seq) for seq in self._new], {}
        self._calls += 1
        said = self._checked(worker.ask({"ask": self._number, "add": add}))
        self._count(said)
        return said

    def _count(self, said: dict[str, Any]) -> None:
        self.kv.num_free, self.num_running = said["free"], said["running"]
        self.num_waiting = said["waiting"] + len(self._new)

    def _started(self) -> Worker:
        if self._worker is None:
            config, kv = self.config, self.kv
            worker = self._worker = worker_of(config.python)
            self.version, self._number = worker.version, worker.new()
            new = {"knobs": config.passed, "block_size": kv.block_size, "num_blocks": kv.num_blocks}
            new |= {"max_model_len": self.max_model_len, "ahead": config.async_scheduling}
            said = self._checked(worker.ask({"new": self._number, "scheduler_cls": config.scheduler_cls or ""} | new))
            self.class_path = said["scheduler"]
            for name in said["unknown"]:
                if name not in WITHOUT or config.passed[name] != WITHOUT[name]:
                    off = f"Set it to {WITHOUT[name]}" if name in WITHOUT else "Use another version"
                    raise ScenarioError(f"engine: vllm {worker.version} has no {name} {config.passed[name]}. {off}.")
        return self._worker

    def _checked(self, said: dict[str, Any]) -> dict[str, Any]:
        if "error" in said:
            raise self._parted(f"raises {said['error']}")
        return said

    def _parted(self, what: str) -> PolicyError:
        return PolicyError(
            f"vllm {self.version}, call {self._calls} of its scheduler: it {what}. See its release notes."
        )

    def __del__(self) -> None:
        if self._worker is not None:
            self._worker.drop(self._number)


def _request(seq: Sequence) -> dict[str, Any]:
    """The request of `seq`, as the engine gets it."""
    request = seq.request
    tokens = request.tokens
    segments = [(prompt_stream(ALONE + request.id), 0, request.prompt_tokens)] if tokens is None else tokens.segments
    return {
        "id": request.id,
        "arrival": request.arrival_ns / NS_PER_S,
        "prompt": [list(segment) for segment in segments],
        "output": output_stream(request.id),
        "cap": seq.max_output_tokens,
        "priority": request.priority,
        "ignore_eos": request.ignore_eos,
    }
