"""The workload block: what it accepts, what it refuses."""

import json
from dataclasses import replace

import pytest
from pydantic import TypeAdapter, ValidationError

from batchsim.base.units import NS_PER_S
from batchsim.workload.laws import FixedTokens, LognormalTokens
from batchsim.workload.lengths import Lengths, TraceLengths
from batchsim.workload.processes import OnOffArrivals, PoissonArrivals
from batchsim.workload.sharing import Sessions
from batchsim.workload.traces.trace_config import RateScale, TraceConfig
from batchsim.workload.workload_config import (
    AllAtOnce,
    ClosedLoop,
    Frontend,
    TraceArrivals,
    TrafficClass,
    WorkloadConfig,
)

LENGTHS = Lengths(FixedTokens(100), FixedTokens(10))
MINUTE_NS = 60 * NS_PER_S
TRACE = TraceConfig("trace.csv")


def workload(**changes):
    """A valid config with some fields changed."""
    fields = {"arrivals": PoissonArrivals(8.0), "output_cap": 64, "lengths": LENGTHS, "duration": MINUTE_NS}
    return WorkloadConfig(**{**fields, **changes})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PoissonArrivals(0.0), "mean_rate is 0/s"),
        (lambda: workload(duration=None), "poisson arrivals have no end"),
        (lambda: workload(requests=5), "both duration and requests"),
        (lambda: workload(warmup=MINUTE_NS), "leaves nothing of the duration"),
        (lambda: workload(lengths=None), "lengths are missing"),
        (lambda: workload(lengths=TraceLengths()), "need trace"),
        (lambda: workload(trace=TRACE), "neither arrivals nor lengths"),
        (lambda: workload(arrivals=TraceArrivals(), lengths=None), "need trace"),
        (lambda: workload(arrivals=TraceArrivals(), lengths=TraceLengths(), trace=TRACE), "Leave lengths out"),
        (
            lambda: workload(lengths=TraceLengths(), trace=TraceConfig("t.csv", rate_scale=RateScale(2.0, "compress"))),
            "trace.rate_scale changes the trace's times, but arrivals are poisson",
        ),
        (lambda: workload(arrivals=AllAtOnce()), "all_at_once takes requests"),
        (lambda: workload(arrivals=AllAtOnce(), duration=None, requests=5, warmup=1), "all_at_once takes requests"),
        (lambda: workload(arrivals=ClosedLoop(9, 0), duration=None, requests=5), "requests is 5 for 9 users"),
        (lambda: workload(arrivals=ClosedLoop(9, 0, shared_list=True)), "shared_list: a list has a length"),
        (
            lambda: workload(
                arrivals=ClosedLoop(2, 0, shared_list=True),
                duration=None,
                requests=5,
                sessions=Sessions(FixedTokens(2)),
            ),
            "shared_list: turns of a session belong to one user",
        ),
        (lambda: workload(arrivals=ClosedLoop(9, 0), max_concurrency=4), "never has more in flight than its users"),
        (
            lambda: workload(sessions=Sessions(FixedTokens(2), think_time=1), max_concurrency=4),
            "max_concurrency 4: the turns of sessions wait for answers",
        ),
        (lambda: workload(max_concurrency=0), "max_concurrency is 0. It must be from 1"),
        (lambda: workload(classes={"a": TrafficClass(0.5)}), "add up to 50%"),
        (lambda: workload(classes={"a": TrafficClass(0.7), "b": TrafficClass(0.7)}), "add up to 140%"),
        (lambda: workload(classes={"": TrafficClass(1.0)}), "has no name"),
    ],
)
def test_bad_blocks_are_refused_in_one_line(make, message):
    """Every broken block names the field, the number and what to do."""
    with pytest.raises(ValueError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_classes_with_lengths_of_their_own_need_no_others():
    """Lengths may be left out only where every class brings its own."""
    own = TrafficClass(0.5, lengths=LENGTHS)
    assert workload(lengths=None, classes={"a": own, "b": own}).lengths is None
    with pytest.raises(ValueError, match="lengths are missing"):
        workload(lengths=None, classes={"a": own, "b": TrafficClass(0.5)})


REPLAYED = {"arrivals": TraceArrivals(), "lengths": None, "trace": TRACE}
RESAMPLED = {"lengths": TraceLengths(), "trace": TRACE}
ANY, LAWS, ROWS = (TrafficClass(0.5, lengths=lengths) for lengths in (None, LENGTHS, TraceLengths()))


@pytest.mark.parametrize(
    ("changes", "classes", "blamed"),
    [
        (REPLAYED, {"a": ANY, "b": ANY}, r"classes: a, b would be drawn .* give every class lengths"),
        (REPLAYED, {"a": ANY, "b": LAWS}, r"classes: a would"),
        (REPLAYED, {"a": ROWS, "b": LAWS}, r"classes: a would"),
        (RESAMPLED, {"a": ANY, "b": ANY}, r"classes: a, b would be drawn .* give all of them but one lengths"),
        (RESAMPLED, {"a": ANY, "b": ROWS, "c": LAWS}, r"classes: a, b would"),
    ],
)
def test_classes_drawn_beside_the_rows_of_a_trace_are_refused(changes, classes, blamed):
    """A share says nothing of which rows are the class's: all classes would have the lengths of all rows."""
    classes = {name: replace(each, share=1 / len(classes)) for name, each in classes.items()}
    with pytest.raises(ValueError, match=blamed) as caught:
        workload(classes=classes, **changes)
    assert "Name the column that says which row is whose" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "classes"),
    [
        (REPLAYED, {"a": TrafficClass(1.0, slo="ttft<1s @ 99%")}),
        (REPLAYED, {"a": TrafficClass(1.0), "never": TrafficClass(0.0)}),
        (REPLAYED, {"a": LAWS, "b": LAWS}),
        (REPLAYED | {"lengths": LENGTHS}, {"a": ANY, "b": LAWS}),
        (RESAMPLED, {"a": ANY, "b": LAWS}),
        (RESAMPLED, {"a": TrafficClass(1.0)}),
    ],
)
def test_what_the_refusal_of_classes_advises_is_accepted(changes, classes):
    """One class to a trace file, or lengths of their own for the others."""
    assert workload(classes=classes, **changes).classes == classes


