"""Workloads as built: common random numbers, caps, classes, front end, traces, loads, predictors."""

import re
from dataclasses import replace
from pathlib import Path
from types import GeneratorType

import numpy as np
import pytest

from batchsim.base.errors import ScenarioError
from batchsim.base.units import NS_PER_S
from batchsim.kernel.types import Request
from batchsim.workload.build import build_workload
from batchsim.workload.laws import FixedTokens, GammaTokens, LognormalTokens, UniformTokens
from batchsim.workload.lengths import Lengths, ListLengths, PairLengths, TraceLengths
from batchsim.workload.predictors import ClassMeanConfig, NoisyConfig, OracleConfig, build_predictor
from batchsim.workload.processes import ConstantArrivals, OnOffArrivals, PoissonArrivals
from batchsim.workload.sharing import Sessions
from batchsim.workload.traces.trace_config import RateScale, TraceConfig
from batchsim.workload.traces.trace_rows import TraceRows
from batchsim.workload.workload_config import (
    AllAtOnce,
    ClosedLoop,
    Frontend,
    Patience,
    TraceArrivals,
    TrafficClass,
    WorkloadConfig,
)

CHAT = Lengths(LognormalTokens(1155, 0.96, max=14050), GammaTokens(211, 0.77, max=1000))
MINUTE_NS = 60 * NS_PER_S
ROWS = TraceRows(
    arrival_ns=np.array([0, 1, 3, 6, 10]) * NS_PER_S,
    prompt_tokens=np.array([10, 20, 30, 40, 50]),
    output_tokens=np.array([1, 2, 3, 4, 5]),
    source="five.csv",
    format="mapping",
    notes=("1 row dropped: zero output",),
)


def build(arrivals, *, load=None, seed=1, max_model_len=131_072, rows=None, **fields):
    """A workload of a config with chat lengths for ten minutes unless said otherwise."""
    if "requests" not in fields and not isinstance(arrivals, TraceArrivals):
        fields.setdefault("duration", 10 * MINUTE_NS)
    if not isinstance(arrivals, TraceArrivals):
        fields.setdefault("lengths", CHAT)
    config = WorkloadConfig(arrivals, **{"output_cap": 1024, **fields})
    return build_workload(
        config, load=load or {}, seed=seed, max_model_len=max_model_len, base=Path("nowhere"), rows=rows
    )


def replay(*, load=None, scale=None, **fields):
    """A workload that replays the five rows."""
    return build(TraceArrivals(), load=load, rows=ROWS, trace=TraceConfig("five.csv", rate_scale=scale), **fields)


def drawn_requests(workload):
    """What every request carries besides its times, in the order of sending."""
    sent = sorted(workload.arrivals(), key=lambda a: a.request.id)
    return [
        (a.request.prompt_tokens, a.output_tokens, a.request.request_class, a.request.max_output_tokens) for a in sent
    ]


CLASSES = {
    "chat": TrafficClass(0.7, patience=Patience(MINUTE_NS, "exponential")),
    "batch": TrafficClass(0.3, priority=5, lengths=Lengths(FixedTokens(4000), UniformTokens(1, 9)), deadline=MINUTE_NS),
}


@pytest.mark.parametrize("arrivals", [PoissonArrivals(2.0), OnOffArrivals(2.0, 4 * NS_PER_S, 6 * NS_PER_S)])
def test_request_i_is_the_same_request_at_every_load(arrivals):
    """Lengths, classes and caps of the first requests do not depend on the rate."""
    low, high = build(arrivals, classes=CLASSES), build(arrivals, load={"mean_rate": 16.0}, classes=CLASSES)
    assert high.num_offered > 5 * low.num_offered
    assert drawn_requests(high)[: low.num_offered] == drawn_requests(low)
    assert drawn_requests(build(arrivals, classes=CLASSES, seed=2)) != drawn_requests(low)


