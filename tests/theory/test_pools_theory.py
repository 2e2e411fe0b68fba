"""Prefill and decode apart against queueing theory, within 99 % t-intervals over independent replications.

Service times are drawn by request, as the cost of the one step that a request takes at an engine: answers have one
token, which the prefill engine throws away and the decode engine computes again. KV is unlimited.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from batchsim.drive.fleet.pools import Pools, PrefillCore, simulate_pools
from batchsim.drive.fleet.routing import RoundRobinConfig
from batchsim.drive.fleet.transfer import TransferConfig
from batchsim.kernel.batch import Batch
from batchsim.kernel.core import EngineCore
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.record import FINISHED, Recorder, Records
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.kernel.types import Arrival, Request
from batchsim.kv.choice import new_kv
from batchsim.policies.systems.vllm.connector_config import VllmConnectorConfig
from batchsim.policies.systems.vllm.vllm_connector import VllmConnector
from tests.theory.laws import pollaczek_khinchine_wait
from tests.theory.stations import MAX_MODEL_LEN, Listed, interval
from tests.theory.waits import md1_wait_cdf, quantile

PREFILL_NS, DECODE_NS = 100_000_000, 80_000_000
"""Mean services: long beside the 1 ms after which an engine without a step looks for transfers again."""
RATE = 0.6 / PREFILL_NS
REPLICATIONS, REQUESTS = 10, 1_500
PROMPT, BLOCK_SIZE, BLOCKS = 16, 16, 1 << 20


@dataclass
class Drawn:
    """The step of a request, alone in it, takes as long as was drawn for it, all on the device."""

    services_ns: NDArray[np.int64]

    def lanes(self) -> Drawn:
        return self

    def host_ns(self, batch: Batch | None) -> tuple[int, int]:
        return 0, 0

    def device_ns(self, batch: Batch) -> int:
        return self.step_ns(batch)

    def step_ns(self, batch: Batch) -> int:
        ((seq, _),) = batch.chunks
        return int(self.services_ns[seq.request.id])


@dataclass
class Tandem:
    """One prefill engine and one decode engine, each of one slot, and a link that takes no time."""

    seed: int
    cores: list[EngineCore] = field(default_factory=list[EngineCore])

    def run(self) -> Records:
        """The records of one replication; all requests finish."""
        rng = np.random.default_rng([20_260, self.seed])
        arrivals_ns = np.cumsum(rng.exponential(1 / RATE, REQUESTS)).astype(np.int64)
        costs = [Drawn(np.ceil(rng.exponential(mean, REQUESTS)).astype(np.int64)) for mean in (PREFILL_NS, DECODE_NS)]
        pools = Pools(1, 1, TransferConfig(bandwidth=1e15), BLOCK_SIZE)

        def new_engine(number: int) -> EngineCore:
            role = ("kv_producer", "kv_consumer")[number]
            config = VllmConnectorConfig(
                kv_role=role, max_num_seqs=1, enable_prefix_caching=False, async_scheduling=False
            )
            loop = config.traits.loop
            kv = new_kv(config, BLOCKS, BLOCK_SIZE, ids=False)
            context = PolicyContext(kv, MAX_MODEL_LEN, loop=loop, connector=pools.connector(number))
            pools.records(number, recorder := Recorder())
            executor = SimExecutor(costs[number], MAX_MODEL_LEN, loop)
            options: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN, "loop": loop}
            kind = EngineCore if number else PrefillCore
            return kind(VllmConnector(config, context), executor, recorder, **options)

        asked = [Arrival(Request(i, int(at_ns), PROMPT, 1), 1) for i, at_ns in enumerate(arrivals_ns)]
        records = simulate_pools(new_engine, RoundRobinConfig().build(0), pools, Listed(asked)).records
        assert (records.requests["outcome"] == FINISHED).all()
        return records


def _steady_ms(records: Records) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Of all requests but the first tenth: how long they were at the prefill engine, and how long in all, ms."""
    requests, stays = records.requests, records.replicas.stays  # pyright: ignore[reportOptionalMemberAccess]
    stays = stays[np.argsort(stays["request_id"])]
    first = len(requests) // 10
    at_prefill, whole = stays["end_ns"] - stays["start_ns"], requests["ended_ns"] - requests["sent_ns"]
    return at_prefill[first:] / 1e6, whole[first:] / 1e6


