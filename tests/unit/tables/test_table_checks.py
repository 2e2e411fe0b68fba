"""Kernel tables are held against physics, other GPUs and themselves, and what fails is told wherever it is used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from batchsim.cost.calibrated import Calibrated
from batchsim.cost.cost_error import CostError, Unknown
from batchsim.cost.profile import Profile, TableFault, load_profile
from batchsim.cost.roofline import Roofline
from batchsim.cost.scaled import Scaled
from batchsim.deployment.catalog import ACCELERATORS, GPUS, MODELS, read_model
from batchsim.deployment.deployment import Deployment
from batchsim.deployment.model import GpuSpec
from batchsim.report.text.profile_text import table
from batchsim.results.heading import heading
from batchsim.scenario.parse import parse_scenario
from batchsim.scenario.setup import Setup
from batchsim.tables import find
from batchsim.tables.check import SHARE, SIZES, Asked, faults_of, floors, siblings
from batchsim.tables.handle import Size, Tables
from batchsim.tables.versions import version

needs_tables = pytest.mark.skipif(version() is None, reason="the kernel tables are not installed: batchsim[gpus]")

LLAMA = Deployment(MODELS["llama-3.1-70b"], GPUS["b200_sxm"], "vllm", tp=4, weight_dtype="fp8")
EIGHT = Deployment(MODELS["llama-3.1-8b"], GPUS["h100"], "vllm")
ONE, FOUR, MANY, PROMPT = Size(1, 2_048, 0), Size(4, 2_048, 0), Size(256, 8_192, 0), Size(0, 0, 2_048)
DECODES = [Size(rows, 2_048, 0) for rows in (1, 4, 16, 64, 256)]
NAME = "llama-3.1-70b-h100-vllm-0.24.0-tp4-fp8"
TEXT = """
model: meta-llama/Llama-3.1-70B
deployment: {engine: vllm, gpu: h100, tp: 4, weights: fp8}
workload:
  arrivals: {kind: closed_loop, users: 4, think_time: 0s}
  lengths: {prompt: {kind: fixed, tokens: 256}, output: {kind: fixed, tokens: 32}}
  output_cap: exact
  requests: 40