def test_the_same_seed_gives_the_same_arrivals_every_time():
    """A workload can be run again, and built again, with equal arrivals."""
    one, other = build(PoissonArrivals(8.0), classes=CLASSES), build(PoissonArrivals(8.0), classes=CLASSES)
    assert list(one.arrivals()) == list(one.arrivals()) == list(other.arrivals())


def test_a_class_of_its_own_leaves_the_others_requests_alone():
    """Changing the lengths of one class changes no request of another."""
    changed = {**CLASSES, "batch": TrafficClass(0.3, lengths=Lengths(FixedTokens(9), FixedTokens(9)))}
    before = drawn_requests(build(PoissonArrivals(8.0), classes=CLASSES))
    after = drawn_requests(build(PoissonArrivals(8.0), classes=changed))
    assert [m for m in before if m[2] == "chat"] == [m for m in after if m[2] == "chat"]
    assert {m[:2] for m in after if m[2] == "batch"} == {(9, 9)}


def test_classes_have_their_shares_lengths_priorities_and_deadlines():
    """What a class says holds for its requests; what it leaves out is the workload's."""
    workload = build(PoissonArrivals(50.0), classes=CLASSES, deadline=2 * MINUTE_NS)
    by_class = {
        name: [a for a in workload.arrivals() if a.request.request_class == name] for name in workload.class_names
    }
    assert len(by_class["batch"]) / workload.num_offered == pytest.approx(0.3, abs=0.01)
    for a in by_class["batch"]:
        assert (a.request.prompt_tokens, a.request.priority, a.cancel_ns) == (4000, 5, None)
        assert 1 <= a.output_tokens <= 9
        assert a.request.deadline_ns == a.request.arrival_ns + MINUTE_NS
    waits = [a.cancel_ns - a.request.arrival_ns for a in by_class["chat"]]
    assert np.mean(waits) == pytest.approx(MINUTE_NS, rel=0.03)
    assert min(waits) >= 1
    assert all(a.request.deadline_ns == a.request.arrival_ns + 2 * MINUTE_NS for a in by_class["chat"])
    assert workload.mean_output_tokens["batch"] == pytest.approx(5, rel=0.02)


def test_outputs_are_cut_to_the_cap_and_counted():
    """The true output never exceeds what the client asks for; each kind of cut is a note with its count."""
    lengths = Lengths(UniformTokens(50, 150), UniformTokens(1, 60))
    workload = build(ConstantArrivals(10.0), lengths=lengths, output_cap=40, max_model_len=130)
    for a in workload.arrivals():
        room = 130 - a.request.prompt_tokens
        assert a.request.max_output_tokens == max(1, min(40, room))
        assert a.output_tokens <= a.request.max_output_tokens
    prompt, asked = workload.requests.prompt_tokens, workload.requests.asked_tokens
    too_long, room = int((prompt >= 130).sum()), 130 - prompt
    by_cap = int(((asked > 40) & (room >= 40)).sum())
    by_model = int(((room >= 1) & (room < 40) & (asked > room)).sum())
    lowered = int(((room >= 1) & (room < 40)).sum())
    assert [note.split(" have ")[0].split(" ask ")[0] for note in workload.notes] == [
        f"{count:,} of 6,000 requests" for count in (too_long, by_cap, lowered, by_model)
    ]
    assert "to be rejected" in workload.notes[0]
    assert "output_cap 40" in workload.notes[1]


def test_caps_by_name():
    """`max_model_len` asks for all that is left, `exact` for the true length, and says so."""
    lengths = Lengths(FixedTokens(100), UniformTokens(1, 60))
    all_left = build(ConstantArrivals(1.0), lengths=lengths, output_cap="max_model_len", max_model_len=1000)
    assert {a.request.max_output_tokens for a in all_left.arrivals()} == {900}
    assert not any("true length" in note for note in all_left.notes)
    exact = build(ConstantArrivals(1.0), lengths=lengths, output_cap="exact", max_model_len=1000)
    assert all(a.request.max_output_tokens == a.output_tokens for a in exact.arrivals())
    assert exact.notes == ("reservations know the true length (output_cap: exact)",)