def _tandem_p99_ms(prefill: float, decode: float) -> float:
    """The 99th percentile of a sum of two independent exponentials, of these rates a ms."""

    def cdf(at: float) -> float:
        return 1 - (decode * exp(-prefill * at) - prefill * exp(-decode * at)) / (decode - prefill)

    return quantile(cdf, 0.99, 1e6)


@pytest.mark.slow
def test_exponential_services_are_a_tandem_of_two_queues() -> None:
    """The prefill engine is an M/M/1, the whole one behind another, whose times are independent (Burke 1956, Reich
    1963): mean and 99th percentile are those of a sum of two exponentials, not the means at a tenth, and the percentile
    at a quarter more traffic."""
    runs = [_steady_ms(Tandem(seed).run()) for seed in range(REPLICATIONS)]
    rates, more, most = ([1e6 * (1 / s - by * RATE) for s in (PREFILL_NS, DECODE_NS)] for by in (1, 1.1, 1.25))
    prefill = interval([float(run[0].mean()) for run in runs])
    assert 1 / rates[0] in prefill and 1 / more[0] not in prefill
    mean = interval([float(run[1].mean()) for run in runs])
    assert sum(1 / rate for rate in rates) in mean and sum(1 / rate for rate in more) not in mean
    p99 = interval([float(np.quantile(run[1], 0.99)) for run in runs])
    assert _tandem_p99_ms(*rates) in p99 and _tandem_p99_ms(*most) not in p99


def _link_waits(seed: int, links: str = "shared") -> NDArray[np.float64]:
    """How long transfers of one size wait for their link, in transfers, where Poisson arrivals keep it busy for 0.7 of
    the time."""
    pools = Pools(1, 2, TransferConfig(bandwidth=1e9, links=links), 1_000_000)  # pyright: ignore[reportArgumentType]
    for number in range(3):
        pools.connector(number)
    rng = np.random.default_rng([20_261, seed])
    waits: list[float] = []
    for i, at_ns in enumerate(np.cumsum(rng.exponential(1e6 / 0.7, 20_000)).astype(np.int64).tolist()):
        pools.kept_at[i] = 0, 0
        pools._ends[0]._kept[i] = None  # pyright: ignore
        start_ns, end_ns = pools.begin(i, 1 + i % 2, 1, at_ns)
        assert end_ns - start_ns == 1_000_000
        waits.append((start_ns - at_ns) / 1e6)
    return np.array(waits[2_000:])


@pytest.mark.slow
def test_a_shared_link_is_an_m_d_1() -> None:
    """Transfers of one size that begin at Poisson times: mean and 99th percentile of the wait are those of M/D/1 by
    Pollaczek and Khinchine, and Erlang. With a link for each pair the same traffic waits less."""
    waits = [_link_waits(seed) for seed in range(REPLICATIONS)]
    mean = interval([float(each.mean()) for each in waits])
    assert pollaczek_khinchine_wait(0.7, np.ones(1)) in mean
    assert pollaczek_khinchine_wait(0.77, np.ones(1)) not in mean
    p99 = quantile(lambda wait: md1_wait_cdf(0.7, wait), 0.99, 30.0)
    assert p99 in interval([float(np.quantile(each, 0.99)) for each in waits])
    apart = interval([float(_link_waits(seed, "per_pair").mean()) for seed in range(REPLICATIONS)])
    assert apart.mean + apart.half_width < 0.3 * pollaczek_khinchine_wait(0.7, np.ones(1))
