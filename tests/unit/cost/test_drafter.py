"""What drafting costs: a term of its own in the steps of policies that draft, and in no others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from batchsim.base.errors import ScenarioError
from batchsim.cost.base import Cost
from batchsim.cost.constant import Linear
from batchsim.cost.drafter import with_drafter
from batchsim.cost.drafter_config import DrafterConfig, DraftersConfig
from batchsim.cost.host_config import HostCost
from batchsim.cost.profile_config import ProfileConfig
from batchsim.cost.roofline import Roofline
from batchsim.cost.scaled import Scaled
from batchsim.cost.work import TIME_TERMS, columns_of
from batchsim.deployment.catalog import GPUS, MODELS
from batchsim.kernel.batch import Batch
from batchsim.kernel.policy_config import DraftMethod, Speculation
from batchsim.results.fleet_inputs import cost_terms
from batchsim.results.heading import heading
from batchsim.results.provenance import cost_sources
from batchsim.scenario import load_scenario
from batchsim.scenario.point import simulate_point
from batchsim.scenario.setup import Setup
from tests.support.paths import ROOT
from tests.unit.cost.test_cost import BATCHES, step

LLAMA, H200 = MODELS["llama-3.1-8b"], GPUS["h200"]
ROOFLINE, LINEAR = Roofline(LLAMA, H200), Linear(5_000_000, per_token=1000)
STATED = DrafterConfig(base=300_000, per_sequence=2_000, per_token=10)
HEAD = DrafterConfig(layers=1)


def drafted(cost: Cost, config: DrafterConfig, method: DraftMethod = "eagle3", passes: int = 3) -> Cost:
    """`cost` under a policy whose drafter by `method`, of that `config`, makes so many drafts."""
    return with_drafter(cost, DraftersConfig(**{method: config}), Speculation(method, passes, {"": (0.5,) * passes}))


def draft_ns(config: DrafterConfig, batch: Batch, method: DraftMethod = "eagle3", passes: int = 3) -> int:
    """ns by which the drafter makes a step of the linear or, for a model, the roofline's cost longer."""
    cost = LINEAR if config.base is not None else ROOFLINE
    return drafted(cost, config, method, passes).step_ns(batch) - cost.step_ns(batch)


@pytest.mark.parametrize(
    "cost",
    [
        drafted(LINEAR, STATED),
        drafted(ROOFLINE, HEAD),
        drafted(Roofline(LLAMA, H200, tp=2), DrafterConfig(base=50_000, model="qwen3-8b")),
        drafted(Scaled(ROOFLINE, 1.5), HEAD),
    ],
    ids=["stated", "layer", "model", "stretched"],
)
def test_the_explained_parts_with_the_drafter_s_add_up_to_the_step(cost: Cost) -> None:
    """The term `draft` is above 0 where anything is computed, and 0 where nothing is."""
    for name, batch in BATCHES.items():
        terms = cost.explain(columns_of(batch))
        assert abs(sum(terms[term][0] for term in TIME_TERMS) - cost.step_ns(batch)) <= 3, name
        computes = batch.num_decode_tokens + batch.num_prefill_tokens > 0
        assert (terms["draft"][0] > 0) == computes, name


def test_stated_times_are_of_each_pass_and_of_each_token_once() -> None:
    """Three drafts are three passes over 10 decodes and a prompt of 100 tokens; a search of the text is one."""
    batch = step([500] * 10, [(0, 100)], drafts=3)
    of_tokens = 10 * (10 * 4 + 100)
    assert draft_ns(STATED, batch) == 3 * (300_000 + 2_000 * 11) + of_tokens
    assert draft_ns(STATED, batch, "ngram") == 300_000 + 2_000 * 11 + of_tokens


def test_a_draft_model_s_first_pass_is_over_the_step_and_the_others_over_one_token_a_sequence() -> None:
    """A later pass is a decode step of one layer and the output matrix; the first one has all rows, of which one a
    sequence is sampled."""
    batch, alone = step([700] * 40, drafts=3), step([700] * 40)
    layer = Roofline(replace(LLAMA, num_hidden_layers=1), H200, host=HostCost(0, 0, 0))
    assert draft_ns(HEAD, batch, passes=3) - draft_ns(HEAD, batch, passes=2) == pytest.approx(
        layer.step_ns(alone), abs=2
    )
    head_ns = layer.head_ns(160) - layer.head_ns(40)
    assert draft_ns(HEAD, batch, passes=1) == pytest.approx(layer.step_ns(batch) - head_ns, abs=2)
    small = Roofline(replace(LLAMA, num_hidden_layers=1, vocab_size=32_000), H200, host=HostCost(0, 0, 0))
    fewer = draft_ns(HEAD, batch, passes=1) - draft_ns(replace(HEAD, draft_vocab_size=32_000), batch, passes=1)
    assert fewer == pytest.approx(layer.head_ns(40) - small.head_ns(40), abs=2)


