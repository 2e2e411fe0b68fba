"""Service-level objectives: what is asked of latencies, in one of two forms.

    population    p99(ttft)<500ms, mean(queue_time)<50ms   percentiles and means of all offered requests, each alone
    per request   ttft<500ms & tpot<50ms @ 99%             one request meets all bounds jointly; 99 % of them must

The margin says by how much an objective is met: the share of the requests that keep it less the share that must; of a
mean, its distance from the limit over the larger of the two. It is met where the margin is 0 or more.

Every offered request counts: one that was rejected, timed out, cancelled or left unfinished misses every bound, in both
forms. A response delivered whole misses a tpot bound, since its client saw no pace at all. A response of one token has
no tpot, so that a tpot bound does not apply to it. A mean with a miss in it is infinite: its margin is -1.

Where requests are parts of tasks, `task_e2e` bounds tasks, of which every one counts likewise: p99(task_e2e)<1min, or
by itself task_e2e<30s @ 95%, of the tasks.

`makespan<2h` bounds the run: how long its work takes, from the first request to the last answer, or of a rollout to the
end of its last training. It stands alone or beside bounds on the population.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import ceil, inf, nextafter
from typing import NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from batchsim.base.errors import ScenarioError, nearest
from batchsim.base.ranges import number_text
from batchsim.base.units import format_duration, parse_duration_ns, parse_share
from batchsim.metrics.latencies import LATENCIES, MAKESPAN, TASK_E2E

_TERM = re.compile(
    r"(?:(?P<of>p[0-9.]+|mean)\(\s*(?P<inner>\w+)\s*\)|(?P<bare>\w+))\s*(?P<op><=|<)\s*(?P<limit>[^<>=]+)\Z"
)
_PERCENT = re.compile(r"[0-9]+\.?[0-9]*\Z|\.[0-9]+\Z")
_DEFAULT_PERCENT = "99"  # what a rewrite proposes where the text names no share that fits
_DEFAULT_UNIT = "s"  # where a limit has none
_ROUNDING = 1e-9  # binary fractions of a percentage: 0.07 × 100 must be rank 7, not 8
_FORMS = (
    "Write p99(ttft)<500ms, mean(queue_time)<50ms (each over all requests) or ttft<500ms & tpot<50ms @ 99% (every bound"
    " by 99% of the requests)."
)


def rank(share: float, count: int) -> int:
    """How many of `count` observations are at most the `share` quantile: the least whole number ≥ share × count."""
    return ceil(share * count - _ROUNDING)


class Sample(NamedTuple):
    """Observations of one metric in ns and how often each occurred. NaN: no bound applies. inf: every bound is missed.

    `uncompleted_share` of the requests are misses without an observation here.
    """

    values_ns: NDArray[np.float64]
    weights: NDArray[np.int64] | None = None
    uncompleted_share: float = 0.0


@dataclass(frozen=True, slots=True)
class Bound:
    """`metric` below `limit_ns` (or at it, if `inclusive`): of one request; at quantile `share` of the population; or
    its `mean`."""

    metric: str
    limit_ns: int
    inclusive: bool = False
    share: float | None = None
    mean: bool = False

    def passes(self, values_ns: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Whether each value keeps the bound; NaN, to which it does not apply, does."""
        kept = values_ns <= self.limit_ns if self.inclusive else values_ns < self.limit_ns
        return kept | np.isnan(values_ns)

    def margin(self, sample: Sample) -> float | None:
        """By how much quantile or mean keeps the bound over all requests, below 0 where it does not; None if it
        applies to no request."""
        values, weights, uncompleted = sample
        applies = ~np.isnan(values)
        values, weights = values[applies], None if weights is None else weights[applies]
        count = len(values) if weights is None else int(weights.sum())
        if not count and not uncompleted:
            return None
        if self.mean:
            mean_ns = inf if uncompleted else float(np.average(values, weights=weights))
            met = bool(self.passes(np.array(mean_ns)))
            return _signed(met, (self.limit_ns - mean_ns) / max(self.limit_ns, mean_ns) if mean_ns < inf else -1.0)
        assert self.share is not None, "a bound on each request has no margin of its own"
        kept = self.passes(values)
        good = int(kept.sum() if weights is None else weights[kept].sum())
        if not count:
            return -self.share
        # What did not complete has no observations to count, so it takes its share of the requests instead.
        met = good >= rank(self.share / (1 - uncompleted), count)
        return _signed(met, good / count * (1 - uncompleted) - self.share)

    def __str__(self) -> str:
        of = (
            ""
            if self.metric == MAKESPAN
            else "mean"
            if self.mean
            else ""
            if self.share is None
            else f"p{100 * self.share:g}"
        )
        name = f"{of}({self.metric})" if of else self.metric
        limit = format_duration(self.limit_ns).replace(" ", "").replace(",", "")  # which parts bounds
        return f"{name}{'<=' if self.inclusive else '<'}{limit}"


