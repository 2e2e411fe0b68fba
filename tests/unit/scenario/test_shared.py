"""Scenarios of models that share a GPU, in turns or side by side: what each engine is, metrics, and mistakes."""

from __future__ import annotations

import pytest

from batchsim.base.errors import ScenarioError
from batchsim.metrics.attribution import attribute
from batchsim.metrics.measure import measure
from batchsim.results.keep import point_inputs
from batchsim.scenario.config import Point
from batchsim.scenario.point import Run, simulate_point
from batchsim.scenario.setup import Setup
from tests.support.scenarios import refusal, setup_of

TEXT = """\
model: llama-3.1-8b
cost: {kind: constant, step: 10ms}
kv: {tokens: 100000}
workload:
  arrivals: {kind: poisson, mean_rate: 4/s}
  lengths: {prompt: {kind: fixed, tokens: 50}, output: {kind: uniform, min: 2, max: 12}}
  output_cap: 16
  classes: {chat: {}, code: {}, search: {}}
  popularity: {kind: zipf, alpha: 1}
  requests: 60
replicas:
  groups: {chat: {count: 1}, code: {count: 1}, search: {count: 1, model: qwen2.5-7b, kv: {tokens: 50000}}}
  sleep: {level: 1, link: 20GB/s, min_awake: 200ms}
policies:
  vllm: {max_num_seqs: 8, max_num_batched_tokens: 512}
slo: ttft<1s @ 90%
seeds: 1
"""
SLEEP = "  sleep: {level: 1, link: 20GB/s, min_awake: 200ms}"
POPULARITY = "  popularity: {kind: zipf, alpha: 1}\n"
CLASSES = "classes: {chat: {}, code: {}, search: {}}"


def ran(text: str) -> tuple[Setup, Run]:
    setup = setup_of(text)
    return setup, simulate_point(setup, Point(setup.scenario.specs[0], setup.scenario.loads[0], 0))


def test_each_model_is_an_engine_of_its_own() -> None:
    """Its shape, its memory, and the share of the requests that its class has by the law."""
    setup = setup_of(TEXT)
    assert {group.name: (group.setup.model.name, group.setup.kv.num_blocks) for group in setup.groups} == {
        "chat": ("llama-3.1-8b", 6250),
        "code": ("llama-3.1-8b", 6250),
        "search": ("qwen2.5-7b", 3125),
    }
    shares = [each.share for each in setup.traffic.classes.values()]
    assert shares == pytest.approx([6 / 11, 3 / 11, 2 / 11])


@pytest.mark.parametrize(
    ("law", "shares"),
    [
        ("{kind: uniform}", [1 / 3] * 3),
        ("{kind: shares, shares: [70%, 20%, 10%]}", [0.7, 0.2, 0.1]),
        ("{kind: zipf, alpha: 2}", [36 / 49, 9 / 49, 4 / 49]),
        ("{kind: first, share: 60%}", [0.6, 0.2, 0.2]),
    ],
)
def test_popularity_is_the_shares_of_the_classes(law: str, shares: list[float]) -> None:
    """In their order."""
    setup = setup_of(TEXT.replace("{kind: zipf, alpha: 1}", law))
    assert [each.share for each in setup.traffic.classes.values()] == pytest.approx(shares)


