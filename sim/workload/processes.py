"""The random processes among the kinds of `arrivals:` of a scenario."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from batchsim.base.later import np
from batchsim.base.plain import LEFT_OUT
from batchsim.base.ranges import Config, Range, check_ranges
from batchsim.base.units import Duration, PositiveDuration, Rate
from batchsim.workload.laws import Cv

if TYPE_CHECKING:
    from numpy.typing import NDArray

Multiple = Annotated[float, Range(0, 1e6)]
"""A rate in proportion to others of the same list; 0: nothing arrives."""
WeibullShape = Annotated[float, Range(0.1, 100)]
"""At 0.1 the gaps have a coefficient of variation of 429; recorded traffic has shapes from 0.4 to 1.1."""
MOST_PARTS, MOST_STATES = 10_000, 8


@dataclass(frozen=True)
class AllAtOnce(Config):
    """Every request at time 0: offline work.

    >>> batchsim.AllAtOnce()
    AllAtOnce(kind='all_at_once')
    """

    kind: Literal["all_at_once"] = "all_at_once"


@dataclass(frozen=True)
class PoissonArrivals(Config):
    """Independent arrivals: exponential gaps.

    >>> batchsim.Poisson("8/s").mean_rate
    8.0
    """

    mean_rate: Rate
    """Requests a second, like 4/s; on the load axis a list of them, or auto."""
    kind: Literal["poisson"] = "poisson"


@dataclass(frozen=True)
class GammaArrivals(Config):
    """Independent gamma gaps.

    >>> batchsim.Gamma("8/s", cv=2.0).cv
    2.0
    """

    mean_rate: Rate
    """Requests a second, like 4/s; on the load axis a list of them, or auto."""
    cv: Cv
    """Coefficient of variation of the gaps: above 1 burstier than Poisson, below it smoother."""
    kind: Literal["gamma"] = "gamma"


@dataclass(frozen=True)
class WeibullArrivals(Config):
    """Independent Weibull gaps.

    >>> round(batchsim.Weibull("8/s", shape=0.5).cv, 2)
    2.24
    """

    mean_rate: Rate
    """Requests a second, like 4/s; on the load axis a list of them, or auto."""
    shape: WeibullShape
    """Shape of the gaps' law: below 1 burstier than Poisson, above it smoother."""
    kind: Literal["weibull"] = "weibull"

    @property
    def cv(self) -> float:
        """The coefficient of variation of the gaps."""
        return math.sqrt(math.gamma(1 + 2 / self.shape) / math.gamma(1 + 1 / self.shape) ** 2 - 1)


@dataclass(frozen=True)
class ConstantArrivals(Config):
    """Equal gaps, the first request at 0.

    >>> batchsim.Constant("4/s").mean_rate
    4.0
    """

    mean_rate: Rate
    """Requests a second, like 4/s; on the load axis a list of them, or auto."""
    kind: Literal["constant"] = "constant"

    deviations: ClassVar[dict[str, str]] = {"seeds_differ": "equal gaps have no chance"}


@dataclass(frozen=True)
class OnOffArrivals(Config):
    """Markov-modulated: Poisson while on, silent while off; exponential sojourns.

    A change of the rate leaves the sojourns as they are.

    >>> batchsim.OnOff("8/s", on="2s", off="6s").off  # ns
    6000000000
    """

    mean_rate: Rate
    """The rate over all time; while on it is mean_rate (on + off) / on."""
    on: PositiveDuration
    """Mean time on."""
    off: PositiveDuration
    """Mean time off."""
    kind: Literal["on_off"] = "on_off"


@dataclass(frozen=True)
class MmppState(Config):
    """A state of a Markov-modulated Poisson process."""

    rate: Multiple
    """Its rate, in proportion to the other states'."""
    stay: PositiveDuration
    """Its mean stay."""
    weight: Annotated[float, Range(0, 1e6, above=True)] = 1.0
    """In proportion to it the state is entered from any other."""


@dataclass(frozen=True)
class MmppArrivals(Config):
    """Markov-modulated Poisson process: in each state, left after an exponential stay, another Poisson rate.

    Begins in the stationary state. A change of `mean_rate` leaves the stays as they are.
    """

    mean_rate: Rate
    """The rate over all time."""
    states: tuple[MmppState, ...]
    """The states, each with its rate and its stay."""
    kind: Literal["mmpp"] = "mmpp"

    def __post_init__(self) -> None:
        check_ranges(self)
        if not 2 <= len(self.states) <= MOST_STATES:
            raise ValueError(f"states are {len(self.states)}. Write from 2 to {MOST_STATES}.")
        _check_rates("states", [state.rate for state in self.states])

    @property
    def time_shares(self) -> NDArray[np.float64]:
        """The share of all time spent in each state."""
        weights = np.array([state.weight for state in self.states])
        # The chain of jumps is reversible: state i is entered in proportion to w_i (sum of all w - w_i).
        shares = weights * (weights.sum() - weights) * np.array([state.stay for state in self.states], float)
        return shares / shares.sum()