def keeps_all(bounds: Sequence[Bound], values_ns: Mapping[str, NDArray[np.float64]]) -> NDArray[np.bool_]:
    """Which requests keep all of `bounds` jointly, by the values in ns that `judged_ns` returns."""
    return np.logical_and.reduce([bound.passes(values_ns[bound.metric]) for bound in bounds])


NOT_ALL = "no number of requests shows that none ever misses. Write a share below 100%, like 99.9%."
"""What is wrong with an objective of 100 % where it is to hold for requests that were not simulated."""


@dataclass(frozen=True, slots=True)
class Slo:
    """Bounds of one form. `share` of the requests must keep all of them jointly; None: bounds on the population."""

    bounds: tuple[Bound, ...]
    share: float | None = None

    @property
    def per_request(self) -> bool:
        """Whether the objective is met or missed by single requests; only then does goodput exist."""
        return self.share is not None

    @property
    def of_tasks(self) -> bool:
        """Whether it bounds tasks: alone, where it is of the per-request form, in which the others bound requests."""
        return any(bound.metric == TASK_E2E for bound in self.bounds)

    def passes(self, values_ns: Mapping[str, NDArray[np.float64]]) -> NDArray[np.bool_]:
        """Which requests keep all bounds jointly. inf misses a bound, NaN is one that does not apply."""
        if self.share is None:
            raise ValueError(f"slo '{self}' bounds the population; no single request meets or misses it")
        return keeps_all(self.bounds, values_ns)

    def margin(self, samples: Mapping[str, Sample]) -> float | None:
        """By how much the offered requests of `samples` keep the objective, the least of all bounds; None where a bound
        applies to no request and no other is missed.

        In the per-request form the samples are parallel arrays, one value a request.
        """
        if self.share is None:
            margins = [bound.margin(samples[bound.metric]) for bound in self.bounds]
            known = [margin for margin in margins if margin is not None]
            return min(known) if len(known) == len(margins) or min(known, default=0.0) < 0 else None
        kept = self.passes({bound.metric: samples[bound.metric].values_ns for bound in self.bounds})
        if not kept.size:
            return None
        good = int(kept.sum())
        return _signed(good >= rank(self.share, kept.size), good / kept.size - self.share)

    def met(self, samples: Mapping[str, Sample]) -> bool | None:
        """Whether the margin of `samples` is 0 or more; None where there is no margin."""
        margin = self.margin(samples)
        return None if margin is None else margin >= 0

    def __str__(self) -> str:
        if self.share is None:
            return ", ".join(map(str, self.bounds))
        return " & ".join(map(str, self.bounds)) + f" @ {100 * self.share:g}%"


def _signed(met: bool, margin: float) -> float:
    """`margin` with the sign that the verdict asks for, where rounding alone gave it the other."""
    return max(margin, 0.0) if met else min(margin, nextafter(0.0, -1.0))


def parse_slo(text: str) -> Slo:
    """The objective that `text` states. ScenarioError, which names the column, on an unknown metric, a missing unit, or
    a mix of the forms."""
    body, at, share_text = text.partition("@")
    terms = [_term(match, text) for match in re.finditer(r"(?:^|[,&])([^,&]*)", body)]
    _check_makespan(terms, "&" in body or bool(at), text)
    population = [term.of is not None or term.metric == MAKESPAN for term in terms]
    if all(population) and not at and "&" not in body:
        return Slo(tuple(_bound(term, text) for term in terms))
    if any(population) or "," in body:
        _refuse_mix(terms, share_text.strip(), text)
    if not at:
        for term in terms:
            if term.metric == "itl":
                _bound(term, text)  # says that a request has many
        proposed = f"{_jointly(terms, text)} @ {_DEFAULT_PERCENT}%"
        raise ScenarioError(f"slo '{text}': no share of the requests that must meet it. Write '{proposed}'.")
    if len({term.metric == TASK_E2E for term in terms}) > 1:
        _refuse_mix_of_tasks(terms, text)
    column = len(body) + 1 + len(share_text) - len(share_text.lstrip())
    try:
        share = parse_share(share_text.strip())
    except ValueError as error:
        _refuse(text, column, str(error))
    if share == 0:
        _refuse(text, column, "0 % of the requests asks for nothing. Write a share above 0%.")
    return Slo(tuple(_bound(term, text) for term in terms), share)


def _check_makespan(terms: list[_Term], per_request: bool, text: str) -> None:
    """ScenarioError where the makespan, one number of the run, is asked of requests."""
    for term in terms:
        if term.metric == MAKESPAN and (per_request or term.of is not None):
            limit = f"makespan{term.op}{_with_unit(term, text)}"
            _refuse(
                text,
                term.column,
                f"makespan is one number of the whole run. Write '{limit}', alone or as in 'p99(ttft)<1s, {limit}'.",
            )


class _Term(NamedTuple):
    """One bound as text: `of` is `mean`, `p99` or None for one on each request. Columns count from 0."""

    of: str | None
    metric: str
    op: str
    limit: str
    column: int
    limit_column: int


