"""What a scenario says of rollouts: groups of answers to a prompt, a trainer that takes them, and its scheme.

A *group* is a prompt with its answers, a *training* one take of the trainer from the complete groups, a *version* of
the weights the number of times that engines have loaded them. Each scheme has the rule and the defaults of one trainer:
slime 624b824a8, OpenRLHF 3c3be623, verl 0.9.1, AReaL 1.0.4, TRL 1.16.0, NeMo-RL 7ea279abf, and RollPacker (2509.21009).
Groups are counted, not answers, so that a group is whole wherever it goes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil
from typing import Annotated, ClassVar, Literal, NamedTuple

from batchsim.base.plain import LEFT_OUT
from batchsim.base.ranges import Config, Range, ShareBelowOne, check_ranges
from batchsim.base.units import Duration, PartDuration, Share
from batchsim.workload.tagged import ByKind

Prompts = Annotated[int, Range(1, 1_000_000)]
"""Groups: each holds its answers as objects while it lives."""
Answers = Annotated[int, Range(1, 4096)]
"""Answers to a prompt."""
Updates = Annotated[int, Range(1, 100_000)]
"""Trainings of a run."""
Age = Annotated[int, Range(0, 1000)]
"""Versions of the weights."""
Pause = Literal["drain", "interrupt", "in_flight"]
"""How engines load weights: `drain`, once they have answered all they have; `interrupt`, at once, and what they had
begun is computed again, prompt and tokens so far; `in_flight`, in a pause between two steps, after which answers go on
with the KV of the old weights."""


class Counts(NamedTuple):
    """The state that a scheme decides by: the version loaded; groups being generated, complete and waiting for the
    trainer, and accepted in all; groups sent since the last loading, with the ones under way by then; whether the
    trainer neither trains nor loads; whether a round of prompts put off as long ones is generated now."""

    version: int
    running: int
    queued: int
    accepted: int
    since_load: int
    is_idle: bool
    in_long_round: bool


class _Scheme(Config):
    """What schemes have in common. Each has its own `room`, and says in `pause` how engines load weights."""

    aborts: ClassVar[bool] = False
    """Whether groups that still run are aborted once a training has its own."""
    partial: ClassVar[bool] = False
    """Whether aborted groups go on in the next step with the tokens that they have: an option of `Synchronous`."""
    speculation: ClassVar[float] = 1.0
    """How many times as many prompts and answers are sent as are needed: an option of `TailBatching`."""

    @property
    def trigger(self) -> int:
        """Trainings between two loadings of weights."""
        return 1

    @property
    def max_age(self) -> int | None:
        """Versions beyond which a group is dropped; None: no group is."""
        return None

    @property
    def limit(self) -> int | None:
        """The most versions that a group may be old when it is trained on; None: there is no such bound."""
        return self.max_age

    def required(self, prompts: int) -> int:
        """Groups that a training takes."""
        return prompts

    def room(self, counts: Counts, prompts: int) -> int:
        """Groups to be sent now."""
        raise NotImplementedError


@dataclass(frozen=True)
class Synchronous(_Scheme):
    """Groups are generated, then trained on, then weights are loaded: the trainer and the engines wait for each other.

    While fewer than `prompts` groups run or are kept, `submit` more are sent; as soon as `prompts` are kept, the others
    are aborted (slime's `over_sampling_batch_size`; with 1 OpenRLHF's replacement of each group that is filtered out).
    """

    submit: Prompts | None = field(default=None, metadata=LEFT_OUT)
    """Groups sent at a time while too few run or are kept; `prompts` unless given."""
    partial: bool = field(default=False, metadata=LEFT_OUT)
    """Whether aborted groups go on before others in the next step, with the tokens that they have; else they are
    lost. Partial answers are computed again, prompt and tokens so far."""
    kind: Literal["synchronous"] = "synchronous"

    pause: ClassVar[Pause] = "drain"
    aborts: ClassVar[bool] = True

    @property
    def limit(self) -> int | None:
        """The most versions that a group may be old when it is trained on; None: partial answers may be of any."""
        return None if self.partial else 0

    def room(self, counts: Counts, prompts: int) -> int:
        if not counts.is_idle or counts.queued + counts.running >= prompts:
            return 0
        return self.submit or prompts


@dataclass(frozen=True)
class TailBatching(_Scheme):
    """Short rounds send more prompts with more answers and keep the first to finish; prompts left over are put off,
    and answered in a long round of their own once there are enough (RollPacker). Synchronous otherwise."""

    speculation: Annotated[float, Range(1, 4, above=True)] = 1.25
    """How many times as many prompts, and as many answers to each, a short round sends."""
    kind: Literal["tail_batching"] = "tail_batching"

    pause: ClassVar[Pause] = "drain"
    aborts: ClassVar[bool] = True

    @property
    def limit(self) -> int:
        """None is older than the weights in use."""
        return 0

    def room(self, counts: Counts, prompts: int) -> int:
        """Groups to be sent now: a long round as soon as enough prompts were put off."""
        if not counts.is_idle or counts.queued + counts.running >= prompts:
            return 0
        return prompts if counts.in_long_round else ceil(self.speculation * prompts)


@dataclass(frozen=True)
class OneStepOff(_Scheme):
    """The next batch is generated while one is trained on, and weights are loaded when nothing is generated.

    slime's train_async, verl's one_step_off_policy; with `ahead` 1 OpenRLHF's queue of one batch between the two.
    """

    ahead: Annotated[int, Range(0, 100)] = 0
    """Complete batches that may wait for the trainer while the next is generated."""
    interval: Annotated[int, Range(1, 1000)] = 1
    """Trainings between two loadings of weights."""
    kind: Literal["one_step_off"] = "one_step_off"

    pause: ClassVar[Pause] = "drain"

    @property
    def trigger(self) -> int:
        return self.interval

    @property
    def limit(self) -> int:
        return self.ahead + 1

    def room(self, counts: Counts, prompts: int) -> int:
        """Groups to be sent now: a batch when the one before is complete, unless too many wait."""
        if counts.running:
            return 0
        lacking = -counts.queued % prompts  # of a batch of which groups were dropped
        return lacking or (prompts if counts.queued <= self.ahead * prompts else 0)


@dataclass(frozen=True)
class VerlFullyAsync(_Scheme):
    """verl's fully_async_policy. A training takes `require_batches` times `prompts` groups, first come first served.

    Groups sent are counted; beyond `int(required · (1 + staleness_threshold) · trigger_parameter_sync_step)` none is
    sent, nor while as many wait. When weights are loaded the count becomes that of groups that run or wait. No group
    is dropped for its age. Where `success` has groups dropped, each of them leaves the count.
    """

    staleness_threshold: Annotated[float, Range(0, 100)] = 0.1
    """By how much more than one loading's worth of groups may be under way."""
    trigger_parameter_sync_step: Annotated[int, Range(1, 1000)] = 4
    """Trainings between two loadings of weights."""
    require_batches: Annotated[int, Range(1, 1000)] = 1
    """Times `prompts` that a training takes."""
    concurrency: Prompts | None = field(default=None, metadata=LEFT_OUT)
    """Groups that run at once at most; verl has 16 for each server, and never more than may be under way."""
    pause: Pause = "interrupt"
    """How engines load weights; `interrupt` is verl's partial_rollout: True, `drain` its False."""
    kind: Literal["verl_fully_async"] = "verl_fully_async"

    @property
    def trigger(self) -> int:
        return self.trigger_parameter_sync_step

    def required(self, prompts: int) -> int:
        return self.require_batches * prompts

    def most(self, prompts: int) -> int:
        """Groups that may be sent between two loadings, with the ones under way before."""
        return int(self.required(prompts) * (1 + self.staleness_threshold) * self.trigger)

    def room(self, counts: Counts, prompts: int) -> int:
        most = self.most(prompts)
        if counts.queued >= most:
            return 0
        return min(min(self.concurrency or most, most) - counts.running, most - counts.since_load)


