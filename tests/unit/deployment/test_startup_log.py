"""Start-up logs: their two lines against each other, the model and the deployment; what cannot be is refused."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from batchsim.base.errors import ScenarioError
from batchsim.base.files import read_text
from batchsim.base.kv_pools import KvPools
from batchsim.deployment.startup_log import Wanted, read_kv_log
from batchsim.scenario import load_scenario
from batchsim.scenario.setup import Setup
from tools.kv_memory import REFERENCE

ROWS = list(csv.DictReader(read_text(REFERENCE / "vllm-0.19.csv").splitlines()))
GIB = 2**30


def vllm(model: str, tokens: str, length: str, count: str, version: str = "0.19.0", more: str = "") -> str:
    """The lines of a start of vLLM."""
    return (
        f"INFO Initializing a V1 LLM engine (v{version}) with config: model='{model}', {more}\n"
        f"INFO GPU KV cache size: {tokens} tokens\nINFO Maximum concurrency for {length} tokens per request: {count}x\n"
    )


def written(tmp_path: Path, text: str) -> Path:
    (tmp_path / "start.log").write_text(text)
    return tmp_path / "start.log"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["file"])
def test_start_ups_say_their_pool_or_the_memory_of_all_groups(tmp_path: Path, row: dict[str, str]) -> None:
    """Of models without windows the tokens as printed; of gemma-2, gemma-3, Llama-4 and gpt-oss the logged GiB."""
    file = REFERENCE / "models" / f"{row['model'].replace('/', '--')}.json"
    model = str(file) if file.is_file() else row["model"]
    config = f"speculative_config=None, tensor_parallel_size={row['tp']}, kv_cache_dtype={row['kv_dtype']}"
    length, count = int(row["max_model_len"]), float(row["max_concurrency"])
    log = vllm(row["model"], f"{int(row['kv_tokens']):,}", f"{length:,}", f"{count:.2f}", more=config)
    kv = "fp8" if row["kv_dtype"] == "fp8" else "auto"
    logged = read_kv_log(written(tmp_path, log), Wanted("vllm", "0.19", int(row["tp"]), 1, model, kv))
    if any(name in row["model"] for name in ("gemma", "Llama-4", "gpt-oss")):
        assert logged.tokens is None and logged.memory_bytes is not None
        assert logged.memory_bytes / GIB == pytest.approx(float(row["kv_GiB"]), abs=0.006)
    else:
        assert (logged.tokens, logged.memory_bytes) == (int(row["kv_tokens"]), None)
    assert logged.source == f"from the log start.log: vllm 0.19.0, {row['model']}"


def test_from_0_21_on_tokens_are_requests_times_their_length(tmp_path: Path) -> None:
    """1,000 blocks are 15,984 tokens in requests of 999, which have 63 blocks: int(1000 / 63 × 999) = 15,857."""
    log = vllm("mine/any", "15,857", "999", "15.87", "0.24.0")
    assert read_kv_log(written(tmp_path, log), Wanted()).tokens == 15_857
    with pytest.raises(ScenarioError, match=r"says 15,858 tokens, no whole number of blocks of 16"):
        read_kv_log(written(tmp_path, log.replace("15,857", "15,858")), Wanted())
    with pytest.raises(ScenarioError, match=r"says 15,857 tokens, no whole number of blocks of 16"):
        read_kv_log(written(tmp_path, log.replace("0.24.0", "0.19.0").replace("999", "992")), Wanted())


DENSE = vllm("Qwen/Qwen3-14B", "158,656", "4,096", "38.73")
SERVED = "INFO:     Application startup complete.\n"


@pytest.mark.parametrize(
    ("log", "wanted", "complaint"),
    [
        (
            DENSE,
            Wanted("vllm", "0.24"),
            r"is of vllm 0\.19\.0, and the deployment asks for 0\.24\. Give its own log, or",
        ),
        (
            DENSE,
            Wanted(model="llama-3.1-8b"),
            r"is of Qwen/Qwen3-14B, and the model is llama-3\.1-8b\. Give its own log",
        ),
        (DENSE, Wanted(block_size=32), ""),
        (DENSE.replace("158,656", "158,650"), Wanted(), "says 158,650 tokens, no whole number of blocks of 16"),
        (DENSE.replace("38.73", "38.79"), Wanted(), "says 158,656 tokens, and that 38.79 requests of 4,096 fit"),
        (DENSE + "non-default args: {'block_size': 32}\n", Wanted(), "is of blocks of 32, and kv.block_size is 16"),
        (DENSE + "x pipeline_parallel_size=2, x\n", Wanted("vllm", pp=1), "is of pp 2, and the deployment has pp 1"),
        (DENSE + "tp_size=2\n", Wanted("vllm", tp=4), "is of tp 2, and the deployment has tp 4"),
        (
            DENSE + "speculative_config=SpeculativeConfig(method='eagle')\n",
            Wanted(drafts=False),
            "is of an engine that drafts, and no policy does: a drafter's weights",
        ),
        (DENSE + "speculative_config=None,\n", Wanted(drafts=True), "that does not draft, and a policy does"),
        (
            DENSE + "ERROR EngineCore failed to start.\n",
            Wanted(),
            "is of a start that failed: 'ERROR EngineCore failed",
        ),
        (
            DENSE + "\x1b[31mERROR\tEngine core initialization failed\x1b[0m\n",
            Wanted(),
            r"is of a start that failed: '\[31mERROR +Engine core initialization failed\[0m'",
        ),
        (DENSE + "torch.OutOfMemoryError: CUDA out of memory.\n", Wanted(), "is of a start that failed: 'torch.OutOf"),
        (
            "Traceback (most recent call last):\n",
            Wanted(),
            "failed: 'Traceback .most recent call last.:'. Give the log",
        ),
        (
            vllm("Qwen/Qwen3.5-27B", "290,864", "32,768", "33.04"),
            Wanted(),
            "has 'Qwen3.5-27B': of a model whose layers",
        ),
        (
            vllm("Qwen/Qwen3.5-27B", "290,864", "32,768", "33.04"),
            Wanted(model="qwen3-14b"),
            "has 'Qwen3.5-27B': of a model whose layers",
        ),
        (
            vllm("Qwen/Qwen3.5-27B", "290,864", "32,768", "33.14"),
            Wanted(model="Qwen/Qwen3.5-27B"),
            r"290,864 tokens and 33\.14 requests of 32,768, which 4 groups of 16 layers of Qwen/Qwen3\.5-27B cannot",
        ),
        (
            vllm("Qwen/Qwen3.5-27B", "290,864", "32,768", "33.04", more="enable_prefix_caching=True"),
            Wanted(model="Qwen/Qwen3.5-27B"),
            "cannot be in blocks of 784",
        ),
        (
            vllm("Qwen/Qwen3.5-35B-A3B", "290,864", "32,768", "33.04"),
            Wanted(model="Qwen/Qwen3.5-27B"),
            r"is of Qwen/Qwen3\.5-35B-A3B, and the model is Qwen/Qwen3\.5-27B",
        ),
        (DENSE, Wanted(max_model_len=8192), "of a longest request of 4,096 tokens, and max_model_len is 8,192"),
        (
            vllm("deepseek-ai/DeepSeek-V4-Flash", "100,000", "8,192", "12.20"),
            Wanted(model="deepseek-ai/DeepSeek-V4-Flash"),
            "has 'DeepSeek-V4-Flash'",
        ),
        (
            vllm("/data/m", "100,000", "8,192", "12.20"),
            Wanted(model="deepseek-ai/DeepSeek-V4-Flash"),
            r"compressed attention keeps states .* Write kv: \{memory: \.\.\., per_token",
        ),
        (
            "Allocated 16.10 GiB for max tokens in paged KV cache (8000).\n",
            Wanted(model="Qwen/Qwen3.5-27B"),
            "is of tensorrt_llm, and what it keeps of the linear layers",
        ),
        (
            "max_total_num_tokens=8000\n",
            Wanted(model="Qwen/Qwen3.5-27B"),
            "does not say for how many requests there are states",
        ),
        (
            "max_total_num_tokens=8000, max_running_requests=40\n",
            Wanted(model="Qwen/Qwen3.5-27B"),
            "40 requests run at once, .* the policies do not say how many. Write max_running_requests: 40",
        ),
        (
            "max_total_num_tokens=8000, max_running_requests=40\n",
            Wanted(model="Qwen/Qwen3.5-27B", max_num_seqs=48),
            "the policies run up to 48. Write max_running_requests: 40",
        ),
        (
            "Setting attention block size to 784 tokens to ensure\n" + vllm("/data/m", "290,864", "32,768", "33.04"),
            Wanted(),
            "etting attention block size to 784 tokens.*no single pool",
        ),
        (vllm("/data/m", "290,864", "32,768", "33.04"), Wanted(), "33.04 requests of 32,768 fit, which are 1,082,655"),
        (vllm("/data/m", "302,921", "131,072", "2.31", "0.30.0"), Wanted(), "says 302,921 tokens, no whole number"),
        (
            vllm("openai/gpt-oss-20b", "1,277,184", "8,192", "155.60"),
            Wanted(model="openai/gpt-oss-20b"),
            "which 2 groups of 12 layers of openai/gpt-oss-20b cannot be",
        ),
        ("GPU KV cache size: 1,277,184 tokens\n", Wanted(model="openai/gpt-oss-20b"), "does not say enough of openai"),
        (
            "max_total_num_tokens=8000\nfull_layer_tokens=8000, swa_layer_tokens=6400\n",
            Wanted("sglang"),
            "says 8,000 tokens of layers that keep all, and 6,400 of layers with a window, and the model is not known",
        ),
        ("ServerArgs(tp_size=1)\nmax_total_num_tokens=80", Wanted("sglang"), "has no line that says how many tokens"),
        (
            "max_total_num_tokens=8000, max_running_requests=4",
            Wanted(model="Qwen/Qwen3.5-27B", max_num_seqs=4),
            "does not say for how many requests there are states",
        ),
        (
            "ServerArgs(model_path='Qwen/Qwen3-32B', tp_size=4)\nmax_total_num_tokens=8000\n",
            Wanted("sglang", tp=4, model="qwen3-14b"),
            "is of Qwen/Qwen3-32B, and the model is qwen3-14b",
        ),
    ],
)
def test_a_log_that_cannot_be_is_one_line(tmp_path: Path, log: str, wanted: Wanted, complaint: str) -> None:
    """What it is of, the numbers, and what to do; "": it can be."""
    path = written(tmp_path, log)
    if not complaint:
        assert read_kv_log(path, wanted).tokens == 158_656
        return
    with pytest.raises(ScenarioError, match=rf"^kv\.log: .*{complaint}") as caught:
        read_kv_log(path, wanted)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("form", ["{'model': '%s', 'method': 'draft_model'}", "SpeculativeConfig(model='%s')"])
def test_a_draft_model_is_not_the_engines(tmp_path: Path, form: str) -> None:
    """Whichever way the line of the configuration writes it."""
    log = DENSE + f"'speculative_config': {form % 'Qwen/Qwen3-0.6B'}, 'x': 1\n"
    logged = read_kv_log(written(tmp_path, log), Wanted(model="qwen3-14b", drafts=True))
    assert logged[:3] == (158_656, None, "from the log start.log: vllm 0.19.0, Qwen/Qwen3-14B")


def test_a_model_that_is_not_known_is_named(tmp_path: Path) -> None:
    """A folder or a fine-tune's own name says nothing of its layers; one that ends in a known name does, as does that
    of the scenario's own file."""
    log = written(tmp_path, DENSE.replace("Qwen/Qwen3-14B", "/models/chat-v7"))
    of = "from the log start.log: vllm 0.19.0, "
    assert read_kv_log(log, Wanted(model="qwen3-14b")).source == of + "/models/chat-v7 (unknown, taken for qwen3-14b)"
    assert read_kv_log(log, Wanted()).source == of + "/models/chat-v7"
    log = written(tmp_path, DENSE.replace("Qwen/Qwen3-14B", "/models/Qwen3-14B/"))
    assert read_kv_log(log, Wanted(model="qwen3-14b")).source == of + "/models/Qwen3-14B/"


