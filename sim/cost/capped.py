"""A cost whose GPUs may draw no more than a stated power: steps that would draw more run at a lower clock, and longer.

The law. A step that would draw P W on a GPU with a cap of C < P runs at the share r of its clock at which

    idle + (P − idle) · r³ = C

since dynamic power goes with frequency × voltage² and voltage with frequency; the arithmetic of matmuls and attention
takes 1 / r times as long, while reads, launches, host and links take as long as before. Compared with the only sweep
found: prefill on RTX 3090 boards under power limits (llmgarage.ai/power-limit-tokens-per-second-benchmark, 2026-02)
reaches 94 and 85 % of its speed at 86 and 71 % of the limit, where the law with a tenth for idle says 94 and 88 % of
arithmetic alone; at 57 % it reaches 60 % and the law says 81, so that caps below 70 % of a board's limit are refused.
P is by the GPU's power law (`power.py`), itself an estimate. Simplifies: a step has one clock, found at
once; reads draw less with the clock too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from batchsim.base.errors import ScenarioError
from batchsim.base.later import np
from batchsim.cost.base import Cost
from batchsim.cost.cost_error import CostError, Unknown
from batchsim.cost.power import PowerLaw, power_law, step_power_w
from batchsim.cost.profile import Profile
from batchsim.cost.work import TIME_TERMS, Columns, Terms, columns_of
from batchsim.cost.wrapped import Wrapped
from batchsim.kernel.batch import Batch

LEAST_SHARE = 0.7
"""Of a board's limit: the lowest cap, below which the law was seen to promise too much."""
_CLOCKED = ("matmul", "attention")
"""The terms whose time goes with the clock."""


@dataclass(frozen=True, slots=True)
class Capped(Wrapped):
    """The cost model `cost` where each GPU draws at most `cap_w` W, by the power law `law` of its GPUs.

    A step is explained anew to know its power, in some tenths of a ms of Python, and no two steps lie on a line.
    """

    cost: Cost
    cap_w: float
    law: PowerLaw

    def step_ns(self, batch: Batch) -> int:
        terms = self.cost.explain(columns_of(batch))
        return int(self.cost.step_ns(batch) + float(self._added_ns(terms)[0])) or 1

    def clock(self, terms: Terms) -> np.ndarray:
        """The share of its clock at which each step runs, by the terms of `cost`; 1 where the cap does not bind."""
        deployment, idle = self.cost.deployment, self.law.idle_w
        assert deployment is not None, "of a GPU with a law"
        duration = sum((terms[name] for name in TIME_TERMS), np.zeros(len(terms["flops"])))
        watts = step_power_w(self.law, deployment, terms["flops"], terms["bytes"], duration) / deployment.num_gpus
        dynamic = np.maximum(watts - idle, self.cap_w - idle)  # at least what the cap leaves: the clock never rises
        return np.cbrt((self.cap_w - idle) / dynamic)

    def _added_ns(self, terms: Terms) -> np.ndarray:
        """ns that the cap adds to each step."""
        clocked = terms["matmul"] + terms["attention"]
        return clocked * (1 / self.clock(terms) - 1)

    def explain(self, columns: Columns) -> Terms:
        """The terms of `cost`, with `matmul` and `attention` at the clock that the cap leaves."""
        terms = self.cost.explain(columns)
        clock = self.clock(terms)
        return terms | {name: terms[name] / clock for name in _CLOCKED}

    def describe(self) -> str:
        text, mark, doubts = self.cost.describe().partition(" · ! ")
        return f"{text}, capped at {self.cap_w:g} W a GPU{mark}{doubts}"

    def sources(self) -> list[str]:
        law = f"power cap {self.cap_w:g} W: arithmetic slowed by the cube root of what is above idle, an estimate"
        return [*self.cost.sources(), law]

    def without_host(self) -> Cost:
        return replace(self, cost=self.cost.without_host())

    @property
    def profile(self) -> Profile | None:
        return self.cost.profile

    @property
    def error(self) -> CostError | Unknown:
        return Unknown(f"steps under a power cap of {self.cap_w:g} W were compared with no measurement of this GPU")


def capped(cost: Cost, cap_w: float | None) -> Cost:
    """`cost` where each GPU draws at most `cap_w` W; itself without a cap. ScenarioError for a cap that the law of its
    GPUs does not reach, and where they have no law."""
    if cap_w is None:
        return cost
    deployment, law = cost.deployment, power_law(cost.deployment)
    gpu = None if deployment is None else deployment.gpu
    if gpu is None or deployment is None:
        raise ScenarioError("power_cap: the power of these steps is not known, since no GPU of the catalog is meant.")
    if law is None:
        pipeline = f"pp {deployment.pp}: steps of a pipeline overlap, and no law says what its GPUs draw. Set pp to 1."
        unknown = f"there is no power law for {gpu.name}. Leave power_cap out, or take a GPU that has one."
        raise ScenarioError(f"power_cap: {pipeline if deployment.pp > 1 else unknown}")
    least = LEAST_SHARE * law.limit_w
    if not least <= cap_w <= law.limit_w:
        raise ScenarioError(
            f"power_cap: {cap_w:g} W is not from {least:g} W to {law.limit_w:g} W, 70 % to all of the limit of"
            f" {gpu.name}, within which the law of slowing was compared. Write one within, or leave it out."
        )
    return cost if cap_w == law.limit_w else Capped(cost, cap_w, law)
