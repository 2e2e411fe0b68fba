"""How far a cost may be from the truth: an interval of the factor between real and predicted step times, or unknown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchsim.cost.profile import Profile


IMPORTED_SHARE = 0.20
"""The error assumed of imported profiles, as a share of step time.

Source: the same matmul differs by 3-20 % between versions of vLLM in the imported kernel tables."""

STEEP = 2.0
"""Times what the steps differ by, from which on a mean latency differs between the ends of a cost's error by a queue.
On an H100 (`tools/measured_engines.py`) the stages at the knee are above 2.5, all others below 1.5."""


@dataclass(frozen=True)
class CostError:
    """Real steps take from `1 + low` to `1 + high` times the predicted time, all of them alike; `source` says why.

    What single steps miss by at random averages out over a run and is not meant.
    """

    low: float
    high: float
    source: str

    @property
    def factors(self) -> tuple[float, float]:
        """The shortest and the longest steps that the error allows, in times the predicted ones."""
        return 1 + self.low, 1 + self.high

    def is_steep(self, fast: float | None, slow: float | None) -> bool:
        """Whether a mean latency of the shortest and of the longest steps differs by so much that a queue is in it: the
        load then lies within the error of saturation. Of a latency that an end has not, no."""
        short, long = self.factors
        return fast is not None and slow is not None and slow * short > STEEP * fast * long

    def __str__(self) -> str:
        low, high = f"{-100 * self.low:.2g}", f"{100 * self.high:.2g}"
        return f"±{high} %" if low == high else f"{100 * self.low:+.2g} to {100 * self.high:+.2g} %".replace("-", "−")


@dataclass(frozen=True)
class Unknown:
    """The error of a cost that was never compared with measurements, for the reason in `source`. It has no number."""

    source: str

    def __str__(self) -> str:
        return "unknown"


def symmetric(share: float, source: str) -> CostError | Unknown:
    return _bounded(-share, share, source)


def _bounded(low: float, high: float, source: str) -> CostError | Unknown:
    """The error from `low` to `high`; unknown where steps might take no time at all, which bounds nothing."""
    error = CostError(low, high, source)
    return error if low > -1 else Unknown(f"{error} is no bound: {source}")


def error_of(profile: Profile, *, host: str = "", beyond: bool = False) -> CostError | Unknown:
    """The error of step times that a profile's own file states, or why none is known.

    `host` says where the host's time is from if not from the profile; `beyond`: steps may lie outside its hull.

    Measured: the biases on held-out steps, whole and by region, widened by the median error, since a run dwells in
    regions of its own. Imported: what nine of ten points of its engine miss, where it was measured on this GPU with
    this type and model, whatever is doubted of the tables; unknown where there are doubts; else what versions of one
    kernel differ by, and what the profile misses of its tables.
    """
    if (points := profile.made.get("measured_in_engine")) is not None and not host:
        said = f"mean TPOT of nine of ten of the {points['points']} measured points that it was fitted to"
        share = float(points["tpot_p90"])
        return CostError(1 / (1 + share) - 1, share, said + _beyond(beyond))  # as far off either way, as a factor
    if profile.doubts:
        return Unknown("; ".join(profile.doubts))
    if profile.origin == "imported":
        of_host = host or ("assumed" if profile.costs.host.assumed else "a preset's")
        own = f"kernels differ so between versions of an engine; its host is {of_host}"
        beside = float(profile.held_out["p50"]) if profile.held_out is not None else 0.0
        return symmetric(IMPORTED_SHARE + beside, own + _beyond(beyond))
    if host:
        return Unknown(f"its host is {host}, and steps were measured with another")
    held_out = profile.held_out
    if held_out is not None:
        rows = [held_out, *held_out.get("steps", [])]
        return _spread(rows, float(held_out["p50"]), f"held-out {held_out.get('what', 'steps')}" + _beyond(beyond))
    if profile.residuals:
        widest = max(float(row["p50"]) for row in profile.residuals)
        return _spread(profile.residuals, widest, "residuals of the fit; no step was held out" + _beyond(beyond))
    return Unknown("the profile has neither held-out steps nor residuals")


def _beyond(beyond: bool) -> str:
    return "; beyond the profile's reach unknown" if beyond else ""


def _spread(rows: Iterable[Mapping[str, Any]], median: float, source: str) -> CostError | Unknown:
    """From the least to the largest real / predicted time in the rows' biases, 1 included, each widened by `median`."""
    factors = [1.0, *(1 / (1 + float(row["bias"])) for row in rows)]
    return _bounded(min(factors) - 1 - median, max(factors) - 1 + median, source)
