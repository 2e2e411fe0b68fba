"""The columns of steps alike, beside those that a recorder writes of such a batch."""

from __future__ import annotations

import numpy as np

from batchsim.cost.work import WORK_COLUMNS, columns_of, even_columns
from batchsim.kernel.batch import Batch
from batchsim.kernel.types import DecodeGroup, Request, Sequence


def _sequence(number: int, computed: int, *, decodes: bool) -> Sequence:
    seq = Sequence(Request(number, 0, computed if decodes else 5000, 10))
    seq.settled_computed_tokens, seq.settled_output_tokens = computed, int(decodes)
    return seq


def test_steps_alike_have_the_columns_of_a_recorded_step() -> None:
    """Three decodes at 700 tokens of context beside two chunks of 5 tokens after a prefix of 40."""
    group = DecodeGroup(16)
    for number in range(3):
        group.join(_sequence(number, 700, decodes=True))
    chunks = [(_sequence(number, 40, decodes=False), 5) for number in (3, 4)]
    recorded = columns_of(Batch(group, chunks, 10))
    alike = even_columns(3, 700, 2, 5, 40)
    assert {name: alike[name].tolist() for name in WORK_COLUMNS} == {
        name: recorded[name].tolist() for name in WORK_COLUMNS
    }


def test_an_array_has_an_element_a_step() -> None:
    """Numbers beside it are those of every step."""
    alike = even_columns(np.array([0, 2]), 10, np.array([1, 0]), 4)
    assert alike["context_tokens"].tolist() == [0, 20]
    assert alike["prefill_pairs"].tolist() == [1 + 2 + 3 + 4, 0]
    assert alike["swap_blocks"].tolist() == [0, 0]
