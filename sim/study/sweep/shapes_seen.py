"""The sizes of steps that a scenario's traffic makes, and the buckets that waste least on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from batchsim.base.errors import ScenarioError
from batchsim.cost.shapes.best import BucketList, best_buckets, held_by
from batchsim.cost.shapes.lists import pow2
from batchsim.cost.shapes.programs import Phase
from batchsim.cost.shapes.shaped import Shaped
from batchsim.kernel.record import Records
from batchsim.scenario.config import Point, PolicySpec
from batchsim.scenario.point import simulate_point
from batchsim.scenario.setup import Setup


@dataclass(frozen=True)
class SizesSeen:
    """Sizes of one list of buckets: `tokens` or decoding `requests`, each with how many steps had it.

    `best` are the buckets that waste least, `own` what the scenario's shapes have, None without, and `powers` powers of
    two up to the limit.
    """

    name: str
    seen: Mapping[int, int]
    best: BucketList
    own: BucketList | None
    powers: BucketList


def seen_sizes(setup: Setup, spec: PolicySpec, load: float, seeds: Iterable[int], count: int) -> list[SizesSeen]:
    """The sizes of steps under a policy at a load, in all `seeds`: tokens and decoding requests, or tokens alone where
    steps mix both. `count`: buckets of a list at most, the policy's limit among them.

    ScenarioError where several replicas serve, or the shapes have lists of three dimensions.
    """
    if setup.groups:
        raise ScenarioError(
            f"{setup.scenario.places['replicas']}: buckets are found for one engine. Drop replicas, or --set"
            " replicas=null."
        )
    cost = setup.cost_under(spec.config)
    shapes = cost.shapes if isinstance(cost, Shaped) else None
    if shapes is not None and shapes.prompts_apart:
        raise ScenarioError(
            f"shapes {shapes.name}: its buckets have three dimensions, and those of one are found. Take preset: lists."
        )
    prompts, decodes, steps = Counter[int](), Counter[int](), Counter[int]()
    is_mixed = shapes is not None and shapes.mixed is not None
    for seed in seeds:
        is_mixed |= _count(simulate_point(setup, Point(spec, load, seed)).records, prompts, decodes, steps)
    traits, longest = spec.config.traits, setup.max_model_len
    budget = traits.max_num_batched_tokens
    if is_mixed:
        return [_listed("tokens", steps, count, budget, shapes and shapes.prefill)]
    most = None if budget is None else min(budget, longest)
    return [
        _listed("tokens", prompts, count, most, shapes and shapes.prefill),
        _listed("requests", decodes, count, traits.max_num_seqs, shapes and shapes.decode),
    ]


def _count(records: Records, prompts: Counter[int], decodes: Counter[int], steps: Counter[int]) -> bool:
    """Adds the sizes of recorded steps: tokens of those with prompts, rows of those of decodes, tokens of all; returns
    whether any step has both."""
    columns = records.step_columns
    rows, tokens = columns["num_decode_tokens"], columns["num_prefill_tokens"]
    prompts.update(tokens[(tokens > 0) & (rows == 0)].tolist())
    decodes.update(rows[(rows > 0) & (tokens == 0)].tolist())
    both = (rows + tokens)[rows + tokens > 0]
    steps.update(both.tolist())
    return bool(((rows > 0) & (tokens > 0)).any())


def _listed(name: str, seen: Counter[int], count: int, most: int | None, phase: Phase | None) -> SizesSeen:
    limit = max([*seen, most or 0])
    powers = held_by(pow2(1, limit), seen) if limit else BucketList((), 0, 0)
    return SizesSeen(name, dict(sorted(seen.items())), best_buckets(seen, count, most), _own(phase, name, seen), powers)


def _own(phase: Phase | None, name: str, seen: Counter[int]) -> BucketList | None:
    """What the list of a phase makes of the sizes seen; None without one, or where some lie beyond and are not padded.

    Of prompts the tokens, of decodes the requests.
    """
    if not phase:
        return None
    dims = ("requests",) if name == "requests" else ("tokens", "query", "longest")
    place = next(i for i, dim in enumerate(phase.dims) if dim in dims)
    sizes = sorted({bucket[place] for bucket in phase.buckets})
    return None if phase.beyond != "error" and max(seen, default=0) > sizes[-1] else held_by(sizes, seen)


def shapes_of_lists(lists: Iterable[SizesSeen]) -> Mapping[str, object]:
    """The best lists as a scenario writes them: `shapes:`."""
    best = {each.name: list(each.best.buckets) for each in lists}
    return {"preset": "lists", **best} | ({} if "requests" in best else {"mix": True})
