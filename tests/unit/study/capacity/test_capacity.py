"""The search for the highest load that keeps an objective, on margins made up so that the answer is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from batchsim.metrics.intervals import paired
from batchsim.study.capacity.book import Book, Probe, Trial, capacity, jackknife, probes, unmeasured
from batchsim.study.capacity.search import Axis, Effort, search

AXIS = Axis(lowest=0.01)


def attainment(load: float, crossing: float, steep: float = 12.0) -> float:
    """A margin of 99 %: misses grow by a power of the load and are 1 % at the crossing."""
    return 0.01 - min(1.0, 0.01 * (load / crossing) ** steep)


def run(law, start=10.0, axis=AXIS, effort=None, grows=lambda load: False, requests=lambda load: 1000.0) -> Book:
    """A search on `law(load, seed)`; every trial it asks for is new."""
    book: Book = {}
    for wanted in search(book, start, axis, effort or Effort()):
        assert wanted and len(set(wanted)) == len(wanted)
        for load, seed in wanted:
            assert seed not in book.setdefault(load, {})
            book[load][seed] = Trial(law(load, seed), requests(load), grows(load))
    return book


@pytest.mark.parametrize("start", [0.5, 5.0, 9.9, 10.1, 40.0, 300.0])
def test_without_noise_the_crossing_is_found(start):
    """From far below, far above and close by; of endlessly many requests, which leave no doubt."""
    found = capacity(run(lambda load, _: attainment(load, 10.0), start, requests=lambda _: 1e15))
    assert found.load == pytest.approx(10.0, rel=0.01)
    assert found.low == pytest.approx(found.load, rel=1e-9) and found.high == found.load and not found.never


def test_with_noise_the_interval_holds_the_crossing_as_often_as_it_says():
    """Seeds that are good or bad at every load: in about 95 of 100 searches the interval holds the truth, and it is as
    narrow as asked."""
    inside, widths, errors, sigma, trials = 0, [], [], 0.05, 150
    truth = 10.0 * math.exp(-12 * sigma**2 / 2)  # where the mean of 12th powers of lognormal luck is 1
    for trial in range(trials):
        luck = np.random.default_rng(trial).normal(0, sigma, 64)
        book = run(lambda load, seed, luck=luck: attainment(load, 10.0 * math.exp(luck[seed])), effort=Effort(most=64))
        found = capacity(book)
        inside += found.low <= truth <= found.high
        widths.append((found.high - found.low) / 2 / found.load)
        errors.append(found.load / truth - 1)
    assert 0.90 <= inside / trials <= 0.99
    assert max(widths) <= 0.03 and np.abs(np.mean(errors)) < 0.01


def test_seeds_are_added_where_the_noise_asks_for_them():
    """A quiet objective is decided with the fewest seeds, a noisy one gets more, never more than allowed."""
    quiet = capacity(run(lambda load, seed: attainment(load, 10.0) + 1e-5 * (-1) ** seed))
    noisy = capacity(run(lambda load, seed: attainment(load, 10.0 * (1 + 0.15 * (-1) ** seed))))
    assert quiet.num_seeds == Effort().fewest < noisy.num_seeds <= Effort().most


def test_a_search_is_bounded():
    """The number of loads stays below its limit even where nothing is ever decided."""
    rng = np.random.default_rng(0)
    assert len(run(lambda load, seed: float(rng.normal(0, 1)))) <= Effort().max_probes


def test_an_objective_met_at_no_load():
    """It is said so, and the loads tried go down to the lowest one."""
    book = run(lambda load, _: -0.5 - load)
    found = capacity(book)
    assert (found.load, found.low, found.never, found.undecided) == (None, None, True, ())
    assert found.high == found.lowest == min(book) < 0.03


def test_loads_in_doubt_get_seeds_before_it_is_said_that_none_meets_the_objective():
    """Two seeds far apart leave a load open that ten decide."""
    book = run(lambda load, seed: (0.01, -0.3)[seed % 2] if load < 5 else -0.5)
    assert capacity(book).never and not capacity(book).undecided
    assert {len(seeds) for load, seeds in book.items() if load < 5} == {Effort().fewest}


def test_an_objective_met_at_every_load():
    """Where the axis ends, the end is a lower bound and no capacity."""
    found = capacity(run(lambda load, _: 0.005, start=0.5, axis=Axis(0.01, highest=1.0)))
    assert (found.load, found.low, found.high, found.never) == (None, 1.0, None, False)
    assert found.highest == 1.0


def _trials(margin: float, luck: float) -> dict[int, Trial]:
    """Four seeds around a margin, each of so many requests that they alone leave no doubt."""
    return {seed: Trial(margin + luck * (-1) ** seed, 1e6) for seed in range(4)}


PASSES, DOUBTFUL, FAILS = _trials(0.009, 1e-5), _trials(0.004, 0.05), _trials(-0.3, 1e-3)
BARELY_FAILS = _trials(-0.004, 0.05)


def test_an_end_of_the_interval_that_no_load_decides_is_none():
    """The lowest and the highest load tried are no ends: each end has a load beyond it that was decided."""
    bracket = {10.0: DOUBTFUL, 11.0: BARELY_FAILS}
    found = capacity(bracket)
    assert found.load is not None and 10 < found.load < 11
    assert (found.low, found.high, found.undecided) == (None, None, (10.0, 11.0))
    assert (found.lowest, found.highest) == (10.0, 11.0)
    below, above = capacity({8.0: PASSES, **bracket}), capacity({**bracket, 14.0: FAILS})
    assert below.low is not None and 8 < below.low < 10 and below.high is None
    assert above.high is not None and 11 < above.high < 14 and above.low is None


def test_a_load_decided_with_fewer_seeds_is_an_end_where_no_other_is():
    """The seeds of the bracket are not those of every load; what others decide counts as it stands."""
    few = {seed: PASSES[seed] for seed in range(3)}, {seed: FAILS[seed] for seed in range(3)}
    found = capacity({8.0: few[0], 10.0: DOUBTFUL, 11.0: BARELY_FAILS, 14.0: few[1]})
    assert (found.low, found.high) == (8.0, 14.0)


def test_without_chance_the_ends_are_the_loads_that_passed_and_failed():
    """One seed of what is not random decides; what lies between the two loads is the capacity's guess alone."""
    found = capacity({load: {0: Trial(margin, 500.0)} for load, margin in ((10.0, 0.01), (11.0, -0.02))})
    assert (found.low, found.high, found.undecided) == (10.0, 11.0, ())
    assert found.load is not None and 10 < found.load < 11