def _refuse(text: str, column: int, why: str) -> NoReturn:
    """ScenarioError that points at the place, counted from 1."""
    raise ScenarioError(f"slo '{text}', column {column + 1}: {why}")


def _term(match: re.Match[str], text: str) -> _Term:
    part = match[1].strip()
    column = match.start(1) + len(match[1]) - len(match[1].lstrip()) if part else match.start(1)
    bound = _TERM.match(part)
    if bound is None:
        _refuse(text, column, f"'{part}' is not a bound. {_FORMS}")
    name = "inner" if bound["inner"] else "bare"
    known = (*LATENCIES, TASK_E2E, MAKESPAN)
    if bound[name] not in known:
        hint = nearest(bound[name], known, f"Known: {', '.join(known)}.")
        _refuse(text, column + bound.start(name), f"{bound[name]} is not a latency with an objective. {hint} {_FORMS}")
    return _Term(bound["of"], bound[name], bound["op"], bound["limit"].strip(), column, column + bound.start("limit"))


def _bound(term: _Term, text: str) -> Bound:
    try:
        limit_ns = parse_duration_ns(term.limit)
    except ValueError as error:
        _refuse(text, term.limit_column, f"{error} {_FORMS}")
    if limit_ns == 0:
        _refuse(text, term.limit_column, "no latency is below 0. Write a time above 0.")
    inclusive = term.op == "<="
    if term.metric == MAKESPAN:
        return Bound(term.metric, limit_ns, inclusive, mean=True)
    if term.of is None:
        if term.metric == "itl":
            _refuse(
                text,
                term.column,
                "itl is a gap between two tokens, so one request has many. Bound tpot instead, or write"
                f" 'p{_DEFAULT_PERCENT}(itl){term.op}{term.limit}'.",
            )
        return Bound(term.metric, limit_ns, inclusive)
    if term.of == "mean":
        return Bound(term.metric, limit_ns, inclusive, mean=True)
    share = _percentile(term.of)
    if share is None:
        _refuse_percentile(term, text)
    return Bound(term.metric, limit_ns, inclusive, share)


def _percentile(of: str) -> float | None:
    """The share that `p99` names; None where it is none."""
    try:
        share = float(of[1:]) / 100
    except ValueError:
        return None
    return share if 0.01 <= share < 1 else None


def _refuse_percentile(term: _Term, text: str) -> NoReturn:
    _refuse(text, term.column, f"{term.of} is no percentile. Write one from 1 to below 100, like p99.")


def _with_unit(term: _Term, text: str) -> str:
    """The limit as a proposal writes it. ScenarioError where it is no time even with a unit."""
    for limit in (term.limit, f"{term.limit}{_DEFAULT_UNIT}"):
        with suppress(ValueError):
            if parse_duration_ns(limit) > 0:
                return limit
    _bound(term, text)  # says what is wrong with it
    raise AssertionError(f"{term.limit} is a time")


def _jointly(terms: list[_Term], text: str) -> str:
    """The bounds on each request: one has no single itl, and its tpot is the mean of its gaps."""
    return " & ".join(f"{'tpot' if t.metric == 'itl' else t.metric}{t.op}{_with_unit(t, text)}" for t in terms)


def _refuse_mix_of_tasks(terms: list[_Term], text: str) -> NoReturn:
    """ScenarioError for bounds of one request and of a task, which has several, that are to be kept jointly."""
    bounds = ", ".join(f"p{_DEFAULT_PERCENT}({t.metric}){t.op}{_with_unit(t, text)}" for t in terms)
    at = next(t.column for t in terms if (t.metric == TASK_E2E) != (terms[0].metric == TASK_E2E))
    _refuse(text, at, f"mixes bounds on requests with one on tasks, which have several. Write '{bounds}'.")


def _refuse_mix(terms: list[_Term], share_text: str, text: str) -> NoReturn:
    """ScenarioError with `text` rewritten in either form; it points at the first that differs from its beginning."""
    for term in terms:
        if term.of not in (None, "mean") and _percentile(term.of) is None:
            _refuse_percentile(term, text)
    percents = [share_text.removesuffix("%").strip(), *(t.of[1:] for t in terms if t.of)]
    with suppress(ValueError):
        percents[0] = number_text(100 * parse_share(share_text))
    percent = next((p for p in percents if _PERCENT.match(p) and _percentile(f"p{p}")), _DEFAULT_PERCENT)
    of = {t.column: "" if t.metric == MAKESPAN else t.of or f"p{percent}" for t in terms}
    named = {t.column: f"{of[t.column]}({t.metric})" if of[t.column] else t.metric for t in terms}
    population = [f"{named[t.column]}{t.op}{_with_unit(t, text)}" for t in terms]
    columns = [t.column for t in terms if (t.of is None) != (terms[0].of is None)]
    columns += [separator.start() for separator in re.finditer("[,@]" if terms[0].of is None else "[&@]", text)]
    _refuse(
        text,
        columns[0],
        "mixes bounds on the population with bounds on each request. Write"
        f" '{', '.join(population)}' or '{_jointly(terms, text)} @ {percent}%'.",
    )
