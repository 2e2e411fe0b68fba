"""KV of layers with a window in a pool of their own, stated or derived."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchsim.base.errors import ScenarioError
from batchsim.base.kv_pools import KvPools
from batchsim.deployment.catalog import GPUS
from batchsim.deployment.deployment import Deployment
from batchsim.deployment.models import read_model
from batchsim.drive.simulate import simulate
from batchsim.kv.pooled_radix import PooledRadixKV
from batchsim.kv.windows import PooledKV
from batchsim.policies.systems.sglang.sglang_config import SglangConfig
from batchsim.scenario.config import Scenario
from batchsim.scenario.parse import parse_scenario
from batchsim.scenario.setup import Setup

TEXT = """\
model: llama-3.1-8b
cost: {kind: roofline, gpu: h100}
kv: {tokens: 40000, block_size: 1, pools: {window: 128, window_tokens: 20000}}
workload:
  arrivals: {kind: poisson, mean_rate: 20/s}
  lengths:
    prompt: {kind: fixed, tokens: 600}
    output: {kind: uniform, min: 2, max: 60}
  output_cap: 60
  requests: 40
policies:
  sglang: {}
slo: ttft<1s & tpot<50ms @ 99%
seeds: 1
max_model_len: 4096
"""


def load_text(text: str) -> Scenario:
    return parse_scenario(text, "pools.yaml", Path())


def test_stated_pools_are_simulated_and_said_in_the_heading() -> None:
    """40,000 tokens and 20,000 of windows; at the end all of both are free."""
    setup = Setup.of(load_text(TEXT))
    assert str(setup.kv).endswith("stated in the scenario), and beside them windows of 128: 20,000 tokens")
    workload = setup.workload(setup.loads[0], 0)
    core = setup.engine(setup.scenario.specs[0], workload)
    simulate(core, workload)
    kv = core.scheduler.kv
    assert isinstance(kv, PooledRadixKV)
    assert (kv.num_free, kv.windows.available) == (40_000, 20_000)
    assert len(core.recorder.records().requests) == 40


def test_without_a_radix_cache_pages_are_counted() -> None:
    """The kind of manager is by the policy."""
    setup = Setup.of(load_text(TEXT.replace("sglang: {}", "sglang: {disable_radix_cache: true}")))
    assert isinstance(setup.new_kv(setup.scenario.specs[0].config), PooledKV)


def test_a_deployment_of_sglang_divides_its_memory_where_sglang_alone_schedules() -> None:
    """0.8 tokens of windows for each other one; where other policies run too, one pool as before."""
    pytest.importorskip("aiconfigurator_core", reason="aiconfigurator-core (extra gpus) is not installed")
    deployed = TEXT.replace("llama-3.1-8b", "openai/gpt-oss-20b").replace("tokens: 40000, ", "")
    deployed = deployed.replace("cost: {kind: roofline, gpu: h100}", "deployment: {engine: sglang, gpu: h200}")
    deployed = deployed.replace(", pools: {window: 128, window_tokens: 20000}", "")
    kv = Setup.of(load_text(deployed)).kv
    assert kv.pools == KvPools(128, int(0.8 * kv.num_blocks))
    assert Setup.of(load_text(deployed.replace("sglang: {}", "sglang: {}\n  vllm: {}"))).kv.pools is None


def test_windows_that_find_nothing_again_have_what_they_ever_need() -> None:
    """8 requests of 127 + 128 + 2 tokens, two chunks of 8,192 and a page; the rest is for the other layers."""
    engine = Deployment(read_model("openai/gpt-oss-20b"), GPUS["h200"], "sglang")
    bounded = SglangConfig(disable_radix_cache=True, max_running_requests=8).traits.windows
    budget = engine.derive_kv(block_size=1, room_bytes=10**10, apart=True, windows=bounded)
    tokens = 8 * (127 + 128 + 2) + 2 * 8192 + 1
    assert budget.pools == KvPools(128, tokens)
    assert budget.num_blocks == (10**10 - tokens * 24_576) // 24_576


def test_states_have_nine_nineteenths_or_what_they_ever_need() -> None:
    """Of 19 GB 9 are for states of 154 MB, of which one pads; without a radix cache 8 requests have 8 and the padding,
    and the tokens the rest."""
    engine = Deployment(read_model("Qwen/Qwen3.5-27B"), GPUS["h200"], "sglang")
    state, token = 48 * 3_207_168, 65_536
    budget = engine.derive_kv(block_size=1, room_bytes=19 * 10**9, apart=True)
    assert budget.pools == KvPools(states=9 * 10**9 // state - 1, extra_buffer=True)
    assert budget.num_blocks == 10**10 // token
    bounded = SglangConfig(disable_radix_cache=True, max_running_requests=8).traits.windows
    budget = engine.derive_kv(block_size=1, room_bytes=10**10, apart=True, windows=bounded, prefix_cache=False)
    assert budget.pools == KvPools(states=8)
    assert budget.num_blocks == (10**10 - 9 * state) // token


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (("sglang: {}", "vllm: {}"), "Vllm with a pool of windows apart is not simulated. Use sglang"),
        (
            ("sglang: {}", "sglang: {speculative_algorithm: NGRAM, acceptance: 0.5}"),
            "Sglang with drafts with a pool of windows apart is not simulated",
        ),
        (("20000", "10000"), "10,000 tokens of windows are fewer than 16,517"),
        (("tokens: 40000, ", "memory: 10GB, "), "pools are beside that of tokens"),
        (("window: 128", "window: 1"), "window is 1. It must be from 2"),
        (("window: 128, ", ""), "window and window_tokens go together"),
        (("window: 128, ", "states: 9, window: 128, "), "pools are of windows or of states"),
        (("window: 128, window_tokens: 20000", "window: 128, window_tokens: 20000, extra_buffer: true"), "of states"),
        (("window: 128, window_tokens: 20000", "states: 9, slide_every: 4"), "slide_every is of windows"),
    ],
)
def test_what_is_not_simulated_is_one_line(change: tuple[str, str], complaint: str) -> None:
    """With the place, and what to do."""
    with pytest.raises(ScenarioError, match=r"^.*pools\.yaml.*") as caught:
        Setup.of(load_text(TEXT.replace(*change)))
    assert complaint in str(caught.value)