def test_a_start_that_served_after_an_error_counts(tmp_path: Path) -> None:
    """A traceback before the server was up is none of a failed start."""
    log = "Traceback (most recent call last):\n" + DENSE + SERVED
    assert read_kv_log(written(tmp_path, log), Wanted(model="qwen3-14b")).tokens == 158_656


QWEN_27B = "Qwen/Qwen3.5-27B"
MTP = "speculative_config=SpeculativeConfig(method='mtp', num_spec_tokens=3), tensor_parallel_size=2"


@pytest.mark.parametrize(
    ("log", "wanted", "blocks", "layout"),
    [
        (
            vllm(QWEN_27B, "290,864", "32,768", "33.04"),
            Wanted(model=QWEN_27B),
            1487,
            "3 × 1 state, 1 × full in blocks of 784",
        ),
        (
            vllm("Qwen/Qwen3.8-27B-FP8", "302,921", "131,072", "2.31", "0.25.0"),
            Wanted("vllm", "0.25", 2, 1, QWEN_27B, "fp8"),
            208,
            "3 × 2 states, 1 × full in blocks of 1568",
        ),
        (
            vllm("Qwen/Qwen3.6-27B", "620,944", "262,144", "2.37", "0.25.0", MTP),
            Wanted("vllm", "0.25", 2, 1, QWEN_27B, "fp8", drafts=True),
            424,
            "3 × 5 states, 1 × full in blocks of 1600",
        ),
    ],
)
def test_blocks_of_hybrids_are_found_as_their_logs_have_them(
    tmp_path: Path, log: str, wanted: Wanted, blocks: int, layout: str
) -> None:
    """vllm-project/vllm issue 40691, talos pull request 1995 and club-3090 issue 295; without its version the first one
    can be of none but 0.20 and before."""
    log = log + "kv_cache_dtype=fp8" if wanted.kv else log
    logged = read_kv_log(written(tmp_path, log), wanted)
    assert (logged.tokens, logged.memory_bytes, logged.num_blocks) == (None, None, blocks)
    assert str(logged.layout) == layout
    assert logged.source.endswith(f", {blocks:,} blocks with the null block")
    if not wanted.kv:
        lines = log[log.index("INFO GPU") :]
        assert read_kv_log(written(tmp_path, lines), wanted).num_blocks == blocks
        grown = log + "Setting attention block size to 784 tokens to ensure that\n"
        assert read_kv_log(written(tmp_path, grown), wanted).num_blocks == blocks
        with pytest.raises(ScenarioError, match="cannot be in blocks of"):
            read_kv_log(written(tmp_path, grown.replace("784", "832")), wanted)


