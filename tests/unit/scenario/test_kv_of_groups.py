"""KV of several groups of layers, stated in a scenario."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchsim.base.errors import ScenarioError
from batchsim.drive.simulate import simulate
from batchsim.kernel.record import Records
from batchsim.kv.grouped import GroupedKV
from batchsim.kv.grouped_cache import GroupedHashKV
from batchsim.scenario.config import Scenario
from batchsim.scenario.parse import parse_scenario
from batchsim.scenario.setup import Setup

STATES = "{kind: state, block_size: 64, states: 1}"
GROUPS = f"[{{kind: full, block_size: 64}}, {STATES}, {STATES}]"
TEXT = f"""\
model: llama-3.1-8b
cost: {{kind: roofline, gpu: h100}}
kv: {{num_blocks: 101, groups: {GROUPS}}}
workload:
  arrivals: {{kind: poisson, mean_rate: 20/s}}
  lengths:
    prompt: {{kind: fixed, tokens: 600}}
    output: {{kind: uniform, min: 2, max: 60}}
  output_cap: 60
  requests: 60
policies:
  vllm: {{enable_prefix_caching: false}}
slo: ttft<1s & tpot<50ms @ 99%
seeds: 1
max_model_len: 4096
"""


def load_text(text: str) -> Scenario:
    return parse_scenario(text, "groups.yaml", Path())


def changed(old: str, new: str) -> str:
    assert TEXT.count(old) == 1, old
    return TEXT.replace(old, new)


def records(text: str) -> tuple[Setup, Records]:
    scenario = load_text(text)
    setup = Setup.of(scenario)
    workload = setup.workload(1.0, 0)
    core = setup.engine(scenario.specs[0], workload)
    simulate(core, workload)
    core.check_returned()
    return setup, core.recorder.records()


def test_the_heading_says_what_a_request_holds() -> None:
    """101 blocks, one of which is never handed out; 98 of them hold 6,272 tokens of one request."""
    setup = Setup.of(load_text(TEXT))
    assert str(setup.kv) == (
        "KV 100 blocks for 3 groups of layers (1 × full in blocks of 64, 2 × 1 state; stated in the scenario):"
        " 1 block for 64 tokens, and 128 tokens' worth a request"
    )
    assert (setup.kv.tokens, setup.kv.block_size, setup.kv.alignment) == (6272, 64, 64)
    kv = setup.new_kv(setup.scenario.specs[0].config)
    assert isinstance(kv, GroupedKV) and kv.num_blocks == 100


def test_memory_is_in_blocks_of_their_bytes() -> None:
    setup = Setup.of(load_text(changed("num_blocks: 101", "memory: 1GB, block_bytes: 4000000")))
    assert setup.kv.num_blocks == 249
    assert "62,500 B a token" in str(setup.kv)


def test_a_prefix_cache_has_states_that_are_aligned() -> None:
    text = TEXT.replace("states: 1", "states: 2, aligned: true").replace("{enable_prefix_caching: false}", "{}")
    setup = Setup.of(load_text(text))
    assert isinstance(setup.new_kv(setup.scenario.specs[0].config), GroupedHashKV)


MISTAKES = {
    "tokens": ("num_blocks: 101", "num_blocks: 101, tokens: 9", "tokens is not read beside groups"),
    "block_size": ("num_blocks: 101", "num_blocks: 101, block_size: 64", "block_size 64 is not read beside groups"),
    "no_pool": ("num_blocks: 101, ", "", "groups share a pool. Write its num_blocks, or memory and block_bytes"),
    "two_pools": ("num_blocks: 101", "num_blocks: 101, memory: 1GB", "groups share a pool"),
    "no_bytes": ("num_blocks: 101", "memory: 1GB", "memory of groups is in blocks of block_bytes bytes"),
    "null_alone": ("num_blocks: 101", "num_blocks: 1", "one block is never handed out"),
    "swap": ("num_blocks: 101", "num_blocks: 101, swap_space: 1GB", "swap_space is not read beside groups"),
    "share": ("num_blocks: 101", "num_blocks: 101, utilisation: 90%", "utilisation is not read beside groups"),
    "no_groups": (f", groups: {GROUPS}", "", "num_blocks is of groups, and there are none"),
    "other_key": ("kind: full,", "kind: full, size: 3,", "size is not a field of kv.groups.0"),
    "other_kind": ("kind: full,", "kind: half,", "kv.groups.0.kind is"),
    "policy": ("vllm: {enable_prefix_caching: false}", "sglang: {}", "Sglang with groups of layers is not simulated"),
    "cached": ("{enable_prefix_caching: false}", "{}", "prefix caching of states that are kept nowhere finds nothing"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line(mistake: str) -> None:
    old, new, said = MISTAKES[mistake]
    with pytest.raises(ScenarioError) as raised:
        Setup.of(load_text(changed(old, new)))
    message = str(raised.value)
    assert said in message and "\n" not in message


def test_a_real_run_of_groups_is_refused() -> None:
    with pytest.raises(ScenarioError, match=r"a model with groups of KV blocks can only be simulated, .*\.$"):
        Setup.of(load_text(TEXT)).check_can_be_real()


def test_a_hybrid_engine_has_room_for_more_requests_of_a_kind_than_a_dense_one_of_the_same_memory() -> None:
    """As many bytes: of the dense model's four groups of full attention each request of 600 tokens takes 40 blocks of
    100, of the hybrid's one and three states 13: the one runs 2 at a time, the other 7, whose steps read as much."""
    full = "{kind: full, block_size: 64}"
    setup, dense = records(changed(GROUPS, f"[{full}, {full}, {full}, {full}]"))
    _, hybrid = records(changed(GROUPS, f"[{full}, {STATES}, {STATES}, {STATES}]"))
    assert (dense.steps["num_running"].max(), hybrid.steps["num_running"].max()) == (2, 7)
    assert dense.requests["last_token_ns"].max() > 1.5 * hybrid.requests["last_token_ns"].max()
    assert setup.kv.num_blocks == dense.steps["free_blocks"].max() + 40  # of the one request that runs then


