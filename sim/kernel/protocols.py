"""The protocols between the parts: scheduler, executor, cost model, workload."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from batchsim.kernel.batch import AdapterLoad, Batch, Idle, Masks, StepResult
from batchsim.kernel.engine_loop import SYNC, EngineLoop
from batchsim.kernel.types import Arrival, Event, Request, Sequence

if TYPE_CHECKING:
    from batchsim.kernel.kv_blocks import KVBlockManager
    from batchsim.kernel.kv_transfer import KvConnector
    from batchsim.kernel.types import DecodeGroup


class LengthPredictor(Protocol):
    """Guesses output lengths for policies that want them; its name is shown in every table."""

    name: str

    def predict(self, request: Request) -> int:
        """The predicted total output tokens of `request`, at least 1; the same for the same request."""
        ...


class StepEstimator(Protocol):
    """What a policy may ask about costs before it decides."""

    def step_ns(self, batch: Batch) -> int:
        """ns that a step of the work of `batch`, made for the question and without a group, is expected to take."""
        ...

    def recompute_ns(self, num_tokens: int) -> int:
        """ns of computing `num_tokens` of one sequence anew."""
        ...

    def swap_ns(self, num_blocks: int) -> int:
        """ns of moving `num_blocks` KV blocks over the host link, one way."""
        ...


@dataclass(frozen=True, slots=True)
class ItemsContext:
    """What a policy may know of the items (images, audios, videos) that requests bring: the tokens of the `largest` and
    the bytes of one embedding."""

    largest: int
    embedding_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """Everything a policy is built with besides its config.

    A predictor is there only for a config whose traits have `needs_predictor`; swap blocks likewise `needs_swap_space`.
    `loop` is the engine's. `adapter_copy_ns` is the time in which a LoRA adapter is copied onto the GPU. `items`: what
    requests with images, audios or videos bring; None: none comes. `connector`: what passes KV between the engine and
    others; None: nothing does.
    """

    kv: KVBlockManager
    max_model_len: int
    predictor: LengthPredictor | None = None
    estimator: StepEstimator | None = None
    loop: EngineLoop = SYNC
    adapter_copy_ns: int = 0
    items: ItemsContext | None = None
    connector: KvConnector | None = None


class Scheduler(Protocol):
    """A batching policy, built as `Policy(config, context)`. It changes its queues, its KV manager, nothing else.

    `streams` says whether tokens reach the client as they are made; if not, a response is delivered whole.
    `events` is appended to by the policy and drained by EngineCore. `evidence` says what vouches for the schedule:
    `recorded` (equal to recordings of the real engine), `hand-derived` (from its source) or `family` (our own rule).
    `deviations`, which a class may have besides, says which checks of `batchsim.testing` it fails on purpose, and why.
    """

    evidence: str
    kv: KVBlockManager
    events: list[Event]
    streams: bool

    @property
    def num_waiting(self) -> int:
        """Number of sequences that wait to be admitted, preempted ones among them."""
        ...

    @property
    def num_running(self) -> int:
        """Number of sequences that were admitted and have neither ended nor been preempted."""
        ...

    def add(self, seq: Sequence, now_ns: int) -> None:
        """Queues a new sequence, or appends a `rejected` event if it can never run; may lower `max_output_tokens`."""
        ...

    def cancel(self, seq: Sequence, now_ns: int) -> list[Sequence]:
        """Forgets a waiting or running sequence and frees its KV. Only between steps.

        Returns the responses sent now: those held for a batch of which `seq` was the last to run.
        """
        ...

    def schedule(self, now_ns: int, drain: bool) -> Batch | Idle:
        """The next step, or until when to wait. `drain`: no arrival will come until this engine acts."""
        ...

    def repeat(self, batch: Batch, now_ns: int) -> bool:
        """Commits one more step identical to `batch`, just made, starting at `now_ns`; False leaves all unchanged.

        Called only when nothing arrived since, nor ended as far as the scheduler can know; ahead of results also when
        the step before `batch` has just been completed and the queue is empty. False is always a correct answer; True
        must equal what `complete` and `schedule` would have done.
        """
        ...

    def complete(self, batch: Batch, finished: list[Sequence], now_ns: int) -> list[Sequence]:
        """Ends a step: moves done prefills into the group, frees the finished. Returns the responses sent now."""
        ...


class Foreseeing(Protocol):
    """What a scheduler may offer besides, for leaps to add many steps at once, and for engines to sleep over steps that
    a request may yet come in between.

    When sequences or prompts end while the queue is empty and every running one decodes then, `schedule` goes on with
    those left: it has a step for them.
    """

    def foreseen(self, batch: Batch) -> list[int] | None:
        """How many KV blocks the step after the decode-only `batch`, just executed, needs, that behind it and so on,
        round and round; None where `repeat` could say no for lack of anything but such blocks, or would change
        anything but them and `batch`, or where `schedule` minds whether it is to drain."""
        ...

    def repeat_by(self, batch: Batch, num_steps: int, due: list[Sequence]) -> None:
        """Commits `num_steps` more steps of `batch`, foreseen or steady, as by `repeat`; `due` need a KV block each, in
        this order."""
        ...


class Steady(Foreseeing, Protocol):
    """What a scheduler may offer beyond that, for leaps ahead of results."""

    def is_steady(self, batch: Batch) -> bool:
        """Whether `repeat`, which has said yes to `batch`, goes on to for as long as there are KV blocks for all its
        decodes, and changes nothing but these and `batch`."""
        ...

    def is_followed_by_decodes(self, batch: Batch) -> bool:
        """Whether `schedule`, if asked next, returns a step of decodes alone, to drain or not: the queue is empty, the
        last prompts end with `batch`, and there are KV blocks for one more token of every sequence. The caller has
        checked that no sequence of `batch` ends by the length of its output."""
        ...


class Turning(Protocol):
    """Optional part of a pipeline's scheduler, for leaps over its calls: in each call one group decodes in its turn.

    `complete` is not called for steps that begin and end within such a leap: no sequence ended with them.
    """

    def is_turning(self) -> bool:
        """Whether each call of `schedule` goes on to return the decodes of one group alone, or nothing if that is
        empty, round `next_groups`, while no sequence arrives, joins a group, leaves one or ends, and `turn` returns
        True."""
        ...

    def next_groups(self) -> list[DecodeGroup]:
        """Whose turn it is in the next call, in the one behind it and so on, until it is theirs again."""
        ...

    def turn(self, group: DecodeGroup) -> bool:
        """Takes the KV blocks for one more step of `group`, whose turn it is; False leaves all unchanged, and is always
        a correct answer."""
        ...

    def turned(self, calls: int, batches: list[Batch]) -> None:
        """Commits `calls` calls, for each of which `turn` returned True; `batches` are the steps of them still in
        flight."""
        ...


def foreseeing(scheduler: Scheduler) -> Foreseeing | None:
    """`scheduler` if it foresees its own steps: not by a class whose `repeat` its own class has replaced."""
    return cast(Foreseeing, scheduler) if _holds(scheduler, "foreseen", "repeat") else None


def foresees_ends(scheduler: Scheduler) -> bool:
    """Whether `scheduler` is `Foreseeing` when sequences end, too: its class has replaced none of what acts then."""
    return _holds(scheduler, "foreseen", "repeat", "schedule", "complete")


def steady(scheduler: Scheduler) -> Steady | None:
    """`scheduler` if it says which of its steps are steady: not by a class of whose rules its own class has replaced
    any."""
    return cast(Steady, scheduler) if _holds(scheduler, "is_steady", "repeat", "schedule", "complete") else None


def turning(scheduler: Scheduler) -> Turning | None:
    """`scheduler` if it offers its turns: not by a class whose `schedule` or `complete` its own class has replaced."""
    return cast(Turning, scheduler) if _holds(scheduler, "is_turning", "schedule", "complete") else None


def _holds(scheduler: Scheduler, what: str, *of: str) -> bool:
    """Whether `scheduler` has the method `what`, and no class below the one that has it replaces any `of` these."""
    for kind in type(scheduler).__mro__:
        if what in vars(kind):
            return True
        if not vars(kind).keys().isdisjoint(of):
            return False
    return False


class Executor(Protocol):
    """Runs batches: on a model, or on a cost model in simulated time."""

    def begin(self, seq: Sequence, output_tokens: int | None) -> None:
        """Takes note of a sequence that the policy has queued and, in simulation, of its true output length."""
        ...

    def end(self, seq: Sequence) -> None:
        """Forgets a sequence that finished, was cancelled or was rejected."""
        ...

    def quiet_steps(self, batch: Batch) -> int:
        """How many more steps of this decode-only batch, just executed, finish no sequence; 0 if unknown. Bounds a
        leap."""
        ...

    def execute(self, batch: Batch) -> StepResult:
        """Runs the step `batch`; returns its duration and the sequences it finishes. Counters still stand as at its
        start."""
        ...

    def host_ns(self, batch: Batch | None) -> tuple[int, int]:
        """ns of the host to launch `batch` and to process its results, where these are predicted; zeros where the host
        does work. None: a call that scheduled nothing. Asked by loops that are ahead."""
        ...


DecodeLine = tuple[float, float, float]
"""(a, b, last): a step of decodes takes int(a + b · context) ns, at least 1, at every total context in tokens from the
present one up to `last`; `b` is not negative."""


class CostModel(Protocol):
    """Predicts the duration of a step from its useful and its padded work."""

    def step_ns(self, batch: Batch) -> int:
        """The duration of the step `batch` in ns, at least 1: GPU, host and swap terms together."""
        ...


class Pads(Protocol):
    """A cost model that pads steps to compiled shapes, before they are timed."""

    def pad(self, batch: Batch) -> int:
        """Writes the padding of its program into `batch`; returns the ns by which the step is longer beside it."""
        ...

    def unpad(self, batch: Batch) -> None:
        """Takes back what `pad` wrote into `batch`, if that was the latest."""
        ...


class Adapters(Protocol):
    """What LoRA adapters cost the steps of one engine, whose executor asks for each of them in turn."""

    def step(self, batch: Batch, duration_ns: int) -> tuple[int, list[AdapterLoad]]:
        """ns of the step `batch`, which takes `duration_ns` without adapters, and what it loads."""
        ...

    def forget(self, seq: Sequence) -> None:
        """Takes note that `seq` has ended."""
        ...


class Encodes(Protocol):
    """How long an encoder takes for the images, audios and videos of a step."""

    def items_ns(self, items: list[list[int]]) -> list[int]:
        """ns of the items of each sequence, given the placeholder tokens of each item; all are of one step."""
        ...


class FillsMasks(Protocol):
    """How long a host takes to fill the masks of answers that grammars constrain."""

    def of(self, batch: Batch) -> Masks | None:
        """The masks that the step `batch` needs, its counters not moved on yet; None where it needs none."""
        ...

    def host_ns(self, batch: Batch) -> int:
        """Of the time of the step `batch` under an engine that waits for each step, ns of the host, beside which no
        masks are filled."""
        ...


class HasLanes(Protocol):
    """A cost model that can be taken apart for engines whose host works while the GPU does."""

    def lanes(self) -> LaneCosts:
        """The times of steps on the GPU and on the host, apart."""
        ...


class LaneCosts(CostModel, Protocol):
    """The times of steps for engines whose host works while the GPU does."""

    def device_ns(self, batch: Batch) -> int:
        """ns of the step `batch` on the GPU, at least 1: all that is not the host's."""
        ...

    def stages_ns(self, batch: Batch) -> tuple[int, ...]:
        """ns of the step `batch` in each stage of the pipeline, each at least 1."""
        ...

    def host_ns(self, batch: Batch | None) -> tuple[int, int]:
        """ns of the host for the step `batch`: until it is launched, and to process its results; None: an empty one."""
        ...


class Workload(Protocol):
    """Where requests come from; without clocks, so that both drivers can use it."""

    def arrivals(self) -> Iterator[Arrival]:
        """The arrivals known in advance, by (arrival_ns, id)."""
        ...

    def responded(self, request: Request, now_ns: int) -> Arrival | tuple[Arrival, ...] | None:
        """The request that follows on the end of `request` for its client, as from closed-loop users, or all of them
        where several do; None if none."""
        ...
