"""Images, audios and videos of requests: who has some, where they stand in prompts, and which are equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batchsim.base.units import NS_PER_S
from batchsim.kernel.types import Arrival
from batchsim.workload.build import build_workload
from batchsim.workload.items import Distinct, Items
from batchsim.workload.laws import EmpiricalTokens, FixedTokens, UniformTokens
from batchsim.workload.lengths import Lengths, NoTokens, TraceLengths
from batchsim.workload.processes import PoissonArrivals
from batchsim.workload.sharing import SharedPrefix
from batchsim.workload.traces.trace_config import Columns, TraceConfig
from batchsim.workload.workload_config import ClosedLoop, TraceArrivals, TrafficClass, WorkloadConfig

LENGTHS = Lengths(FixedTokens(10), FixedTokens(5))
SIZES = EmpiricalTokens((16, 32, 64))


def arrivals(requests: int = 400, *, users: int = 0, **more: object) -> list[Arrival]:
    process = ClosedLoop(users, 0, shared_list=True) if users else PoissonArrivals(8.0)
    config = WorkloadConfig(process, "exact", **{"lengths": LENGTHS, **more}, requests=requests)  # type: ignore[arg-type]
    workload = build_workload(config, load={}, seed=3, max_model_len=4096, base=Path())
    return list(workload.arrivals())


def test_a_share_of_the_requests_has_items_beside_its_text() -> None:
    """Half of them, one to three each; prompts are as much longer, and the items stand before the text, in order."""
    made = arrivals(items=Items(SIZES, UniformTokens(1, 3), share=0.5))
    some = [each.request for each in made if each.request.items]
    assert 150 < len(some) < 250
    assert {len(request.items) for request in some} == {1, 2, 3}
    for request in (each.request for each in made):
        at = 0
        for item in request.items:
            assert (item.start, item.tokens in SIZES.values) == (at, True)
            at += item.tokens
        assert request.prompt_tokens == at + 10


def test_with_a_share_of_0_no_request_has_items_and_the_rest_is_the_same() -> None:
    """As adapters are asked for by none at a share of 0, to compare with."""
    made = arrivals(items=Items(SIZES, UniformTokens(1, 3), share=0.0))
    assert made == arrivals()


def test_items_are_behind_a_shared_prefix_or_after_the_text() -> None:
    """The tokens of a prompt are those of the group, of each item from its first token on, and of its own text."""
    prefix = SharedPrefix(1, 7)
    for place, start in (("before_text", 7), ("after_text", 17)):
        (first, *_) = arrivals(1, items=Items(FixedTokens(4), FixedTokens(2), place=place), shared_prefix=prefix)  # type: ignore[arg-type]
        request = first.request
        assert [item.start for item in request.items] == [start, start + 4]
        assert request.tokens is not None
        lengths = [length for _, _, length in request.tokens.segments]
        assert lengths == ([7, 4, 4, 10] if place == "before_text" else [7, 10, 4, 4])
        identifiers = [stream for stream, begin, _ in request.tokens.segments if begin == 0]
        assert {item.identifier for item in request.items} < set(identifiers)


def test_equal_items_have_equal_sizes_and_others_none_in_common() -> None:
    """Of five contents each has one size, the first being used most; without `distinct` no two items are equal."""
    few = [
        item
        for a in arrivals(items=Items(SIZES, FixedTokens(2), distinct=Distinct(5, zipf=1.5)))
        for item in a.request.items
    ]
    sizes = {(item.identifier, item.tokens) for item in few}
    assert len(sizes) == 5
    counts = sorted((sum(item.identifier == i for item in few) for i, _ in sizes), reverse=True)
    assert counts[0] > 2 * counts[1] > 2 * counts[4] > 0
    own = [item.identifier for a in arrivals(items=Items(SIZES, FixedTokens(2))) for item in a.request.items]
    assert len(set(own)) == len(own) == 800


def test_classes_have_items_of_their_own() -> None:
    """One class has images as it says, another those of the workload; equal contents of both are not the same."""
    classes = {
        "a": TrafficClass(share=0.5, items=Items(FixedTokens(3), distinct=Distinct(1))),
        "b": TrafficClass(share=0.5),
    }
    made = arrivals(items=Items(FixedTokens(9), distinct=Distinct(1)), classes=classes)
    by_class = {
        name: {item for a in made if a.request.request_class == name for item in a.request.items} for name in "ab"
    }
    assert [{item.tokens for item in by_class[name]} for name in "ab"] == [{3}, {9}]
    assert {item.identifier for item in by_class["a"]}.isdisjoint(item.identifier for item in by_class["b"])


def test_the_first_requests_are_the_same_for_every_number_and_in_a_closed_loop() -> None:
    """Adding requests changes none before; users who take requests from one list get those of the list."""
    items = Items(SIZES, UniformTokens(1, 3), share=0.5, distinct=Distinct(9))
    few, many = arrivals(20, items=items), arrivals(200, items=items)
    assert [a.request for a in few] == [a.request for a in many[:20]]
    loop = arrivals(20, users=4, items=items)
    assert [a.request.items for a in loop] == [a.request.items for a in few[:4]]


def test_output_0_asks_for_no_token() -> None:
    """Neither the request nor its answer has any."""
    made = arrivals(5, lengths=Lengths(FixedTokens(10), NoTokens()))
    assert {(a.request.max_output_tokens, a.output_tokens) for a in made} == {(0, 0)}
    assert max(a.request.arrival_ns for a in made) < 10 * NS_PER_S


def test_a_trace_counts_the_items_of_its_rows(tmp_path: Path) -> None:
    """As many as its column says, of the sizes of the law; a row that says no number is an error of the trace."""
    (tmp_path / "t.csv").write_text("at,in,out,images\n0,10,5,2\n1,20,5,0\n2,30,5,1\n")
    columns = Columns(prompt="in", output="out", arrival="at", items="images")
    trace = TraceConfig(path="t.csv", columns=columns, time_unit="s")
    items = Items(FixedTokens(8))
    config = WorkloadConfig(TraceArrivals(), "exact", trace=trace, items=items)
    made = build_workload(config, load={}, seed=0, max_model_len=4096, base=tmp_path).arrivals()
    assert [(len(a.request.items), a.request.prompt_tokens) for a in made] == [(2, 26), (0, 20), (1, 38)]


@pytest.mark.parametrize(
    ("items", "arrivals", "said"),
    [
        (None, TraceArrivals(), "trace.columns.items 'images': of how many tokens is not said"),
        (Items(FixedTokens(8)), PoissonArrivals(8.0), "trace.columns.items 'images' is of rows that are replayed"),
        (Items(FixedTokens(8), share=0.5), TraceArrivals(), "says how many there are. Drop share and per_request."),
    ],
)
def test_a_column_of_items_goes_with_what_else_is_said(items: Items | None, arrivals: Any, said: str) -> None:
    """Sizes are the workload's, numbers the trace's, which is replayed."""
    columns = Columns(prompt="in", output="out", arrival="at", items="images")
    replays = isinstance(arrivals, TraceArrivals)
    more = {} if replays else {"lengths": TraceLengths(), "requests": 3}
    with pytest.raises(ValueError, match=said.replace(".", r"\.")):
        WorkloadConfig(
            arrivals, "exact", trace=TraceConfig(path="t.csv", columns=columns, time_unit="s"), items=items, **more
        )
