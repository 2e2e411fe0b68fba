"""Engines' own command lines: what they say to a scenario, that they come back the same, and what is refused."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import yaml

from batchsim.base.errors import ScenarioError
from batchsim.cli.starter import deployed_text
from batchsim.policies.registry import POLICIES
from batchsim.scenario.command_lines.engines import (
    SERVERS,
    command_of,
    keys_of,
    of_checkpoint,
    read_command,
    write_command,
)
from batchsim.scenario.command_lines.lines import OPTIONS_FILE
from batchsim.scenario.deployment_config import DeploymentConfig
from batchsim.scenario.parse import parse_scenario
from tests.unit.scenario.test_deployment_config import SHEET, TEXT

FLAGS_FOLDER = Path(str(resources.files("batchsim.scenario.command_lines")))

OPTIONS = """
cuda_graph_config:
    enable_padding: true
    max_batch_size: 512
enable_attention_dp: true
kv_cache_config:
    dtype: fp8
    free_gpu_memory_fraction: 0.8
stream_interval: 10
moe_config:
    backend: DEEPGEMM
"""
DOCUMENTED: dict[str, tuple[str, str, dict[str, Any]]] = {
    # where from: engine, line as documented, the keys that it says
    "docs.vllm.ai/projects/recipes Ring-1T-FP8": (
        "vllm",
        """vllm serve inclusionAI/Ring-1T-FP8 \\
          --trust-remote-code \\
          --tensor-parallel-size 8 \\
          --gpu-memory-utilization 0.97 \\
          --max_num_seqs 32 \\
          --kv-cache-dtype fp8 \\
          --compilation-config '{"use_inductor": false}' \\
          --served-model-name Ring-1T-FP8""",
        {
            "model": "inclusionAI/Ring-1T-FP8",
            "deployment.tp": 8,
            "kv.utilisation": "97%",
            "policy.max_num_seqs": 32,
            "deployment.kv": "fp8",
        },
    ),
    "mintlify.com/vllm-project cli-usage, one node": (
        "vllm",
        "vllm serve meta-llama/Llama-3.2-1B-Instruct --dtype auto --max-model-len 4096 --trust-remote-code",
        {"model": "meta-llama/Llama-3.2-1B-Instruct", "max_model_len": 4096},
    ),
    "mintlify.com/vllm-project cli-usage, data parallel": (
        "vllm",
        "vllm serve meta-llama/Llama-3.2-1B-Instruct \\\n --data-parallel-size 4 \\\n --tensor-parallel-size 2",
        {"model": "meta-llama/Llama-3.2-1B-Instruct", "deployment.dp_attention": 4, "deployment.tp": 2},
    ),
    "mintlify.com/vllm-project distributed-serving": (
        "vllm",
        "vllm serve meta-llama/Llama-405B-Instruct \\\n--tensor-parallel-size 16 \\\n--pipeline-parallel-size 1",
        {"model": "meta-llama/Llama-405B-Instruct", "deployment.tp": 16, "deployment.pp": 1},
    ),
    "pastebin.com/wFt4hKqg, its first tensor-parallel-size left out": (
        "vllm",
        "vllm serve /srv/models/awq/GLM-4.5-Air-AWQ --host 192.168.1.12 --port 8000 --api-key token-abc123"
        " --tool-call-parser glm45 --reasoning-parser glm45 --enable-auto-tool-choice --dtype half"
        " --enable-expert-parallel --tensor-parallel-size 2 --pipeline-parallel-size 1 --max-model-len 16384"
        " --max-num-seqs 16 --kv-cache-dtype fp8 --calculate-kv-scales --gpu-memory-utilization 0.98",
        {
            "model": "/srv/models/awq/GLM-4.5-Air-AWQ",
            "deployment.tp": 2,
            "deployment.pp": 1,
            "deployment.ep": 2,
            "deployment.kv": "fp8",
            "max_model_len": 16384,
            "policy.max_num_seqs": 16,
            "kv.utilisation": "98%",
        },
    ),
    "huggingface.co/lukealonso/MiniMax-M2.7-NVFP4 discussion 10, KV as the model has it": (
        "vllm",
        "CUDA_VISIBLE_DEVICES=0,1 \\\nSAFETENSORS_FAST_GPU=1 \\\nOMP_NUM_THREADS=8 \\\nNCCL_P2P_DISABLE=1 \\\n"
        "VLLM_USE_FLASHINFER_MOE_FP4=0 \\\nvllm serve lukealonso/MiniMax-M2.7-NVFP4 \\\n  --port 23333 \\\n"
        "  --trust-remote-code \\\n  --served-model-name MM-27 \\\n  --tensor-parallel-size 2 \\\n"
        "  --enable-auto-tool-choice \\\n  --tool-call-parser minimax_m2 \\\n"
        "  --reasoning-parser minimax_m2_append_think \\\n  --disable-custom-all-reduce \\\n"
        "  --enable_expert_parallel \\\n  --gpu-memory-utilization 0.95 \\\n  --max-num-seqs 8 \\\n"
        "  --max-model-len 130k",
        {
            "model": "lukealonso/MiniMax-M2.7-NVFP4",
            "deployment.tp": 2,
            "deployment.ep": 2,
            "kv.utilisation": "95%",
            "policy.max_num_seqs": 8,
            "max_model_len": 130_000,
        },
    ),
    "docs.sglang.io deepseek_v32": (
        "sglang",
        "python -m sglang.launch_server --model deepseek-ai/DeepSeek-V3.2-Exp --tp 8 --dp 8 --enable-dp-attention",
        {"model": "deepseek-ai/DeepSeek-V3.2-Exp", "deployment.tp": 1, "deployment.dp_attention": 8},
    ),
    "docs.sglang.io deepseek_v32, experts": (
        "sglang",
        "python -m sglang.launch_server --model deepseek-ai/DeepSeek-V3.2-Exp --tp 8 --ep 8",
        {"model": "deepseek-ai/DeepSeek-V3.2-Exp", "deployment.tp": 8, "deployment.ep": 8},
    ),
    "cloud.tencent.com/developer/news/2369647": (
        "sglang",
        "python3 -m sglang.launch_server --model-path /mnt/disk1/LLM/QwQ-32B --host 0.0.0.0 --port 4000 --dtype half"
        " --trust-remote-code --tp 4 --max-total-tokens 96000 --max-running-requests 6 --mem-fraction-static 0.9"
        " --max-prefill-tokens 16384 --chunked-prefill-size 4096 --schedule-policy lpm --attention-backend flashinfer"
        " --stream-interval 2 --kv-cache-dtype auto --disable-cuda-graph-padding --enable-metrics --warmups 3"
        " --triton-attention-num-kv-splits 4 --reasoning-parser deepseek-r1",
        {
            "model": "/mnt/disk1/LLM/QwQ-32B",
            "deployment.tp": 4,
            "kv.tokens": 96_000,
            "policy.max_running_requests": 6,
            "policy.max_prefill_tokens": 16_384,
            "policy.chunked_prefill_size": 4096,
            "policy.schedule_policy": "lpm",
        },
    ),
    "nvidia.github.io/TensorRT-LLM deepseek_r1_reasoning_parser": (
        "tensorrt_llm",
        "trtllm-serve \\\n deepseek-ai/DeepSeek-R1 \\\n --host localhost --port 8000 \\\n --trust_remote_code \\\n"
        " --max_batch_size 1024 --max_num_tokens 8192 \\\n --tp_size 8 --ep_size 8 --pp_size 1 \\\n"
        " --config ./config.yml \\\n --reasoning_parser deepseek-r1",
        {
            "model": "deepseek-ai/DeepSeek-R1",
            "deployment.dp_attention": 8,
            "deployment.ep": 8,
            "deployment.pp": 1,
            "deployment.kv": "fp8",
            "kv.utilisation": "80%",
            "policy.max_batch_size": 1024,
            "policy.max_num_tokens": 8192,
        },
    ),
    "mintlify.com/NVIDIA/TensorRT-LLM trtllm-serve": (
        "tensorrt_llm",
        "trtllm-serve TinyLlama/TinyLlama-1.1B-Chat-v1.0 \\\n --host localhost --port 8000 --backend pytorch"
        " --tp_size 2 --max_batch_size 128 --max_num_tokens 8192",
        {
            "model": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
            "deployment.tp": 2,
            "policy.max_batch_size": 128,
            "policy.max_num_tokens": 8192,
        },
    ),
}


@pytest.mark.parametrize(("engine", "line", "keys"), DOCUMENTED.values(), ids=DOCUMENTED)
def test_a_documented_command_line_comes_back_the_same(
    engine: str, line: str, keys: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says those keys, and the line written of them says the same ones again."""
    monkeypatch.chdir(tmp_path)
    Path("config.yml").write_text(OPTIONS, encoding="utf-8")
    read = read_command(line, engine)
    assert read.keys == keys
    written = write_command(keys, engine)
    assert written.unsaid == ()
    Path(OPTIONS_FILE).write_text("\n".join(written.options), encoding="utf-8")
    again = read_command(written.line, engine)
    assert again.keys == keys
    assert write_command(again.keys, engine) == written
    assert again.same == again.untold == ()


