"""Shapes from config.json files, parameter counts, and the KV budget."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from batchsim.base.errors import ScenarioError
from batchsim.base.plain import from_plain, to_plain
from batchsim.deployment.catalog import (
    GPUS,
    MODEL_SOURCES,
    MODELS,
    checkpoint_names,
    load_gpu,
    load_model,
    read_model,
)
from batchsim.deployment.deployment import Deployment
from batchsim.deployment.layers import DenseMlp, Experts, GroupedAttention, LatentAttention, Layers
from batchsim.deployment.model import ModelSpec
from batchsim.scenario import Point, load_scenario
from batchsim.scenario.document import read_document
from batchsim.scenario.long_forms import lengthen
from batchsim.scenario.point import simulate_point
from batchsim.scenario.setup import Setup

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-14b", 14_768_307_200),
        ("mistral-7b", 7_248_023_552),
    ],
)
def test_parameters_are_those_of_the_published_weights(name: str, parameters: int) -> None:
    """The count is exact: biases, norms and embeddings included."""
    assert MODELS[name].num_parameters == parameters


TEMPLATE = "/{repo_id}/resolve/{revision}/{filename}"
NOWHERE = "http://127.0.0.1:9" + TEMPLATE


@contextmanager
def hub_of(answer: Callable[[str], tuple[int, dict[str, str], bytes]]) -> Iterator[str]:
    """The address of a server on this machine that answers each path with a status, headers and a body."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, headers, body = answer(self.path)
            self.send_response(status)
            for name, value in ({"Content-Length": str(len(body))} | headers).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815 - http.server's names

        def log_message(self, format: str, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def _fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of huggingface_hub with the config.json of my/model at two revisions, of which the later is main."""
    constants = pytest.importorskip("huggingface_hub.constants", reason="huggingface_hub is not installed")
    for revision, layers in (("1a", 32), ("2b", 40)):
        folder = tmp_path / "models--my--model" / "snapshots" / revision
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": layers}))
    refs = tmp_path / "models--my--model" / "refs"
    refs.mkdir()
    (refs / "main").write_text("2b")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))


def test_an_id_that_was_fetched_is_read_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At main, or at the revision that stands behind it; the model has the name by which it was asked for."""
    _fetched(tmp_path, monkeypatch)
    models = [read_model(name) for name in ("my/model", "my/model@1a")]
    assert [(model.name, model.num_hidden_layers) for model in models] == [("my/model", 40), ("my/model@1a", 32)]


@pytest.mark.parametrize(
    ("pinned", "id_"),
    [("revision: 1a, hub: my/model", "my/model@1a"), ("hub: my/model, revision: 012", "my/model@012"),
     ("hub: my/model, revision: refs/pr/1", "my/model@refs/pr/1"),
     ("hub: my/model, revision: null", "my/model"), ("hub: my/model", "my/model")],
)  # fmt: skip
def test_a_scenario_pins_a_revision(pinned: str, id_: str) -> None:
    """A commit of digits alone is text."""
    document = read_document(f"model: {{{pinned}}}", "s.yaml")
    lengthen(document)
    assert document.value["model"] == id_


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("revision: main", "model.hub is missing"),
        ("hub: [my/model]", "model.hub is .*, no Hugging Face id"),
        ("hub: llama-3.1-8b", "model.hub is .*, no Hugging Face id"),
        ("hub: ./tiny.json", "model.hub is .*, no Hugging Face id"),
        ("hub: my/model@a", "model.hub is .*, no Hugging Face id"),
        ("hub: my/model, rev: a", "model has no rev. Known are hub, revision"),
        ("hub: my/model, revision: [1]", "model.revision is"),
        ("hub: my/model, revision: ''", "model.revision is"),
        ("hub: my/model, revision: ../main", "model.revision is"),
    ],
)
def test_a_model_of_the_hub_that_is_written_wrongly_is_one_line(wrong: str, said: str) -> None:
    document = read_document(f"model: {{{wrong}}}", "s.yaml")
    with pytest.raises(ScenarioError, match=rf"^s.yaml:1: {said}[^\n]*\.$"):
        lengthen(document)