max_model_len: 4096
slo: ttft<1s @ 90%
"""


def asked(its: Deployment, gpu: GpuSpec | None = None, takes: Mapping[tuple[str, Size], float] | None = None) -> Asked:
    """What good tables answer: every part in one and a half times what its sheet allows, and some µs a layer.

    `takes`: so many times that, of an operation at a size.
    """
    its, found = replace(its, gpu=gpu or its.gpu), {}
    assert its.gpu is not None
    for size in SIZES:
        least = floors(its, size)
        matrices = 1.5 * least["all matrices"] + 0.5
        ms = {"qkv_gemm": matrices / 4, "ffn_gemm": 3 * matrices / 4, "attention": 1.5 * least["attention"] + 0.3}
        ms |= {"logits_gemm": 1.5 * least["the output matrix"], "ar_1": 6 * least["all-reduce"] + 0.1}
        found[size] = {name: each * (takes or {}).get((name, size), 1.0) for name, each in ms.items()}
    return Asked(its.gpu, "1", found, frozenset({"attention"}), whole=False)


def sibling(gpu: str) -> Asked:
    return asked(LLAMA, GPUS[gpu])


# ---- bounds


def test_what_must_be_read_and_computed_is_the_least_that_a_step_takes() -> None:
    """Llama-3.1-8B in 16 bits on an H100, by hand: weights and keys over bandwidth, FLOPs over peak; other types by
    their bytes and their own peak."""
    weights = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    one, prompt = floors(EIGHT, ONE), floors(EIGHT, PROMPT)
    assert one["all matrices"] == pytest.approx(2 * weights / 3.35e12 * 1e3)
    assert one["the output matrix"] == pytest.approx(2 * 128256 * 4096 / 3.35e12 * 1e3)
    assert one["attention"] == pytest.approx(2048 * 131072 / 3.35e12 * 1e3)
    assert floors(EIGHT, FOUR)["attention"] == pytest.approx(4 * one["attention"])
    assert prompt["all matrices"] == pytest.approx(2 * 2048 * weights / 989e12 * 1e3)
    assert prompt["attention"] == pytest.approx(4 * 32 * 4096 * 2048**2 / 2 / 989e12 * 1e3)
    assert prompt["the output matrix"] == one["all-reduce"] == 0
    eight = floors(replace(EIGHT, weight_dtype="fp8", kv_dtype="fp8"), PROMPT)
    assert eight["all matrices"] == pytest.approx(prompt["all matrices"] * 989 / 1979)
    assert floors(replace(EIGHT, kv_dtype="fp8"), ONE)["attention"] == pytest.approx(one["attention"] / 2)
    four = floors(replace(EIGHT, weight_dtype="nvfp4", gpu=GPUS["b200_sxm"]), PROMPT)
    assert four["all matrices"] == pytest.approx(2 * 2048 * weights / 9e15 * 1e3)


def test_several_gpus_share_the_least_and_exchange_what_they_computed() -> None:
    """Each holds a part; what it sends crosses the link to its peers, of PCIe where there is no NVLink."""
    two = replace(EIGHT, tp=2)
    assert floors(two, ONE)["all matrices"] == pytest.approx(floors(EIGHT, ONE)["all matrices"] / 2)
    assert floors(two, PROMPT)["all-reduce"] == pytest.approx(32 * 2048 * 4096 * 2 / 2 / 450e9 * 1e3)
    assert floors(replace(two, gpu=GPUS["l40s"]), PROMPT)["all-reduce"] == pytest.approx(
        floors(two, PROMPT)["all-reduce"] * 450 / 32
    )


def test_experts_are_read_at_the_least_once_for_each_that_a_token_takes() -> None:
    """All tokens may go to the same ones; each token computes its own."""
    mixture = Deployment(read_model("MiniMaxAI/MiniMax-M2.5"), GPUS["h200"], "vllm", tp=4)
    attention = 62 * (2 * 3072 * 48 * 128 + 3072 * 2 * 8 * 128) // 4
    eight = 62 * 8 * 3 * 3072 * 1536 // 4
    assert floors(mixture, ONE)["all matrices"] == pytest.approx((attention + eight) / 4.8e12 * 1e3)
    assert floors(mixture, FOUR) == pytest.approx(floors(mixture, ONE) | {
        "attention": 4 * floors(mixture, ONE)["attention"], "all-reduce": 4 * floors(mixture, ONE)["all-reduce"]
    })  # fmt: skip
    assert floors(mixture, PROMPT)["all matrices"] == pytest.approx(2 * 2048 * (attention + eight) / 1979e12 * 1e3)


def test_windows_and_sparse_attention_need_less_than_all_keys() -> None:
    """gpt-oss reads 128 tokens in every other layer; of sparse attention no least is told."""
    oss = Deployment(read_model("openai/gpt-oss-120b"), GPUS["h200"], "vllm")
    full, windowed = 18 * 8_192, 18 * 128
    its = floors(oss, Size(1, 8_192, 0))["attention"]
    assert its == pytest.approx((full + windowed) * 2 * 8 * 64 * 2 / 4.8e12 * 1e3)
    sparse = Deployment(read_model("zai-org/GLM-5"), GPUS["h200"], "sglang", tp=8)
    assert floors(sparse, ONE)["attention"] == floors(sparse, PROMPT)["attention"] == 0


# ---- what fails


def test_good_tables_pass() -> None:
    """Beside a GPU of their own generation, one of another, and none."""
    for others in ([], [sibling("b300_sxm")], [sibling("h200"), sibling("gb200")]):
        assert faults_of(LLAMA, asked(LLAMA), others) == ()


@pytest.mark.parametrize(("times", "fails"), [(0.6, True), (0.72, False)])
def test_a_time_below_physics_fails(times: float, fails: bool) -> None:
    """A part that takes less than what must be read, with its size and both times; rounded sheets are let be."""
    decodes = [Size(256, 8_192, 0), Size(64, 8_192, 0)]
    found = faults_of(EIGHT, asked(EIGHT, takes={("attention", size): times for size in decodes}), [])
    assert bool(found) == fails
    if fails:
        (fault,) = found
        least = floors(EIGHT, MANY)["attention"]
        assert (fault.operation, fault.bound, fault.size) == ("attention", "floor", "256 decodes with 8,192 tokens")
        assert fault.bound_ms == pytest.approx(least, rel=1e-3) and fault.ms < 0.95 * least
        assert str(fault).endswith(f"less than the {fault.bound_ms:.3g} ms of the sheet of h100")


@pytest.mark.parametrize(
    ("times", "sizes", "fails"),
    [(6.0, SIZES, True), (1.8, SIZES, False), (2.6, (PROMPT,), False), (3.6, (PROMPT,), True)],
)
def test_more_than_twice_a_scaled_sibling_fails(times: float, sizes: tuple[Size, ...], fails: bool) -> None:
    """By the kindest ratio of the sheets: a B200 has 1.6 times an H200's bandwidth and 2.3 times its FLOP/s, so that a
    prompt is believed up to 2.8 times its own good time."""
    own = asked(LLAMA, takes={("ffn_gemm", size): times for size in sizes})
    found = faults_of(LLAMA, own, [sibling("h200")])
    assert [fault.bound for fault in found] == ["ceiling"] * fails
    if fails:
        assert found[0].operation == "ffn_gemm" and found[0].share > 2 * SHARE
        assert "times what twice h200's scaled by its sheet allows" in str(found[0])
        assert faults_of(LLAMA, own, [sibling("b300_sxm"), asked(LLAMA, GPUS["h200"])]) != ()
        assert faults_of(LLAMA, own, []) == ()


def test_launches_do_not_shorten_on_a_faster_gpu() -> None:
    """A kernel of 5 µs a layer on an H200 may take 10 on a B200, not less for its bandwidth; a slower GPU is allowed
    more."""
    short = {size: {"qkv_gemm": 0.4, "ffn_gemm": 0.5} for size in SIZES}
    theirs = Asked(GPUS["h200"], "1", short, frozenset(), whole=False)
    for gpu, times, fails in (("b200_sxm", 1.95, False), ("b200_sxm", 2.3, True), ("h100", 2.7, False)):
        its = replace(LLAMA, gpu=GPUS[gpu])
        mine = {size: {"qkv_gemm": 0.4 * times, "ffn_gemm": 0.5} for size in SIZES}
        found = [f for f in faults_of(its, Asked(GPUS[gpu], "1", mine, frozenset(), False), [theirs])
                 if f.bound == "ceiling"]  # fmt: skip
        assert bool(found) == fails, (gpu, times)


@pytest.mark.parametrize(("times", "fails"), [(2.0, True), (1.3, False)])
def test_a_larger_size_that_takes_much_less_fails(times: float, fails: bool) -> None:
    """Four decodes longer than sixteen; by a third, kernels and noise differ."""
    found = faults_of(LLAMA, asked(LLAMA, takes={("ffn_gemm", FOUR): times, ("ffn_gemm", ONE): 1.0}), [])
    assert [fault.bound for fault in found] == ["order"] * fails
    if fails:
        assert str(found[0]).startswith("ffn_gemm of 16 decodes with 2,048 tokens takes ")
        assert str(found[0]).endswith("ms of 4 decodes with 2,048 tokens")


def test_what_moves_no_step_is_not_told() -> None:
    """An operation ten times too slow that takes less than `SHARE` of a step beyond its bound is let be."""
    tiny = asked(LLAMA)
    for ms in tiny.times.values():
        ms["router_gemm"] = 1.0
    its = asked(LLAMA, GPUS["h200"])
    for size, ms in its.times.items():
        ms["router_gemm"] = (1.0 - 0.9 * SHARE * sum(tiny.times[size].values())) / 2
    assert faults_of(LLAMA, tiny, [its]) == ()


# ---- what is told


FAULT = TableFault("qkv_gemm", "16 decodes with 2,048 tokens", 13.2, "ceiling", 4.55, "twice h200's", 0.3)


def doubted(*faults: TableFault) -> Profile:
    return replace(load_profile(NAME), checks=faults)


def test_a_profile_keeps_its_checks_and_its_error_is_unknown() -> None:
    """Through its file; heading, error and the whole profile in words name the worst and count the rest."""
    profile = doubted(FAULT, replace(FAULT, operation="proj_gemm"))
    assert Profile.from_json(profile.to_json(), "kept") == profile
    assert "checks" not in doubted().to_json() and isinstance(Calibrated(doubted()).error, CostError)
    said = (
        "tables of h100: qkv_gemm of 16 decodes with 2,048 tokens takes 13.2 ms, 2.9 times what twice h200's allows;"
        " 1 more of the kind: not to be trusted"
    )
    for cost in (Calibrated(profile), Scaled(Calibrated(profile), 1.1)):
        assert cost.error == Unknown(said)
        assert cost.describe().endswith(f" · ! {said}")
    assert "× 1.1: every step's time stretched · !" in Scaled(Calibrated(profile), 1.1).describe()
    assert "proj_gemm of 16 decodes" in table(profile)
    measured = {"measured_in_engine": {"points": 9, "tpot_p90": 0.2}}
    assert isinstance(Calibrated(replace(profile, made=profile.made | measured)).error, CostError)
    assert isinstance(Calibrated(replace(doubted(), made=profile.made | measured)).error, CostError)


def setup_of(monkeypatch: pytest.MonkeyPatch, *overrides: str) -> Setup:
    """Where the tables of H100 have a fault and those of H200 none."""
    monkeypatch.setattr(find, "version", lambda: None)
    own = find.load_profile
    monkeypatch.setattr(find, "load_profile", lambda name: doubted(FAULT) if name == NAME else own(name))
    return Setup.of(parse_scenario(TEXT, "some.yaml", Path(), overrides))


def test_a_heading_names_what_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one engine, of groups of replicas, and of each value of what varies."""
    mark = "! tables of h100: qkv_gemm of 16 decodes"
    other = "deployment.gpu=h200"
    assert mark in heading(setup_of(monkeypatch)) and "!" not in heading(setup_of(monkeypatch, other))
    for gpus in ("[h100, h200]", "[h200, h100]"):
        assert heading(setup_of(monkeypatch, f"vary={{deployment.gpu: {gpus}}}")).count(mark) == 1
    groups = "{a: {count: 1}, b: {count: 1, deployment: {engine: vllm, gpu: h100, tp: 4, weights: fp8}}}"
    assert mark in heading(setup_of(monkeypatch, other, f"replicas={{router: random, groups: {groups}}}"))


