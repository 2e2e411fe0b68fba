"""Faults on demand, to test a client or a gateway: errors, streams that stall, replicas that fail.

Which requests meet one depends on the seed and on their number alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from batchsim.base.errors import ScenarioError, shown
from batchsim.base.units import format_duration, parse_duration_ns
from batchsim.scenario import Scenario, changed
from batchsim.workload.traces.random_stream import random_stream

FORMS = "'error p=0.02', 'stall p=0.01', 'stall p=0.01 for=5s', 'replica=1 at=30s' or 'replica=1 at=30s for=10s'"
_NEVER = "8760h"  # the longest that a replica can be down


@dataclass
class Faults:
    """The shares of requests that get a 500 and of streams that stall, for how long in ns of simulated time (None:
    until the client leaves), and the failures of replicas; and how many requests met which so far."""

    seed: int = 0
    error: float = 0.0
    stall: float = 0.0
    stall_ns: int | None = None
    failures: list[dict[str, object]] = field(default_factory=list[dict[str, object]])
    num_errors: int = 0
    num_stalls: int = 0

    def errs(self, number: int) -> bool:
        """Whether request `number` is to get a 500; counts the errors."""
        errs = _meets(self.seed, "error", number, self.error)
        self.num_errors += errs
        return errs

    def stalls(self, number: int) -> bool:
        """Whether the stream of request `number` is to stall after its first piece; counts the stalls."""
        stalls = _meets(self.seed, "stall", number, self.stall)
        self.num_stalls += stalls
        return stalls

    def failing(self, scenario: Scenario) -> Scenario:
        """`scenario` whose replicas fail as asked, beside its own failures; `lost` is `fail` unless it says otherwise.

        ScenarioError where there is no such replica.
        """
        if not self.failures:
            return scenario
        replicas = scenario.plain.get("replicas")
        if replicas is None:
            raise ScenarioError("--fault replica: the scenario has one engine and no replicas. Add replicas to it.")
        every = [*(replicas.get("failures") or []), *self.failures]
        lost = replicas.get("lost") or "fail"
        return changed(scenario, [f"replicas.failures={json.dumps(every)}", f"replicas.lost={lost}"])


def _meets(seed: int, fault: str, number: int, share: float) -> bool:
    return share > 0 and bool(random_stream(seed, f"serve {fault}", block=number).random() < share)


def read_faults(texts: Sequence[str], seed: int) -> Faults:
    """The faults that `texts` ask for, each as FORMS has it. ScenarioError for what is none."""
    faults = Faults(seed)
    for text in texts:
        kind, _, rest = text.strip().partition(" ")
        parts = [part.partition("=") for part in ([kind, *rest.split()] if "=" in kind else rest.split())]
        values = {key: value for key, _, value in parts}
        name = "replica" if "replica" in values else kind
        needed, known = ({"replica", "at"}, {"replica", "at", "for"}) if name == "replica" else ({"p"}, {"p", "for"})
        if name == "error":
            known = {"p"}
        if name not in ("error", "stall", "replica") or len(values) < len(parts) or not needed <= set(values) <= known:
            raise ScenarioError(f"--fault {shown(text)}: is none. Write {FORMS}.")
        if name != "replica" and getattr(faults, name):
            raise ScenarioError(f"--fault {shown(text)}: {name} is asked for twice. Leave one out.")
        try:
            _add(faults, name, values)
        except ValueError as error:
            raise ScenarioError(f"--fault {shown(text)}: {error}") from None
    return faults


def _add(faults: Faults, name: str, values: dict[str, str]) -> None:
    if name == "replica":
        if not values["replica"].isdecimal():
            raise ValueError(f"replica {shown(values['replica'])} is no number from 0 on")
        for key in ("at", "for"):
            parse_duration_ns(values.get(key, "0s"))
        failure = {"replica": int(values["replica"]), "at": values["at"], "down_for": values.get("for", _NEVER)}
        faults.failures.append(failure)
        return
    try:
        share = float(values["p"])
    except ValueError:
        raise ValueError(f"p is {shown(values['p'])}, no number. It must be above 0 and at most 1.") from None
    if not 0 < share <= 1:
        raise ValueError(f"p is {share:g}. It must be above 0 and at most 1.")
    setattr(faults, name, share)
    if name == "stall" and "for" in values:
        faults.stall_ns = parse_duration_ns(values["for"])
        if not faults.stall_ns:
            raise ValueError(f"for is {format_duration(0)}. It must be above 0.")
