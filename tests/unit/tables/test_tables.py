"""Profiles of deployments: found by what they are of, shipped within their bounds, explained exactly."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchsim.base.errors import CalibrationError, ExtrapolationError
from batchsim.cost.calibrated import Calibrated
from batchsim.cost.profile import Profile, check_model, load_profile, profile_names, work_of
from batchsim.cost.profile_config import ProfileConfig
from batchsim.cost.work import TIME_TERMS, columns_of
from batchsim.deployment.catalog import GPUS, MODELS, read_model
from batchsim.deployment.deployment import Deployment
from batchsim.deployment.layers import DenseMlp, GroupedAttention, Layers
from batchsim.tables import find
from batchsim.tables.build import build_profile, knots_of, name_of, setup_of
from batchsim.tables.compare import MEDIAN, P95, within
from batchsim.tables.handle import Tables
from batchsim.tables.modes import NoTablesError
from batchsim.tables.versions import nearest_version, version
from tests.unit.cost.test_cost import BATCHES, step

NAMES = profile_names()
LLAMA = Deployment(MODELS["llama-3.1-70b"], GPUS["h100"], "vllm", tp=4, weight_dtype="fp8")
WINDOWED = replace(LLAMA.model, layers=(Layers(80, GroupedAttention(64, 8, 128, window=4_096), DenseMlp(28_672)),))
shipped = cache(load_profile)
needs_tables = pytest.mark.skipif(version() is None, reason="the kernel tables are not installed: batchsim[gpus]")


@pytest.fixture
def no_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the kernel tables are not installed."""
    monkeypatch.setattr(find, "version", lambda: None)


# ---- what is shipped


def test_sixty_deployments_are_shipped() -> None:
    """On every engine and seven GPUs, dense models and experts, grouped and latent attention, 16, 8 and 4 bits."""
    profiles = [shipped(name) for name in NAMES]
    setups = [profile.setup for profile in profiles if profile.setup is not None]
    assert len(setups) == len(NAMES) >= 60
    assert {its.engine for its in setups} == {"vllm", "sglang", "tensorrt_llm"}
    assert {profile.gpu for profile in profiles} >= {"h100", "h200", "a100", "l40s", "b200_sxm", "gb200"}
    assert {its.weight_dtype for its in setups} >= {"bfloat16", "fp8", "fp8_block", "nvfp4"}
    kinds = {(each.attention.kind, each.mlp.kind) for profile in profiles for each in profile.model.kinds}
    assert kinds >= {("grouped", "dense"), ("grouped", "experts"), ("latent", "experts")}


def test_shipped_profiles_follow_their_tables() -> None:
    """The file of each says so of 200 steps it was not made of, and is what its name says."""
    for name in NAMES:
        profile = shipped(name)
        found, setup = profile.held_out, profile.setup
        assert found is not None and setup is not None, name
        assert (found["n"], found["p50"] <= MEDIAN, found["p95"] <= P95) == (200, True, True), name
        made_of = name_of(replace(profile.deployment, gpu=None), setup.version)
        assert name == profile.name == made_of.replace("-gpu-", f"-{profile.gpu}-")
        assert {row["region"] for row in found["steps"]} == {"decodes", "prompts", "both"}, name


@pytest.mark.parametrize("name", NAMES[::12])
def test_a_step_of_a_shipped_profile_is_explained(name: str) -> None:
    """`explain` on a recorded row and `step_ns` on the batch tell the same duration."""
    cost = Calibrated(shipped(name), extrapolate=True)
    for batch in BATCHES.values():
        if batch.swap_in or batch.swap_out:
            continue  # not every GPU has a link in the catalog
        took_ns = cost.step_ns(batch)  # which notes what is read within a window
        terms = cost.explain(columns_of(batch))
        assert abs(sum(terms[term][0] for term in TIME_TERMS) - took_ns) <= 1


# ---- finding one


def test_a_deployment_has_its_shipped_profile(no_tables: None) -> None:
    """Found by the model's work, not its name, by GPU, engine, degrees and types; any version where none is asked."""
    mine = replace(LLAMA, model=replace(LLAMA.model, name="mine", max_position_embeddings=4_096))
    profile = find.profile_of(mine)
    assert (profile.name, profile.model.name) == ("llama-3.1-70b-h100-vllm-0.24.0-tp4-fp8", "mine")
    assert find.profile_of(replace(mine, version="0.24")) == profile
    kept = find.profile_of(replace(LLAMA, kv_dtype="fp8")).setup
    assert kept is not None and (kept.kv_dtype, str(kept)) == ("fp8", "vllm 0.24.0, tp 4, weights fp8, kv fp8")
    halves = replace(LLAMA, weight_dtype="float16", kv_dtype="float16")
    assert find.profile_of(halves).name == "llama-3.1-70b-h100-vllm-0.24.0-tp4"