@dataclass(frozen=True)
class ProfiledArrivals(Config):
    """Arrivals in a time that runs as fast as the rate is: gamma gaps there, so that a `cv` of 1 is a Poisson process
    of varying rate; or those of an MMPP, whose stays are at the mean rate."""

    mean_rate: Rate
    """The mean rate: over the ramp, over all steps, over a period."""
    cv: Cv = field(default=1.0, kw_only=True, metadata=LEFT_OUT)
    """Coefficient of variation of the gaps: standard deviation over mean; 1 for Poisson gaps."""
    states: tuple[MmppState, ...] | None = field(default=None, kw_only=True, metadata=LEFT_OUT)
    """States of rate between which the arrivals change besides, each with its rate and how long it lasts."""

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.states is not None:
            if self.cv != 1:
                raise ValueError(f"cv {self.cv:g} and states both say how bursty arrivals are. Keep one.")
            MmppArrivals(self.mean_rate, self.states)

    @property
    def residual(self) -> MmppArrivals | None:
        """The process of `states`, at the mean rate all the time."""
        return None if self.states is None else MmppArrivals(self.mean_rate, self.states)


@dataclass(frozen=True)
class RampArrivals(ProfiledArrivals):
    """The rate grows in a straight line during `over` to `growth` times what it was at the start, and stays there.

    `mean_rate` is the mean during `over`. Below 1 the rate falls.
    """

    growth: Annotated[float, Range(1e-3, 1e3)]
    """The rate at the end over that at the start; below 1 it falls."""
    over: PositiveDuration
    """How long the rate changes; it stays after that."""
    kind: Literal["ramp"] = "ramp"

    deviations: ClassVar[dict[str, str]] = {"mean_rate": "mean_rate is that of the ramp, whose last rate stays"}


@dataclass(frozen=True)
class StepsArrivals(ProfiledArrivals):
    """The rate steps from one of `rates` to the next; the last one stays.

    `mean_rate` is the mean over all of them.
    """

    rates: tuple[Multiple, ...]
    """The rates one after another, in proportion to each other."""
    every: PositiveDuration
    """How long each rate lasts."""
    kind: Literal["steps"] = "steps"

    deviations: ClassVar[dict[str, str]] = {"mean_rate": "mean_rate is that of all steps, of which the last stays"}

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_rates("rates", self.rates)
        if not self.rates[-1]:
            raise ValueError("rates end with 0, which would stay for ever. End the arrivals with duration.")


@dataclass(frozen=True)
class DiurnalArrivals(ProfiledArrivals):
    """The rate repeats every `period`, in the shape of `profile`.

    `mean_rate` is the mean over a period.

    >>> batchsim.Diurnal("8/s", profile=(1, 3, 2), period="60s").period  # ns
    60000000000
    """

    profile: tuple[Multiple, ...]
    """Rates in the middle of as many equal parts of the period, in proportion to each other, with straight lines
    between them."""
    period: PositiveDuration = 24 * 3600 * 10**9
    """After how long the rate repeats."""
    start: Duration = 0
    """How far into the period the arrivals begin."""
    kind: Literal["diurnal"] = "diurnal"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_rates("profile", self.profile)


@dataclass(frozen=True)
class OwnArrivals(Config):
    """What an arrival process of a user's own derives from: `kind: "module:Class"` names the dataclass.

    `mean_rate` is the load axis.
    """

    mean_rate: Rate

    @property
    def kind(self) -> str:
        return type(self).__name__

    def times_s(self, random: np.random.Generator) -> Iterator[float]:
        """The times of all arrivals in s from 0 on, never decreasing, without an end; chance is of `random` alone."""
        raise NotImplementedError


Profiled = RampArrivals | StepsArrivals | DiurnalArrivals
Process = (
    PoissonArrivals
    | GammaArrivals
    | WeibullArrivals
    | ConstantArrivals
    | OnOffArrivals
    | MmppArrivals
    | RampArrivals
    | StepsArrivals
    | DiurnalArrivals
    | OwnArrivals
)
"""What draws the times of an open stream at a `mean_rate`."""


def process_name(kind: str) -> str:
    """The name of a kind of arrivals in a sentence."""
    return {"poisson": "Poisson", "on_off": "on/off", "weibull": "Weibull", "mmpp": "MMPP"}.get(kind, kind)


def _check_rates(name: str, rates: tuple[float, ...] | list[float]) -> None:
    """ValueError unless there are rates, one of them above 0."""
    if not 1 <= len(rates) <= MOST_PARTS:
        raise ValueError(f"{name} has {len(rates):,} rates. Write from 1 to {MOST_PARTS:,}.")
    if not any(rates):
        raise ValueError(f"{name}: all rates are 0, so nothing ever arrives. Write one above 0.")