@dataclass(frozen=True)
class Areal(_Scheme):
    """AReaL: groups are let in so that none is older than `max_head_offpolicyness` when it is trained on, if groups are
    taken in order: running and accepted ones are at most (η + version + 1) · `prompts`. None is dropped."""

    max_head_offpolicyness: Age = 0
    """η: versions that a group may be old when it is trained on."""
    max_concurrent_rollouts: Prompts | None = field(default=None, metadata=LEFT_OUT)
    """Groups that run at once at most; `prompts` unless given."""
    in_order: bool = True
    """Whether a training takes groups strictly in the order of sending, without which η is no bound. AReaL itself takes
    the oldest of those complete (`false`), so that one that comes late is older."""
    pause: Pause = "interrupt"
    """How engines load weights."""
    kind: Literal["areal"] = "areal"

    @property
    def limit(self) -> int:
        return self.max_head_offpolicyness

    def room(self, counts: Counts, prompts: int) -> int:
        allowed = (self.max_head_offpolicyness + counts.version + 1) * prompts
        most = self.max_concurrent_rollouts or prompts
        return min(most - counts.running, allowed - counts.accepted - counts.running)


@dataclass(frozen=True)
class TrlAsync(_Scheme):
    """TRL's async GRPO: as many groups run at once as `max_staleness` batches have; a group that is older than
    `max_staleness` when it is to be trained on is dropped."""

    max_staleness: Age = 4
    """Versions that a group may be old when it is trained on."""
    weight_sync_steps: Annotated[int, Range(1, 1000)] = 1
    """Trainings between two loadings of weights."""
    queue: Prompts = 1024
    """Complete groups that wait for the trainer at most: TRL's queue_maxsize, which counts answers."""
    pause: Pause = "in_flight"
    """How engines load weights."""
    kind: Literal["trl_async"] = "trl_async"

    @property
    def trigger(self) -> int:
        return self.weight_sync_steps

    @property
    def max_age(self) -> int:
        return self.max_staleness

    def room(self, counts: Counts, prompts: int) -> int:
        in_flight = max(self.max_staleness, 1) * prompts
        return min(in_flight - counts.running, self.queue - counts.queued - counts.running)