def test_loads_that_are_all_in_doubt_decide_nothing():
    """Missed or met by chance at every load: not never, nor up to the highest."""
    missed, met = capacity({10.0: BARELY_FAILS}), capacity({10.0: DOUBTFUL})
    assert missed.never and (missed.low, missed.high, missed.undecided) == (None, None, (10.0,))
    assert not met.never and (met.low, met.high, met.highest) == (None, None, 10.0)


def test_a_lower_load_that_fails_is_found():
    """A batch that does not fill makes its members wait: the objective holds between 4 and 10 only."""
    found = capacity(run(lambda load, _: attainment(load, 10.0) if load > 4 else -0.3))
    assert found.load == pytest.approx(10.0, rel=0.01)
    assert 2.0 in [round(load) for load in found.fails_below]


def test_the_interval_holds_the_estimate_where_the_queue_grows_before_all_seeds_miss():
    """Above, the mean margin is missed, and at the upper end of its interval the queue alone fails."""
    below = {seed: Trial(0.01, 300.0) for seed in range(10)}
    above = {seed: Trial(-0.307 if seed == 0 else 0.01, 300.0, True) for seed in range(10)}
    found = capacity({47.1: below, 48.4: above})
    assert found.load is not None and found.low is not None and found.high is not None
    assert found.low <= found.load <= found.high == 48.4