def test_another_version_than_asked_for_is_named(no_tables: None) -> None:
    """Where the tables are not installed the nearest one shipped stands in, and the sources of the cost say so."""
    profile = find.profile_of(replace(LLAMA, version="0.19.1"))
    assert profile.costs == find.profile_of(LLAMA).costs
    assert Calibrated(profile).sources()[-1].startswith("vllm 0.19.1 was asked for; of the versions with")


def test_a_checkpoint_brings_its_types(no_tables: None) -> None:
    """FP8 in blocks and MXFP4 experts are found without a word of them, as the checkpoint's config.json has them."""
    gpus = {"gpu": GPUS["h200"], "engine": "sglang"}
    deepseek = Deployment(read_model("deepseek-ai/DeepSeek-V3"), **gpus, tp=8, ep=8)
    assert find.profile_of(deepseek).name == "deepseek-v3-h200-sglang-0.5.14-tp8-ep8-fp8_block"
    oss = Deployment(read_model("openai/gpt-oss-120b"), GPUS["b200_sxm"], "vllm")
    assert find.profile_of(oss).name == "gpt-oss-120b-b200_sxm-vllm-0.24.0-moe-mxfp4"


def test_what_is_neither_shipped_nor_built_says_how_to_get_it(no_tables: None) -> None:
    """One line with the model, GPU and setup, the extra to install, and the ways out."""
    with pytest.raises(CalibrationError) as caught:
        find.profile_of(replace(LLAMA, weight_dtype="int4", version="0.24"))
    message = str(caught.value)
    assert "llama-3.1-70b on h100, vllm 0.24, tp 4, weights int4, kv bfloat16" in message
    assert "pip install 'batchsim[gpus]'" in message and "kind: linear" in message and "\n" not in message


@pytest.mark.parametrize(
    ("change", "nearest"),
    [
        ({"weight_dtype": "int4"}, "llama-3.1-70b-h100-vllm-0.24.0-tp4, llama-3.1-70b-h100-vllm-0.24.0-tp4-fp8"),
        (
            {"gpu": GPUS["l40s"], "engine": "sglang"},
            "llama-3.1-70b-l40s-vllm-0.24.0-tp4-fp8, llama-3.1-70b-h100-sglang",
        ),
        ({"model": replace(LLAMA.model, name="x", hidden_size=64)}, "llama-3.1-70b-h100-vllm-0.24.0-tp4-fp8"),
    ],
)
def test_the_nearest_profiles_are_named_where_one_is_missing(
    no_tables: None, change: dict[str, Any], nearest: str
) -> None:
    """Of the same model before the same GPU, of this before the same engine, of that before the same degrees."""
    with pytest.raises(CalibrationError, match=re.escape(f"The nearest that come with batchsim: {nearest}")):
        find.profile_of(replace(LLAMA, **change))


def test_a_shipped_profile_needs_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's cache is looked for where something is to be kept, by nobody else."""
    monkeypatch.setattr(find, "user_cache", lambda: pytest.fail("nothing is kept"))
    assert find.profile_of(LLAMA).name == "llama-3.1-70b-h100-vllm-0.24.0-tp4-fp8"


def test_the_key_of_the_cache_knows_all_that_shapes_a_profile() -> None:
    """Another GPU, degree, type, version or model is another key; another name of the same is not."""
    others = [
        replace(LLAMA, gpu=GPUS["h200"]),
        replace(LLAMA, tp=8),
        replace(LLAMA, kv_dtype="fp8"),
        replace(LLAMA, version="0.27"),
        replace(LLAMA, engine="sglang"),
        replace(LLAMA, model=replace(LLAMA.model, hidden_size=4_096)),
        replace(LLAMA, model=replace(LLAMA.model, max_position_embeddings=4_096)),
        replace(LLAMA, model=replace(LLAMA.model, model_type="qwen3")),
    ]
    assert len({find.key_of(each) for each in [LLAMA, *others]}) == 1 + len(others)
    assert find.key_of(replace(LLAMA, model=replace(LLAMA.model, name="mine"))) == find.key_of(LLAMA)