@dataclass(frozen=True)
class NemoRl(_Scheme):
    """NeMo-RL's asynchronous GRPO: groups of version v are trained on at versions v to v + `max_trajectory_age_steps`,
    older ones are dropped; twice as many batches run or wait as versions may differ."""

    max_trajectory_age_steps: Annotated[int, Range(1, 1000)] = 1
    """Versions that a group may be old when it is trained on."""
    pause: Pause = "drain"
    """How engines load weights; `in_flight` is NeMo-RL's in_flight_weight_updates, and `interrupt` that with its
    recompute_kv_cache_after_weight_updates."""
    kind: Literal["nemo_rl"] = "nemo_rl"

    @property
    def max_age(self) -> int:
        return self.max_trajectory_age_steps

    def room(self, counts: Counts, prompts: int) -> int:
        return 2 * self.max_trajectory_age_steps * prompts - counts.running - counts.queued


Scheme = Annotated[Synchronous | TailBatching | OneStepOff | VerlFullyAsync | Areal | TrlAsync | NemoRl, ByKind()]


@dataclass(frozen=True)
class Trainer(Config):
    """What one training takes: `time`, and a part for each token of the prompts and answers it is given."""

    time: Duration = 0
    """Time of a training, whatever it is given: rewards, log-probabilities and the update."""
    per_token: PartDuration = 0
    """Time for each token of the prompts and answers of its groups."""


@dataclass(frozen=True)
class Success(Config):
    """Which answers are right. Only groups with right and wrong answers are kept, as dynamic sampling (DAPO) has it.

    Each prompt has a probability, drawn from a beta law. A prompt whose n answers are right with probability p is
    dropped with probability p^n + (1 - p)^n.
    """

    mean: Share
    """Mean probability that an answer is right."""
    spread: ShareBelowOne = 0.0
    """How much prompts differ, from 0, all alike: the correlation of two answers to one prompt, which is 1/(a + b + 1)
    of the beta law."""

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.mean in (0, 1):
            raise ValueError(
                f"success.mean {100 * self.mean:g}%: all groups have answers of one kind, and none is ever kept. Write"
                " a share between."
            )

    def mean_dropped(self, answers: int) -> float:
        """The share of groups of `answers` that are dropped."""
        p, q = self.mean, 1 - self.mean
        if not self.spread:
            return p**answers + q**answers
        total = 1 / self.spread - 1
        right = wrong = 1.0
        for i in range(answers):  # the moments of the beta law
            right *= (p * total + i) / (total + i)
            wrong *= (q * total + i) / (total + i)
        return right + wrong


@dataclass(frozen=True)
class Rollout(Config):
    """Groups of answers that a trainer asks for: `arrivals: {kind: rollout}`. Its scheme decides when which are
    sent; the run ends with the last training."""

    prompts: Prompts
    """Groups that a training takes."""
    answers: Answers
    """Answers to each prompt."""
    updates: Updates
    """Trainings until the run ends."""
    scheme: Scheme
    """When groups are sent, taken and dropped, and when weights are loaded."""
    correlation: Share = 0.0
    """How alike the lengths of a group's answers are: the correlation of the normal numbers behind them. Every length
    has the law of the workload."""
    growth: Share = field(default=0.0, metadata=LEFT_OUT)
    """How much longer answers become with each training: the law of those to the k-th `prompts` prompts, counted from
    0, has (1 + growth)^k times the mean of the workload's, which has a mean and a CV."""
    success: Success | None = field(default=None, metadata=LEFT_OUT)
    """Which answers are right, where groups without a difference are dropped; else all groups are kept."""
    trainer: Trainer = field(default_factory=Trainer)
    """How long a training takes."""
    sync: Duration = 0
    """How long engines take to load weights, and the trainer to hand them over."""
    kind: Literal["rollout"] = "rollout"

    def __post_init__(self) -> None:
        check_ranges(self)
        scheme = self.scheme
        if isinstance(scheme, VerlFullyAsync):
            self._check_verl(scheme)
        if isinstance(scheme, TrlAsync) and scheme.queue < self.prompts:
            raise ValueError(
                f"scheme.queue {scheme.queue} holds less than the {self.prompts} prompts of a training, which would"
                " never begin. Raise it."
            )
        if self.success is not None and self.success.mean_dropped(self.answers) > MOST_DROPPED:
            raise ValueError(
                f"success: {100 * self.success.mean_dropped(self.answers):.4g} % of the groups of {self.answers} have"
                " answers of one kind and would be dropped. Write more answers, or a mean nearer to 50%."
            )

    def _check_verl(self, scheme: VerlFullyAsync) -> None:
        if scheme.concurrency is not None and scheme.concurrency > scheme.most(self.prompts):
            raise ValueError(
                f"scheme.concurrency {scheme.concurrency}: no more than {scheme.most(self.prompts)} groups may be under"
                " way. Lower it, or raise staleness_threshold."
            )


MOST_DROPPED = 0.999
"""The largest share of groups that may be dropped by their answers: of a thousand one is kept then."""