def test_a_line_of_0_33_says_both_numbers(tmp_path: Path) -> None:
    """300 blocks of 832 tokens, of which a request of 32,768 has 40 and nine states: 300 / 49 × 32,768 tokens."""
    line = "INFO GPU KV cache size: 200,620 tokens, Maximum concurrency for 32,768 tokens per request: 6.12x\n"
    logged = read_kv_log(written(tmp_path, "V1 LLM engine (v0.33.0)\n" + line), Wanted(model=QWEN_27B))
    assert (logged.num_blocks, str(logged.layout)) == (300, "3 × 3 states, 1 × full in blocks of 832")


def test_gemmas_windows_are_groups_too(tmp_path: Path) -> None:
    """A request of 262,144 tokens has 11,077 blocks of 2.5 MiB (configiq issue 112), of 22,000 in all."""
    log = vllm("google/gemma-4-31B-it", "520,643", "262,144", "1.99", "0.24.0", "max_num_batched_tokens=8192")
    logged = read_kv_log(written(tmp_path, log), Wanted(model="google/gemma-4-31B-it"))
    assert logged.num_blocks == 22_000 and logged.layout is not None
    assert logged.layout.block_bytes == 2.5 * 2**20


def test_numbers_that_several_ways_allow_are_refused(tmp_path: Path) -> None:
    """One request of any length fits in as many blocks as it has, whichever states it keeps."""
    log = vllm(QWEN_27B, "32,768", "32,768", "1.00", "0.25.0")
    with pytest.raises(ScenarioError, match=r"which may be 45 blocks of 3 × 1 state.*; 48 blocks of 3 × 2 states"):
        read_kv_log(written(tmp_path, log), Wanted(model=QWEN_27B))