def test_clipping_by_a_law_is_noted_with_the_means():
    """The share clipped, the mean that results and the mean asked for are all said."""
    lengths = Lengths(LognormalTokens(100, 1.0, min=50, max=150), FixedTokens(1))
    (note,) = build(ConstantArrivals(1.0), lengths=lengths).notes
    assert note.startswith("prompt lengths: ")
    assert "clipped" in note
    assert "(asked 100.0)" in note


def test_the_front_end_delays_the_arrival_and_orders_by_it():
    """The engine sees requests later, long prompts more so, ordered by arrival there and then by id."""
    frontend = Frontend(request=4_000_000, per_prompt_token=1_000_000)
    workload = build(PoissonArrivals(20.0), frontend=frontend, patience=Patience(MINUTE_NS), deadline=MINUTE_NS)
    arrivals = list(workload.arrivals())
    keys = [(a.request.arrival_ns, a.request.id) for a in arrivals]
    assert keys == sorted(keys)
    assert [a.request.id for a in arrivals] != sorted(a.request.id for a in arrivals)
    for a in arrivals:
        assert a.request.arrival_ns == a.sent_ns + 4_000_000 + 1_000_000 * a.request.prompt_tokens
        assert a.cancel_ns == a.request.deadline_ns == a.sent_ns + MINUTE_NS
    without = build(PoissonArrivals(20.0))
    assert [a.sent_ns for a in sorted(arrivals, key=lambda a: a.request.id)] == without.sent_ns.tolist()
    assert {a.sent_ns for a in without.arrivals()} == {None}


def test_a_million_requests_are_made_one_slice_at_a_time():
    """Arrivals come from a generator, and taking the first few does not take long lists."""
    workload = build(PoissonArrivals(1000.0), requests=1_000_000, lengths=Lengths(FixedTokens(5), FixedTokens(5)))
    arrivals = workload.arrivals()
    assert isinstance(arrivals, GeneratorType)
    assert [next(arrivals).request.id for _ in range(3)] == [0, 1, 2]
    assert workload.num_offered == 1_000_000
    assert workload.window_ns == (0, int(workload.sent_ns[-1]))


def test_the_window_is_from_the_warmup_to_the_end_of_arrivals():
    """The duration ends it; with a number of requests, the last of them."""
    assert build(PoissonArrivals(8.0), warmup=MINUTE_NS).window_ns == (MINUTE_NS, 10 * MINUTE_NS)
    with pytest.raises(ScenarioError, match=r"warmup 60 s leaves nothing of the arrivals, which end at 4\.88 s"):
        build(ConstantArrivals(8.0), requests=40, warmup=MINUTE_NS)


def test_all_at_once_is_offline_work():
    """Every request comes at 0, and says so."""
    workload = build(AllAtOnce(), requests=50)
    assert (workload.all_at_once, workload.num_offered, workload.window_ns) == (True, 50, (0, 0))
    assert {a.request.arrival_ns for a in workload.arrivals()} == {0}
    assert workload.describe["text"] == "50 requests at once"


def test_a_trace_whose_rows_are_of_one_time_is_sent_all_at_once() -> None:
    """Like offline work, and said; rows that wait for the answers of others are not all sent then."""
    rows = replace(ROWS, arrival_ns=np.zeros(len(ROWS), np.int64))
    workload = build(TraceArrivals(), trace=TraceConfig("t.csv"), rows=rows, output_cap=1024)
    assert workload.all_at_once and workload.window_ns == (0, 0)
    assert workload.describe["text"] == f"{len(ROWS)} requests at once"
    assert f"all {len(ROWS)} rows are of one time: sent all at once" in workload.notes


