"""Checks before the first point that a profile was measured up to the longest prompt: else every point would fail."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from batchsim.base.errors import ExtrapolationError, ScenarioError
from batchsim.cost.base import Cost
from batchsim.drive.simulate import simulate
from batchsim.kernel.types import Arrival, Request
from batchsim.scenario import PolicySpec
from batchsim.scenario.setup import Setup
from batchsim.workload.build import BuiltWorkload


def check_reach(setup: Setup, specs: Sequence[PolicySpec], load: float, seeds: Iterable[int], advice: str = "") -> None:
    """ScenarioError, with the numbers and what to do, where a policy cannot compute the longest prompt within what the
    profile was measured on.

    Checked are the requests that are known to be sent: all of open arrivals, the first of every session and user.
    `advice`, where given, takes the place of the cost's own on how to go beyond that.
    """
    engines = [group.setup for group in setup.groups] or [setup]
    bounded = [(engine, hull) for engine in engines if (hull := engine.cost.reach) is not None]
    for seed in seeds if bounded else ():
        workload = setup.workload(load, seed)
        for engine, hull in bounded:
            longest = _longest(engine, workload)
            if longest is not None and longest.prompt_tokens > min(hull.max_chunk_context, hull.max_tokens):
                _check(engine, specs, workload, longest, seed, advice)


def _longest(setup: Setup, workload: BuiltWorkload) -> Request | None:
    """The request with the longest prompt that model and KV memory have room for."""
    room, most = setup.kv.tokens, setup.max_model_len
    requests = (arrival.request for arrival in workload.arrivals())
    fitting = (
        r for r in requests if r.prompt_tokens < most and min(r.prompt_tokens + r.max_output_tokens, most) <= room
    )
    return max(fitting, key=lambda request: request.prompt_tokens, default=None)


def _check(
    setup: Setup,
    specs: Sequence[PolicySpec],
    workload: BuiltWorkload,
    longest: Request,
    seed: int,
    advice: str,
) -> None:
    """Runs `longest` alone under every policy, up to its first token. ScenarioError if the cost does not reach it."""
    tokens = longest.prompt_tokens
    alone = Request(longest.id, 0, tokens, longest.max_output_tokens, longest.priority, longest.request_class)
    for spec in specs:
        try:
            simulate(setup.engine(spec, workload), _Alone(Arrival(alone, 1)))
        except ExtrapolationError as error:
            refusal = _whole(setup.cost, tokens) or error
            refusal = ExtrapolationError(refusal.message, advice or refusal.advice)
            raise ScenarioError(f"{spec.name}, the longest prompt (seed {seed}): {refusal}") from None
        except (Exception, SystemExit):
            continue  # other errors of a policy are reported at its points, and the others' are kept


def _whole(cost: Cost, tokens: int) -> ExtrapolationError | None:
    """The cost's error on a prompt of `tokens` as a whole, in place of that on its first chunk beyond; None without."""
    try:
        cost.recompute_ns(tokens)
    except ExtrapolationError as error:
        return error
    return None


@dataclass(frozen=True)
class _Alone:
    """A workload of one request."""

    arrival: Arrival

    def arrivals(self) -> Iterator[Arrival]:
        return iter([self.arrival])

    def responded(self, request: Request, now_ns: int) -> Arrival | None:
        return None