def test_stretching_a_cost_stretches_its_drafter() -> None:
    """Every step's time, the drafter's too."""
    whole, half = drafted(Scaled(ROOFLINE, 0.5), HEAD), drafted(ROOFLINE, HEAD)
    assert whole.step_ns(BATCHES["drafts"]) == pytest.approx(half.step_ns(BATCHES["drafts"]) / 2, abs=1)


def test_who_drafts_by_a_method_without_a_time_or_not_at_all_has_the_cost_as_it_is() -> None:
    """No wrapper, no time."""
    config = DraftersConfig(ngram=STATED)
    assert with_drafter(LINEAR, config, Speculation("mtp", 1, {"": (0.5,)})) is LINEAR
    assert with_drafter(LINEAR, config, None) is LINEAR
    assert with_drafter(LINEAR, None, Speculation("ngram", 1, {"": (0.5,)})) is LINEAR


# ---- in a scenario

SCENARIO = """
model: llama-3.1-8b
cost: {kind: linear, base: 5ms, draft: {eagle3: {base: 300us, per_sequence: 2us}}}
kv: {tokens: 100000}
workload:
  arrivals: {kind: constant, mean_rate: 20/s}
  lengths: {prompt: {kind: fixed, tokens: 100}, output: {kind: fixed, tokens: 12}}
  output_cap: 12
  requests: 20
policies:
  eagle: {kind: vllm, async_scheduling: false, speculative_config: SPEC}
  plain: {kind: vllm, async_scheduling: false}
slo: ttft<1s @ 99%
seeds: 1
""".replace("SPEC", "{method: eagle3, num_speculative_tokens: 2, acceptance: 0.5}")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("drafts") / "some.yaml"
    file.write_text(SCENARIO, encoding="utf-8")
    return str(file)


@pytest.mark.parametrize("ahead", ["true", "false"])
def test_steps_of_a_policy_that_drafts_hold_its_drafter(path: str, ahead: str) -> None:
    """Two passes a step, ahead of results too, where they are explained; the plain policy's steps take 5 ms."""
    scenario = load_scenario(path, overrides=(f"policies.eagle.async_scheduling={ahead}",))
    setup = Setup.of(scenario)
    for point in scenario.points():
        records = simulate_point(setup, point).records
        sequences = records.steps["num_decode"].astype(int) + records.steps["num_chunks"]
        drafting = 2 * (300_000 + 2_000 * sequences) * (point.spec.label == "eagle")
        assert records.steps["duration_ns"].tolist() == (5_000_000 + drafting).tolist()
        terms = cost_terms(setup, records, point.spec.config)
        assert terms["draft"].tolist() == drafting.tolist()


@pytest.mark.parametrize(
    ("spec", "passes"),
    [("{decoding_type: Eagle3, max_draft_len: 2, acceptance: 0.5}", 2), ("{decoding_type: MTP, acceptance: 0.5}", 0)],
)
@pytest.mark.parametrize("waits", ["true", "false"])
def test_tensorrt_llm_s_drafters_go_by_their_methods(path: str, spec: str, passes: int, waits: str) -> None:
    """Two passes a step of Eagle3's; of MTP's nothing is said, so that it takes no time."""
    eagle = f"{{kind: tensorrt_llm, disable_overlap_scheduler: {waits}, speculative_config: {spec}}}"
    setup = Setup.of(load_scenario(path, overrides=(f"policies.eagle={eagle}",)))
    point = next(point for point in setup.scenario.points() if point.spec.label == "eagle")
    records = simulate_point(setup, point).records
    sequences = records.steps["num_decode"].astype(int) + records.steps["num_chunks"]
    drafting = passes * (300_000 + 2_000 * sequences)
    assert records.steps["duration_ns"].tolist() == (5_000_000 + drafting).tolist()
    assert records.steps["num_accepted_tokens"].sum() > 0
    assert cost_terms(setup, records, point.spec.config)["draft"].tolist() == drafting.tolist()