def test_a_queue_that_grows_fails_whatever_the_margin():
    """The capacity lies between the last stable load and the first that is not: no more than that is known of it."""
    found = capacity(run(lambda load, _: 0.01, grows=lambda load: load > 7.0))
    assert found.load == pytest.approx(7.0, rel=0.03)
    assert found.low <= 7.0 < found.high and found.high / found.low <= Effort().width


def test_whole_loads_are_tried_as_whole_ones():
    """37 users keep it and 38 do not."""
    book = run(lambda load, _: 0.01 if load <= 37 else -0.01, start=10, axis=Axis(1.0, whole=True))
    assert all(load == int(load) for load in book)
    low, high = (p.load for p in probes(book) if p.load in (37.0, 38.0))
    assert (low, high) == (37.0, 38.0)


def test_a_probe_weighs_its_seeds_by_their_requests():
    """One seed of 900 requests and one of 100: the margin is that of all 1000 together."""
    probe = Probe.of(1.0, [Trial(0.01, 900), Trial(-0.09, 100)], most=0.01)
    assert probe.margin == pytest.approx(0.0) and probe.num_requests == 1000 and not probe.decided


@pytest.mark.parametrize(("num_requests", "shown"), [(57, False), (183, False), (184, True)])
def test_few_requests_without_a_miss_show_little(num_requests, shown):
    """Two seeds without a miss under 99 %: of 368 requests at most 1 % may miss yet, of 2 × 57 3.2 %."""
    probe = Probe.of(1.0, 2 * [Trial(0.01, num_requests)], most=0.01)
    assert probe.low == pytest.approx(0.01 - (1 - 0.025 ** (1 / (2 * num_requests))))
    assert probe.high == probe.margin == pytest.approx(0.01)
    assert probe.passes and probe.decided is shown


def test_a_mean_has_no_share_that_may_miss():
    """Its margin is a distance: two seeds alike have an interval without width."""
    probe = Probe.of(1.0, 2 * [Trial(0.01, 5, is_share=False)], most=0.01)
    assert (probe.low, probe.high) == (0.01, 0.01)


def test_a_search_gives_a_strict_objective_the_seeds_that_it_takes():
    """99.9 % takes 3,688 requests without a miss: of 300 a seed, more seeds are run than of 3,000."""

    def law(load, _):
        return 0.001 if load <= 8 else -0.2

    few, many = (capacity(run(law, requests=lambda _, n=n: n)) for n in (300.0, 3000.0))
    assert few.num_seeds * 300 >= 3688 and few.num_seeds > many.num_seeds == Effort().fewest


def test_a_load_with_nobody_to_measure_is_too_low_to_be_tried():
    """From below it the search goes up, and to a load that fails everywhere else it does not add a verdict."""
    users = Axis(1.0, whole=True)

    def some(load):
        return 0.0 if load < 6 else 1000.0

    def law(load, _):
        return 0.01 if load <= 37 else -0.01

    for start in (1.0, 5.0, 100.0):
        book = run(law, start, users, requests=some)
        assert math.floor(capacity(book).load) == 37
        assert all(probe.load >= 6 for probe in probes(book))
    never = run(lambda load, _: -0.01, 20.0, users, requests=some)
    assert capacity(never).never and unmeasured(never) and max(unmeasured(never)) < 6
    nobody = run(lambda load, _: 0.0, 20.0, users, requests=lambda _: 0.0)
    assert probes(nobody) == [] and len(nobody) < Effort().max_probes


def test_paired_capacities_differ_by_less_than_their_intervals():
    """Two policies, one 2 % better at every seed: each one's interval is wider than that, the paired one is not."""
    luck = np.exp(np.random.default_rng(1).normal(0, 0.06, 16))
    effort = Effort(fewest=16, most=16)
    books = [run(lambda load, s, k=k: attainment(load, 10.0 * k * luck[s]), effort=effort) for k in (1.0, 1.02)]
    one, other = (capacity(book, 16) for book in books)
    assert one.low < other.load < one.high
    difference = paired(jackknife(books[1], 16), jackknife(books[0], 16))
    assert difference.mean == pytest.approx(0.2, abs=0.1) and not difference.is_none
    assert paired(jackknife(books[0], 16), jackknife(books[0], 16)).is_none
