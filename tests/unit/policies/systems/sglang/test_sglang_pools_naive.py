"""The SGLang policy with a pool of windows against plain loops over lists, step by step on random runs."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from batchsim.base.errors import ScenarioError
from batchsim.base.kv_pools import KvPools
from batchsim.kernel.batch import Batch, Idle
from batchsim.kernel.kv_blocks import CountingKV
from batchsim.kernel.types import Arrival
from batchsim.kv.pooled_radix import PooledRadixKV
from batchsim.kv.radix_cache import RadixKV
from batchsim.kv.windows import PooledKV
from batchsim.policies.systems.sglang.sglang import Sglang
from batchsim.policies.systems.sglang.sglang_config import SglangConfig
from tests.plain.sglang_pools import NaivePools
from tests.support.random_cases import few_and_many, random_cases
from tests.support.stepping import Logged, crowds, run
from tests.support.whole_batches import MAX_MODEL_LEN
from tests.unit.policies.systems.sglang.test_sglang_naive import KNOBS, texts

Found = tuple[int, list[tuple[int, int]], list[int], int, int]
"""Start in ns, work, retracted, free pages of either pool: those that can be evicted are free."""


class Watched(Logged):
    """A scheduler whose pools are proved whole before each call; keeps what of the windows is available then."""

    windows: list[int]

    def schedule(self, now_ns: int, drain: bool) -> Batch | Idle:
        self.inner.kv.check()
        work = super().schedule(now_ns, drain)
        if isinstance(work, Batch):
            self.windows.append(self.inner.kv.windows.available)
        return work


def compared(config: SglangConfig, arrivals: list[Arrival], blocks: int, page: int, pools: KvPools) -> list[Found]:
    """The steps, after proving them those of the plain loops."""
    made: list[Watched] = []

    def policy(config: Any, context: Any) -> Watched:
        made.append(Watched(Sglang(config, context)))
        made[0].windows = []
        return made[0]

    kv = PooledRadixKV if config.traits.prefix_cache else PooledKV
    log = run(policy, config, arrivals, kv=lambda n, size, swap: kv(n, size, pools), blocks=blocks, block_size=page).log
    rows = zip(log, made[0].windows, strict=True)
    found: list[Found] = [(row.start_ns, row.items, row.preempted, row.free, windows) for row, windows in rows]
    naive = NaivePools(config, arrivals, blocks, page, pools, MAX_MODEL_LEN)
    expected = [(*step, windows) for step, windows in zip(naive.steps(), naive.windows, strict=True)]
    assert found == expected
    at_rest = made[0].inner.kv
    assert at_rest.windows.available == at_rest.windows.num_blocks
    return found


POOLS = st.sampled_from([(11, 4), (40, 1), (20, 4), (26, 2), (60, 1)])
WINDOWS = st.builds(
    KvPools,
    window=st.sampled_from([2, 3, 6, 9]),
    window_tokens=st.integers(24, 80),
    slide_every=st.sampled_from([1, 2, 5]),
)


def _alike(knobs: dict[str, Any], arrivals: list[Arrival], pool: tuple[int, int], pools: KvPools) -> None:
    """Step by step the same work in the same order, retractions and free pages of both pools, where SGLang starts."""
    try:
        config = SglangConfig(**knobs)
        compared(config, arrivals, *pool, pools)
    except (ValueError, ScenarioError):
        return


test_the_steps_are_those_of_the_plain_loops, test_they_are_so_in_many_more_cases = few_and_many(
    _alike, st.fixed_dictionaries(KNOBS), texts(), POOLS, WINDOWS, few=100, many=2000
)


@random_cases(40)
@given(st.fixed_dictionaries(KNOBS), crowds(), POOLS)
def test_windows_that_are_never_short_change_nothing(
    knobs: dict[str, Any], arrivals: list[Arrival], pool: tuple[int, int]
) -> None:
    """Prompts that share nothing, beside a pool of windows for all their tokens: the steps are those of one pool."""
    try:
        config = SglangConfig(**knobs)
    except ValueError:
        return
    blocks, page = pool
    pools = KvPools(5, 10_000, 3)
    one, two = (RadixKV, PooledRadixKV) if config.traits.prefix_cache else (CountingKV, PooledKV)
    setting: dict[str, Any] = {"blocks": blocks, "block_size": page}
    apart = run(Sglang, config, arrivals, kv=lambda n, size, swap: two(n, size, pools), **setting)
    assert apart.log == run(Sglang, config, arrivals, kv=one, **setting).log