OFFLINE = "HF_HUB_OFFLINE is set, and the cache of huggingface_hub lacks it. By hand: save"


@pytest.mark.parametrize(
    ("name", "address"),
    [("my/other", "my/other/resolve/main/config.json"), ("my/model@3c", "my/model/resolve/3c/config.json")],
)
def test_an_id_that_is_not_in_the_cache_says_why_and_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, address: str
) -> None:
    """Here the hub may not be asked, which huggingface_hub obeys."""
    _fetched(tmp_path, monkeypatch)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        ScenarioError, match=rf"model: {name} is neither .* {OFFLINE} https://huggingface.co/{address}, "
    ):
        read_model(name)


def test_a_hub_that_refuses_the_connection_is_no_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Port 9 of this machine has no server."""
    _fetched(tmp_path, monkeypatch)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", NOWHERE)
    with pytest.raises(
        ScenarioError, match=r"^model: my/other is [^\n]* It cannot be fetched \(\w*Error\)\. By hand: "
    ):
        read_model("my/other")


@pytest.mark.parametrize(
    ("status", "code", "why"),
    [
        (404, "EntryNotFound", r"my/other has no config\.json\."),
        (404, "RevisionNotFound", r"my/other has no revision 3c\."),
        (401, "RepoNotFound", r"The hub shows no my/other to this user\."),
        (500, "", r"The hub answers 500\."),
        (403, "GatedRepo", r"Its owner shows my/other to those who have agreed .*: hf auth login, or set HF_TOKEN\."),
    ],
)
def test_what_the_hub_refuses_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, code: str, why: str
) -> None:
    """A server here answers as the hub does, with the reason in X-Error-Code."""
    _fetched(tmp_path, monkeypatch)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with hub_of(lambda path: (status, {"X-Error-Code": code}, b"")) as address:
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", address + TEMPLATE)
        with pytest.raises(ScenarioError, match=why):
            read_model("my/other@3c")


def test_an_id_that_the_hub_has_is_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of it config.json alone is asked for; afterwards the cache has it."""
    _fetched(tmp_path, monkeypatch)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    body, asked = json.dumps(LLAMA | {"num_hidden_layers": 48}).encode(), list[str]()
    headers = {"X-Repo-Commit": "c" * 40, "ETag": '"e"', "Content-Length": str(len(body))}

    def answer(path: str) -> tuple[int, dict[str, str], bytes]:
        asked.append(path)
        return 200, headers, body

    with hub_of(answer) as address:
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", address + TEMPLATE)
        assert read_model("my/other").num_hidden_layers == 48
        assert {*asked} == {"/my/other/resolve/main/config.json"}
        count = len(asked)
        assert read_model("my/other").num_hidden_layers == 48
        assert len(asked) == count


@pytest.mark.parametrize("name", ["a/b/c", "-a/b", "../a", "my/model.json"])
def test_what_can_be_no_id_is_no_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """So that nothing is advised for it that cannot be done."""
    _fetched(tmp_path, monkeypatch)
    with pytest.raises(ScenarioError, match="neither in the catalog nor a file") as caught:
        read_model(name)
    assert "By hand" not in str(caught.value)


def test_a_config_json_gives_the_same_spec_as_the_catalog() -> None:
    """head_dim, tied embeddings and the KV heads take the defaults of the format."""
    assert ModelSpec.from_config(LLAMA, "llama-3.1-8b") == MODELS["llama-3.1-8b"]


def test_kv_bytes_and_flops_of_llama_8b() -> None:
    """128 KiB of KV a token; matmul FLOPs are twice the parameters of the layers' matrices."""
    model = MODELS["llama-3.1-8b"]
    assert model.kv_bytes_per_token == 131_072
    assert model.weight_bytes == 2 * model.num_parameters
    assert model.matmul_flops_per_token == 2 * 6_979_321_856