def test_sglangs_tokens_are_those_of_full_layers_where_its_states_suffice(tmp_path: Path) -> None:
    log = "Mamba Cache is allocated. max_mamba_cache_size: 200\nmax_total_num_tokens=8000, max_running_requests=40\n"
    assert read_kv_log(written(tmp_path, log), Wanted("sglang", model=QWEN_27B, max_num_seqs=40)).tokens == 8000


def test_a_log_of_groups_becomes_the_pool_of_a_scenario(tmp_path: Path) -> None:
    """With the blocks that can be given out, and in the heading what a request holds of them."""
    log = vllm(QWEN_27B, "290,864", "32,768", "33.04")
    (tmp_path / "s.yaml").write_text(SCENARIO.replace("openai/gpt-oss-20b", QWEN_27B))
    written(tmp_path, log)
    kv = Setup.of(load_scenario(str(tmp_path / "s.yaml"))).kv
    assert kv.num_blocks == 1486
    assert str(kv) == (
        "KV 1,486 blocks for 4 groups of layers (3 × 1 state, 1 × full in blocks of 784; from the log start.log: vllm"
        " 0.19.0, Qwen/Qwen3.5-27B, 1,487 blocks with the null block): 65,536 B a token, and 2,352 tokens' worth"
        " a request"
    )


