"""How long the steps of a recording take: by the law that it states, or as they were recorded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal

from batchsim.base.errors import shown
from batchsim.check.conform.fields import BadRecording
from batchsim.kernel.batch import Batch

US = 1000
NUMBER = r"\d{1,9}(?:\.\d{1,12})?|gpu_fixed_us|gpu_token_us"
TERMS = rf"(?P<base>{NUMBER}) \+ (?P<per_token>{NUMBER})\*sum\(num_tokens\)"
LAW = re.compile(rf"t_end = (?P<of>t_start|t_gpu_start) \+ {TERMS}")
STAGES = re.compile(
    rf"(?P<of>\d{{1,4}}) stages, each \({TERMS}\)/(?P=of) rounded down to whole microseconds: stage k of a step starts"
    r" when its stage k-1 and stage k of the previous step have ended"
)
SAID = {
    "also for steps with no scheduled token",
    "t_scheduled = t_start + host_schedule",
    "t_gpu_start = max(t_scheduled, previous t_end)",
    "t_gpu_start = max(t_scheduled (t_launch if given), previous t_end)",
    "t_gpu_start = start of stage 0, t_end = end of the last",
    "t_processed = max(host clock, t_end) + host_update",
    "a step with no token takes no GPU time: t_gpu_start = t_end = t_scheduled",
    "a step with no token takes no GPU time",
}
"""Clauses of `meta.step_time` that say what every replay does."""


@dataclass(frozen=True)
class StepLaw:
    """The stated formula of step time: `base_ns` plus `per_token_ns` for each scheduled token; in a pipeline of several
    `stages` each takes an equal part of it, in whole microseconds.
    """

    base_ns: int
    per_token_ns: int = 0
    stages: int = 1

    def step_ns(self, num_tokens: int) -> int:
        return self.base_ns + self.per_token_ns * num_tokens

    def stages_ns(self, num_tokens: int) -> tuple[int, ...]:
        """The duration in each stage, ns."""
        return (self.step_ns(num_tokens) // self.stages // US * US,) * self.stages


def read_law(text: str, start: str, stages: int, named_us: Mapping[str, int]) -> StepLaw | None:
    """The formula in `text`, which counts from the field `start` or holds for each of several `stages`; numbers that it
    names are `named_us`, in microseconds. None if it is finer than recorded times; BadRecording for another form.
    """
    laws = [clause for clause in text.split("; ") if clause not in SAID]
    match = (LAW if stages == 1 else STAGES).fullmatch(laws[0]) if len(laws) == 1 else None
    if match is None or match["of"] != (start if stages == 1 else str(stages)):
        terms = "0.005 + 0.00002*sum(num_tokens)"
        like = f"t_end = {start} + {terms}" if stages == 1 else f"{stages} stages, each ({terms})/{stages} rounded ..."
        raise BadRecording(f"meta.step_time is {shown(text)}, not like {like}. Write it so, or into meta.note.")
    base_ns, per_token_ns = (_ns(match[term], named_us) for term in ("base", "per_token"))
    whole_us = base_ns % US == 0 and per_token_ns % US == 0  # recorded times are rounded to 1 us
    return StepLaw(int(base_ns), int(per_token_ns), stages) if whole_us else None


def _ns(number: str, named_us: Mapping[str, int]) -> Decimal:
    if number[0].isdigit():
        return Decimal(number) * 10**9
    if number not in named_us:
        raise BadRecording(f"meta.step_time names {number}, which meta has not. Write it down.")
    return Decimal(named_us[number] * US)


class RecordedTimes:
    """The cost model of a replay: `law`, or else each step's own recorded one of `durations_ns`, in order; steps beyond
    their end take 1 ns. `host_ns` is what the host takes to launch a step and to process its results; where steps
    differ in it, `each_host_ns` has those of every step that ran, in order, and `host_ns` is of calls without one.
    """

    def __init__(
        self,
        law: StepLaw | None,
        durations_ns: Iterable[int],
        host_ns: tuple[int, int],
        each_host_ns: Iterable[tuple[int, int]] | None = None,
    ) -> None:
        self._law = law
        self._durations_ns = iter(durations_ns)
        self._host_ns = host_ns
        self._each_host_ns = None if each_host_ns is None else iter(each_host_ns)

    def lanes(self) -> RecordedTimes:
        return self

    def step_ns(self, batch: Batch) -> int:
        return next(self._durations_ns, 1) if self._law is None else self._law.step_ns(_tokens(batch))

    device_ns = step_ns

    @property
    def encoder_time(self) -> RecordedTimes:
        """Itself: what encoding took is in the recorded steps."""
        return self

    def items_ns(self, items: list[list[int]]) -> list[int]:
        return [0] * len(items)

    def stages_ns(self, batch: Batch) -> tuple[int, ...]:
        assert self._law is not None  # a pipeline's times are read only as a law
        return self._law.stages_ns(_tokens(batch))

    def host_ns(self, batch: Batch | None) -> tuple[int, int]:
        if batch is None or self._each_host_ns is None:
            return self._host_ns
        return next(self._each_host_ns, self._host_ns)


def _tokens(batch: Batch) -> int:
    return sum(n for _, n in batch.items())