def test_a_kept_profile_is_read_and_a_broken_one_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables are asked once; a cut file, and a folder that cannot be made, cost a build and nothing else."""
    asked = replace(LLAMA, weight_dtype="int4")
    built = replace(load_profile(NAMES[0]), model=asked.model)
    monkeypatch.setattr(find, "version", lambda: "0.12.0")
    builds: list[Deployment] = []
    monkeypatch.setattr(find, "build", lambda deployment: builds.append(deployment) or built)
    folder = tmp_path / "kept"
    assert find.profile_of(asked, cache_folder=folder) == find.profile_of(asked, cache_folder=folder) == built
    (path,) = folder.iterdir()
    path.write_text(path.read_text()[:500])
    assert find.profile_of(asked, cache_folder=folder) == built
    assert len(builds) == 2 and Profile.from_json(path.read_text(), "kept") == built
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert find.profile_of(asked, cache_folder=blocked / "kept") == built


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("", "0.24.0"),
        ("0.24", "0.24.0"),
        ("0.27.0", "0.27.0"),
        ("0.19", "0.24.0"),
        ("1.0", "0.27.0"),
        ("0.26.1", "0.27.0"),
    ],
)
def test_the_nearest_version_is_taken(asked: str, found: str) -> None:
    """The one named, else by number; where none is named the tables' own choice."""
    assert nearest_version(asked, ["0.24.0", "0.27.0"]) == found


def test_mxfp4_is_of_experts_alone() -> None:
    """A checkpoint of that type is the same deployment whether its weights or its experts are said to have it."""
    mixtral = load_profile("gpt-oss-120b-h100-vllm-0.24.0-moe-mxfp4").deployment
    assert setup_of(replace(mixtral, weight_dtype="mxfp4", moe_dtype=""), "1") == setup_of(mixtral, "1")


# ---- what a profile is of


def test_a_profile_of_several_gpus_is_no_plain_cost() -> None:
    """`cost:` counts one GPU, so such a profile is found by `deployment:` only."""
    with pytest.raises(CalibrationError, match=r"is of a deployment on 4 GPUs\. Write it as deployment: \{engine"):
        ProfileConfig("llama-3.1-70b-h100-vllm-0.24.0-tp4-fp8").build(MODELS["llama-3.1-70b"])
    one = ProfileConfig("llama-3.1-8b-h100-vllm-0.24.0").build(MODELS["llama-3.1-8b"])
    assert one.describe().startswith("cost: kernel tables of vllm 0.24.0, weights bfloat16, kv bfloat16 (aiconf")
    assert "follows them to ±" in one.describe() and one.describe().endswith("; host assumed)")


def test_a_step_beyond_what_the_tables_were_asked_is_refused() -> None:
    """In one line with the limit and the way out that a deployment has."""
    cost = Calibrated(shipped("llama-3.1-8b-h100-vllm-0.24.0"))
    with pytest.raises(ExtrapolationError) as caught:
        cost.step_ns(step([1_000] * 1_025))
    expected = (
        "1025 decode sequences asked; the kernel tables of llama-3.1-8b-h100-vllm-0.24.0 were asked up to 1024. Let"
    )
    assert str(caught.value).startswith(expected) and "pass --set deployment.extrapolate=true" in str(caught.value)
    assert "asked of the tables up to 1024 decodes" in cost.sources()[1]


def test_only_what_costs_time_must_be_the_models() -> None:
    """Biases and tied matrices may differ; a narrower layer may not, and is named."""
    profile = load_profile("llama-3.1-70b-h100-vllm-0.24.0-tp4-fp8")
    model = MODELS["llama-3.1-70b"]
    check_model(profile, replace(model, name="other", tie_word_embeddings=True, model_type="qwen3"))
    with pytest.raises(CalibrationError, match=r"with layers .* mine has"):
        check_model(profile, replace(model, name="mine", intermediate_size=1_024))
    assert json.dumps(work_of(model))  # plain, since keys are made of it


def test_decodes_beside_chunks_cost_what_others_timed() -> None:
    """Where one kernel serves both, decode attention is slower beside chunks; the file says whose timings those are."""
    slower = {name for name in NAMES if shipped(name).costs.beside > 1}
    assert slower == {name for name in NAMES if "-l40s-vllm" in name or "-rtx_pro_6000_server-vllm" in name}
    assert all(any("others' timings" in note for note in shipped(name).notes) for name in slower)


# ---- knots


