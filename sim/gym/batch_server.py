"""The batch server that theory knows: Poisson arrivals, one server, batches whose time and energy grow with their size.

Source: Xu, Zhou and Niu, arXiv 2301.12865, of which the abstract was read: a semi-Markov decision process that weighs
mean response time against mean power.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class BatchServer:
    """A server and what is asked of it.

    Requests arrive at `rate` a second; a batch of b, at most `max_batch`, takes `alpha_s + b * beta_s` seconds and
    `energy_j + b * energy_per_request_j` joules. The cost of a second is `delay_weight` by the mean response time (by
    Little's law, the requests there by `rate`) and `energy_weight` by the watts.
    """

    rate: float = 60.0
    alpha_s: float = 0.02
    beta_s: float = 0.002
    max_batch: int = 16
    energy_j: float = 0.0
    energy_per_request_j: float = 0.0
    delay_weight: float = 1.0
    energy_weight: float = 0.0

    def __post_init__(self) -> None:
        if not (0 < self.rate < math.inf and self.alpha_s >= 0 and self.beta_s >= 0 and self.alpha_s + self.beta_s > 0):
            raise ValueError(
                f"rate {self.rate:g}, alpha_s {self.alpha_s:g}, beta_s {self.beta_s:g}: the rate and the time of a"
                " batch of one must be above 0. Correct them."
            )
        if self.max_batch < 1 or self.max_batch != int(self.max_batch):
            raise ValueError(f"max_batch {self.max_batch} must be a whole number of at least 1.")
        low = min(self.energy_j, self.energy_per_request_j, self.delay_weight, self.energy_weight)
        if low < 0:
            raise ValueError(f"energies and weights must be at least 0, one is {low:g}.")

    def service_s(self, size: int) -> float:
        """Seconds of a batch of `size`."""
        return self.alpha_s + size * self.beta_s

    def energy(self, size: int) -> float:
        """Joules of a batch of `size`."""
        return self.energy_j + size * self.energy_per_request_j

    @property
    def capacity(self) -> float:
        """Requests a second that full batches serve."""
        return self.max_batch / self.service_s(self.max_batch)

    def cost(self, request_s: float, joules: float) -> float:
        """The cost of a while in which the requests there spent `request_s` seconds altogether, and `joules` went."""
        return self.delay_weight / self.rate * request_s + self.energy_weight * joules