def test_tied_embeddings_are_counted_once() -> None:
    """Tying saves exactly one vocabulary matrix."""
    model = MODELS["qwen3-8b"]
    assert model.num_parameters - replace(model, tie_word_embeddings=True).num_parameters == model.head_parameters


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"model_type": "mamba"}, "'mamba': layers of kind Mamba alone are not known. State step"),
        ({"model_type": None}, "model_type None"),
        (
            {"model_type": "new", "num_experts": 4, "hidden_size": None},
            "model_type 'new' is none whose layers are known. State step times and KV memory: cost",
        ),
        ({"num_experts": 8, "num_experts_per_tok": 2}, "mixture of experts"),
        ({"num_local_experts": 8}, "num_experts_per_tok is missing.*Or state step times and KV memory: cost"),
        ({"kv_lora_rank": 512}, "qk_nope_head_dim is missing"),
        (
            {"model_type": "nemotron-nas", "num_attention_heads": None},
            "'nemotron-nas': layers of kind blocks of .* are not known. State step",
        ),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"sliding_window": 4096}, "sliding_window is 4096"),
        (
            {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 9},
            "layer_types has 2 of 32 layers",
        ),
        ({"layer_types": ["linear_attention"] * 32, "sliding_window": 9}, "layer_types has 'linear_attention'"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers is '32'"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_key_value_heads": 5}, "not a multiple of num_key_value_heads 5"),
        ({"hidden_size": 4097}, "not a multiple of num_attention_heads"),
        ({"torch_dtype": "int4"}, "torch_dtype is 'int4'"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1"),
        ({"attention_bias": [1] * 10_000}, r"attention_bias is \[1, 1, .{1,300}Write true or false"),
        ({"attn_output_gate": 1}, "attn_output_gate is 1. Write true or false"),
        ({"text_config": [1]}, r"text_config is \[1\]. Write an object"),
        ({"attention_bias": "no"}, "attention_bias is 'no'. Write true or false"),
        ({"layer_types": "full_attention", "sliding_window": 9}, "layer_types is 'full_attention'. Write a list"),
        ({"layer_types": {"0": "full_attention"}}, "layer_types is .* Write a list"),
        (
            {"num_local_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": 3},
            "mlp_only_layers is 3. Write a list, one of 0 to 31",
        ),
        ({"model_type": "qwen2", "head_dim": 2**30}, "vectors is .* must be from 0 to 2147483647. Correct the sizes"),
        (
            {
                **{"model_type": "llava_next", "vision_config": {"image_size": 336, "patch_size": 14}},
                "image_grid_pinpoints": [[336, 672], [336]],
            },
            "image_grid_pinpoints is .* heights and widths",
        ),
        ({"quantization_config": {"quant_method": "fp8", "ignore": 3}}, "ignore is 3. Write a list of modules"),
        ({"quantization_config": {"quant_method": "fp8", "ignore": ["re:("]}}, r"'re:\(' is no pattern"),
        ({"quantization_config": {"config_groups": [1]}}, r"config_groups is \[1\]. Write an object"),
        ({"quantization_config": {"config_groups": {"g": {"weights": 8}}}}, "weights is 8. Write an object"),
        (
            {"quantization_config": {"config_groups": {"g": {"weights": {"type": "float", "num_bits": []}}}}},
            "quant_method '', which is not known",
        ),
        ({"quantization_config": {"quantized_layers": ["lm_head"]}}, r"quantized_layers is .* Write an object"),
        ({"quantization_config": {"quantization": 7}}, "quantization is 7. Write an object"),
        ({"quantization_config": {"quant_method": "fp8"}, "expert_dtype": "fp2"}, "expert_dtype is 'fp2'"),
    ],
)
def test_what_is_not_modelled_is_refused(change: dict[str, object], complaint: str) -> None:
    """One line names the file and the key; nothing is guessed."""
    with pytest.raises(ScenarioError, match=complaint) as caught:
        ModelSpec.from_config(LLAMA | change, "my/config.json").check_timed()
    assert str(caught.value).startswith("my/config.json: ")
    assert "\n" not in str(caught.value)


