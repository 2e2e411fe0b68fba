"""Step times by one measured point: the mean time per output token at a concurrency."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache

from batchsim.base.errors import ScenarioError
from batchsim.base.units import format_duration
from batchsim.cost.base import Cost
from batchsim.cost.calibrated import Calibrated
from batchsim.cost.cost_error import Unknown
from batchsim.cost.in_engine import in_engine
from batchsim.cost.presets import Preset
from batchsim.cost.scaled import Scaled
from batchsim.drive.simulate import simulate
from batchsim.kernel.core import EngineCore
from batchsim.kernel.record import FINISHED
from batchsim.scenario.deployment_config import Anchor
from batchsim.workload.build import BuiltWorkload

MakeEngine = Callable[[Cost], tuple[EngineCore, BuiltWorkload]]
"""Makes an engine whose steps take what a cost says, and the requests of the users who keep it busy."""
LEAST, MOST = 0.2, 5.0
"""Factors beyond which the point is of another deployment than the one that is costed, not of the same one measured."""
REQUESTS = 5
"""Requests of each user: the mean of several generations, of which the first begins at once."""
_CLOSE = 1e-3  # of the measured time: far below the spread of repeats
_NARROW = 1e-5  # of x: between two so close TPOT jumps


class OutOfReach(ScenarioError):  # noqa: N818
    """No x between LEAST and MOST meets the measured point."""


@dataclass(frozen=True)
class Form:
    """A way in which steps may differ from what they are said to take: `at(x)` is the cost, at 1 the one that there is.
    `text`: what x stands for."""

    at: Callable[[float], Cost]
    text: Callable[[float], str]


def anchored(cost: Cost, preset: Preset | None, anchor: Anchor, engine: MakeEngine) -> Cost:
    """`cost` changed so that a closed loop of the users of `anchor` has its mean TPOT on the engines of `engine`, in
    the first form of `forms_of` that meets it. ScenarioError if none does, or no answer has two tokens.
    """
    forms = forms_of(cost, preset, anchor)
    number, x = first_met(engine, anchor, forms)
    form = forms[number]
    changed = form.at(x)
    if not isinstance(changed, Calibrated):
        return Scaled(cost, x, str(anchor))
    text = f"anchored to {anchor}: {form.text(x)}"
    profile = changed.profile
    return changed.of(replace(profile, made=profile.made | {"anchor": text}, notes=(*profile.notes, text)))


def forms_of(cost: Cost, preset: Preset | None, anchor: Anchor) -> tuple[Form, ...]:
    """How steps may differ from `cost`, the likeliest first; the last is that every step does, by a factor.

    Kernel tables of an engine that `preset` knows differ in steps of decodes alone, by a constant or a factor: a time
    per output token says nothing of prompts. Where it is mostly prompts' that form meets no point. Of a cost with an
    unknown error, as of collectives over PCIe, every step is in doubt.
    """
    every = Form(lambda x: Scaled(cost, x), lambda x: f"every step's time × {x:.4g}")
    if preset is None or not isinstance(cost, Calibrated) or isinstance(cost.error, Unknown):
        return (every,)
    if preset.form == "shift":
        decodes = Form(
            lambda x: _adjusted(cost, shift_ns=(x - 1) * anchor.tpot),
            lambda x: f"steps of decodes {(x - 1) * anchor.tpot / 1e6:+.3g} ms".replace("-", "−"),
        )
    else:
        decodes = Form(lambda x: _adjusted(cost, decode=x), lambda x: f"steps of decodes × {x:.4g}")
    return decodes, every


def first_met(engine: MakeEngine, anchor: Anchor, forms: Sequence[Form]) -> tuple[int, float]:
    """The number of the first of `forms` in which the point is within reach, and the x with which it is met.
    ScenarioError if that is none."""
    for number, form in enumerate(forms[:-1]):
        with suppress(OutOfReach):
            return number, solved(engine, anchor, form.at)
    return len(forms) - 1, solved(engine, anchor, forms[-1].at)


def _adjusted(cost: Calibrated, **how: float) -> Calibrated:
    return cost.of(replace(cost.profile, costs=in_engine(cost.profile.costs, **how)), cost.host)


def solved(engine: MakeEngine, anchor: Anchor, at: Callable[[float], Cost]) -> float:
    """The x with which the engine under the cost `at(x)` has the mean TPOT of `anchor`, by Brent's method.

    OutOfReach if x is not between LEAST and MOST; ScenarioError if TPOT jumps over the point, or no answer has two
    tokens.
    """
    from scipy.optimize import root_scalar

    tpot_ns = anchor.tpot
    where = f"anchor: tpot {format_duration(round(tpot_ns))} at concurrency {anchor.concurrency}"

    @cache
    def off(x: float) -> float:
        """Simulated over measured, less 1; 0 where that is close enough."""
        simulated_ns = mean_tpot_ns(*engine(at(x)))
        if simulated_ns is None:
            raise ScenarioError(f"{where}: no request finished with two tokens or more. Give longer outputs.")
        return 0.0 if abs(simulated_ns / tpot_ns - 1) < _CLOSE else simulated_ns / tpot_ns - 1

    if not off(1.0):
        return 1.0
    end = MOST if off(1.0) < 0 else LEAST
    if off(1.0) * off(end) > 0:
        raise OutOfReach(
            f"{where} is {1 / (1 + off(1.0)):.3g} times what is simulated, and step times are stretched by {LEAST:g} to"
            f" {MOST:g} at most. Correct the point or the deployment."
        )
    x = root_scalar(off, bracket=(1.0, end), method="brentq", xtol=_NARROW, rtol=_NARROW).root
    if off(x):
        raise ScenarioError(f"{where}: no factor on step times meets it; near {x:.3g} TPOT jumps. Anchor elsewhere.")
    return x


def mean_tpot_ns(core: EngineCore, workload: BuiltWorkload) -> float | None:
    """The mean over requests of the time per output token after the first; None where no request has two."""
    simulate(core, workload)
    requests = core.recorder.records().requests
    done = requests[(requests["outcome"] == FINISHED) & (requests["output_tokens"] > 1)]
    if not len(done):
        return None
    return float(((done["delivered_ns"] - done["first_delivery_ns"]) / (done["output_tokens"] - 1)).mean())
