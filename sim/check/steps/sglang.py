"""SGLang's lines "Prefill batch" and "Decode batch".

    [2026-01-05 10:00:00 DP0 TP0] Decode batch, #running-req: 8, #token: 9320, token usage: 0.02, cuda graph: True, gen
    throughput (token/s): 812.40, #queue-req: 0

A "Decode batch" line comes every `--decode-log-interval` (40) decode steps, and has the tokens made since the last
one over the time since then, whatever ran between. So it gives the mean time of a step where the same requests
decoded all along: as many as in the line before, and no "Prefill batch" between. Their mean context is that of the
tokens held in both lines. A "Prefill batch" line has no time. Newer ones have `input throughput`: new tokens over the
time since the last such line, of this batch or of the one before, by version. It gives a batch's time where both have
as many tokens, prompts waited, and no decodes ran between: no request was decoding, or the numbers of forward passes
(SGLANG_LOG_FORWARD_ITERS) follow each other. Mixed steps, and tokens of a chunk's beginning, are in no line.
Source: scheduler_metrics_mixin.py and metrics_reporter.py under python/sglang/srt, of 2025 and 2026.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from statistics import mode

from batchsim.check.steps.recorded import MAX_TOKENS, Engine, Step, number_of, pairs_between, time_ns

FORM = "SGLang's batches"
_LINE = re.compile(r"\[[\d-]+ [\d:,.]+(?P<core>(?: \w+)*)\] (?P<kind>Prefill|Decode) batch(?: \[(?P<pass>\d+)\])?[.,] ")
_FIELD = re.compile(r"([#\w][\w /()#-]{0,40}): ([^,\s]{1,40})")
_LETTERS = 2000
"""Of a line's fields."""
SAME = 0.01
"""Share by which the tokens of two prefill batches that count as alike differ at most."""
STEADY = 0.1
"""Share of the log's usual number of tokens between two lines by which that of a batch may differ."""
SHARED = 0.01
"""Share of prompt tokens found in the cache from which on KV counts as shared."""


@dataclass(frozen=True)
class _Line:
    kind: str
    number: int | None
    fields: dict[str, float]

    def __getitem__(self, name: str) -> float:
        return self.fields.get(name, math.nan)

    @property
    def held(self) -> float:
        return self.fields.get("#token", self["#full token"])


class SglangLog:
    """Takes the lines of a log of `engine` one by one; then `steps` has the steps in order."""

    form = FORM
    doubt = ""
    marks = ("Prefill batch", "Decode batch")

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.left_out: Counter[str] = Counter()
        self._lines: dict[str, list[_Line]] = {}
        self._new = self._hit = 0.0

    @property
    def num_records(self) -> int:
        """How many records of steps there were, those left out too."""
        return sum(map(len, self._lines.values())) + self.left_out.total()

    def line(self, text: str) -> None:
        """Takes a line that holds one of `marks`."""
        match = _LINE.search(text)
        rest = "" if match is None else text[match.end() : match.end() + _LETTERS]
        fields = {name: number_of(value) for name, value in _FIELD.findall(rest)}
        needed = ["#new-seq", "#new-token"]
        if match and match["kind"] == "Decode":
            needed = ["#running-req", *(name for name in ("#token", "#full token") if name in fields)]
        counts = [fields.get(name, math.nan) for name in needed]
        if match is None or not all(0 <= count <= MAX_TOKENS and count == int(count) for count in counts):
            self.left_out["cut or garbled"] += 1
            return
        line = _Line(match["kind"], int(match["pass"]) if match["pass"] else None, fields)
        self._lines.setdefault(match["core"].strip(), []).append(line)
        if line.kind == "Prefill":
            self._new, self._hit = self._new + line["#new-token"], self._hit + fields.get("#cached-token", 0.0)

    def steps(self) -> list[Step]:
        """The steps whose times follow from the lines; the other lines are counted."""
        steps: list[Step] = []
        for core, lines in self._lines.items():
            intervals = [
                round((now.held - last.held) / now["#running-req"])
                for last, now in pairwise(lines)
                if last.kind == now.kind == "Decode" and last["#running-req"] == now["#running-req"] > 0
                and now.held > last.held
            ]  # fmt: skip
            usual = mode(intervals) if intervals else 0
            for last, now in zip([None, *lines], lines, strict=False):
                step = self._decode(core, last, now, usual) if now.kind == "Decode" else self._prefill(core, last, now)
                if isinstance(step, str):
                    self.left_out[step] += 1
                else:
                    steps.append(step)
        return steps

    def _decode(self, core: str, last: _Line | None, now: _Line, usual: int) -> Step | str:
        rows = now["#running-req"]
        if "accept len" in now.fields:
            return "with draft tokens"
        if last is None or last.kind != "Decode" or last["#running-req"] != rows or not rows:
            return "over whose time other requests ran"
        grown = now.held - last.held
        if not abs(grown - usual * rows) <= STEADY * usual * rows:
            return "over whose time other requests ran"
        rate = now["gen throughput (token/s)"]
        ns = time_ns(1e3 * rows / rate) if rate > 0 else None
        if ns is None or not 0 < now.held <= MAX_TOKENS:
            return "of a time or a context that cannot be"
        shared = self._hit > SHARED * (self._new + self._hit)
        context = (last.held + now.held) / 2
        return Step(core, ns, int(rows), int(rows), 0, 0, context, math.inf if shared else context, 0.0, 0.0)

    def _prefill(self, core: str, last: _Line | None, now: _Line) -> Step | str:
        tokens, chunks = int(now["#new-token"]), int(now["#new-seq"])
        rate = now["input throughput (token/s)"]
        if math.isnan(rate):
            return "of prompts without a time"
        if last is None or last.kind != "Prefill" or abs(last["#new-token"] - tokens) > SAME * tokens:
            return "of prompts whose time is not told apart"
        numbered = last.number is not None and now.number == last.number + 1
        waited = max(last.fields.get("#queue-req", 0.0), last.fields.get("#pending-token", 0.0)) > 0
        alone = last["#running-req"] == now["#running-req"] == 0
        if not numbered and not (waited and alone):
            return "of prompts whose time is not told apart"
        ns = time_ns(1e3 * tokens / rate) if rate > 0 else None
        if ns is None or not 1 <= chunks <= tokens:
            return "of a time or contents that cannot be"
        return Step(core, ns, 0, 0, chunks, tokens, 0.0, 0.0, *pairs_between(tokens, chunks, 0.0, math.inf))

    def notes(self) -> list[str]:
        """What is to be known of the times and the contents."""
        notes = ["times are means over the decode steps between two lines, or of prompts that ran back to back"]
        if self._hit > SHARED * (self._new + self._hit):
            notes.append("prompts share KV, so that the tokens held do not tell the contexts of decodes")
        return notes
