"""Random scenarios of vLLM's scheduler, from numbers; and where the vLLM is that records them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from batchsim.scenario.config import Scenario
from batchsim.scenario.parse import parse_scenario

PYTHON = Path(__file__).parents[2] / ".vllm" / "bin" / "python"


def need_vllm() -> str:
    """The interpreter that `make real-engines` makes; skips the test where it is not there."""
    if not PYTHON.exists():
        pytest.skip("no vLLM in .vllm here: make real-engines installs it")
    return str(PYTHON)


def random_scenario(seed: int, python: str = "", version: str | None = None) -> Scenario:
    """Scenario number `seed`: KV runs short in most of them, and each knob that the recorder passes is set in some.

    Its policy is `vllm` of a `version`; with `python` also `real`, the scheduler of that interpreter's vLLM.
    """
    draw = random.Random(seed)
    block_size = draw.choice([1, 4, 16, 32])
    longest = draw.choice([200, 400])
    tokens = draw.choice([64, 128, 512])
    seqs = draw.choice([4, 8, 32])
    config: dict[str, Any] = {
        "async_scheduling": draw.random() < 0.5,
        "enable_prefix_caching": draw.random() < 0.5,
        "max_num_batched_tokens": tokens,
        "max_num_seqs": seqs,
        "policy": draw.choice(["fcfs", "priority"]),
        "scheduler_reserve_full_isl": draw.random() < 0.5,
        "long_prefill_token_threshold": draw.choice([0, 0, 16, 50]),
        "long_prefill_token_threshold_adaptive": draw.random() < 0.3,
        "watermark": draw.choice([0.0, 0.0, 0.05]),
        "max_num_active_seqs": draw.choice([None, None, max(seqs // 2, 1)]),
        "max_num_scheduled_tokens": draw.choice([None, None, tokens // 2]),
        "prefill_schedule_interval": draw.choice([1, 1, 1, 3]),
        "enable_chunked_prefill": True,
    }
    if draw.random() < 0.2:
        config |= {"enable_chunked_prefill": False, "max_num_batched_tokens": 2 * longest}
        config["max_num_scheduled_tokens"] = None
    prompt = {"kind": "lognormal", "mean": longest / 4, "cv": 1, "max": longest // 2}
    output = {"kind": "lognormal", "mean": 20, "cv": 1, "max": longest // 2 - 10}
    lengths = {"prompt": prompt, "output": output}
    arrivals: dict[str, Any] = {"kind": "poisson", "mean_rate": f"{draw.choice([10, 40, 200])}/s"}
    if draw.random() < 0.2:
        arrivals = {"kind": "closed_loop", "users": 12, "think_time": "50ms"}
    workload: dict[str, Any] = {
        "arrivals": arrivals,
        "classes": {
            name: {"share": share, "priority": priority, "lengths": lengths, "slo": "e2e<1min @ 99%"}
            for name, share, priority in (("now", "40%", 0), ("later", "60%", 1))
        },
        "output_cap": draw.choice(["exact", longest // 2]),
        "requests": 60,
    }
    if config["enable_prefix_caching"]:
        workload["shared_prefix"] = {"added_tokens": longest // 8, "groups": 3}
    cost: dict[str, Any] = {"kind": "linear", "base": "3ms", "per_token": "20us", "per_sequence": "50us"}
    if draw.random() < 0.3:
        cost = {"engine": "vllm", "gpu": "h100"}
    text = {
        "model": "llama-3.1-8b",
        "deployment" if "engine" in cost else "cost": cost,
        "kv": {
            "tokens": draw.choice([1, 1, 2, 4]) * (longest + 16) // block_size * block_size,
            "block_size": block_size,
        },
        "max_model_len": longest,
        "workload": workload,
        "slo": "e2e<1min @ 99%",
        "policies": {"vllm": config if version is None else config | {"version": version}},
    }
    if python:
        text["policies"]["real"] = {"kind": "engine", "engine": "vllm", "python": python} | config
    return parse_scenario(json.dumps(text), f"random{seed}.yaml", Path(), allow_code=bool(python))
