"""Numbers of replicas of the recommended kind, each with the trouble that it survives and its price."""

from __future__ import annotations

from batchsim.study.planning.configurations import Row, replicas_of
from batchsim.study.planning.fleet_search import SmallestGroup
from batchsim.study.planning.make import GROWN, Planned
from batchsim.study.planning.money import cost_per_month

CHEAPEST = "cheapest"
CASES = {"grown": GROWN, "lost": "a lost replica", "slow": "slower steps"}
"""By column, the trouble that a number of replicas survives or does not."""


def choices(planned: Planned) -> list[Row]:
    """A row for each number of replicas that some trouble asks for, the fewest first; none where nothing holds.

    Whether they hold with more traffic, with one lost, and with steps as long as the cost's error allows: True from the
    fewest on that were shown to; None where that is not known.
    """
    if planned.best is None:
        return []
    held = planned.holding(planned.best)
    group, offer = held.ask.group, planned.book.offer(held.ask.group)
    fewest = _fewest(planned, planned.best, group.replicas)
    rows: list[Row] = []
    survived: list[str] = []
    for replicas in sorted({group.replicas, *(number for number in fewest.values() if number is not None)}):
        holds = {case: replicas >= number if number is not None else False for case, number in fewest.items()}
        added = [CASES[case] for case in fewest if holds[case] and case not in survived]
        survived += [case for case in fewest if holds[case]]
        rows.append(
            {
                "gpu": group.gpu,
                "policy": group.name,
                "replicas": replicas,
                "forecast": True,
                **{case: holds.get(case) for case in CASES},
                "cost_per_month": cost_per_month(offer, replicas),
                "choice": CHEAPEST if not rows else f"to survive {_listed(added)}",
            }
        )
    return rows


def _listed(names: list[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def _fewest(planned: Planned, best: int, replicas: int) -> dict[str, int | None]:
    """By case the fewest replicas shown to survive it, None where none did; a case that was not tried is left out."""
    fewest: dict[str, int | None] = {}
    if isinstance(grown := planned.changed.get((best, GROWN)), SmallestGroup):
        fewest["grown"] = replicas_of(grown)
    fewest["lost"] = replicas + 1
    if best in planned.at_error:
        fewest["slow"] = replicas_of(planned.at_error[best][1])
    return fewest
