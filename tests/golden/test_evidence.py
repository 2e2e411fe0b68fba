"""What `batchsim policies` says of recorded schedules is what lies in the folder of recordings."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from batchsim.policies.evidence import FOLLOWED
from batchsim.policies.registry import POLICIES

FOLDER = Path(os.environ.get("BATCHSIM_GOLDEN", ""))
FOLDERS = {
    "vllm": [
        "vllm-v1",
        "vllm-async",
        "vllm-pp",
        "vllm-spec",
        "vllm-prefill-interval",
        "vllm-dp",
        "vllm-lora",
        "vllm-mm",
        "vllm-pd",
        "vllm-nixl",
        "vllm-tiers",
    ],
    "sglang": ["sglang", "sglang-overlap"],
    "tensorrt_llm": ["tensorrt_llm", "tensorrt_llm/minimal"],
}
VIDUR = {"vllm": "vllm_v0"}  # by Vidur's names; the others keep theirs
RECORDED = [name for name, (_, policy) in POLICIES.items() if policy.evidence == "recorded"]


def _recordings(policy: str) -> list[Path]:
    """Of the engine that `policy` follows, but for those in an order that only a twin puts right."""
    if policy not in FOLDERS:
        return [path for path in (FOLDER / "vidur").glob("*.json") if _scheduler(path) == policy]
    paths = [path for name in FOLDERS[policy] for path in (FOLDER / name).glob("*.json")]
    return [path for path in paths if not path.with_stem(f"{path.stem}_by_arrival").exists()]


def _scheduler(path: Path) -> str | None:
    """The policy that stands for a recording of Vidur; None for one of a run that failed."""
    data = json.loads(path.read_text(encoding="utf-8"))
    return None if data["error"] else VIDUR.get(data["scheduler"]["name"], data["scheduler"]["name"])


@pytest.mark.parametrize("policy", RECORDED)
def test_as_many_schedules_are_recorded_as_is_said(policy: str) -> None:
    """The number that stands for `recorded` is that of the recordings at hand, which the tests beside find equal."""
    if "BATCHSIM_GOLDEN" not in os.environ:
        pytest.skip("BATCHSIM_GOLDEN names no folder with recordings")
    assert len(_recordings(policy)) == FOLLOWED[policy].schedules > 0