def test_a_replay_says_how_its_rate_changes() -> None:
    """In the heading, by the first and the last of its parts; a steady one says nothing."""
    ends = []
    for fold in (92, 1.001):
        times = (3600e9 * np.log1p((np.arange(1100) + 0.5) / 1100 * (fold - 1)) / np.log(fold)).astype(np.int64)
        tokens = np.full(1100, 100)
        rows = TraceRows(times - times[0], tokens, tokens, "t.csv", "vidur")
        workload = build(TraceArrivals(), trace=TraceConfig("t.csv"), rows=rows, output_cap=1024)
        ends.append(str(workload.describe["text"]))
    assert re.match(r"trace arrivals, rate from 0\.0\d+/s to 1\.\d+/s, CV ", ends[0]), ends
    assert ends[1].startswith("trace arrivals, CV ")


def test_a_trace_is_replayed_with_its_own_times_and_lengths():
    """Row i is request i; the reader's notes are kept."""
    workload = replay()
    sent = [(a.request.arrival_ns // NS_PER_S, a.request.prompt_tokens, a.output_tokens) for a in workload.arrivals()]
    assert sent == [(0, 10, 1), (1, 20, 2), (3, 30, 3), (6, 40, 4), (10, 50, 5)]
    assert workload.notes == ROWS.notes
    assert workload.window_ns == (0, 10 * NS_PER_S)
    assert workload.describe["trace"] == "five.csv"
    assert workload.responded(next(workload.arrivals()).request, 5) is None


def test_a_trace_is_cut_by_duration_or_requests_with_a_note():
    """What is left out is counted; a duration beyond the end is said too."""
    by_time = replay(duration=6 * NS_PER_S)
    assert (by_time.num_offered, by_time.window_ns) == (3, (0, 6 * NS_PER_S))
    assert by_time.notes[-1] == "2 of 5 rows left out: at or after the duration 6 s"
    by_count = replay(requests=2)
    assert (by_count.num_offered, by_count.window_ns) == (2, (0, NS_PER_S))
    beyond = replay(duration=MINUTE_NS)
    assert beyond.window_ns == (0, 10 * NS_PER_S)
    assert "before the duration" in beyond.notes[-1]
    with pytest.raises(ScenarioError, match=r"five\.csv: requests is 6, but 5 rows are usable"):
        replay(requests=6)


def test_a_trace_is_rescaled_by_the_load():
    """`rate_scale` of a point replaces the factor; how is the scenario's to say."""
    compress = RateScale(1.0, "compress")
    assert replay(scale=compress, load={"rate_scale": 2}).window_ns == (0, 5 * NS_PER_S)
    assert replay(scale=RateScale(2.0, "compress")).window_ns == (0, 5 * NS_PER_S)
    with pytest.raises(ScenarioError, match="how is not said"):
        replay(load={"rate_scale": 2})


def test_trace_times_can_carry_drawn_lengths():
    """Lengths given beside trace arrivals replace those of the rows."""
    workload = replay(lengths=Lengths(FixedTokens(7), FixedTokens(3)))
    assert {(a.request.prompt_tokens, a.output_tokens) for a in workload.arrivals()} == {(7, 3)}


def test_pairs_are_drawn_jointly_from_a_trace():
    """Resampled rows keep prompt and output together, and every row occurs."""
    workload = build(PoissonArrivals(8.0), lengths=TraceLengths(), rows=ROWS, trace=TraceConfig("five.csv"))
    pairs = {(a.request.prompt_tokens, a.output_tokens) for a in workload.arrivals()}
    assert pairs == {(10, 1), (20, 2), (30, 3), (40, 4), (50, 5)}


def test_pairs_that_are_listed_stay_pairs():
    """Each of the pairs as often as its weight says, one of weight 0 never; at every number the first are the same."""
    pairs = PairLengths((10, 20, 30), (3, 2, 1), (3.0, 0.0, 1.0))
    drawn = drawn_requests(build(PoissonArrivals(50.0), lengths=pairs, duration=100 * NS_PER_S))
    found = [(prompt, output) for prompt, output, *_ in drawn]
    assert set(found) == {(10, 3), (30, 1)}
    assert found.count((10, 3)) / len(found) == pytest.approx(0.75, abs=0.03)
    with pytest.raises(ValueError, match="1 outputs for 2 prompts"):
        PairLengths((1, 2), (1,))


LISTED = ListLengths(prompt=(500, 20, 30, 40), output=(5, 2, 3, 4))
AT_ONCE = AllAtOnce()
SHARED = ClosedLoop(2, 0, shared_list=True, ramp=0)


@pytest.mark.parametrize("arrivals", [AT_ONCE, PoissonArrivals(5.0), SHARED])
def test_a_list_of_requests_is_sent_as_it_is(arrivals) -> None:
    """Each once, in order, whatever the seed, also from users who share one list; what is not sent is said."""
    for seed in (1, 2):
        workload = build(arrivals, seed=seed, requests=3, lengths=LISTED)
        requests = (workload.listed if arrivals is SHARED else workload).requests
        assert [*zip(requests.prompt_tokens, requests.output_tokens, strict=True)] == [(500, 5), (20, 2), (30, 3)]
        assert "1 of 4 listed requests are not sent" in workload.notes
    with pytest.raises(ScenarioError, match=r"lengths list 4 requests, and 5 are sent\. List more, or ask for fewer"):
        build(arrivals, requests=5, lengths=LISTED)


def test_a_class_has_a_list_of_its_own() -> None:
    """Its i-th request is the i-th of its list; the other class draws as it would without."""
    classes = {"a": TrafficClass(0.5, lengths=LISTED), "b": TrafficClass(0.5, lengths=CHAT)}
    workload = build(AT_ONCE, requests=6, classes=classes, lengths=None)
    mine = workload.requests.request_class == 0
    assert workload.requests.prompt_tokens[mine].tolist() == [500, 20, 30, 40][: mine.sum()] and mine.any()
    assert (workload.requests.prompt_tokens[~mine] > 0).all() and not mine.all()
    with pytest.raises(ScenarioError, match="lengths list 4 requests of class a, and"):
        build(AT_ONCE, requests=40, classes=classes, lengths=None)


def test_a_list_needs_one_order_and_pairs_stand_for_it_where_any_number_is_asked() -> None:
    """Users with requests of their own, and sessions, have none; a pile of requests draws from the list."""
    with pytest.raises(ValueError, match=r"write arrivals\.shared_list: true, or write kind: pairs"):
        build(ClosedLoop(2, 0), requests=4, lengths=LISTED)
    with pytest.raises(ValueError, match="drop sessions, or write kind: pairs"):
        build(PoissonArrivals(5.0), lengths=LISTED, sessions=Sessions(FixedTokens(2), NS_PER_S))
    config = WorkloadConfig(AT_ONCE, 64, LISTED, requests=4)
    assert config.of_any_number.lengths == PairLengths((500, 20, 30, 40), (5, 2, 3, 4))
    assert config.lengths == LISTED and LISTED.mean_output_tokens == 3.5


def test_a_trace_without_times_gives_lengths_only():
    """Replaying it is an error that says what it is good for."""
    timeless = TraceRows(None, ROWS.prompt_tokens, ROWS.output_tokens, "lengths.csv", "vidur")
    with pytest.raises(ScenarioError, match=r"lengths\.csv: this trace has no times"):
        build(TraceArrivals(), rows=timeless, trace=TraceConfig("lengths.csv"))


@pytest.mark.parametrize(
    ("arrivals", "load", "message"),
    [
        (PoissonArrivals(8.0), {"users": 4}, "load.users does not fit poisson arrivals. .*: mean_rate"),
        (ClosedLoop(4, 0), {"mean_rate": 4.0}, "load.mean_rate does not fit closed_loop"),
        (ClosedLoop(4, 0), {"users": 2.5}, "load.users is 2.5"),
        (ClosedLoop(4, 0), {"users": float("inf")}, "load.users: "),
        (ClosedLoop(4, 0), {"users": 0}, "load.users: users is 0"),
        (PoissonArrivals(8.0), {"mean_rate": -1.0}, "load.mean_rate: mean_rate is -1/s"),
        (PoissonArrivals(8.0), {"rate": 1.0}, "load.rate does not fit"),
        (PoissonArrivals(8.0), {"rate_scale": 2}, "load.rate_scale does not fit poisson"),
    ],
)
def test_loads_that_do_not_fit_the_arrivals_are_refused(arrivals, load, message):
    """A point's axis must be one that its arrivals have."""
    with pytest.raises(ScenarioError, match=message) as caught:
        build(arrivals, load=load)
    assert "\n" not in str(caught.value)


def test_the_description_has_the_measured_figures():
    """The text is what a table's head prints; the figures are those of the arrivals."""
    workload = build(OnOffArrivals(8.0, 4 * NS_PER_S, 6 * NS_PER_S))
    assert workload.describe["text"].startswith("on/off arrivals, CV ")
    assert workload.describe["cv"] > 2
    assert workload.describe["mean_prompt_tokens"] == workload.requests.prompt_tokens.mean()
    columns = workload.columns()
    assert {len(column) for column in columns.values()} == {workload.num_offered}


def test_predictors_guess_as_they_say():
    """The oracle knows, noise is keyed by request and right in the median, the class mean knows the class."""
    workload = build(PoissonArrivals(20.0), classes=CLASSES)
    requests = [a.request for a in workload.arrivals()]
    true = np.array([workload.true_output_tokens(r) for r in requests])
    assert true.tolist() == [a.output_tokens for a in workload.arrivals()]
    oracle = build_predictor(OracleConfig(), workload)
    assert (oracle.name, [oracle.predict(r) for r in requests]) == ("oracle", true.tolist())
    noisy, again = (build_predictor(NoisyConfig(0.5), workload) for _ in range(2))
    guesses = np.array([noisy.predict(r) for r in requests])
    assert guesses.tolist() == [again.predict(r) for r in reversed(requests)][::-1]
    logs = np.log(guesses[true > 50] / true[true > 50])
    assert (np.median(logs), logs.std()) == pytest.approx((0, 0.5), abs=0.03)
    assert noisy.name == "noisy (sigma 0.5)"
    mean = build_predictor(ClassMeanConfig(), workload)
    assert {mean.predict(r) for r in requests if r.request_class == "batch"} == {5}
    with pytest.raises(ValueError, match="sigma is 4"):
        NoisyConfig(4.0)


def test_a_class_that_does_not_occur_has_the_overall_mean():
    """A class too rare for the sample can still be predicted."""
    workload = build(ConstantArrivals(1.0), classes={"a": TrafficClass(1.0), "rare": TrafficClass(0.0)})
    predictor = build_predictor(ClassMeanConfig(), workload)
    rare = Request(id=0, arrival_ns=0, prompt_tokens=1, max_output_tokens=9, request_class="rare")
    assert predictor.predict(rare) == round(workload.requests.output_tokens.mean())


def test_longer_prompts_are_the_same_requests() -> None:
    """prompt_scale multiplies drawn and replayed prompts in whole tokens, changes nothing else, and is noted."""
    plain, longer = (build(PoissonArrivals(2.0), prompt_scale=x) for x in (1.0, 1.5))
    assert np.array_equal(longer.requests.prompt_tokens, np.rint(plain.requests.prompt_tokens * 1.5))
    assert np.array_equal(longer.sent_ns, plain.sent_ns)
    assert np.array_equal(longer.requests.output_tokens, plain.requests.output_tokens)
    assert "every prompt 1.5 times as long (prompt_scale)" in longer.notes
    assert replay(prompt_scale=0.5).requests.prompt_tokens.tolist() == [5, 10, 15, 20, 25]
    with pytest.raises(ValueError, match="prompt_scale is 0"):
        build(PoissonArrivals(2.0), prompt_scale=0.0)