def test_metrics_tell_wakes_moves_and_waits() -> None:
    """As the spans and the requests' times have them; 16.06 GB at 20 GB/s are 803 ms."""
    setup, run = ran(TEXT)
    values = measure(point_inputs(setup, run)).values
    start_ns, end_ns = run.window_ns
    waking = [span for span in run.spans if span.state == "starting"]
    assert values["wakes"] == sum(start_ns <= span.start_ns < end_ns for span in waking) > 5
    assert {round((span.end_ns - span.start_ns) / 1e6) for span in waking if span.replica < 2} == {803}
    moves_ns = sum(
        max(min(span.end_ns, end_ns) - max(span.start_ns, start_ns), 0)
        for span in run.spans
        if span.state in ("starting", "offloading")
    )
    assert values["weights_moving_share"] == pytest.approx(moves_ns / (end_ns - start_ns))
    requests = run.records.requests
    queued_ns = requests["scheduled_ns"] - requests["sent_ns"]  # with 8 places a request waits for nothing else
    assert values["asleep_wait_mean_s"] == pytest.approx(queued_ns.mean() / 1e9, abs=0.01)
    assert run.records.replicas is not None
    waited = requests["router_ns"] > 0
    for span in waking:
        came = (span.start_ns <= requests["arrival_ns"]) & (requests["arrival_ns"] < span.end_ns)
        waited |= (run.records.replicas.requests == span.replica) & came
    assert values["asleep_wait_share"] == pytest.approx(waited.mean())
    assert values["num_replicas_mean"] == pytest.approx(1)  # one GPU, whoever has it


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (f"  {CLASSES}\n{POPULARITY}", "", "the workload has no classes. Write classes: {chat, code, search}"),
        ("classes: {chat: {}", "classes: {chat: {}, extra: {}", "has no model for the class extra"),
        (", search: {}}", "}", "replicas.groups.search: no class asks for it"),
        ("{chat: {count: 1}", "{chat: {count: 2}", "groups.chat.count is 2"),
        (SLEEP, SLEEP.replace("level: 1", "level: 2"), "sleep.disk is missing"),
        (SLEEP, SLEEP.replace("link", "disk: 2GB/s, link"), "at level 1 weights are in the host's memory"),
        (SLEEP, SLEEP + "\n  router: round_robin", "router is not simulated where models take turns"),
        (SLEEP, "  router: round_robin", "groups.search.model is for models that share a GPU. Add sleep, where"),
        ("chat: {count: 1}, code: {count: 1}", "chat: {count: 1, own_gpu: true}, code: {count: 1, own_gpu: true}",
         "of the models 1 shares a GPU"),
        (POPULARITY, "", "classes.chat has no share"),
        ("chat: {},", "chat: {share: 10%},", "popularity says the shares of all classes, and classes.chat has share"),
        ("{kind: zipf, alpha: 1}", "{kind: shares, shares: [50%, 50%]}", "has 2 shares, and there are 3 classes"),
        (f"  {CLASSES}\n", "", "popularity: the workload has no classes. Drop it, or write classes."),
        ("slo:", "lora_cost: {step: 5%, per_adapter: 1%, load_gpu: 1ms, load_disk: 2ms}\nslo:", "no LoRA adapters"),
        ("groups: {chat: {count: 1}", "groups: {chat: {count: 1, cost: a100, kv: {tokens: 9999}}",
         "chat is on 1 × a100 and code is on 1 × an unnamed GPU: they cannot share it"),
        ("model: qwen2.5-7b", "model: qwen2.5-9b", "replicas.groups.search: mine.yaml: model: qwen2.5-9b is neither"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(old: str, new: str, words: str) -> None:
    """Each says where it is and what to write."""
    assert old in TEXT and words in refusal(TEXT.replace(old, new))


def test_kinds_of_work_that_sleep_does_not_keep_are_refused() -> None:
    """Adapters, tiers of KV, and a bound of the queue."""
    adapters = TEXT.replace("  requests: 60", "  loras: {count: 2}\n  requests: 60").replace(
        "slo:", "lora_cost: {step: 5%, per_adapter: 1%, load_gpu: 1ms, load_disk: 2ms}\nslo:"
    )
    with pytest.raises(ScenarioError, match="LoRA adapters beside models that take turns on a GPU: not simulated"):
        ran(adapters)
    with pytest.raises(ScenarioError, match="max_waiting beside models that take turns on a GPU: not simulated"):
        setup_of(TEXT.replace("slo:", "max_waiting: 5\nslo:"))
    tiers = "tiers: [{size: 10GB, bandwidth: 50GB/s}]}"
    for kv in ("kv: {tokens: 100000", "kv: {tokens: 50000"):  # of all models, of one
        with pytest.raises(ScenarioError, match="tiers of KV beside models that take turns on a GPU: not simulated"):
            ran(TEXT.replace(f"{kv}}}", f"{kv}, {tiers}"))


# ---- side by side

SIDE = """\
model: llama-3.1-8b
deployment: {engine: vllm, gpu: h100}
workload:
  arrivals: {kind: poisson, mean_rate: 6/s}
  lengths: {prompt: {kind: fixed, tokens: 300}, output: {kind: uniform, min: 20, max: 60}}
  output_cap: 60
  classes: {chat: {share: 60%}, code: {share: 40%}}
  requests: 60
replicas:
  groups:
    chat: {count: 1, kv: {utilisation: 50%}}
    code: {count: 1, kv: {utilisation: 40%}}
  share: {steps: queued}
policies:
  vllm: {max_num_seqs: 16, max_num_batched_tokens: 2048}
slo: ttft<1s @ 90%
seeds: 1
"""


def test_each_model_has_the_kv_of_its_share() -> None:
    """As an engine alone with that share would have it; the GPU counts once, and its energy is not known."""
    setup, run = ran(SIDE)
    for group, share in zip(setup.groups, (0.5, 0.4), strict=True):
        room = share * setup.groups[0].setup.gpu.memory_bytes  # pyright: ignore[reportOptionalMemberAccess]
        assert group.setup.kv.num_blocks * 16 * 131_072 < room - group.setup.model.weight_bytes
        alone = setup_of(
            SIDE.split("replicas:")[0] + f"kv: {{utilisation: {share}}}\n" + SIDE[SIDE.index("policies:") :]
        )
        assert group.setup.kv.num_blocks == alone.kv.num_blocks
    values = measure(point_inputs(setup, run)).values
    waited = attribute(run.records)
    share_waited = waited[waited["part"] == "waiting_for_gpu"]["ns"].sum() / waited["ns"].sum()
    assert values["attr_waiting_for_gpu_share"] == pytest.approx(share_waited, abs=0.02) and share_waited > 0.1
    alone_on_it = values["output_tokens_per_s"]
    assert values["output_tokens_per_s_per_gpu"] == alone_on_it
    assert values["energy_j_per_output_token"] is None


def test_a_model_with_its_own_gpu_is_not_waited_for() -> None:
    """Of three models two share a GPU; the third one's requests wait for none."""
    third = SIDE.replace("classes: {chat: {share: 60%}", "classes: {own: {share: 30%}, chat: {share: 30%}").replace(
        "  groups:\n", "  groups:\n    own: {count: 1, own_gpu: true}\n"
    )
    _, run = ran(third)
    requests, parts = run.records.requests, attribute(run.records)
    assert run.records.replicas is not None
    of = dict(zip(requests["request_id"].tolist(), run.records.replicas.requests.tolist(), strict=True))
    waiting = parts[parts["part"] == "waiting_for_gpu"]["request_id"]
    assert {of[request_id] for request_id in waiting} == {1, 2}


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("steps: queued", "steps: mps", "replicas.share.steps is \"mps\". Write 'queued'"),
        ("50%", "61%", "kv.utilisation: chat 61% and code 40% are more than all of the GPU's memory. Lower one."),
        (", kv: {utilisation: 50%}", "", "replicas.groups.chat.kv.utilisation is missing: models side by side"),
        ("engine: vllm", "engine: sglang", "groups.chat: sglang shares the memory that is free as it starts"),
        ("gpu: h100}", "gpu: h100, pp: 2}", "groups.chat: pp 2 beside other models on its GPUs: not simulated"),
        ("share: {steps", "sleep: {level: 1, link: 9GB/s}\n  share: {steps", "sleep and share both say how"),
        ("queued}\n", "queued}\n  router: round_robin\n", "router is not simulated where models are side by side"),
        ("code: {count: 1, kv", "code: {count: 1, own_gpu: true, kv", "share: of the models 1 shares a GPU"),
        ("  classes: {chat: {share: 60%}, code: {share: 40%}}\n", "", "replicas.share: a request is of the model"),
        ("  requests: 60", "  loras: {count: 2}\n  requests: 60", "lora_cost"),
        ("slo:", "max_waiting: 9\nslo:", "max_waiting beside models that are side by side on a GPU: not simulated"),
    ],
)  # fmt: skip
def test_mistakes_side_by_side_are_one_line(old: str, new: str, words: str) -> None:
    """Each says where it is and what to write."""
    assert old in SIDE
    if "pp: 2" in new:  # no profile of which comes with batchsim
        pytest.importorskip("aiconfigurator_core", reason="aiconfigurator-core (extra gpus) is not installed")
    text = SIDE.replace(old, new)
    if "sglang" in new:
        text = text.replace("vllm: {max_num_seqs: 16, max_num_batched_tokens: 2048}", "sglang: {}")
    assert words in refusal(text)
