"""The steps of one attention group of several that share a model's experts, apart from what the experts take.

A profile of `dp_attention` groups is over the tokens of all of them, divided evenly. Where they are not, a pass of all
groups takes

    max over groups (what the group's own batch takes without experts) + experts(tokens of all groups)

since dispatch has all groups wait for the slowest before the experts of a layer, and each expert computes the tokens of
all. Waits of single layers, which could be longer together than that of the pass, are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from batchsim.cost.calibrated import Calibrated
from batchsim.cost.interpolation import Curve, Grid
from batchsim.cost.profile import ChunkGrid, Hull, Recurrence, StepCosts, WindowedAttention


def of_one_group(cost: Calibrated) -> Calibrated:
    """`cost`, of a profile of several attention groups, for the batch of one of them: over its own tokens, sequences
    and rows, and without what `experts_ns` says. ValueError if the profile does not hold experts apart."""
    profile = cost.profile
    setup, costs, hull = profile.setup, profile.costs, profile.hull
    if setup is None or costs.experts is None:
        raise ValueError(f"profile {profile.name} does not hold experts apart")
    groups = setup.dp_attention
    reach = Hull(hull.max_sequences // groups, hull.max_tokens // groups, hull.max_context, hull.max_chunk_context)
    return cost.of(replace(profile, costs=_own(costs, groups), hull=reach), cost.host)


def _own(costs: StepCosts, groups: int) -> StepCosts:
    experts, windowed, recurrence = costs.experts, costs.windowed, costs.recurrence
    assert experts is not None and costs.decode is not None, "profiles of tables have both"
    per_pair = costs.chunk_attention.per_pair * groups
    return replace(
        costs,
        layers=_curve(_without(costs.layers, experts.layers), groups),
        head=_curve(costs.head, groups),
        decode=_curve(_without(costs.decode, experts.decode), groups),
        decode_attention=_grid(costs.decode_attention, groups),
        chunk_attention=replace(costs.chunk_attention, per_pair=per_pair),
        chunk_grid=costs.chunk_grid and _grid(costs.chunk_grid, groups),
        more_chunks=tuple(
            ChunkGrid(more.chunks // groups, _grid(more.grid, groups))
            for more in costs.more_chunks
            if more.chunks > groups
        ),
        windowed=windowed
        and WindowedAttention(windowed.window, _grid(windowed.decode, groups), _grid(windowed.chunks, groups)),
        recurrence=recurrence
        and Recurrence(
            replace(_grid(recurrence.scan, groups), context=_divided(recurrence.scan.context, groups)),
            _curve(recurrence.update, groups),
        ),
    )


def _without(whole: Curve, part: Curve) -> Curve:
    """`whole` less `part`, at the knots of both; its end is lifted to where it does not fall."""
    knots = sorted({*whole.x, *part.x})
    ns = [max(whole.at_one(x) - part.at_one(x), 0.0) for x in knots]
    ns[-1] = max(ns[-2:])
    return Curve(tuple(knots), tuple(ns))


def _curve(curve: Curve, groups: int) -> Curve:
    return Curve(_divided(curve.x, groups), curve.ns)


def _grid(grid: Grid, groups: int) -> Grid:
    return replace(grid, sequences=tuple(n // groups for n in grid.sequences))


def _divided(knots: Sequence[float], groups: int) -> tuple[float, ...]:
    return tuple(x / groups for x in knots)
