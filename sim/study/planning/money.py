"""What a group costs: by the month, by the token, in energy; and how the bill is shared among classes of requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from batchsim.results.point_files import read_table

HOURS_A_MONTH = 730.0  # 365 days / 12
J_PER_KWH = 3.6e6
MILLION = 1e6


@dataclass(frozen=True)
class Bought:
    """What a group's replicas are bought as: `gpus` of a `price` an hour each, of a replica or of a set of prefill and
    decode engines, and `memory` of its host, whose price an hour is of all of it."""

    price: float
    gpus: int
    memory: float = 0.0


def cost_per_hour(bought: Bought, replicas: int) -> float:
    """The price of all GPUs of a group, and of its hosts' memory where that has one, for an hour, used or not, in the
    plan's currency."""
    return (bought.price * bought.gpus + bought.memory) * replicas


def cost_per_month(bought: Bought, replicas: int) -> float:
    """The price of a group for a month."""
    return cost_per_hour(bought, replicas) * HOURS_A_MONTH


def memory_per_hour(num_bytes: int, gb_month: float) -> float:
    """The price an hour of memory that costs `gb_month` a GB a month."""
    return num_bytes / 1e9 * gb_month / HOURS_A_MONTH


def gpu_price_at(bought: Bought, replicas: int, cost: float) -> float | None:
    """The price an hour of a GPU at which the group costs `cost` an hour; None if its memory alone costs more."""
    price = (cost / replicas - bought.memory) / bought.gpus
    return price if price >= 0 else None


def tokens_per_month(peak_rps: float, mean_share: float, output_tokens: float) -> float:
    """Output tokens that the traffic asks for in a month of rounds like the one planned for."""
    return peak_rps * mean_share * output_tokens * HOURS_A_MONTH * 3600


def tier_replicas(counts: Sequence[int | None]) -> list[int]:
    """Replicas that hold each class and the more important ones, from the search results of each such set.

    A group that holds more classes holds these as well, so each count is the least of its own and of all that follow:
    the counts never fall, and what a class adds is never negative. `counts` has
    None where a search found no group; the last count is never None.
    """
    least = [count for count in counts[-1:] if count is not None]
    assert least, "the group that holds all classes"
    for count in reversed(counts[:-1]):
        least.append(least[-1] if count is None else min(count, least[-1]))
    return least[::-1]


def energy_kwh(joules_a_token: float | None) -> float | None:
    """kWh per million tokens; None where joules a token are unknown."""
    return None if joules_a_token is None else joules_a_token * MILLION / J_PER_KWH


def shares_by_use(folder: Path, names: tuple[str, ...]) -> dict[str, float]:
    """The share of the engines' step time that each class used.

    A decoded token takes the mean time of one in the steps that decode alone; what is left of all steps' time is the
    prompts', by their computed tokens. Rejected requests used nothing.
    """
    requests, steps = read_table(folder, "requests"), read_table(folder, "steps")
    ns, decodes = steps["duration_ns"].to_numpy(), (steps["num_decode"] + steps["num_accepted_tokens"]).to_numpy()
    alone = (steps["num_prefill_tokens"].to_numpy() == 0) & (decodes > 0)
    decode_ns = ns[alone].sum() / decodes[alone].sum() if alone.any() else 0.0
    request_class = np.asarray(requests["request_class"].astype(str))
    ran = np.asarray(requests["scheduled_ns"].notna())
    output = np.where(ran, requests["output_tokens"].to_numpy(), 0)
    prompt = requests["prompt_tokens"].to_numpy() - requests["cached_tokens"].to_numpy()
    prompt = np.where(ran, prompt + requests["recomputed_tokens"].to_numpy(), 0)
    left_ns = max(float(ns.sum() - decode_ns * decodes.sum()), 0.0)
    used = {}
    for name in names:
        of_class = request_class == name
        used[name] = decode_ns * float(output[of_class].sum()) + left_ns * float(prompt[of_class].sum()) / max(
            prompt.sum(), 1
        )
    whole = sum(used.values())
    return {name: part / whole if whole else 0.0 for name, part in used.items()}
