"""Two points, request by request: a request that one never answered is slower there, and every request is counted."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from batchsim.base.errors import ScenarioError
from batchsim.kernel.record import FINISHED, MISSING
from batchsim.view.comparison import compared

UNFINISHED = FINISHED + 1
_COLUMNS = ("request_id", "prompt_tokens", "output_tokens", "outcome", "sent_ns", "first_delivery_ns", "delivered_ns")


def rows(ttfts_s: Mapping[int, float | None], *, tokens: int = 2, prompt: int = 10) -> np.ndarray:
    """Requests by id with their TTFT, None of one that was never answered."""
    found = []
    for number, ttft_s in ttfts_s.items():
        first = MISSING if ttft_s is None else round(ttft_s * 1e9)
        outcome = UNFINISHED if ttft_s is None else FINISHED
        last = MISSING if ttft_s is None else first + 10**9
        found.append((number, prompt, tokens, outcome, 0, first, last))
    return np.array(found, [(name, "i8") for name in _COLUMNS])


def test_a_request_never_answered_is_slower_there() -> None:
    """On whichever side; the median change is of requests answered twice, and all add up."""
    ours = rows({0: 1.0, 1: 1.0, 2: 1.0, 3: None, 4: None, 5: 1.0})
    theirs = rows({0: 2.0, 1: 0.5, 2: None, 3: 1.0, 4: None, 6: 1.0})
    found = compared(ours, theirs, "ttft", 100, 5)
    assert (found["slower"], found["faster"], found["unanswered"]) == (2, 2, [1, 1])
    assert (found["of"], found["both"], found["neither"], found["undefined"], found["only"]) == (5, 2, 1, 0, [1, 1])
    assert found["median_change_s"] == 0.25 and found["largest"] == [[0, 1.0, 2.0], [1, 1.0, 0.5]]


def test_where_one_side_answers_none_all_are_slower() -> None:
    """There is a result without a pair, and no median."""
    found = compared(rows({0: 1.0, 1: 2.0}), rows({0: None, 1: None}), "ttft", 100, 5)
    assert (found["slower"], found["both"], found["median_change_s"], found["id"]) == (2, 0, None, [])


def test_a_latency_that_a_request_has_not_by_its_nature_makes_it_no_slower() -> None:
    """The TPOT of one token, whether the other side finished it or not."""
    found = compared(rows({0: 1.0, 1: 1.0}, tokens=1), rows({0: 1.0, 1: None}, tokens=1), "tpot", 100, 5)
    assert (found["undefined"], found["slower"], found["faster"], found["neither"]) == (2, 0, 0, 0)


def test_other_prompts_are_other_requests() -> None:
    """Counted beside those that are the same; without any of these it is an error."""
    ours, theirs = rows({0: 1.0, 1: 1.0}), rows({0: 1.0, 1: 1.0})
    theirs["prompt_tokens"][1] = 11
    assert compared(ours, theirs, "e2e", 100, 5)["unlike"] == 1
    with pytest.raises(ScenarioError, match="no request was sent with the same prompt at both"):
        compared(ours, rows({0: 1.0}, prompt=9), "e2e", 100, 5)