def test_knots_miss_no_point_by_more_than_the_tolerance() -> None:
    """Of a saw with steps at every tile; the ends of each tooth are kept, what lies on a line is not."""
    points = [(float(n), 5.0 + 0.01 * n + 2.0 * ((n - 1) // 256)) for n in range(1, 2_049)]
    kept = knots_of(points, 0.01)
    x, y = np.array(points).T
    drawn = np.interp(x, x[kept], y[kept])
    assert np.max(np.abs(drawn / y - 1)) <= 0.01
    assert {255, 256, 511, 512} <= set(kept) and len(kept) == 2 * 8


# ---- the tables themselves


@needs_tables
def test_a_hole_in_the_tables_is_told_while_a_profile_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """A size beyond those tried first that has no data is one line with the ways out."""
    from aiconfigurator_core.sdk.errors import PerfDataNotAvailableError

    def hole(self: Tables, rows: int, context: int) -> float:
        raise PerfDataNotAvailableError("perf database error: no rows of that size at /some/where")

    monkeypatch.setattr(Tables, "decode_step", hole)
    with pytest.raises(NoTablesError, match=r"no rows of that size\. Try other types.*linear") as caught:
        find.build(LLAMA)
    assert "\n" not in str(caught.value)


@needs_tables
def test_the_tables_give_what_is_shipped() -> None:
    """A profile built now has the shipped one's numbers, and the same errors."""
    now = find.build(LLAMA)
    kept = load_profile(now.name)
    names = ("costs", "hull", "setup", "held_out", "checks")
    assert [getattr(now, name) for name in names] == [getattr(kept, name) for name in names]
    assert now.notes[-1] == kept.notes[-1]


@needs_tables
def test_a_deployment_that_is_not_shipped_is_built(tmp_path: Path) -> None:
    """With the tables, in its kind's bounds, and another version than the shipped one where that is asked for."""
    profile = find.profile_of(replace(LLAMA, tp=8, version="0.27"), cache_folder=tmp_path)
    assert within(profile) and profile.name == "llama-3.1-70b-h100-vllm-0.27.0-tp8-fp8"
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


@needs_tables
def test_a_model_that_the_tables_do_not_know_is_timed_by_its_shape() -> None:
    """One of plain layers needs no config of theirs: Llama's shape under another vocabulary costs what it does."""
    known = Tables(replace(LLAMA, weight_dtype=""))
    other = Tables(replace(LLAMA, weight_dtype="", model=replace(LLAMA.model, vocab_size=128_000)))
    assert (known.model_id, other.model_id) == ("meta-llama/Meta-Llama-3.1-70B", "a plain LlamaForCausalLM")
    assert other.layers(300) == known.layers(300)
    assert other.chunk_attention(512, 256.5) == known.chunk_attention(512, 256.5)
    assert 0 < other.head(8) < known.head(8)


@needs_tables
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gpu": GPUS["rtx4090"]}, "no kernel tables of vllm on rtx4090"),
        ({"engine": "vlm"}, "no kernel tables of 'vlm'. Did you mean vllm"),
        ({"kv_dtype": "nvfp4"}, "deployment.kv: no kernel tables of nvfp4"),
        ({"gpu": GPUS["a100"]}, "cannot time llama-3.1-70b: "),
        ({"model": WINDOWED}, "has no model of the shape of llama-3.1-70b"),
    ],
)
def test_what_the_tables_lack_is_named(change: dict[str, object], message: str) -> None:
    """One line with the way out, and no path of the machine."""
    with pytest.raises(NoTablesError, match=message) as caught:
        Tables(replace(LLAMA, **change))  # type: ignore[arg-type]
    assert "\n" not in str(caught.value) and " at /" not in str(caught.value)


@needs_tables
@pytest.mark.slow
def test_a_jump_between_no_prefix_and_one_token_is_said() -> None:
    """SGLang's sparse latent attention takes a dense kernel for whole short prompts, vLLM's one kernel for all."""
    model = read_model("deepseek-ai/DeepSeek-V3.2")
    jumps, even = (
        build_profile(Tables(Deployment(model, GPUS["h200"], engine, tp=8, ep=8, kv_dtype="fp8")))
        for engine in ("sglang", "vllm")
    )
    assert jumps.made["jump"] == [2048, pytest.approx(1.47, abs=0.02)] and "jump" not in even.made
    (said,) = jumps.cautions
    assert said.startswith("tables: a prompt of 2,048 tokens takes 1.47 times as long after a prefix of one token as")
    assert said in Calibrated(jumps).describe()
    assert not jumps.doubts and not even.cautions