STATED = """\
model: llama-3.1-8b
cost: {kind: linear, base: 5ms, per_token: 20us}
kv: {tokens: 16000}
workload:
  arrivals: {kind: all_at_once}
  lengths: {prompt: {kind: fixed, tokens: 9}, output: {kind: fixed, tokens: 3}}
  requests: 4
  output_cap: 8
policies: {continuous: {max_num_seqs: 4, max_num_batched_tokens: 512}}
slo: ttft<1s @ 99%
"""


@pytest.mark.parametrize(
    ("change", "complaint", "copy"),
    [
        (
            {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2},
            "num_local_experts means a mixture of experts, ",
            "",
        ),
        (
            {"model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8},
            "num_experts means a mixture of experts, ",
            "",
        ),
        (
            {
                "model_type": "deepseek_v3",
                "n_routed_experts": 256,
                "num_experts_per_tok": 8,
                "quantization_config": {"quant_method": "fp8"},
            },
            "n_routed_experts means a mixture of experts, ",
            "",
        ),
        (
            {"mlp_bias": True},
            "mlp_bias means biases on the MLP matrices, ",
            "Or remove mlp_bias from a copy of the file: that is the model with no biases.",
        ),
        (
            {
                "model_type": "llama4",
                "text_config": {
                    "num_local_experts": 16,
                    "num_experts_per_tok": 1,
                    "interleave_moe_layer_step": 1,
                    "intermediate_size_mlp": 9,
                },
            },
            "num_local_experts means a mixture",
            "",
        ),
        ({"model_type": "gemma2"}, "model_type 'gemma2' is none of the known llama, ", ""),
        ({"sliding_window": 4096}, "sliding_window is 4096: ", ""),
    ],
)
def test_a_refused_model_is_told_why_and_the_ways_out(change: dict[str, object], complaint: str, copy: str) -> None:
    """What makes it unlike the known ones is named, not its type; stated times always do, a copy where a key can go."""
    with pytest.raises(ScenarioError) as caught:
        ModelSpec.from_config(LLAMA | change, "my/config.json").check_timed()
    message = str(caught.value)
    assert message.startswith(f"my/config.json: {complaint}") and message.endswith(copy)
    assert "cost: {kind: linear, base: ..., per_token: ...} and kv: {tokens: ...}, and for model any name of" in message
    assert ("model_type" in message) is ("model_type" in complaint)


def test_a_quantised_model_is_timed_but_not_run(tmp_path: Path) -> None:
    """Whoever would run or measure it is told how it could; a roofline knows its types."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(
        ScenarioError, match=r"weights are quantised \(weights fp8, attention fp8, moe fp8\), which cannot"
    ):
        load_model(str(tmp_path))
    read_model(str(tmp_path)).check_timed()


def test_the_ways_out_of_a_refused_model_work(tmp_path: Path) -> None:
    """A scenario with stated times runs, and at the same speed whichever model it names."""
    (tmp_path / "s.yaml").write_text(STATED)
    ends = []
    for model in ("llama-3.1-8b", "qwen3-14b"):
        scenario = load_scenario(str(tmp_path / "s.yaml"), overrides=[f"model={model}"])
        ends.append(simulate_point(Setup.of(scenario), Point(scenario.specs[0], 1.0, 0)).end_ns)
    assert ends[0] == ends[1] > 0


MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000}
QWEN_MOE = {
    **LLAMA,
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "vocab_size": 151936,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
DEEPSEEK = {
    **LLAMA,
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "intermediate_size": 18432,
    "vocab_size": 129280,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
}


@pytest.mark.parametrize(
    ("config", "parameters", "kv_bytes"),
    [(MIXTRAL, 46_702_792_704, 131_072), (QWEN_MOE, 30_532_122_624, 98_304), (DEEPSEEK, 671_026_419_200, 70_272)],
)
def test_experts_and_latent_attention_are_read(config: dict[str, object], parameters: int, kv_bytes: int) -> None:
    """As many parameters as the published weights of Mixtral 8x7B, Qwen3-30B-A3B and, but for its extra head,
    DeepSeek-V3; KV of a token as its layers keep it."""
    model = ModelSpec.from_config(config, "m")
    assert (model.num_parameters, model.kv_bytes_per_token) == (parameters, kv_bytes)
    assert "mixture of experts" in model.untimed


def test_layers_of_several_kinds_follow_each_other() -> None:
    """DeepSeek's first three are dense; windows stand where `layer_types`, or the number of a qwen's layer, says."""
    latent = LatentAttention(128, 512, 1536, 128, 64, 128)
    assert ModelSpec.from_config(DEEPSEEK, "m").kinds == (
        Layers(3, latent, DenseMlp(18432)),
        Layers(58, latent, Experts(256, 8, 2048, 2048, vectors=1)),
    )
    full, mlp = GroupedAttention(32, 8, 128), DenseMlp(14336)
    window = replace(full, window=4096)
    types = ["full_attention", *["sliding_attention"] * 30, "full_attention"]
    mixed = ModelSpec.from_config(LLAMA | {"layer_types": types, "sliding_window": 4096}, "m")
    assert mixed.kinds == (Layers(1, full, mlp), Layers(30, window, mlp), Layers(1, full, mlp))
    late = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 28}
    qwen, narrow = replace(full, vectors=6144), replace(window, vectors=6144)  # the biases of q, k and v
    assert ModelSpec.from_config(LLAMA | late, "m").kinds == (Layers(28, qwen, mlp), Layers(4, narrow, mlp))
    every = {"model_type": "mistral", "sliding_window": 4096}
    assert ModelSpec.from_config(LLAMA | every, "m").kinds == (Layers(32, window, mlp),)
    sparse = {"decoder_sparse_step": 2, "mlp_only_layers": [1], "num_hidden_layers": 4}
    assert [type(each.mlp) for each in ModelSpec.from_config(QWEN_MOE | sparse, "m").kinds] == [DenseMlp, Experts]


def test_a_model_that_no_cost_can_time_runs_with_stated_times(tmp_path: Path) -> None:
    """Where times would be derived, of a GPU's sheet, it is refused in one line."""
    (tmp_path / "moe.json").write_text(json.dumps(QWEN_MOE))
    (tmp_path / "s.yaml").write_text(STATED.replace("model: llama-3.1-8b", "model: moe.json"))
    setup = Setup.of(load_scenario(str(tmp_path / "s.yaml")))
    assert simulate_point(setup, Point(setup.scenario.specs[0], 1.0, 0)).end_ns > 0
    message = r"moe\.json: num_experts means a mixture of experts, whose step times cannot be derived\. A deployment "
    with pytest.raises(ScenarioError, match=rf"--set cost=h200: .*{message}"):
        Setup.of(load_scenario(str(tmp_path / "s.yaml"), overrides=["cost=h200"]))
    with pytest.raises(ScenarioError, match=message):
        load_model(str(tmp_path / "moe.json"))


@pytest.mark.parametrize(
    ("cost", "short"), [("h200", 3.6), ("{kind: profile, profile: llama-3.1-8b-h200-vllm-0.24.0}", 1.5)]
)
def test_what_does_not_fit_is_told_by_the_name_that_the_scenario_has_for_it(
    tmp_path: Path, cost: str, short: float
) -> None:
    """A profile of the same shape is of a model of another name."""
    (tmp_path / "mine.json").write_text(json.dumps(LLAMA))
    (tmp_path / "s.yaml").write_text(STATED.replace("model: llama-3.1-8b", "model: mine.json"))
    scenario = load_scenario(str(tmp_path / "s.yaml"), overrides=[f"cost={cost}", "kv={utilisation: 10%}"])
    with pytest.raises(ScenarioError, match=rf"mine on h200: {short} GB short of one KV block"):
        Setup.of(scenario)


def test_a_deployment_holds_weights_and_kv_in_their_own_types_on_every_gpu() -> None:
    """Two GPUs share weights and KV heads, of latent attention each has a copy; four bytes a number are twice two."""
    model, latent = MODELS["llama-3.1-8b"], ModelSpec.from_config(DEEPSEEK, "m")
    two = Deployment(model, GPUS["h100"], tp=2)
    norms = (2 * 32 + 1) * 4096  # each GPU has a copy
    assert (two.num_gpus, two.weight_bytes, two.kv_bytes_per_token) == (2, model.num_parameters + norms, 65_536)
    wide = replace(two, weight_dtype="float32", kv_dtype="float32")
    assert (wide.weight_bytes, wide.kv_bytes_per_token) == (2 * two.weight_bytes, 2 * two.kv_bytes_per_token)
    assert Deployment(latent, tp=8).kv_bytes_per_token == Deployment(latent).kv_bytes_per_token == 70_272
    assert (Deployment(model).peak_flops, two.memory_bandwidth) == (None, 2 * GPUS["h100"].memory_bandwidth)


def test_what_is_as_by_default_is_left_out_of_a_model_that_is_written() -> None:
    """So that profiles of dense models read as ever; what is written comes back."""
    plain = to_plain(MODELS["llama-3.1-8b"])
    assert isinstance(plain, dict) and list(plain)[-1] == "dtype"
    for model in (MODELS["llama-3.1-8b"], ModelSpec.from_config(DEEPSEEK, "m")):
        assert from_plain(ModelSpec, to_plain(model)) == model


def test_a_window_that_is_switched_off_is_no_window() -> None:
    """Qwen2 configs name a window and a switch; without the switch the model is a full-attention one."""
    config = LLAMA | {"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}
    assert ModelSpec.from_config(config, "q").kinds[0].attention.window is None
    with pytest.raises(ScenarioError, match="sliding_window is 4096"):
        ModelSpec.from_config(config | {"use_sliding_window": True, "max_window_layers": 9}, "q").check_timed()


def test_a_model_is_loaded_by_file_or_folder(tmp_path: Path) -> None:
    """Both the file's path and its folder's are understood."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert load_model(str(tmp_path)).num_parameters == load_model(str(tmp_path / "config.json")).num_parameters


TWICE = json.dumps(LLAMA)[:-1] + ', "hidden_size": 4096}'


@pytest.mark.parametrize("text", ["{", "[]", '{"model_type": "llama"}', "\x00", "[" * 100_000, TWICE])
def test_a_broken_config_is_one_line(tmp_path: Path, text: str) -> None:
    """Whatever the file holds, the error is ours and names the file."""
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ScenarioError, match=r"config\.json") as caught:
        load_model(str(path))
    assert "\n" not in str(caught.value)


def test_an_unknown_name_gets_a_suggestion() -> None:
    """Near misses of models and GPUs are named, else the whole list."""
    with pytest.raises(ScenarioError, match=r"Did you mean llama-3\.1-8b"):
        load_model("llama-3.1-8B")
    with pytest.raises(ScenarioError, match="Did you mean h200"):
        load_gpu("H200")
    with pytest.raises(ScenarioError, match="Known are h200, h100, a100, l40s, rtx4090"):
        load_gpu("cerebras")


def test_a_hugging_face_id_is_its_checkpoint() -> None:
    """By the shape of the catalog, of a config.json that is kept, or of another checkpoint that is alike."""
    llama = read_model("meta-llama/Llama-3.1-70B")
    assert llama == replace(MODELS["llama-3.1-70b"], name="meta-llama/Llama-3.1-70B")
    assert read_model("meta-llama/Llama-3.3-70B-Instruct").same_shape(llama)
    mixtral = read_model("mistralai/Mixtral-8x7B-Instruct-v0.1")
    assert [kind.mlp for kind in mixtral.kinds] == [Experts(8, 2, 14336)]
    assert round(mixtral.num_parameters / 1e9, 1) == 46.7
    with pytest.raises(ScenarioError, match=r"Did you mean deepseek-ai/DeepSeek-V3\?"):
        read_model("DeepSeek-AI/deepseek-v3")


def test_every_kept_checkpoint_is_read_or_says_why_not() -> None:
    """One line with the checkpoint's name; nearly all dense ones are read."""
    read: list[str] = []
    for name in checkpoint_names():
        try:
            assert read_model(name).num_parameters > 10**8
            read.append(name)
        except ScenarioError as error:
            assert str(error).startswith(f"{name}: ")
            assert "\n" not in str(error)
    assert len(read) > 40
    assert {"Qwen/Qwen3-32B", "deepseek-ai/DeepSeek-R1", "meta-llama/Meta-Llama-3.1-405B"} <= set(read)


def test_a_gpu_stands_under_the_name_that_the_kernel_tables_have_for_it_too() -> None:
    """Both names are one spec; a board that nothing was fitted to says of which it is taken to reach the shares."""
    assert load_gpu("h100_sxm") is load_gpu("h100")
    assert load_gpu("h100_sxm").name == "h100"
    b200 = load_gpu("b200_sxm")
    assert b200.efficiencies.error_p95 is None
    assert b200.efficiencies.fitted_on == "nothing of b200_sxm, assumed to reach the same shares as h200"
    assert "aiconfigurator-core 0.12.0" in b200.source


def test_the_budget_of_llama_8b_on_h200_is_55_8k_blocks() -> None:
    """The example everybody knows, and the sum it is printed with."""
    budget = Deployment(MODELS["llama-3.1-8b"], GPUS["h200"]).derive_kv()
    assert budget.num_blocks == 55_798
    assert str(budget) == ("KV 892,768 tokens (55,798 blocks of 16: 150.8 GB × 0.90 − 16.1 weights − 2.6 reserve)")


def test_the_budget_follows_its_terms() -> None:
    """Blocks are the free bytes over a block's bytes, for any reserve, utilisation and block size."""
    model, gpu = MODELS["qwen3-8b"], GPUS["h100"]
    budget = Deployment(model, gpu).derive_kv(utilisation=0.8, block_size=32, reserve_bytes=10**9)
    free = int(gpu.memory_bytes * 0.8) - model.weight_bytes - 10**9
    assert budget.num_blocks == free // (model.kv_bytes_per_token * 32)
    assert budget.tokens == 32 * budget.num_blocks


def test_a_model_that_does_not_fit_says_what_is_missing_and_what_would_fit() -> None:
    """70B in bf16 is 141 GB of weights: two H200 hold it."""
    with pytest.raises(ScenarioError, match=r"8\.0 GB short of one KV block.*It fits with tp: 2\."):
        Deployment(MODELS["llama-3.1-70b"], GPUS["h200"]).derive_kv()
    assert Deployment(MODELS["llama-3.1-70b"], GPUS["h200"], tp=2).derive_kv().num_blocks > 20_000


def test_a_model_no_degree_makes_fit_says_so() -> None:
    """Without a degree up to 8 that fits, the advice is another model or GPU."""
    huge = replace(MODELS["llama-3.1-70b"], num_hidden_layers=1000)
    with pytest.raises(ScenarioError, match="Use a smaller model or a GPU with more memory"):
        Deployment(huge, GPUS["l40s"]).derive_kv()


def test_tensor_parallelism_divides_kv_heads_until_there_are_none_left() -> None:
    """Eight KV heads over 16 GPUs are copied, not halved; heads that cannot be cut are an error."""
    model = MODELS["llama-3.1-70b"]
    assert [Deployment(model, tp=tp).kv_bytes_per_token for tp in (1, 2, 8, 16)] == [327_680, 163_840, 40_960, 40_960]
    with pytest.raises(ScenarioError, match=r"28 heads.*into 8 equal parts"):
        Deployment(MODELS["qwen2.5-7b"], tp=8)


def test_every_catalog_entry_has_a_source() -> None:
    """No number without where it is from."""
    assert MODEL_SOURCES.keys() == MODELS.keys()
    assert all(gpu.source and gpu.efficiencies.source and gpu.efficiencies.fitted_on for gpu in GPUS.values())