def test_the_head_of_a_run_and_its_sources_say_what_drafting_costs(path: str, tmp_path: Path) -> None:
    """By method; a draft model of a file beside the scenario has a digest of its shape, which a change of it moves."""
    setup = Setup.of(load_scenario(path))
    assert " · drafting: eagle3 300 us + 2 us a sequence · measured at" in heading(setup)
    file, model = tmp_path / "s.yaml", tmp_path / "small.json"
    cost = "cost: {kind: roofline, gpu: h200, draft: {draft_model: {model: small.json}}}"
    file.write_text(SCENARIO.replace(SCENARIO.splitlines()[2], cost).replace("method: eagle3", "method: draft_model"))
    shape = (ROOT / "scenarios" / "tiny-llama.json").read_text().replace("float32", "bfloat16")
    sources = []
    for hidden in (shape, shape.replace('"vocab_size": ', '"vocab_size": 1')):
        model.write_text(hidden)
        setup = Setup.of(load_scenario(str(file)))
        assert "drafting: draft_model" in heading(setup)
        sources.append(cost_sources(setup)[-1])
    assert "small.json by roofline, as stated in the scenario (shape " in sources[0] and sources[0] != sources[1]


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        ("{eagle3: {layers: 1}}", r"some.yaml:3: cost: draft.eagle3 names a draft model, and no GPU is known"),
        ("{eagle3: {per_sequence: 1us}}", r"some.yaml:3: cost.draft.eagle3: says no time. Write base"),
        ("{eagle3: {layers: 1, model: qwen3-8b}}", r"model and layers are two draft models. Write one"),
        ("{draft_model: {model: qwen3-8b, draft_vocab_size: 32000}}", r"draft_vocab_size is of layers, which are not"),
        ("{ngram: {layers: 1}}", r"ngram has no draft model: it searches the text"),
        ("{eagle4: {base: 1ms}}", r"eagle4"),
        ("{eagle3: {base: 1000}}", r"1000"),
    ],
)
def test_a_drafter_that_cannot_be_is_one_line(tmp_path: Path, draft: str, message: str) -> None:
    """With the place, and what to write instead."""
    file = tmp_path / "some.yaml"
    file.write_text(SCENARIO.replace("{eagle3: {base: 300us, per_sequence: 2us}}", draft))
    with pytest.raises(ScenarioError, match=message) as error:
        Setup.of(load_scenario(str(file)))
    assert str(error.value).count("\n") == 0


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (DrafterConfig(layers=33), "draft.eagle3: layers 33, and llama-3.1-8b has 32. Write no more"),
        (DrafterConfig(layers=1, draft_vocab_size=200_000), "draft_vocab_size 200000, and llama-3.1-8b has 128256"),
        (DrafterConfig(model="llama"), "draft.eagle3: model: llama is neither in the catalog nor a file"),
    ],
)
def test_a_draft_model_that_cannot_be_timed_is_told(draft: DrafterConfig, message: str) -> None:
    """More layers than the model's, a model that nobody knows."""
    with pytest.raises(ScenarioError, match=message):
        drafted(ROOFLINE, draft)


def test_a_drafter_leaves_what_the_cost_says_of_itself() -> None:
    """Its profile, how far that reaches and its error are those of the engine's steps."""
    cost = ProfileConfig("llama-3.1-8b-h200-vllm-0.24.0").build(LLAMA)
    found = drafted(cost, STATED)
    assert cost.profile is not None
    assert cost.reach is not None
    assert (found.profile, found.reach, found.error) == (cost.profile, cost.reach, cost.error)
    assert not cost.overlap_known and not found.overlap_known


def test_branches_are_rows_of_every_pass_but_the_first() -> None:
    """A second pass over four rows of each sequence takes longer than over one; it is explained as it is timed."""
    batch = BATCHES["decodes"]
    found = []
    for branches in (1, 4):
        speculation = Speculation("eagle", 2, {"": (0.5, 0.25)}, branches=branches)
        cost = with_drafter(ROOFLINE, DraftersConfig(eagle=HEAD), speculation)
        found.append(cost.step_ns(batch))
        assert cost.explain(columns_of(batch))["draft"][0] == pytest.approx(found[-1] - ROOFLINE.step_ns(batch), abs=2)
    assert found[0] < found[1]
