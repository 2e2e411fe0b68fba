"""vLLM's line of each iteration, which `--enable-logging-iteration-details` prints.

    Iteration(7): 1 context requests, 512 context tokens, 3 generation requests, 3 generation tokens, iteration elapsed
    time: 18.42 ms, GPU KV cache usage: 37.1%

The last part came in mid-2026, when the lines moved from the engine core to the frontend. The time is that of waiting
for the model's output: it begins after the batch was scheduled and handed over, and ends before the output is taken in.
Where the model runs in the core's own process handing over is launching its kernels, on a CPU all of the model. Under
asynchronous scheduling it begins after the next batch was scheduled too, so that it is only the rest.
Contexts of decodes are in no line; the KV in use after the step before holds them, to a tenth of a percent of the pool
and half a block a sequence, less what prompts in progress hold. Where KV is shared it is less than what is read.
Source: vllm/v1/engine/core.py, metrics/loggers.py and utils.py of 0.32.0; vLLM's pull requests 31193 and 46647.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from dataclasses import dataclass

from batchsim.check.steps.recorded import MAX_TOKENS, Engine, Step, number_of, pairs_between, time_ns

FORM = "vLLM's iterations"
_ITERATION = re.compile(
    r"(?P<core>(?:Engine \d+: )?)Iteration\((?P<index>\d{1,18})\): (?P<chunks>\d{1,12}) context requests, "
    r"(?P<prompt>\d{1,12}) context tokens, (?P<decodes>\d{1,12}) generation requests, "
    r"(?P<decoded>\d{1,12}) generation tokens, iteration elapsed time: (?P<ms>\S+) ms(?P<dummy> \(dummy\))?"
    r"(?:, \w+ KV cache usage: (?P<usage>[\d.]+)%)?(?P<encoder>, encoder inputs: )?"
)
_PROCESS = re.compile(r"\((\w+ pid=\d+)\)")
_POOL = re.compile(r"KV cache size: ([\d,]{1,20}) tokens")
_HITS = re.compile(r"Prefix cache hit rate: ([\d.]+)%")
_CACHING = re.compile(r"\benable_prefix_caching['\"]?[=:] ?(True|False)")
_AHEAD = re.compile(r"\basync_scheduling['\"]?[=:] ?(True|False)")
ROUNDING = 0.0005
"""Of a pool's share in use, which is printed to a tenth of a percent."""
SHARED = 1.0
"""Percent of prompt tokens found in the cache from which on KV counts as shared."""
ALIKE = 0.05
"""Share by which the pools of the cores of one engine differ at most."""


@dataclass(frozen=True)
class _Line:
    core: str
    index: int
    chunks: int
    prompt: int
    decodes: int
    decoded: int
    ns: float | None
    usage: float | None
    why_not: str


