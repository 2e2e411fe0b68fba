"""Does the search of a plan find what looking at everything finds?

    python -m tests.search_check [SCENARIO] [--set KEY=VALUE ...] [--draws 10] [--first 0] [--jobs 2]

For each draw of the requests (other seeds, none in two draws) it runs the plan's search, then decides every
configuration with all seeds on the whole window, from one replica up, until it holds or costs more than the cheapest
that does. It prints both winners, what they cost and how many requests either simulated, and exits with 1 where fewer
than 9 of 10 draws agree; `--first` goes on from a draw. Without a scenario: the shipped `search` with 60 configurations
and a window of a minute.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from batchsim.cli.common import one_line_errors
from batchsim.scenario import Scenario, load_scenario
from batchsim.study.planning.demand import demand_of
from batchsim.study.planning.fleet_search import judge
from batchsim.study.planning.money import cost_per_hour
from batchsim.study.planning.probe import Ask, Book, GroupProbe, drive, with_replicas
from batchsim.study.planning.searched import search
from batchsim.study.planning.space import Space, space_of
from batchsim.study.sweep.points import Sweep

SIXTY = (
    "plan.window=60s",
    "plan.free={gpu: [h100, h200, l40s], weights: [bfloat16, fp8],"
    " max_num_batched_tokens: [1024, 2048, 4096, 8192, 16384]}",
)
AGREED = 0.9
_SAME = 1e-9  # relative: two costs that differ by less are the same

Winner = tuple[Any, float]
"""The cheapest group that holds, None where none does, and its price an hour."""


def searched(book: Book, space: Space) -> Winner:
    """The winner of the plan's own search."""
    found = search(book, space)
    group = None if found.best is None else found.group(found.best)
    return group, 0.0 if group is None else cost_per_hour(book.offer(group), group.replicas)


def exhaustive(book: Book, space: Space) -> Winner:
    """The winner where every configuration is decided by all seeds on the whole window."""
    price = {group: cost_per_hour(book.offer(group), 1) for group in space.groups}
    holding: list[GroupProbe] = []
    ceiling = float("inf")
    for replicas in range(1, book.demand.plan.max_replicas + 1):
        held = {with_replicas(probe.ask.group, 1) for probe in holding}
        groups = [group for group in space.groups if group not in held]
        groups = [group for group in groups if price[group] * replicas <= ceiling * (1 + _SAME)]
        asks = [Ask(with_replicas(group, replicas)) for group in groups]
        holding += [probe for probe in drive(book, [judge(book, ask) for ask in asks]) if probe.met]
        costs = [price[with_replicas(probe.ask.group, 1)] * probe.ask.group.replicas for probe in holding]
        ceiling = min(costs, default=ceiling)
    cheapest = [probe for probe, cost in zip(holding, costs, strict=True) if cost <= ceiling * (1 + _SAME)]
    best = max(cheapest, key=lambda probe: probe.margin.low or 0.0, default=None)
    return (None, 0.0) if best is None else (best.ask.group, ceiling)


def check(scenario: Scenario, draws: int, jobs: int, first: int = 0) -> int:
    """How many of the draws from `first` on agree: on the group, or on its price where others of it hold too."""
    space, agreed = space_of(scenario), 0
    demand = demand_of(scenario)
    typer.echo(
        f"{len(space.groups)} configurations, {scenario.file.seeds} seeds a draw, window {demand.plan.window / 1e9:g} s"
    )
    for draw in range(first, first + draws):
        winners, took = list[Winner](), list[str]()
        for find in (searched, exhaustive):
            begun = time.monotonic()
            with tempfile.TemporaryDirectory() as folder:  # the two share nothing
                book = Book(demand, Sweep(Path(folder) / "r", jobs=jobs), first_seed=draw * scenario.file.seeds)
                winners.append(find(book, space))
            points = sum(map(len, book.results.values()))
            took.append(f"{points} points in {time.monotonic() - begun:.0f} s")
        (ours, price), (other, least) = winners
        same = abs(price - least) <= _SAME * max(least, 1)
        agreed += same
        group = f"{ours}" if ours == other else f"{ours} beside {other}"
        word = "same" if same else "OTHER"
        typer.echo(f"draw {draw}: {word} price {price:.2f} beside {least:.2f}: {group}; {' beside '.join(took)}")
    typer.echo(f"{agreed} of {draws} draws agree")
    return agreed


@one_line_errors
def main(
    scenario: Annotated[str, typer.Argument(help="A scenario whose plan searches.")] = "search",
    set_: Annotated[list[str] | None, typer.Option("--set", help="Changes a key.")] = None,
    draws: Annotated[int, typer.Option(min=1, help="Draws of the requests.")] = 10,
    first: Annotated[int, typer.Option(min=0, help="The first draw.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = 2,
) -> None:
    """Compares the search with looking at everything."""
    changes = [*(SIXTY if scenario == "search" else ()), *(set_ or [])]
    loaded = load_scenario(scenario, overrides=changes)
    if check(loaded, draws, jobs, first) < AGREED * draws:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