# ---- collectives without NVLink


def test_every_gpu_has_the_link_to_its_peers() -> None:
    """PCIe is no faster than the link to the host, NVLink several times."""
    for gpu in GPUS.values():
        assert gpu.link and gpu.over_pcie == (gpu.peer_link <= gpu.host_link), gpu.name
        assert gpu.over_pcie or gpu.link.startswith("NVLink") or gpu.name in ACCELERATORS


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("llama-3.1-70b-l40s-vllm-0.24.0-tp4-fp8", "4 GPUs over PCIe 4.0 x16: collectives as the tables' own machine"),
        ("qwen3-32b-l40s-vllm-0.24.0-tp2", "2 GPUs over PCIe 4.0 x16: collectives as the tables' own machine"),
        ("qwen3-8b-l40s-vllm-0.24.0", ""),
        (NAME, ""),
    ],
)
def test_collectives_over_pcie_have_no_known_error(name: str, told: str) -> None:
    """Whatever the tables' own machine reached: heading and error say so. One GPU has none, NVLink is measured."""
    cost = Calibrated(load_profile(name))
    assert isinstance(cost.error, Unknown) == bool(told)
    assert (f" · ! {told}" in cost.describe()) if told else "!" not in cost.describe()


def test_a_roofline_takes_the_link_of_the_sheet_and_says_so() -> None:
    """Of its own GPU, with the latency of a hop; the error is unknown and names PCIe."""
    l40s, h100 = (Roofline(MODELS["llama-3.1-8b"], GPUS[gpu], tp=2) for gpu in ("rtx4090", "h100"))
    assert l40s.error == Unknown("no kernel of rtx4090 was timed, no collective over PCIe 4.0 x16")
    assert "between GPUs PCIe 4.0 x16 of 32 GB/s one way, all of it reached, and 10 µs" in l40s.sources()[0]
    assert "NVLink 4 of 450 GB/s" in h100.sources()[0]
    assert "between GPUs" not in Roofline(MODELS["llama-3.1-8b"], GPUS["rtx4090"]).sources()[0]