def test_what_a_line_leaves_untold_is_named() -> None:
    """Flags without effect on timing apart from those that choose kernels."""
    read = read_command(DOCUMENTED["docs.vllm.ai/projects/recipes Ring-1T-FP8"][1], "vllm")
    assert read.same == ("--trust-remote-code", "--served-model-name")
    assert read.untold == ("--compilation-config",)


@pytest.mark.parametrize(
    ("engine", "line", "says"),
    [
        ("vllm", "", "the command begins with nothing. Write vllm serve MODEL"),
        ("vllm", "vllm bench serve", "the command begins with vllm bench serve"),
        ("vllm", "vllm serve", "names no model"),
        ("vllm", "vllm serve --port 8000", "names no model"),
        ("vllm", "vllm serve m n", "n is the value of no flag, and the model is m"),
        ("vllm", "vllm serve m 'n", "no closing quotation"),
        ("vllm", "vllm serve m -tp", "-tp has no value"),
        ("vllm", "vllm serve m -tp --port 1", "-tp has no value"),
        ("vllm", "vllm serve m -tp four", "-tp is 'four'. Write a whole number"),
        ("vllm", "vllm serve m -tp 2 --tensor_parallel_size 4", "--tensor_parallel_size is given twice. Keep one"),
        ("vllm", "vllm serve m --tensor-paralel-size 4", "Did you mean --tensor-parallel-size?"),
        ("vllm", "vllm serve m --frobnicate", "--frobnicate is no flag that is known"),
        ("vllm", "vllm serve m --enforce-eager", "without them steps are slower"),
        ("vllm", "vllm serve m -O0", "-O0 has no counterpart: the kernel tables time decodes with CUDA graphs"),
        (
            "vllm",
            "vllm serve m --enforce-eager",
            "Leave it out here, and state that in the scenario: deployment.host: {base: 20ms}, say.",
        ),
        ("sglang", "sglang serve --model m --disable-cuda-graph", "deployment.host: {base: 20ms}, say."),
        ("vllm", "vllm serve m --dtype float32", "--dtype float32 has no counterpart: tables and rooflines are of 16"),
        (
            "vllm",
            "vllm serve m --dtype=float",
            "or state what steps take: cost: {kind: linear, ...}, with kv: {tokens:",
        ),
        ("sglang", "sglang serve --model m --dtype float32", "--dtype float32 has no counterpart"),
        ("vllm", "vllm serve m --enable-eplb", "experts that move. Leave it out to simulate an engine without it."),
        ("vllm", "vllm serve m --optimization-level 0", "--optimization-level 0 has no counterpart"),
        ("vllm", 'vllm serve m -cc \'{"cudagraph_mode": "NONE"}\'', "without them steps are slower"),
        ("vllm", "vllm serve m --hf-overrides '{\"num_hidden_layers\": 2}'", "it may change the model's shape"),
        ("vllm", "vllm serve m --speculative-config {}", "no flag says how many drafts the model accepts"),
        ("vllm", "vllm serve m --max-loras 4", "--max-loras does nothing without --enable-lora. Add that, or leave it"),
        ("vllm", "vllm serve m --enable-lora --lora-modules a=b", "and write how many in the scenario: workload.loras"),
        ("vllm", "vllm serve m --enable-lora --fully-sharded-loras", "kernels of adapters have a stated cost"),
        ("sglang", "sglang serve --model m --max-loras-per-batch 4", "does nothing without --enable-lora"),
        ("sglang", "sglang serve --model m --enable-lora --max-lora-rank 8", "workload.loras.rank. Leave it out here."),
        ("vllm", "vllm serve m --kv-cache-dtype turboquant_k8v4", "Write one of auto, fp8"),
        ("vllm", "vllm serve m --quantization bitsandbytes", "--quantization is 'bitsandbytes'"),
        ("vllm", "vllm serve m --gpu-memory-utilization 90", "a number above 0 and up to 1"),
        ("vllm", "vllm serve m --max-model-len 8q", "a whole number, like 8192, or with one of k, m"),
        ("vllm", "vllm serve m --max-model-len 1.2345k5", "a whole number"),
        ("vllm", "vllm serve m --enable-prefix-caching=yes", "takes no value"),
        ("vllm", "vllm serve m --enable-prefix-caching --no-enable-prefix-caching", "another thing than a flag before"),
        ("vllm", "FOO=1 vllm serve m", "whether FOO changes timing is not known"),
        ("vllm", "VLLM_USE_V1=0 vllm serve m", "whether VLLM_USE_V1 changes timing"),
        ("sglang", "vllm serve m", "Write python -m sglang.launch_server --model-path MODEL"),
        ("sglang", "python -m sglang.launch_server --tp 2", "names no model"),
        ("sglang", "sglang serve --model m --dp 2", "is 2 engines behind a router"),
        ("sglang", "sglang serve --model m --tp 3 --dp 2 --enable-dp-attention", "no multiple of the 2 groups"),
        ("sglang", "sglang serve --model m --disable-cuda-graph", "without them steps are slower"),
        ("sglang", "sglang serve --model m --schedule-policy dfs-weight", "Write one of fcfs, lpm"),
        ("sglang", "sglang serve --model m --speculative-algorithm EAGLE", "no flag says how many drafts"),
        ("sglang", "sglang serve --model m --nnodes 2", "GPUs of one machine"),
        ("tensorrt_llm", "trtllm-bench m", "Write trtllm-serve MODEL"),
        ("tensorrt_llm", "trtllm-serve m --tp_sizes 2", "Did you mean --tp_size?"),
        ("tensorrt_llm", "trtllm-serve m --backend tensorrt", "--backend is 'tensorrt'. Write one of pytorch"),
        ("tensorrt_llm", "trtllm-serve m --config backend.yaml", "backend.yaml:1: backend is 'tensorrt'. Write one of"),
        (
            "tensorrt_llm",
            "trtllm-serve m --config v2.yaml",
            "use_kv_cache_manager_v2 is 'true'. Write one of false, auto",
        ),
        ("tensorrt_llm", "trtllm-serve m --config py.yaml", "use_python_scheduler is 'true'. Write one of false"),
        ("tensorrt_llm", "trtllm-serve m --config nowhere.yaml", "nowhere.yaml: cannot be read"),
        ("tensorrt_llm", "trtllm-serve m --config options.yaml", "options.yaml:2: kv_cache_config.dtyp is no option"),
        ("tensorrt_llm", "trtllm-serve m --extra_llm_api_options more.yaml", "more.yaml:1: enable_attention_dp is '8'"),
        ("tensorrt_llm", "trtllm-serve m --tp_size 4 --config tp.yaml", "another thing than a flag before"),
        ("tensorrt_llm", "trtllm-serve m --config list.yaml", "list.yaml: holds ['tensor_parallel_size'], no options"),
        ("tensorrt_llm", "trtllm-serve m --config bytes.yaml", "bytes.yaml: cannot be read: byte 1 is not UTF-8"),
        ("tensorrt_llm", "trtllm-serve m --config dots.yaml", "dots.yaml:2: kv_cache_config.dtype is given twice"),
        ("vllm", f"vllm serve m --max-model-len {'9' * 310}", "Write a whole number, like 8192"),
        ("vllm", f"vllm serve m --max-model-len {'9' * 4301}", "Write a whole number, like 8192"),
        ("vllm", f"vllm serve m --max-num-seqs 1.{'9' * 400}k", "Write a whole number, like 8192"),
        ("vllm", f"vllm serve m -tp {'9' * 310}", "Write a whole number of at most 20 digits"),
        ("sglang", f"sglang serve --model m --tp {'9' * 4301}", "Write a whole number of at most 20 digits"),
        ("sglang", "sglang serve --model m --schedule-conservativeness nan", "'nan'. Write a number"),
        ("sglang", "sglang serve --model m --schedule-conservativeness 1e999", "'1e999'. Write a number"),
    ],
)
def test_a_line_that_cannot_be_taken_says_why(
    engine: str, line: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one line, which names the flag and what to do."""
    monkeypatch.chdir(tmp_path)
    Path("options.yaml").write_text("kv_cache_config:\n  dtyp: fp8\n", encoding="utf-8")
    Path("backend.yaml").write_text("backend: tensorrt\n", encoding="utf-8")
    Path("v2.yaml").write_text("kv_cache_config: {use_kv_cache_manager_v2: true}\n", encoding="utf-8")
    Path("py.yaml").write_text("scheduler_config: {use_python_scheduler: true}\n", encoding="utf-8")
    Path("more.yaml").write_text("enable_attention_dp: 8\n", encoding="utf-8")
    Path("tp.yaml").write_text("tensor_parallel_size: 8\n", encoding="utf-8")
    Path("list.yaml").write_text("- tensor_parallel_size\n", encoding="utf-8")
    Path("bytes.yaml").write_bytes(b"\xff")
    Path("dots.yaml").write_text("kv_cache_config.dtype: fp8\nkv_cache_config: {dtype: auto}\n", encoding="utf-8")
    with pytest.raises(ScenarioError, match=re.escape(says)) as caught:
        read_command(line, engine)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith((".", "?"))


@pytest.mark.parametrize("flag", ["--port 80", "-O3", "--served-model-name a b", "--seed -1"])
def test_a_flag_without_effect_takes_no_other_flag_as_its_value(flag: str) -> None:
    """One of one hyphen after it counts, and so does the model."""
    assert read_command(f"vllm serve m {flag} -tp 4", "vllm").keys == {"model": "m", "deployment.tp": 4}
    if "name" not in flag:
        assert read_command(f"vllm serve {flag} m", "vllm").keys == {"model": "m"}


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_checkpoint_is_quantised_only_as_its_config_says(engine: str) -> None:
    """`awq` of a model that is known in 16 bits is refused, `fp8` of one in FP8 by blocks is what it has already."""

    def weights(model: str, method: str) -> str | None:
        head = "vllm serve" if engine == "vllm" else "sglang serve --model"
        return of_checkpoint(read_command(f"{head} {model} --quantization {method}", engine), model).keys.get(
            "deployment.weights"
        )

    with pytest.raises(ScenarioError, match="--quantization awq is of a checkpoint that is quantised so"):
        weights("llama-3.1-8b", "awq")
    with pytest.raises(ScenarioError, match="fp8 is not how openai/gpt-oss-20b is quantised"):
        weights("openai/gpt-oss-20b", "fp8")
    assert weights("deepseek-ai/DeepSeek-V3", "fp8") is None
    assert weights("openai/gpt-oss-20b", "mxfp4") is None
    assert weights("llama-3.1-8b", "fp8") == "fp8"


def test_what_no_flag_says_is_told() -> None:
    """A type that only a checkpoint has, a division of experts that the engine does not make."""
    its = {"model": "m", "deployment.weights": "nvfp4", "deployment.kv": "fp8"}
    assert write_command(its, "vllm").unsaid == ("deployment.weights nvfp4",)
    with pytest.raises(ScenarioError, match="over all 8 GPUs of a stage or none, not over 2"):
        write_command({"model": "m", "deployment.tp": 8, "deployment.ep": 2}, "vllm")


@pytest.mark.parametrize("engine", SERVERS)
def test_a_pinned_revision_is_a_flag_of_its_own(engine: str) -> None:
    """No engine takes ORG/NAME@REVISION as a model."""
    line = write_command({"model": "my/model@abc123"}, engine).line
    assert "my/model " in line and line.endswith(" --revision abc123")


def test_memory_for_kv_is_said_in_bytes() -> None:
    """Both ways, and a share beside it says nothing."""
    line = "vllm serve m --kv-cache-memory-bytes 20G --gpu-memory-utilization 0.8"
    keys = read_command(line, "vllm").keys
    assert keys == {"model": "m", "kv.memory": f"{20 * 2**30}B"}
    assert write_command({"model": "m", "kv.memory": "20GiB"}, "vllm").line == (
        f"vllm serve m --kv-cache-memory-bytes {20 * 2**30}"
    )


@pytest.mark.parametrize("engine", SERVERS)
def test_every_flag_sets_a_key_that_scenarios_have(engine: str) -> None:
    """Knobs are the policy's own, degrees and types a deployment's; no name means two things."""
    server = SERVERS[engine]
    knobs = POLICIES[engine][0].__dataclass_fields__
    names = [name for flag in server.flags for name in (flag.name, *flag.others)]
    every = [*names, *server.model_flags, *_listed(engine)]
    assert len(every) == len({*every}) and {*every} == {*server.names()}
    for flag in server.flags:
        owner, _, name = flag.key.rpartition(".")
        assert owner != "policy" or name in knobs, flag


def _listed(engine: str) -> list[str]:
    """The flags that other_flags.yaml has of an engine, as often as it has them."""
    table = yaml.safe_load((FLAGS_FOLDER / "other_flags.yaml").read_text(encoding="utf-8"))[engine]
    groups = [*table["same"].values(), *table["untold"].values(), *table["refused"]]
    return [name for group in groups for name in group.split()]


@pytest.mark.parametrize("engine", SERVERS)
def test_a_scenario_of_a_line_is_started_with_that_line(engine: str, tmp_path: Path) -> None:
    """Through the file that `init` writes and back."""
    keys: dict[str, Any] = {"model": "meta-llama/Llama-3.1-8B", "deployment.tp": 4, "kv.utilisation": "85%"}
    keys |= {"max_model_len": 8192, f"policy.{_knob(engine)}": 128}
    text = deployed_text(keys, engine, "GPU", tmp_path, None, None).replace("gpu: GPU", f"gpu: {SHEET}")
    scenario = parse_scenario(text, "some.yaml", tmp_path)
    assert keys_of(scenario) == keys
    written = command_of(scenario)
    assert read_command(written.line, engine).keys == keys and written.unsaid == ()
    both = parse_scenario(text, "some.yaml", tmp_path, (f"policies={{a: {{kind: {engine}}}, b: {{kind: {engine}}}}}",))
    assert command_of(both).unsaid == ("policy b",)
    policies = (
        f"{{a: {{kind: {engine}}}, b: {{kind: {engine}, {_knob(engine)}: 9}}, c: {{kind: static, batch_size: 9}}}}"
    )
    several = parse_scenario(text, "some.yaml", tmp_path, (f"policies={policies}",))
    assert f"policy.{_knob(engine)}" not in read_command(command_of(several, "a").line, engine).keys
    assert read_command(command_of(several, "b").line, engine).keys[f"policy.{_knob(engine)}"] == 9
    assert [command_of(several, name).unsaid for name in "bc"] == [(), ("policy c",)]


@pytest.mark.parametrize(
    "line",
    [
        "vllm serve llama-3.1-8b --enable-lora --max-loras 1",
        "vllm serve llama-3.1-8b --enable-lora --max-loras 4 --max-cpu-loras 16 --max-lora-rank 32",
        "python -m sglang.launch_server --model-path llama-3.1-8b --enable-lora --max-loras-per-batch 8",
        "python -m sglang.launch_server --model-path llama-3.1-8b --enable-lora --max-loras-per-batch 4"
        " --lora-eviction-policy fifo --enable-lora-overlap-loading",
    ],
)
def test_adapters_of_a_line_come_back(line: str, tmp_path: Path) -> None:
    """Through a file whose workload has adapters of the rank; alone, --enable-lora is the engine's own number."""
    engine = "sglang" if "sglang" in line else "vllm"
    keys = read_command(line, engine).keys
    text = deployed_text(keys, engine, "h200", tmp_path, None, None)
    scenario = parse_scenario(text, "some.yaml", tmp_path)
    loras = scenario.file.workload.loras
    assert loras is not None and loras.rank == keys.get("policy.max_lora_rank", 16)
    written = command_of(scenario)
    assert read_command(written.line, engine).keys == {**keys, "model": "meta-llama/Llama-3.1-8B"}
    assert written.unsaid == ()
    if line.endswith("--max-loras 1"):
        assert read_command(line.removesuffix(" --max-loras 1"), engine).keys == keys


def _knob(engine: str) -> str:
    return {"vllm": "max_num_seqs", "sglang": "max_running_requests", "tensorrt_llm": "max_batch_size"}[engine]


def test_only_a_deployment_has_a_command() -> None:
    """A scenario that states a cost says what to write instead."""
    scenario = parse_scenario(TEXT, "some.yaml", Path(), ("cost=h200", "policies={vllm: {}}"))
    with pytest.raises(ScenarioError, match=r"cost of kind roofline names no engine\. Write a deployment"):
        command_of(scenario)


@pytest.mark.parametrize("longest", [2, 3, 16, 1024, 1500, 4096, 131_072])
def test_a_starter_asks_for_no_more_than_its_engine_takes(longest: int, tmp_path: Path) -> None:
    """Its longest request fits max_model_len, and its means lie within its own limits."""
    keys = {"model": "llama-3.1-8b", "max_model_len": longest}
    workload = parse_scenario(deployed_text(keys, "vllm", "h200", tmp_path, None, None), "s", tmp_path).file.workload
    assert workload.lengths.prompt.max + workload.output_cap <= longest  # type: ignore[union-attr]


def test_what_eager_is_sent_to_is_read() -> None:
    """The host's time of each step, stated, stands in the place of what CUDA graphs save."""
    text = (
        "model: llama-3.1-8b\ndeployment: {engine: vllm, gpu: h100_sxm, host: {base: 20ms}}\nkv: {tokens: 9000}\n"
        "workload: {arrivals: {kind: all_at_once}, requests: 2, output_cap: 9, lengths: {kind: list, prompt: [9, 9],"
        " output: [5, 5]}}\nslo: ttft<1s @ 99%\n"
    )
    scenario = parse_scenario(text, "eager.yaml", Path())
    assert isinstance(scenario.cost, DeploymentConfig) and scenario.cost.host is not None
    assert scenario.cost.host.base == 20_000_000
