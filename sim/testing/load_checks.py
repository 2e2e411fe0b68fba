"""What arrivals, predictors of output lengths and trace readers must keep: `check_arrivals`, `check_predictor`,
`check_reader`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from math import sqrt
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args, get_type_hints

import numpy as np
from hypothesis import strategies as st

from batchsim.base.errors import TraceError
from batchsim.base.files import file_hash, open_file, write_bytes
from batchsim.base.ranges import Config
from batchsim.base.units import NS_PER_S
from batchsim.kernel.types import Request
from batchsim.testing.check import CASES, Cases, Check, name_of, named, one_line, refused_in_one_line
from batchsim.testing.random_configs import configs
from batchsim.testing.random_configs import knobs as random_knobs
from batchsim.workload.arrivals import arrival_times_ns
from batchsim.workload.build import BuiltWorkload, build_workload
from batchsim.workload.laws import LognormalTokens
from batchsim.workload.lengths import Lengths
from batchsim.workload.predictors import build_predictor
from batchsim.workload.processes import PoissonArrivals
from batchsim.workload.traces.own_reader import TraceReader, records_of
from batchsim.workload.workload_config import WorkloadConfig

ARRIVALS = 200
_MANY, _SEEDS = 2000, 12
_SPAN_NS = 400 * NS_PER_S
_DAMAGED_BYTES = 1_000_000
_ERRORS, _BIAS = 5.0, 0.02
"""By how many standard errors, and which share besides, a mean rate may be off."""

Seeded = tuple[Any, int]
"""A config and a seed."""


def check_arrivals(config: type[Config], *, knobs: Mapping[str, Any] | None = None, cases: int = CASES) -> list[Check]:
    """The checks of an arrival process by its config, which has a `mean_rate`, as `check_policy` has them of a policy.
    The random cases are configs and seeds."""
    drawn, stated = _seeded(config, knobs or {}, cases, _in_seconds(config))
    few = Cases(drawn.strategy, max(2, cases // 4), config.__name__)
    return named(
        config,
        {
            "in_order": drawn.all(in_order),
            "goes_on": drawn.all(goes_on),
            "equal_seeds": drawn.all(equal_times),
            "seeds_differ": drawn.all(seeds_differ),
            "mean_rate": few.all(mean_rate),
            "one_line_errors": stated.all(lambda drawn: refused_in_one_line(config, drawn)),
        },
        cases,
    )


@st.composite
def _made(draw: st.DrawFn, config: type[Config], fixed: Mapping[str, Any], in_seconds: list[str]) -> Any:
    long = {knob: draw(st.integers(1, 20)) * NS_PER_S for knob in in_seconds}
    return draw(configs(config, long | dict(fixed)))


def _seeded(
    config: type[Config], fixed: Mapping[str, Any], cases: int, in_seconds: list[str]
) -> tuple[Cases[Seeded], Cases[Any]]:
    """Configs with seeds, and knobs as a user may state them. `in_seconds`: knobs of whole seconds."""
    makes, whose = _made(config, fixed, in_seconds).filter(lambda one: one is not None), config.__name__
    return Cases(st.tuples(makes, st.integers(0, 1000)), cases, whose), Cases(random_knobs(config, fixed), cases, whose)


def _in_seconds(config: Any) -> list[str]:
    """The knobs of `config` that are durations: a process whose states last for ns would change a billion times."""
    hints = get_type_hints(config, include_extras=True)
    marks = {name: [getattr(mark, "example", "") for mark in get_args(hint)] for name, hint in hints.items()}
    return [knob.name for knob in fields(config) if "50ms" in marks[knob.name]]


def in_order(case: Seeded) -> None:
    """Times begin at 0 or later, are finite and never decrease; those of a duration lie in it."""
    config, seed = case
    drawn = arrival_times_ns(config, seed, None, ARRIVALS), arrival_times_ns(config, seed, _SPAN_NS, None)
    for times_ns, end_ns in zip(drawn, (np.inf, _SPAN_NS), strict=True):
        inside = times_ns[0] >= 0 and times_ns[-1] < end_ns
        assert inside and (np.diff(times_ns) >= 0).all(), f"times are not in order from 0 to the end: {times_ns}"


def goes_on(case: Seeded) -> None:
    """As many arrivals come as are asked for, and of more the first are the same."""
    config, seed = case
    few, more = (arrival_times_ns(config, seed, None, count) for count in (ARRIVALS, 2 * ARRIVALS))
    assert len(few) == ARRIVALS and len(more) == 2 * ARRIVALS, f"{len(few)} and {len(more)} arrivals come"
    assert np.array_equal(few, more[:ARRIVALS]), "the first arrivals change with how many are asked for"


def equal_times(case: Seeded) -> None:
    """The same seed gives the same times, whatever was drawn in between."""
    config, seed = case
    first = arrival_times_ns(config, seed, None, ARRIVALS)
    arrival_times_ns(config, seed + 1, None, ARRIVALS)
    assert first.tobytes() == arrival_times_ns(config, seed, None, ARRIVALS).tobytes(), "a seed has two runs of times"


def seeds_differ(case: Seeded) -> None:
    """Another seed gives other times."""
    config, seed = case
    one, other = (arrival_times_ns(config, each, None, ARRIVALS) for each in (seed, seed + 1))
    assert not np.array_equal(one, other), "two seeds give the same times"


def mean_rate(case: Seeded) -> None:
    """Over many arrivals and seeds the rate is the `mean_rate` that is asked for, within five standard errors."""
    config, seed = case
    spans = [arrival_times_ns(config, seed + k, None, _MANY)[-1] / NS_PER_S for k in range(_SEEDS)]
    asked = _MANY / config.mean_rate
    off = abs(np.mean(spans) - asked)
    allowed = _ERRORS * np.std(spans, ddof=1) / sqrt(_SEEDS) + _BIAS * asked
    assert off <= allowed, f"{_MANY} arrivals take {np.mean(spans):g} s, not {asked:g} s at {config.mean_rate:g}/s"


def check_predictor(config: type[Config], *, knobs: Mapping[str, Any] | None = None, cases: int = CASES) -> list[Check]:
    """The checks of a predictor of output lengths by its config, as `check_policy` has them of a policy. The random
    cases are configs and seeds; the requests of each are 10 s of chat."""
    drawn, stated = _seeded(config, knobs or {}, cases, [])
    return named(
        config,
        {
            "whole_tokens": drawn.all(whole_tokens),
            "equal_seeds": drawn.all(equal_predictions),
            "same_when_asked_again": drawn.all(same_when_asked_again),
            "order_of_requests": drawn.all(order_of_requests),
            "has_a_name": drawn.all(has_a_name),
            "one_line_errors": stated.all(lambda drawn: refused_in_one_line(config, drawn)),
        },
        cases,
    )


def _chat(seed: int) -> tuple[BuiltWorkload, list[Request]]:
    lengths = Lengths(LognormalTokens(mean=200.0, cv=1.0), LognormalTokens(mean=100.0, cv=1.0))
    block = WorkloadConfig(PoissonArrivals(4.0), output_cap=400, lengths=lengths, duration=10 * NS_PER_S)
    workload = build_workload(block, load={}, seed=seed, max_model_len=2048, base=Path())
    return workload, [arrival.request for arrival in workload.arrivals()]


def whole_tokens(case: Seeded) -> None:
    """Every prediction is a whole number of tokens, at least 1."""
    workload, requests = _chat(case[1])
    predictor = build_predictor(case[0], workload)
    for request in requests:
        tokens = predictor.predict(request)
        assert type(tokens) is int and tokens >= 1, f"predict gives {tokens!r} for request {request.id}"


def equal_predictions(case: Seeded) -> None:
    """Two predictors of one config and seed predict alike."""
    workload, requests = _chat(case[1])
    one, other = (build_predictor(case[0], workload) for _ in range(2))
    predicted = [(one.predict(request), other.predict(request)) for request in requests]
    assert all(a == b for a, b in predicted), "two predictors of one seed differ"


def same_when_asked_again(case: Seeded) -> None:
    """A request that is asked for again, as after a preemption, has the same prediction."""
    workload, requests = _chat(case[1])
    predictor = build_predictor(case[0], workload)
    first = [predictor.predict(request) for request in requests]
    assert first == [predictor.predict(request) for request in requests], "a request has two predictions"


def order_of_requests(case: Seeded) -> None:
    """The order in which requests are asked for, which every policy has its own of, does not matter."""
    workload, requests = _chat(case[1])
    one, other = (build_predictor(case[0], workload) for _ in range(2))
    backwards = [other.predict(request) for request in reversed(requests)]
    assert [one.predict(request) for request in requests] == backwards[::-1], "the order of requests matters"


def has_a_name(case: Seeded) -> None:
    """Its name, which every table has, is one of a few words on one line."""
    name = build_predictor(case[0], _chat(case[1])[0]).name
    assert name.strip() and name.isprintable() and len(name) <= 60, f"{name!r} is no name for a table"


def check_reader(reader: Any, path: str | Path) -> list[Check]:
    """The checks of a trace reader, a class with `records(path)`, on the file at `path`, which it can read, and on
    damaged copies of it."""
    file, name = Path(path), name_of(reader)
    return named(
        reader,
        {
            "rows": lambda: rows(reader, file),
            "reads_alike": lambda: reads_alike(reader, file),
            "rows_apart": lambda: rows_apart(reader, file),
            "ends_early": lambda: ends_early(reader, file),
            "file_untouched": lambda: file_untouched(reader, file),
            "one_line_errors": lambda: damage_is_one_line(reader, name, file),
        },
    )


def rows(reader: type[TraceReader], file: Path) -> None:
    """There are rows, each a mapping from names of columns."""
    read = list(reader().records(file))
    assert read, f"{file} has no rows"
    for number, row in enumerate(read, 1):
        named_well = isinstance(row, Mapping) and row and all(type(key) is str for key in row)
        assert named_well, f"row {number} is no mapping from names of columns: {row!r}"


def reads_alike(reader: type[TraceReader], file: Path) -> None:
    """The same file gives the same rows, to one reader twice and to another."""
    one = reader()
    first, again = (list(map(dict, one.records(file))) for _ in range(2))
    other = list(map(dict, reader().records(file)))
    assert first == again == other, "a file is read differently when it is read again"


def rows_apart(reader: type[TraceReader], file: Path) -> None:
    """A row stays as it is when the next one is read."""
    kept = list(reader().records(file))
    assert [dict(row) for row in kept] == [dict(row) for row in reader().records(file)], (
        "later rows change earlier ones"
    )


def ends_early(reader: type[TraceReader], file: Path) -> None:
    """A scenario that needs the first rows alone may stop there."""
    records = iter(reader().records(file))
    next(records)
    if close := getattr(records, "close", None):
        close()


def file_untouched(reader: type[TraceReader], file: Path) -> None:
    """Reading changes nothing of the file."""
    before = file_hash(file)
    list(reader().records(file))
    assert file_hash(file) == before, f"reading changes {file}"


def damage_is_one_line(reader: type[TraceReader], name: str, file: Path) -> None:
    """A file that is missing, empty, cut off or no text is read as far as it goes, or refused in one line."""
    with open_file(file) as whole:
        data = whole.read(_DAMAGED_BYTES)
    with TemporaryDirectory() as folder:
        missing = Path(folder) / f"missing{file.suffix}"
        for content in (None, b"", data[: len(data) * 2 // 3], b"\x00\xff\xfe\x1f\x8b" * 40, data[::-1]):
            if content is not None:
                write_bytes(missing, content)
            try:
                list(records_of(reader(), name, missing))
            except (TraceError, OSError) as error:
                one_line(error)
