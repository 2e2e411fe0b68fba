"""What a scenario says of tasks: the stages of requests that each is made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from batchsim.base.plain import LEFT_OUT
from batchsim.base.ranges import Config, Priority, Range, check_ranges
from batchsim.base.units import Duration, Share
from batchsim.workload.laws import Law

FanOut = Annotated[int, Range(1, 4096)]
"""Requests of a task that are sent side by side."""
MAX_REQUESTS_OF_A_TASK = 65_536


@dataclass(frozen=True)
class TaskStage(Config):
    """Requests sent at once, joined before the next stage.

    Their prompts are all that the task holds so far, every prompt and answer of the stages before; then new text that
    they share, of law `shared_prompt`; then new text of their own, of law `prompt`.

    With a `depth` the stage is a tree: to each answer above the last level `fan_out` requests more follow at once,
    whose prompts hold that answer. With `success` the first answer of the last level that succeeds joins the stage: all
    its other requests are pruned, cancelled at the engines or never sent; where none does, the stage is joined when all
    have ended. Which succeed is drawn beforehand, and is the same under every policy. The prompts of later stages hold
    nothing of the answers of such a stage, nor of a tree: whose would go on depends on which came first. Write what is
    kept of it as their new text.
    """

    output: Law
    """Tokens of answers."""
    prompt: Law | None = None
    """Tokens of new text that each prompt has of its own."""
    shared_prompt: Law | None = None
    """Tokens of new text that all prompts of the stage share, before their own."""
    fan_out: FanOut = 1
    """Requests sent at once; in a tree, after each answer above the last level."""
    depth: Annotated[int, Range(1, 16)] = 1
    """Levels of the tree; 1: no tree."""
    success: Share | None = None
    """Probability that an answer of the last level succeeds; the first that does joins the stage."""
    priorities: tuple[Priority, ...] | None = field(default=None, metadata=LEFT_OUT)
    """The value of branches: one of these priorities is drawn for each request of the first level, all equally likely,
    in the place of its class's; in a tree the requests below have that of the one above. Where KV is short, policies
    that mind priorities pause the highest numbers first."""
    wait: Duration = 0
    """Time from the last answer of the stage before: a tool's, or the user's."""
    wait_kind: Literal["constant", "exponential"] = "constant"
    """How waits are drawn: all alike, or exponential, for every task anew."""

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.prompt is None and self.shared_prompt is None:
            raise ValueError("a stage has neither prompt nor shared_prompt. Write the law of its new text.")
        if self.priorities == ():
            raise ValueError("priorities is empty. List the priorities that branches may have, or leave it out.")
        if self.num_requests > MAX_REQUESTS_OF_A_TASK:
            raise ValueError(
                f"a stage of fan_out {self.fan_out} and depth {self.depth} has {self.num_requests:,} requests, at most"
                f" {MAX_REQUESTS_OF_A_TASK:,} are possible. Lower one of them."
            )

    @property
    def levels(self) -> list[int]:
        """How many requests each level has, one after another."""
        return [self.fan_out**level for level in range(1, self.depth + 1)]

    @property
    def num_requests(self) -> int:
        """Requests of the stage, all levels together."""
        return sum(self.levels)

    @property
    def is_held(self) -> bool:
        """Whether the prompts of later stages hold its prompts and answers."""
        return self.depth == 1 and self.success is None


@dataclass(frozen=True)
class Tasks(Config):
    """Tasks made of stages, each joined before the next is sent: a task is done when its last request is.

    `mean_rate` of the arrivals is that of all requests, pruned ones included: tasks begin as much less often as each
    has requests. A task is of one class. A request that fails counts as answered when it ends, and its task is never
    done. An answer stands in later prompts as long as it truly is, even where its client gave up: prompts are the same
    under every policy.
    """

    stages: tuple[TaskStage, ...]
    """The stages of every task, one after another."""

    def __post_init__(self) -> None:
        check_ranges(self)
        if not self.stages:
            raise ValueError("tasks.stages is empty. List the stages of a task.")
        if self.stages[0].wait:
            raise ValueError("tasks: the first stage has a wait, and there is no answer to wait after. Drop it.")
        if self.num_requests > MAX_REQUESTS_OF_A_TASK:
            raise ValueError(
                f"tasks: a task has {self.num_requests:,} requests, at most {MAX_REQUESTS_OF_A_TASK:,} are possible."
                " Lower fan_out."
            )

    @property
    def num_requests(self) -> int:
        """Requests of a task."""
        return sum(stage.num_requests for stage in self.stages)
