"""Service-level objectives: what is asked of latencies, in one of two forms.

    population    p99(ttft)<500ms, p99(tpot)<50ms      percentiles over the offered requests, each on its own
    per request   ttft<500ms & tpot<50ms @ 99%         one request meets all bounds jointly; 99 % of them must

Every offered request counts: one that was rejected, timed out, cancelled or left unfinished misses every bound, in both
forms. A response delivered whole misses a tpot bound, since its client saw no pace at all. A response of one token has
no tpot, so that a tpot bound does not apply to it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from math import ceil
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from sim.errors import ScenarioError
from sim.units import format_duration, parse_duration_ns, parse_share

METRICS = ("ttft", "tpot", "itl", "e2e", "norm_latency")
_TERM = re.compile(
    r"(?:p(?P<percent>[0-9.]+)\(\s*(?P<inner>\w+)\s*\)|(?P<bare>\w+))\s*(?P<op><=|<)\s*(?P<limit>[^<>=]+)\Z"
)
_DEFAULT_PERCENT = "99"  # what a rewrite proposes where the text names no share
_ROUNDING = 1e-9  # binary fractions of a percentage: 0.07 × 100 must be rank 7, not 8
_EXAMPLES = "p99(ttft)<500ms, p99(tpot)<50ms or ttft<500ms & tpot<50ms @ 99%"


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
    """`metric` below `limit_ns` (or at it, if `inclusive`); at quantile `share` of the population, or None."""

    metric: str
    limit_ns: int
    inclusive: bool = False
    share: float | None = None

    def passes(self, values_ns: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Whether each value keeps the bound; NaN, to which it does not apply, does."""
        kept = values_ns <= self.limit_ns if self.inclusive else values_ns < self.limit_ns
        return kept | np.isnan(values_ns)

    def met(self, sample: Sample) -> bool | None:
        """Whether the quantile keeps the bound, counted over all requests; None without any that it applies to."""
        assert self.share is not None, "a bound on each request has no quantile"
        values, weights = sample.values_ns, sample.weights
        applies = ~np.isnan(values)
        kept = applies & self.passes(values)
        count = applies.sum() if weights is None else weights[applies].sum()
        good = kept.sum() if weights is None else weights[kept].sum()
        if not count:
            return None if sample.uncompleted_share == 0 else False
        # What did not complete has no observations to count, so it takes its share of the requests instead.
        return bool(good >= rank(self.share / (1 - sample.uncompleted_share), int(count)))

    def __str__(self) -> str:
        name = self.metric if self.share is None else f"p{100 * self.share:g}({self.metric})"
        return f"{name}{'<=' if self.inclusive else '<'}{format_duration(self.limit_ns).replace(' ', '')}"


@dataclass(frozen=True, slots=True)
class Slo:
    """Bounds of one form. `share` of the requests must keep all of them jointly; None: bounds on the population."""

    bounds: tuple[Bound, ...]
    share: float | None = None

    @property
    def per_request(self) -> bool:
        """Whether one request can be said to meet it; only then does goodput exist."""
        return self.share is not None

    def passes(self, values_ns: Mapping[str, NDArray[np.float64]]) -> NDArray[np.bool_]:
        """Which requests keep all bounds jointly. inf misses a bound, NaN is one that does not apply."""
        if self.share is None:
            raise ValueError(f"slo '{self}' bounds percentiles; no single request meets or misses it")
        kept = self.bounds[0].passes(values_ns[self.bounds[0].metric])
        for bound in self.bounds[1:]:
            kept = kept & bound.passes(values_ns[bound.metric])
        return kept

    def met(self, samples: Mapping[str, Sample]) -> bool | None:
        """Whether it holds for the offered requests of `samples`; None where there was none to judge.

        In the per-request form the samples are parallel arrays, one value a request.
        """
        if self.share is None:
            verdicts = [bound.met(samples[bound.metric]) for bound in self.bounds]
            return False if False in verdicts else None if None in verdicts else True
        kept = self.passes({bound.metric: samples[bound.metric].values_ns for bound in self.bounds})
        return bool(kept.sum() >= rank(self.share, kept.size)) if kept.size else None

    def __str__(self) -> str:
        if self.share is None:
            return ", ".join(map(str, self.bounds))
        return " & ".join(map(str, self.bounds)) + f" @ {100 * self.share:g}%"


