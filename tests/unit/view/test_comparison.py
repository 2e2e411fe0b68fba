"""Two points, request by request: a request that one never answered is slower there, and every request is counted."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from batchsim.base.errors import ScenarioError
from batchsim.kernel.record import FINISHED
from batchsim.view.comparison import Side, compared

UNFINISHED = FINISHED + 1


def side(ttfts_s: Mapping[int, float | None], *, defined: bool = True, prompt: int = 10) -> Side:
    """Requests by id with a latency in s, None of one that did not finish; without `defined` none has it."""
    found = [(number, prompt, UNFINISHED if it is None else FINISHED) for number, it in ttfts_s.items()]
    latencies_s = [it if defined and it is not None else np.nan for it in ttfts_s.values()]
    return np.array(found, [(name, "i8") for name in ("request_id", "prompt_tokens", "outcome")]), np.array(latencies_s)


def test_a_request_never_answered_is_slower_there() -> None:
    """On whichever side; the median change is of requests answered twice, and all add up."""
    ours = side({0: 1.0, 1: 1.0, 2: 1.0, 3: None, 4: None, 5: 1.0})
    theirs = side({0: 2.0, 1: 0.5, 2: None, 3: 1.0, 4: None, 6: 1.0})
    found = compared(ours, theirs, 100, 5)
    assert (found["slower"], found["faster"], found["unanswered"]) == (2, 2, [1, 1])
    assert (found["of"], found["both"], found["neither"], found["undefined"], found["only"]) == (5, 2, 1, 0, [1, 1])
    assert found["median_change_s"] == 0.25 and found["largest"] == [[0, 1.0, 2.0], [1, 1.0, 0.5]]


def test_where_one_side_answers_none_all_are_slower() -> None:
    """There is a result without a pair, and no median."""
    found = compared(side({0: 1.0, 1: 2.0}), side({0: None, 1: None}), 100, 5)
    assert (found["slower"], found["both"], found["median_change_s"], found["id"]) == (2, 0, None, [])


def test_a_latency_that_an_answer_does_not_have_makes_it_no_slower() -> None:
    """One sent whole has no TPOT; unfinished at the other point it has none at either."""
    found = compared(side({0: 1.0, 1: 1.0, 2: 1.0}, defined=False), side({0: 1.0, 1: None, 2: None}), 100, 5)
    assert (found["undefined"], found["slower"], found["faster"], found["neither"]) == (3, 0, 0, 0)


def test_other_prompts_are_other_requests() -> None:
    """Counted beside those that are the same; without any of these it is an error."""
    ours, theirs = side({0: 1.0, 1: 1.0}), side({0: 1.0, 1: 1.0})
    theirs[0]["prompt_tokens"][1] = 11
    assert compared(ours, theirs, 100, 5)["unlike"] == 1
    with pytest.raises(ScenarioError, match="no request was sent with the same prompt at both"):
        compared(ours, side({0: 1.0}, prompt=9), 100, 5)
