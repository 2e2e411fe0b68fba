"""Which models the catalog says that the kernel tables time."""

from __future__ import annotations

import pytest

from batchsim.base.files import read_text
from batchsim.cli.catalog import timed
from tools import kernel_tables


def row(status: str, **other: str) -> dict[str, str]:
    return {"HuggingFaceID": "a/m", "System": "h200_sxm", "Backend": "trtllm", "Mode": "agg", "Status": status} | other


def test_a_model_is_timed_where_any_version_passed() -> None:
    """In one engine for prompts and answers; a model of which nothing passed is timed nowhere."""
    rows = [
        row("PASS"),
        row("FAIL", System="b200_sxm"),
        row("HYBRID_PASS", System="b200_sxm", Backend="vllm"),
        row("PASS", System="l40s", Mode="disagg"),
        row("HW_INCOMPATIBLE", HuggingFaceID="a/none"),
    ]
    assert kernel_tables.timed(rows) == {"a/m": {"vllm": ["b200_sxm"], "tensorrt_llm": ["h200_sxm"]}, "a/none": {}}


def test_the_kept_account_is_that_of_the_installed_tables() -> None:
    pytest.importorskip("aiconfigurator_core", reason="the kernel tables are not installed")
    assert read_text(kernel_tables.TIMED) == kernel_tables.timed_text()


def test_each_model_names_its_engines() -> None:
    assert {"vllm", "sglang", "tensorrt_llm"} >= {engine for engines in timed().values() for engine in engines}
    assert timed()["deepseek-ai/DeepSeek-V4-Flash"]["vllm"] == ["b200_sxm", "b300_sxm", "gb200", "gb300"]
