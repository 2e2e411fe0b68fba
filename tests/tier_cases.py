"""Many random runs of engines with KV in the memory of their host: what is conserved, and the steps of plain loops.

    python -m tests.tier_cases [--check CHECK ...] [--cases 1000] [--seed 0] [--slices 1]

`CHECK` is one of those below, by default all. A slice has a seed of its own, and prints a line once it is through: the
check, the seed, how many runs there were and their CPU time. The first run that fails ends it, with that run in the
smallest form found.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from tests.unit.metrics import test_tiers
from tests.unit.policies.systems.sglang import test_sglang_hicache_naive
from tests.unit.policies.systems.tensorrt_llm import test_tensorrt_llm_host
from tests.unit.policies.systems.vllm import test_vllm_lmcache, test_vllm_lmcache_layers

Check = tuple[Callable[..., None], tuple[st.SearchStrategy[Any], ...]]

CHECKS: dict[str, Check] = {
    "vllm": (test_tiers.is_conserved, (test_tiers.CASES,)),
    "hicache": (test_sglang_hicache_naive.conserved, test_sglang_hicache_naive.MORE_CASES),
    "lmcache": (test_vllm_lmcache.conserved, test_vllm_lmcache.MORE_CASES),
    "lmcache-layers": (test_vllm_lmcache.conserved, test_vllm_lmcache_layers.MORE_CASES),
    "tensorrt_llm": (test_tensorrt_llm_host.conserved, test_tensorrt_llm_host.MORE_CASES),
    "hicache-loops": (test_sglang_hicache_naive.compared, test_sglang_hicache_naive.CASES),
    "lmcache-loops": (test_vllm_lmcache.compared, test_vllm_lmcache.CASES),
    "lmcache-layers-loops": (test_vllm_lmcache_layers.compared, test_vllm_lmcache_layers.CASES),
    "tensorrt_llm-loops": (test_tensorrt_llm_host.compared, test_tensorrt_llm_host.CASES),
}
"""By name: what each run is held to, and of what runs are drawn. `-loops`: against plain loops, step by step; the
others check what is conserved."""


SLOW = (HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large)


def checked(name: str, cases: int, seed_: int) -> int:
    """Holds `cases` random runs to the check `name`; returns how many there were, which may be a few less."""
    check, drawn = CHECKS[name]
    count = 0

    @seed(seed_)
    @settings(max_examples=cases, database=None, deadline=None, suppress_health_check=SLOW)
    @given(st.tuples(*drawn))
    def run(case: tuple[Any, ...]) -> None:
        nonlocal count
        check(*case)
        count += 1

    run()
    return count


def main() -> None:
    """Prints a line a slice."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", choices=list(CHECKS), action="append", help="one of them alone")
    parser.add_argument("--cases", type=int, default=1000, help="runs of a slice")
    parser.add_argument("--seed", type=int, default=0, help="of the first slice; those of others count up from it")
    parser.add_argument("--slices", type=int, default=1)
    options = parser.parse_args()
    for seed_ in range(options.seed, options.seed + options.slices):
        for name in options.check or CHECKS:
            start_s = time.process_time()
            count = checked(name, options.cases, seed_)
            print(f"{name}: seed {seed_}, {count} runs, {time.process_time() - start_s:.0f} s of CPU", flush=True)


if __name__ == "__main__":
    main()