def test_two_numbers_stand_for_what_no_rule_says(tmp_path: Path) -> None:
    """Of 60 GB in blocks of 16 tokens of 65,536 bytes a request holds 477 for its 500 MB."""
    (tmp_path / "s.yaml").write_text(SCENARIO.replace("openai/gpt-oss-20b", "deepseek-ai/DeepSeek-V4-Flash"))
    numbers = "kv={memory: 60GB, per_token: 65536B, per_request: 500MB}"
    kv = Setup.of(load_scenario(str(tmp_path / "s.yaml"), overrides=[numbers])).kv
    assert kv.num_blocks == 60 * 10**9 // 2**20 and kv.layout is not None
    assert kv.layout.fixed_blocks == 477
    assert str(kv).endswith(": 65,536 B a token, and 7,632 tokens' worth a request")
    plain = Setup.of(load_scenario(str(tmp_path / "s.yaml"), overrides=["kv={memory: 60GB, per_token: 64KiB}"])).kv
    assert (plain.num_blocks, plain.layout) == (kv.num_blocks, None)


SCENARIO = """\
model: openai/gpt-oss-20b
cost: {kind: linear, base: 10ms, per_token: 50us}
kv: {log: start.log}
workload:
  arrivals: {kind: all_at_once}
  lengths: {prompt: {kind: fixed, tokens: 9}, output: {kind: fixed, tokens: 3}}
  requests: 4
  output_cap: 8
policies: {continuous: {max_num_seqs: 4, max_num_batched_tokens: 512}}
slo: ttft<1s @ 99%
"""


