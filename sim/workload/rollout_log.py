"""What became of the groups of a rollout: when each was trained on, by which weights it was made, what was lost."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from batchsim.workload.traces.trace_rows import Ints

Outcome = Literal["", "used", "filtered", "stale", "aborted", "failed", "left"]
"""Of a group: trained on; its answers all right or all wrong; too old; aborted as enough others were complete; an
answer rejected or lost; still there when the run ended. "": none yet."""


Place = Literal["running", "queued", "resting", "put off"]
"""Of a group: generated; complete, to be taken; aborted with what it has, to go on; a long one, for a later round."""


@dataclass(eq=False)
class Answer:
    """An answer of a group: `tokens` in all, `made` so far; `request_id` as which it is at an engine, -1: as none.

    `parts` are the requests that made it, each with its tokens. `first_version` is that of the weights when the request
    with its first token was sent, `last_version` when its last one came.
    """

    group: Group
    index: int
    tokens: int
    cap: int
    made: int = 0
    ignores_eos: bool = False
    request_id: int = -1
    parts: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    first_version: int = 0
    last_version: int = 0
    done_ns: int = -1
    is_cut: bool = False
    """Whether it stands at its cap, short of what was drawn."""


@dataclass(eq=False)
class Group:
    """A prompt with its answers, of which `needed` complete it; `version` is that of the weights as it was sent first.

    `place` is where it is as long as it has no outcome. `update` is the number of the training that took it;
    `lost_tokens` were made of its answers and thrown away.
    """

    prompt: int
    prompt_tokens: int
    needed: int
    sent_ns: int
    version: int
    answers: list[Answer] = field(default_factory=list[Answer])
    place: Place = "running"
    num_done: int = 0
    done_ns: int = -1
    outcome: Outcome = ""
    update: int = -1
    lost_tokens: int = 0

    @property
    def used(self) -> list[Answer]:
        """The answers that are trained on if the group is: the first to be done."""
        return sorted((each for each in self.answers if each.done_ns >= 0), key=lambda each: each.done_ns)[
            : self.needed
        ]


@dataclass
class Update:
    """A training, from `start_ns` to `end_ns`, of groups taken at version `version`; the trainer waited `wait_ns` for
    them. Weights were loaded after it from `loading_ns`, as soon as engines were ready, to `loaded_ns`; -1: not."""

    version: int
    start_ns: int
    wait_ns: int
    end_ns: int = -1
    loading_ns: int = -1
    loaded_ns: int = -1
    tokens: int = 0


@dataclass(frozen=True)
class RolloutLog:
    """The groups and trainings of a run. `generated_tokens` counts every token of an answer that was made."""

    groups: tuple[Group, ...]
    updates: tuple[Update, ...]
    limit: int | None
    generated_tokens: int
    prefilled_again_tokens: int
    end_ns: int

    @property
    def used(self) -> list[Group]:
        """The groups that were trained on, in order of being taken."""
        return sorted((each for each in self.groups if each.outcome == "used"), key=lambda each: each.update)

    def tokens_of(self, outcome: Outcome) -> int:
        """Tokens of answers, by what became of their groups; of groups used, those of answers that were."""
        groups = [each for each in self.groups if each.outcome == outcome]
        if outcome == "used":
            return sum(answer.made for group in groups for answer in group.used)
        tokens = sum(answer.made for group in groups for answer in group.answers)
        if outcome == "aborted":  # and what others lost by being aborted
            tokens += sum(each.lost_tokens for each in self.groups)
            used = (each for each in self.groups if each.outcome == "used")
            tokens += sum(sum(a.made for a in each.answers) - sum(a.made for a in each.used) for each in used)
        return tokens

    def staleness(self) -> Ints:
        """For every answer that was trained on, the versions between its first token and its use."""
        return np.array(
            [self.updates[group.update].version - answer.first_version for group in self.used for answer in group.used],
            np.int64,
        )

    def is_mixed(self) -> NDArray[np.bool_]:
        """Whether every answer that was trained on has tokens by several versions of the weights."""
        return np.array([a.first_version != a.last_version for group in self.used for a in group.used], bool)
