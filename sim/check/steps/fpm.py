"""Forward-pass metrics (FPM), version 1, as Dynamo, SGLang and AISimulate pass them on: JSON, an object a step.

    {"version": 1, "worker_id": "a", "dp_rank": 0, "counter_id": 7, "wall_time": 0.0123, "scheduled_requests":
     {"num_prefill_requests": 1, "sum_prefill_tokens": 512, "sum_prefill_kv_tokens": 0, "num_decode_requests": 3,
      "sum_decode_kv_tokens": 2048, ...}, "queued_requests": {...}}

By itself on a line, in the records of Dynamo's trace (DYN_FPM_TRACE=1, `fpm`), in an envelope (`event`: `fpm`), or over
several lines as `dynamo.common.recv_forward_pass_metrics` prints it. Contexts of decodes are exact. Of several chunks
only sums are given, unless `extend_lengths` and `past_kv_lengths` (AISimulate's hooks) list the requests, prompts
first. `wall_time` is in seconds: of vLLM from one step's output to the next one's, so that idle time is in it where it
is not reported, and of the first step from when it was scheduled; of SGLang on the GPU alone, of two passes together
where its overlap scheduler ended them at once.
Source: dynamo/common/forward_pass_metrics.py and dynamo/vllm/instrumented_scheduler.py of ai-dynamo 1.6.1, SGLang's
metrics_reporter.py, AISimulate's learned-forward-pass-model.md.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

from batchsim.base.errors import MeasuredError
from batchsim.check.measured.values import Node
from batchsim.check.steps.recorded import Engine, Step, pairs_between, time_ns

FORM = "forward-pass metrics"
VERSION = 1
_FIRST = re.compile(r"(\[worker=.*\] )?\{")
"""The first line of an object that stands over several."""
_LONGEST = 200
"""Lines of such an object."""
_MOST_PAIRS = 9e18
_CUT = "cut or garbled"
_IMPOSSIBLE = "of contents or a time that cannot be"


class ForwardPassLog:
    """Takes the lines of a log of `engine` one by one; then `steps` has the steps in order."""

    form = FORM
    doubt = ""
    marks = ("{", "}", '"')

    def __init__(self, engine: Engine) -> None:
        self.left_out: Counter[str] = Counter()
        self._steps: list[Step] = []
        self._seen: set[tuple[str, int]] = set()
        self._open: list[str] = []
        self._sums_alone = False

    @property
    def num_records(self) -> int:
        """How many records of steps there were, those left out too."""
        return len(self._steps) + self.left_out.total()

    def line(self, text: str) -> None:
        """Takes a line that holds one of `marks`."""
        bare = text.strip()
        if "scheduled_requests" in bare and not bare.startswith('"scheduled_requests"'):
            self._drop()
            self._parse(bare)
        elif _FIRST.fullmatch(bare):
            self._drop()
            self._open = [bare]
        elif self._open:
            self._open.append(bare)
            if text.startswith("}"):
                whole, self._open = " ".join(self._open), []
                if "scheduled_requests" in whole:
                    self._parse(whole)
            elif len(self._open) > _LONGEST:
                self._drop()

    def _parse(self, text: str) -> None:
        try:
            self._record(json.loads(text[text.index("{") :].rstrip(",]")))
        except (ValueError, RecursionError):
            self.left_out[_CUT] += 1

    def _drop(self) -> None:
        """Gives up an object over several lines that does not end."""
        if any("scheduled_requests" in line for line in self._open):
            self.left_out[_CUT] += 1
        self._open = []

    def _record(self, record: Any) -> None:
        for name in ("event", "fpm"):
            record = record.get(name, record) if isinstance(record, dict) else record
        try:
            step = self._step(Node(record, ""))
        except MeasuredError:
            step = _IMPOSSIBLE
        if isinstance(step, str):
            self.left_out[step] += 1
        elif step is not None:
            self._steps.append(step)

    def _step(self, fpm: Node) -> Step | str | None:
        """The step of a record; a text where it is skipped, the reason; None for a heartbeat."""
        if fpm.has("version") and fpm.of("version").value != VERSION:
            return f"of another version than {VERSION}"
        of = fpm.of("scheduled_requests")

        def count(name: str) -> int:
            return of.maybe(name, Node.tokens) or 0

        chunks, tokens, before = (
            count(name) for name in ("num_prefill_requests", "sum_prefill_tokens", "sum_prefill_kv_tokens")
        )
        decodes, context = count("num_decode_requests"), count("sum_decode_kv_tokens")
        seconds = fpm.of("wall_time").number()
        core = f"{fpm.maybe('worker_id', Node.text) or ''} {fpm.maybe('dp_rank', Node.tokens) or 0}"
        number = fpm.maybe("counter_id", Node.tokens) or 0
        if not seconds and not chunks + decodes:
            return None
        if number and (core, number) in self._seen:
            return "recorded twice"
        self._seen.add((core, number))
        ns = time_ns(1e3 * seconds)
        if ns is None or not chunks + decodes or not chunks <= tokens or (tokens and not chunks):
            return _IMPOSSIBLE
        lists = [of.maybe(name, _whole) for name in ("extend_lengths", "past_kv_lengths")]
        decoded, pairs = decodes, pairs_between(tokens, chunks, before, before)
        if lists[0] and lists[1]:
            each = list(zip(*lists, strict=False))
            if len(lists[0]) != len(lists[1]) or len(each) != chunks + decodes:
                return _IMPOSSIBLE
            pairs = (float(sum(new * past + new * (new + 1) / 2 for new, past in each[:chunks])),) * 2
            tokens, decoded = (sum(new for new, _ in part) for part in (each[:chunks], each[chunks:]))
            if decoded < decodes or tokens < chunks or pairs[0] > _MOST_PAIRS:
                return _IMPOSSIBLE
        self._sums_alone |= pairs[0] != pairs[1]
        return Step(core, ns, decodes, decoded, chunks, tokens, float(context), float(context), *pairs)

    def steps(self) -> list[Step]:
        """The steps of all records taken."""
        self._drop()
        return self._steps

    def notes(self) -> list[str]:
        """What is to be known of the times and the contents."""
        notes = [
            "times are, of vLLM, from one step's output to the next one's; of SGLang, on the GPU alone (record it with"
            " --disable-overlap-schedule, else one may hold two steps)"
        ]
        if self._sums_alone:
            notes.append("of steps with several prompts their tokens are told together alone, so that pairs are not")
        return notes


def _whole(node: Node) -> list[int]:
    return [one.tokens() for one in node.items()]