class VllmLog:
    """Takes the lines of a log of `engine` one by one; then `steps` has the steps in order."""

    form = FORM
    marks = (
        "Iteration(",
        "KV cache size",
        "Prefix cache hit rate",
        "enable_prefix_caching",
        "async_scheduling",
        "synchronous scheduling",
    )

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.left_out: Counter[str] = Counter()
        self._lines: list[_Line] = []
        self._pools: list[int] = []
        self._most_hits: float | None = None
        self._shares, self._ahead = engine.shares, engine.ahead

    @property
    def num_records(self) -> int:
        """How many records of steps there were, those left out too."""
        return len(self._lines) + self.left_out.total()

    def line(self, text: str) -> None:
        """Takes a line that holds one of `marks`."""
        if "Iteration(" in text:
            self._iteration(text)
        elif pool := _POOL.search(text):
            self._pools.append(int(pool[1].replace(",", "") or 0))
        elif hits := _HITS.search(text):
            self._most_hits = max(self._most_hits or 0.0, number_of(hits[1]))
        else:
            caching, ahead = _CACHING.search(text), _AHEAD.search(text)
            self._shares = self._shares if caching is None else caching[1] == "True"
            self._ahead = self._ahead if ahead is None else ahead[1] == "True"
            self._ahead |= "Asynchronous scheduling is enabled" in text

    def _iteration(self, text: str) -> None:
        match = _ITERATION.search(text)
        if match is None:
            self.left_out["cut or garbled"] += 1
            return
        process = _PROCESS.search(text)
        core = f"{process[1] if process else ''} {match['core']}"
        index, chunks, prompt, decodes, decoded = (
            int(match[name]) for name in ("index", "chunks", "prompt", "decodes", "decoded")
        )
        ns, usage = time_ns(number_of(match["ms"])), None if match["usage"] is None else number_of(match["usage"]) / 100
        whole = chunks <= prompt <= MAX_TOKENS and decodes <= decoded <= MAX_TOKENS and bool(chunks) == bool(prompt)
        why_not = ""
        if match["dummy"]:
            why_not = "of a rank without work (dummy)"
        elif not whole or not chunks + decodes:
            why_not = "of contents that no step has"
        elif match["encoder"]:
            why_not = "with images or sound"
        elif ns is None or (usage is not None and not 0 <= usage <= 1):
            why_not = "of a time or a KV usage that cannot be"
        self._lines.append(_Line(core, index, chunks, prompt, decodes, decoded, ns, usage, why_not))

    def steps(self) -> list[Step]:
        """The steps of all lines taken, those left out counted."""
        steps: list[Step] = []
        before: dict[str, _Line] = {}
        begun: defaultdict[str, float] = defaultdict(lambda: math.inf)  # tokens that prompts in progress may hold
        for line in self._lines:
            last = before.get(line.core)
            if last is not None and line.index == last.index and line == last:
                self.left_out["printed twice"] += 1
                continue
            follows = line.index == 0 or (last is not None and line.index == last.index + 1)
            before[line.core] = line
            if not follows:
                last, begun[line.core] = None, math.inf
            elif line.index == 0:
                last, begun[line.core] = None, 0.0
            held = begun[line.core]
            begun[line.core] = held + line.prompt if line.chunks else 0.0
            if line.why_not or line.ns is None:
                self.left_out[line.why_not] += 1
                continue
            pairs = pairs_between(line.prompt, line.chunks, 0.0, self._cached(held))
            steps.append(
                Step(
                    line.core,
                    line.ns,
                    line.decodes,
                    line.decoded,
                    line.chunks,
                    line.prompt,
                    *self._context(line, last, held),
                    *pairs,
                )
            )
        return steps

    def _cached(self, held: float) -> float:
        """The most tokens that chunks may begin after, where prompts in progress hold up to `held`."""
        unshared = not self._shares or self._most_hits == 0
        return held if unshared else math.inf

    def _context(self, line: _Line, last: _Line | None, held: float) -> tuple[float, float]:
        if not line.decodes:
            return 0.0, 0.0
        pool = self._pool
        if last is None or last.usage is None or pool is None:
            return float(line.decodes), math.inf
        used, off = last.usage * pool, ROUNDING * pool
        slack = off + line.decodes * (self.engine.block_size - 1)
        if line.chunks:
            slack += held + line.prompt + line.chunks * self.engine.block_size
        most = math.inf if (self._most_hits or 0.0) >= SHARED else max(used + off, line.decodes)
        return min(max(used - slack, line.decodes), most), most

    @property
    def _pool(self) -> int | None:
        if self.engine.kv_tokens is None or not self._pools:
            return self.engine.kv_tokens
        return min(self._pools) if min(self._pools) >= (1 - ALIKE) * max(self._pools) else None

    @property
    def doubt(self) -> str:
        """Why the times cannot be durations of steps, "" where they can."""
        if not self._ahead:
            return ""
        return (
            "times are the rest of waiting for a step once the next one was scheduled (asynchronous scheduling): steps"
            " took longer than that. Record with --no-async-scheduling"
        )

    def notes(self) -> list[str]:
        """What is to be known of the times and the contents."""
        notes = [
            "times are those of waiting for the model's output once a step is handed over: scheduling is not in them,"
            " nor, with the model in the engine core's process, launching its kernels (on a CPU, the model)"
        ]
        if self.doubt:
            notes = [self.doubt]
        decoding = [line for line in self._lines if line.decodes]
        if any(line.usage is None for line in decoding):
            notes.append("lines without KV usage, of an older vLLM, do not tell the contexts of decodes")
        elif decoding and self._pool is None:
            notes.append("KV usage tells no contexts: the size of the pool is unknown, or differs by core or layer")
        elif decoding and (self._most_hits or 0.0) >= SHARED:
            notes.append("prompts share KV, so that KV usage does not tell the contexts of decodes")
        elif decoding and self._shares and self._most_hits is None:
            notes.append(
                "contexts are taken from the KV in use, as if no prompts shared any: no line says how many did"
            )
        return notes
