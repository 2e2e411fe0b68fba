"""What compiled shapes came to, counted by hand from a few recorded steps."""

from __future__ import annotations

import numpy as np

from batchsim.explain.shape_use import ProgramUse, shape_use, shapes_of
from batchsim.kernel.record import REQUEST_DTYPE, STATE_DTYPE, STEP_DTYPE, Records

SECOND = 1_000_000_000


def records(*steps: dict[str, int]) -> Records:
    rows = np.zeros(len(steps), STEP_DTYPE)
    for i, step in enumerate(steps):
        for name, value in step.items():
            rows[name][i] = value
    return Records(np.zeros(0, REQUEST_DTYPE), rows, np.zeros(0, STATE_DTYPE), (), {})


DECODES = {"num_decode": 3, "num_decode_tokens": 3, "pad_decode_rows": 1, "context_tokens": 60}
DECODES |= {"pad_context_tokens": 340, "duration_ns": 10, "num_running": 3}
PROMPT = {"num_prefill_tokens": 90, "num_chunks": 1, "pad_prefill_tokens": 38, "duration_ns": 35, "num_running": 4}


def test_padding_by_dimension_and_programs_by_time() -> None:
    """Two decodes of 3 in 4 that read 100 tokens each, and a prompt of 90 in 128, which takes longer than both."""
    use = shape_use({"preset": "neuron"}, records(DECODES, PROMPT, DECODES))
    assert use.padding == {"rows of decodes": 0.25, "context read": 0.85, "tokens of prompts": 38 / 128}
    assert use.programs == (
        ProgramUse("prompts", "128 tokens of prompts", 1, 35),
        ProgramUse("decodes", "4 decodes of 100 tokens", 2, 20),
    )
    assert (use.total_ns, use.compiled, use.wait_ns, use.held) == (55, 0, 0, 0)


def test_flat_programs_are_of_all_tokens() -> None:
    """A mixed step of 3 decodes and 90 tokens, padded by 35, runs in the program of 128 tokens."""
    mixed = DECODES | PROMPT | {"pad_decode_rows": 35, "pad_prefill_tokens": 0, "pad_context_tokens": 0}
    use = shape_use({"preset": "tpu"}, records(mixed))
    assert use.padding == {"tokens": 35 / 128}
    assert [(each.what, each.sizes) for each in use.programs] == [("steps", "128 tokens")]


def test_compilations_are_what_steps_took_beyond_their_work() -> None:
    """One step waited for two programs, one for none but its rounding: of 4 requests each, those of the first count."""
    shapes, rest_ns = {"preset": "gaudi", "compile": "20s"}, np.array([40.0 * SECOND + 60, 60.0])
    use = shape_use(shapes, records(PROMPT | {"num_waiting": 2}, PROMPT), rest_ns)
    assert (use.compiled, use.wait_ns, use.held) == (2, 40 * SECOND + 60, 6)
    assert shape_use(shapes, records(PROMPT, PROMPT)).compiled == 0  # not known


def test_shapes_stand_in_the_cost() -> None:
    assert shapes_of({"cost": {"kind": "linear", "shapes": {"preset": "tpu"}}}) == {"preset": "tpu"}
    assert shapes_of({"cost": {"kind": "linear", "shapes": None}}) is shapes_of({"cost": "h200"}) is None