@pytest.mark.parametrize("per_request", ["500GB", "2GB"])
def test_more_beside_the_tokens_than_can_be_is_one_line(per_request: str) -> None:
    """Of a request that cannot fit, and of one that would be millions of blocks."""
    kv = f"{{memory: 10GB, per_token: 1B, per_request: {per_request}}}"
    with pytest.raises(ScenarioError) as raised:
        Setup.of(load_text(changed(f"{{num_blocks: 101, groups: {GROUPS}}}", kv)))
    message = str(raised.value)
    assert "kv.per_request: " in message and "at most 10,000 are possible here" in message and "\n" not in message


def test_a_prefix_cache_of_requests_with_a_state_by_two_numbers_is_one_line() -> None:
    """Which speaks of what the scenario has: there are no groups in it whose states could be aligned."""
    kv = "{memory: 10GB, per_token: 65536B, per_request: 1MB}"
    text = changed(f"{{num_blocks: 101, groups: {GROUPS}}}", kv)
    assert Setup.of(load_text(text)).kv.layout is not None
    with pytest.raises(ScenarioError) as raised:
        Setup.of(load_text(text.replace("{enable_prefix_caching: false}", "{}")))
    message = str(raised.value)
    assert ": kv.per_request: 1,000,000 B of a request are its state" in message
    assert message.endswith("so that prefix caching finds nothing. Set enable_prefix_caching: false.")
    assert "\n" not in message and "aligned" not in message


WINDOWED = (
    TEXT.replace("llama-3.1-8b", "openai/gpt-oss-20b")
    .replace(f"{{num_blocks: 101, groups: {GROUPS}}}", "{memory: 1GB}")
    .replace("{kind: roofline, gpu: h100}", "{kind: linear, base: 10ms, per_token: 50us}")
)


def test_windows_of_a_model_are_groups_under_vllm() -> None:
    """A request of 660 tokens holds 42 blocks of full attention and at most 42 of the windows' group, later 9."""
    setup = Setup.of(load_text(WINDOWED))
    assert str(setup.kv).startswith("KV 2,542 blocks for 2 groups of layers (1 × window 128 in blocks of 16, 1 × full")
    setup, held = records(WINDOWED)
    alone = int(held.steps["free_blocks"].min())
    assert setup.kv.num_blocks - alone < held.steps["num_running"].max() * 2 * 42


HOST = "tiers: [{kind: host, size: 1GB, bandwidth: 50GB/s, latency: 10us}]"
ITEMS = "items: {tokens: {kind: fixed, tokens: 64}}"
ONE_POOL = {
    "policy": [("vllm: {", "sglang: {}\n  vllm: {")],
    "interval": [("caching: false", "caching: false, prefill_schedule_interval: 2")],
    "tiers": [("memory: 1GB", f"memory: 1GB, {HOST}"), ("caching: false", "caching: true")],
    "images": [
        ("per_token: 50us", "per_token: 50us, encoder: {base: 1ms, per_token: 1us}"),
        ("  requests: 60", f"  requests: 60\n  {ITEMS}"),
    ],
}


@pytest.mark.parametrize("changes", ONE_POOL.values(), ids=ONE_POOL)
def test_beside_what_no_groups_can_have_windows_are_set_aside_in_one_pool(changes: list[tuple[str, str]]) -> None:
    """It is simulated as it was before windows had groups."""
    text = WINDOWED
    for old, new in changes:
        assert text.count(old) == 1
        text = text.replace(old, new)
    assert Setup.of(load_text(text)).kv.layout is None