def test_memory_of_groups_is_divided_as_derived_memory_is(tmp_path: Path) -> None:
    """58.47 GiB of gpt-oss-20b on an H100 are 79,824 blocks of each of two groups; under a policy that has none there
    is room for twice the tokens that the line says, windows beside."""
    (tmp_path / "s.yaml").write_text(SCENARIO)
    written(tmp_path, vllm("openai/gpt-oss-20b", "1,277,184", "8,192", "155.75"))
    kv = Setup.of(load_scenario(str(tmp_path / "s.yaml"))).kv
    assert kv.num_blocks == 2 * 79_824 - 1 and kv.layout is not None  # one is the null block
    other = ["policies.orca={batch_size_cap: 4, max_tokens_per_request: 12}"]
    kv = Setup.of(load_scenario(str(tmp_path / "s.yaml"), overrides=other)).kv
    half, windows = 12 * 2 * 8 * 64 * 2, (4 * 128 + 512) * 12 * 2 * 8 * 64 * 2
    assert kv.num_blocks == (2 * 79_824 * 16 * half - windows) // half // 16
    assert kv.terms == "62.8 GB of each GPU, from the log start.log: vllm 0.19.0, openai/gpt-oss-20b"
    stated = load_scenario(str(tmp_path / "s.yaml"), overrides=["kv={memory: 10GB}"])
    assert Setup.of(stated).kv.terms == "10.0 GB of each GPU, stated in the scenario"


@pytest.mark.parametrize(
    ("kv", "complaint"),
    [
        ("{log: start.log, memory: 1GB}", r"kv\.memory is not read beside kv\.log"),
        ("{tokens: 1600, memory: 1GB}", "tokens and memory both say how much fits"),
        ("{memory: 1GB, utilisation: 80%}", "utilisation is not read beside memory"),
        ("{memory: 1GB, per_request: 1MB}", "per_request is read beside per_token, which is not given"),
        ("{tokens: 1600, per_token: 1kB}", "per_token is read beside memory, which is not given"),
        ("{source: mine}", "source says what tokens or memory are from, and neither is given"),
        ("{memory: 100kB}", r"kv\.memory: 0\.0001 GB are less than one block of openai/gpt-oss-20b"),
    ],
)
def test_memory_that_is_said_twice_or_not_at_all(tmp_path: Path, kv: str, complaint: str) -> None:
    """Each in a line with its place."""
    (tmp_path / "s.yaml").write_text(SCENARIO)
    written(tmp_path, vllm("openai/gpt-oss-20b", "1,277,184", "8,192", "155.75"))
    with pytest.raises(ScenarioError, match=complaint):
        Setup.of(load_scenario(str(tmp_path / "s.yaml"), overrides=[f"kv={kv}"]))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ((), ""),
        (("deployment.version=0.24",), r"kv\.log: .*start\.log is of vllm 0\.19\.0, and the deployment asks for 0\.24"),
        (("deployment.tp=2",), "is of tp 1, and the deployment has tp 2"),
        (("deployment.kv=fp8",), "is of KV in another type, and the deployment's is fp8"),
        (
            ("policies={vllm: {speculative_config: {method: eagle, num_speculative_tokens: 1, acceptance: 0.5}}}",),
            "is of an engine that does not draft, and a policy does",
        ),
        (
            ("policies={vllm: {speculative_config: {method: ngram, num_speculative_tokens: 1, acceptance: 0.5}}}",),
            "",
        ),
    ],
)
def test_a_scenario_says_what_its_log_must_be_of(tmp_path: Path, changes: tuple[str, ...], complaint: str) -> None:
    """Its deployment and policies, as --set has them, with the place of the key."""
    head = "model: llama-3.1-8b\ndeployment: {engine: vllm, version: 0.19, gpu: h200}\n"
    rest = SCENARIO[SCENARIO.index("kv:") :].replace("policies: {continuous:", "policies: {vllm:")
    (tmp_path / "s.yaml").write_text(head + rest)
    config = "speculative_config=None, tensor_parallel_size=1, pipeline_parallel_size=1, kv_cache_dtype=auto"
    written(tmp_path, vllm("meta-llama/Llama-3.1-8B-Instruct", "904,000", "8,192", "110.35", more=config))
    if complaint:
        with pytest.raises(ScenarioError, match=rf"s\.yaml:3: .*{complaint}"):
            load_scenario(str(tmp_path / "s.yaml"), overrides=list(changes))
        return
    kv = load_scenario(str(tmp_path / "s.yaml"), overrides=list(changes)).file.kv
    assert (kv.tokens, kv.source) == (904_000, "from the log start.log: vllm 0.19.0, meta-llama/Llama-3.1-8B-Instruct")