def parse_slo(text: str) -> Slo:
    """The objective that `text` states. ScenarioError on an unknown metric, a missing unit, or a mix of the forms."""
    body, at, share_text = text.partition("@")
    terms = [_term(part.strip(), text) for part in re.split("[,&]", body)]
    quantiles = [term["percent"] is not None for term in terms]
    if all(quantiles) and not at and "&" not in body:
        bounds = tuple(_bound(term, text) for term in terms)
        return Slo(bounds)
    if any(quantiles) or "," in body:
        _refuse_mix(terms, share_text.strip(), text)
    if not at:
        raise ScenarioError(
            f"slo '{text}': no share of the requests that must meet it. Write '{body.strip()} @ {_DEFAULT_PERCENT}%'."
        )
    try:
        share = parse_share(share_text.strip())
    except ValueError as error:
        raise ScenarioError(f"slo '{text}': {error}") from None
    if share == 0:
        raise ScenarioError(f"slo '{text}': 0 % of the requests asks for nothing. Write a share above 0%.")
    return Slo(tuple(_bound(term, text) for term in terms), share)


def _term(part: str, text: str) -> dict[str, Any]:
    """The pieces of one bound: percent (None for a bare one), metric, op, limit."""
    match = _TERM.match(part)
    if match is None:
        raise ScenarioError(f"slo '{text}': '{part}' is not a bound. Write {_EXAMPLES}.")
    metric = match["inner"] or match["bare"]
    if metric not in METRICS:
        near = get_close_matches(metric, METRICS, 1)
        hint = f"Did you mean {near[0]}?" if near else f"Known: {', '.join(METRICS)}."
        raise ScenarioError(f"slo '{text}': {metric} is not a latency with an objective. {hint}")
    return {"percent": match["percent"], "metric": metric, "op": match["op"], "limit": match["limit"].strip()}


def _bound(term: dict[str, Any], text: str) -> Bound:
    try:
        limit_ns = parse_duration_ns(term["limit"])
    except ValueError as error:
        raise ScenarioError(f"slo '{text}': {error}") from None
    if limit_ns == 0:
        raise ScenarioError(f"slo '{text}': no latency is below 0. Write a time above 0.")
    if term["percent"] is None:
        if term["metric"] == "itl":
            raise ScenarioError(
                f"slo '{text}': itl is a gap between two tokens, so one request has many. Bound tpot instead, or write"
                f" p{_DEFAULT_PERCENT}(itl)<{term['limit']}."
            )
        return Bound(term["metric"], limit_ns, term["op"] == "<=")
    try:
        share = float(term["percent"]) / 100
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        raise ScenarioError(f"slo '{text}': p{term['percent']} is no percentile. Write one above 0 and below 100.")
    return Bound(term["metric"], limit_ns, term["op"] == "<=", share)


def _refuse_mix(terms: list[dict[str, Any]], share_text: str, text: str) -> NoReturn:
    """ScenarioError with `text` rewritten in either form."""
    percent = share_text.removesuffix("%").strip() or next(
        (term["percent"] for term in terms if term["percent"]), _DEFAULT_PERCENT
    )
    population = [f"p{t['percent'] or percent}({t['metric']}){t['op']}{t['limit']}" for t in terms]
    # One request has no single itl; its tpot is the mean of its gaps.
    jointly = [f"{'tpot' if t['metric'] == 'itl' else t['metric']}{t['op']}{t['limit']}" for t in terms]
    raise ScenarioError(
        f"slo '{text}': mixes percentiles over all requests with bounds on each request. Write"
        f" '{', '.join(population)}' or '{' & '.join(jointly)} @ {percent}%'."
    )