def test_shares_that_miss_1_by_rounding_only_are_accepted():
    """Ten times 10% is 100%, whatever binary fractions make of it."""
    assert len(workload(classes={str(i): TrafficClass(0.1) for i in range(10)}).classes) == 10


BLOCK = {
    "arrivals": {"kind": "on_off", "mean_rate": "8/s", "on": "4s", "off": "6s"},
    "lengths": {
        "prompt": {"kind": "lognormal", "mean": 1155, "cv": 0.96, "max": 14050},
        "output": {"kind": "fixed", "tokens": 1},
    },
    "output_cap": 1024,
    "duration": "10min",
    "warmup": "1min",
    "classes": {"chat": {"share": "80%"}, "batch": {"share": "20%", "priority": 1, "deadline": "1min"}},
    "patience": {"mean": "30s", "kind": "exponential"},
    "frontend": {"request": "4ms"},
}


def validated(block):
    """The config that a validator makes of a block."""
    return TypeAdapter(WorkloadConfig).validate_json(json.dumps(block))


def test_a_scenario_block_validates_to_the_config():
    """Units become numbers and kinds become classes."""
    config = validated(BLOCK)
    assert config.arrivals == OnOffArrivals(8.0, 4 * NS_PER_S, 6 * NS_PER_S)
    assert config.lengths == Lengths(LognormalTokens(1155, 0.96, max=14050), FixedTokens(1))
    assert config.classes["batch"] == TrafficClass(0.2, priority=1, deadline=MINUTE_NS)
    assert (config.duration, config.warmup, config.frontend) == (10 * MINUTE_NS, MINUTE_NS, Frontend(4_000_000))
    resampled = {**BLOCK, "classes": {}, "lengths": {"kind": "trace"}, "trace": {"path": "t"}}
    assert validated(resampled).lengths == TraceLengths()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arrivals": {"kind": "poison", "mean_rate": "8/s"}}, "'poison'.*does not match any of the expected tags"),
        ({"arrivals": {"mean_rate": "8/s"}}, "discriminator 'kind'"),
        ({"arrivals": {"kind": "poisson", "mean_rate": 8}}, "8 is not a rate"),
        ({"arrivals": {"kind": "poisson", "mean_rate": "8/s", "cv": 2.0}}, "cv"),
        ({"lengths": {"prompt": {"kind": "fixed", "tokens": 5}}}, "output"),
        ({"lengths": {"kind": "traces"}}, "'traces'.*does not match"),
        ({"output_cap": "all"}, "max_model_len"),
        ({"duration": 600}, "600 is not a time"),
        ({"durations": "600s"}, "durations"),
    ],
)
def test_a_wrong_key_or_kind_is_named_once(changes, message):
    """Only the class that `kind` names reports, so that an error has one cause."""
    with pytest.raises(ValidationError, match=f"(?s){message}") as caught:
        validated({**BLOCK, **changes})
    assert caught.value.error_count() <= (2 if "output_cap" in changes else 1)


def test_the_block_has_a_json_schema():
    """Editors get a schema with every kind of arrivals."""
    text = json.dumps(TypeAdapter(WorkloadConfig).json_schema())
    assert all(kind in text for kind in ("poisson", "closed_loop", "lognormal", "empirical"))