def test_two_pools_of_sglang_are_read_with_the_window_of_the_model(tmp_path: Path) -> None:
    """8,000 tokens of layers that keep all and 6,400 of those with gpt-oss's window of 128."""
    log = "max_total_num_tokens=8000\nfull_layer_tokens=8000, swa_layer_tokens=6400\n"
    logged = read_kv_log(written(tmp_path, log), Wanted("sglang", model="openai/gpt-oss-20b"))
    assert (logged.tokens, logged.pools) == (8000, KvPools(128, 6400))


PAGED = "[TensorRT-LLM][INFO] [MemUsageChange] Allocated {} GiB for max tokens in paged KV cache ({}).\n"


@pytest.mark.parametrize(
    ("gib", "tokens", "kv", "tp", "complaint"),
    [
        ("16.10", 131_891, "", 1, ""),
        ("16.10", 263_782, "", 1, ""),  # in 8 bits, which the deployment does not rule out
        ("16.10", 263_782, "fp8", 1, ""),
        ("16.10", 263_782, "", 2, ""),
        ("16.10", 301_472, "", 1, "says 16.1 GiB for 301,472 tokens, 57,343 B a token, of which llama-3.1-8b keeps"),
        ("16.10", 131_891, "fp8", 1, r"131,072 B a token, of which llama-3\.1-8b keeps 65,536 B on each of 1 GPUs"),
        ("16.10", 0, "", 1, "says 16.1 GiB for 0 tokens"),
    ],
)
def test_bytes_of_tensorrt_llms_line_are_those_of_its_tokens(
    tmp_path: Path, gib: str, tokens: int, kv: str, tp: int, complaint: str
) -> None:
    """Of Llama-3.1-8B, 131,072 B in 16 bits; the log of another model is none of it."""
    path = written(tmp_path, PAGED.format("0.25", "2048") + PAGED.format(gib, tokens))
    wanted = Wanted("tensorrt_llm", tp=tp, pp=1, model="llama-3.1-8b", kv=kv)
    if complaint:
        with pytest.raises(ScenarioError, match=complaint):
            read_kv_log(path, wanted)
    else:
        assert read_kv_log(path, wanted).tokens == tokens


def test_public_lines_of_tensorrt_llm_are_their_models_tokens(tmp_path: Path) -> None:
    """triton-inference-server/tutorials pull request 150: 116,617 blocks of 32 tokens, 22 layers of 4 heads of 64."""
    path = written(tmp_path, PAGED.format("78.30", "3731744"))
    file = tmp_path / "tiny.json"
    file.write_text(
        '{"model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 22, "num_attention_heads": 32,'
        ' "num_key_value_heads": 4, "intermediate_size": 5632, "vocab_size": 32000, "torch_dtype": "bfloat16",'
        ' "max_position_embeddings": 2048}'
    )
    assert read_kv_log(path, Wanted("tensorrt_llm", tp=1, pp=1, model=str(file))).tokens == 116_617 * 32