# ---- the tables themselves


@needs_tables
@pytest.mark.slow
def test_tables_that_are_wrong_are_found() -> None:
    """vLLM's matmuls of FP8 in blocks on a B300, which take longer than on an H200, of which nothing fails."""
    block = {"tp": 4, "weight_dtype": "fp8_block", "moe_dtype": "fp8_block"}
    model = read_model("MiniMaxAI/MiniMax-M2.5")
    wrong, right = (find.build(Deployment(model, GPUS[gpu], "vllm", **block)) for gpu in ("b300_sxm", "h200"))
    assert {"qkv_gemm", "proj_gemm"} <= {fault.operation for fault in wrong.checks if fault.bound == "ceiling"}
    assert not right.checks and not right.doubts
    assert wrong.notes[-1].endswith("and b200_sxm (vllm 0.24.0), h200 (vllm 0.24.0) scaled by its sheet")


@needs_tables
@pytest.mark.slow
def test_cards_on_pcie_are_held_against_each_other() -> None:
    """Boards with NVLink among themselves; where there is no sibling a note says so."""
    card = Tables(Deployment(MODELS["llama-3.1-8b"], GPUS["rtx_pro_6000_server"], "vllm"))
    assert {each.deployment.gpu.over_pcie for each in siblings(card) if each.deployment.gpu} == {True}
    alone = find.build(Deployment(MODELS["llama-3.1-8b"], GPUS["b60"], "vllm", version="0.20"))
    assert any("each operation is held against its GPU's sheet" in note for note in alone.notes)
