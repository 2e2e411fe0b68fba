"""What is asked of a request in an environment of an engine, and the reward of what became of requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from batchsim.kernel.core import EngineCore
from batchsim.kernel.record import FINISHED, MISSING


@dataclass(frozen=True)
class Objectives:
    """Times in seconds within which a request is in its SLO, each None if nothing is asked: to the first token and to
    the whole answer, as its client sees them, and the mean between tokens of its answer. `miss` is what a request
    that misses costs where one within gains 1."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    miss: float = 1.0

    def __post_init__(self) -> None:
        asked = [one for one in (self.ttft_s, self.tpot_s, self.e2e_s) if one is not None]
        if not asked:
            raise ValueError(
                "objectives: none of ttft_s, tpot_s and e2e_s is asked, so that nothing can miss. Add one."
            )
        if min(asked) <= 0 or self.miss < 0:
            raise ValueError(f"objectives: times must be above 0 and miss at least 0; they are {self}.")

    def kept(self, row: Mapping[str, int]) -> bool:
        """Whether the request that left the record `row` was within all of them; one that did not finish was not."""
        if row["outcome"] != FINISHED:
            return False
        ttft_s = (row["first_delivery_ns"] - row["sent_ns"]) / 1e9
        tpot_s = (row["last_token_ns"] - row["first_token_ns"]) / 1e9 / max(row["output_tokens"] - 1, 1)
        e2e_s = (row["delivered_ns"] - row["sent_ns"]) / 1e9
        asked = ((ttft_s, self.ttft_s), (tpot_s, self.tpot_s), (e2e_s, self.e2e_s))
        return all(most is None or value <= most for value, most in asked)

    def missed_already(self, core: EngineCore, now_ns: int) -> int:
        """How many open requests can no longer be in their SLO, their first token or their end being late."""
        late = 0
        for life in core.journal.lives.values():
            request = life.arrival.request
            sent_ns = request.arrival_ns if life.arrival.sent_ns is None else life.arrival.sent_ns
            age_s, waits = (now_ns - sent_ns) / 1e9, life.first_token_ns == MISSING
            late += (self.e2e_s is not None and age_s > self.e2e_s) or (
                self.ttft_s is not None and waits and age_s > self.ttft_s
            )
        return late

    def count(self, rows: Iterable[Mapping[str, int]]) -> tuple[int, int, int]:
        """How many requests of `rows` finished, were in their SLO, and were not."""
        finished = in_slo = ended = 0
        for row in rows:
            ended += 1
            finished += row["outcome"] == FINISHED
            in_slo += self.kept(row)
        return finished, in_slo, ended - in_slo
