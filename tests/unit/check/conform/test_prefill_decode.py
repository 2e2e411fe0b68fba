"""Recordings of prefill and decode engines behind a proxy: what is refused before any engine is replayed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batchsim.base.errors import ScenarioError
from batchsim.check.conform import conform
from tests.unit.check.conform.test_conform_form import put, written

RECORDING: dict[str, Any] = {
    "meta": {"hop": 0.001, "transfer": {"fixed": 0.001, "per_block": 0.0}, "fail_hold": 0.002}
    | {"engines": {"P0": {"role": "kv_producer"}, "D0": {"role": "kv_consumer"}}}
    | {"step_time": "t_end = t_gpu_start + 0.005 + 0*sum(num_tokens)"},
    "requests": [{"id": 0, "arrival": 0.0, "prompt_len": 8, "output_len": 2, "load_fails": True}],
    "handed": [],
    "engines": [{"engine": name, "steps": [], "per_request": {}} for name in ("P0", "D0")],
}


@pytest.mark.parametrize(
    ("keys", "value", "said"),
    [
        (("requests", 0, "id"), [0], "requests[0].id is [0], not a whole number"),
        (("requests", 0, "id"), {}, "requests[0].id is {}, not a whole number"),
        (("requests", 0, "load_fails"), 1, "requests[0].load_fails is 1, not true or false"),
        (("meta", "fail_hold"), -1, "meta.fail_hold is -1, not a time in seconds"),
        (("meta", "transfer"), {"fixed": 0.001}, "meta.transfer has no per_block"),
        (("meta", "engines", "X0"), {}, "meta.engines has X0, not a name like P0 or D0"),
        (("meta", "engines", "P1"), {}, "engines are ['P0', 'D0'], meta.engines ['P0', 'D0', 'P1']: not the same"),
        (
            ("meta", "engines", "P0", "role"),
            "kv_consumer",
            "meta.engines.P0.role is 'kv_consumer', not that of its name",
        ),
        (("meta", "engines", "P0", "order"), "free", "meta.engines.P0 has order, which is not an engine's own here"),
        (
            ("meta", "engines", "P0", "step_time"),
            "",
            "meta.engines.P0 has step_time, which is not an engine's own here",
        ),
        (("meta", "totals"), {"joules": 3}, "meta.totals has joules, which is not known"),
        (("engines", 0, "requests"), [], "engines[0] has requests, which is not known"),
        (("handed",), [[0.0, 0]], "handed[0] is [0.0, 0], not [t, id, prefill engine, decode engine, blocks]"),
        (("routed",), [], "the recording has routed, which is not known"),
    ],
)
def test_what_is_no_whole_recording_is_refused(
    keys: tuple[str | int, ...], value: Any, said: str, tmp_path: Path
) -> None:
    """In one line, with its place."""
    with pytest.raises(ScenarioError) as caught:
        conform(written(put(RECORDING, keys, value), tmp_path), "vllm")
    assert said in str(caught.value) and "\n" not in str(caught.value)
