"""The luck of draft tokens: its law, and that it depends on request and position alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from batchsim.base.errors import ScenarioError, TraceError
from batchsim.kernel.acceptance import DraftCounts, DrawnLuck, outcome
from batchsim.kernel.draft_group import DraftGroup, DraftRows, Verified
from batchsim.kernel.policy_config import PromptLookup
from batchsim.kernel.protocols import Executor
from batchsim.kernel.record import Records
from batchsim.kernel.types import Request, Sequence
from batchsim.policies.systems.vllm.speculative_config import SpeculativeConfig
from batchsim.scenario import load_scenario
from batchsim.scenario.point import simulate_point
from batchsim.scenario.setup import Setup

SHARES = (0.8, 0.6, 0.45)


def group(luck: DrawnLuck, ids: range, computed: int, request_class: str = "") -> DraftGroup:
    """Requests `ids`, in that order, with so many tokens computed."""
    made = DraftGroup(16)
    for i in ids:
        seq = Sequence(Request(i, 0, computed, 100, request_class=request_class))
        seq.settled_computed_tokens, seq.settled_output_tokens = computed, 1
        made.join(seq)
        made.luck[seq.phase] = luck.key(seq)
    return made


def accepted(luck: DrawnLuck, ids: range, computed: int, drafts: int = 3, request_class: str = "") -> list[int]:
    made = group(luck, ids, computed, request_class)
    return luck.accepted(made, np.full(len(ids), drafts)).tolist()


def test_each_position_is_accepted_in_its_share_of_steps() -> None:
    """Over requests, over positions of one request, and of fewer drafts the same first ones."""
    luck = DrawnLuck(0, {"": SHARES})
    over_requests = np.array(accepted(luck, range(5_000), 100))
    of_one = np.array([accepted(luck, range(7, 8), 100 + at)[0] for at in range(3_000)])
    for found, tolerance in ((over_requests, 0.012), (of_one, 0.03)):
        assert [(found > n).mean() for n in range(3)] == pytest.approx(SHARES, abs=tolerance)
    assert accepted(luck, range(500), 100, drafts=2) == np.minimum(accepted(luck, range(500), 100), 2).tolist()


def test_all_policies_see_the_same_luck() -> None:
    """A draw is of seed, request and position: not of who decodes beside it, or before."""
    luck = DrawnLuck(3, {"": SHARES})
    assert accepted(luck, range(40, 60), 7) == accepted(luck, range(100), 7)[40:60]
    assert accepted(DrawnLuck(4, {"": SHARES}), range(100), 7) != accepted(luck, range(100), 7)
    assert accepted(luck, range(100), 8) != accepted(luck, range(100), 7)


@pytest.mark.parametrize("laws", [{"": SHARES}, {"chat": SHARES, "": (0.5, 0.5, 0.1)}])
def test_members_who_stay_see_the_luck_of_those_who_come_and_go(laws: dict[str, tuple[float, ...]]) -> None:
    """Drawn ahead for a group that stays as it is, drafts are as right as those drawn for each step alone; of fewer
    rows, or after somebody left, too."""
    luck, alone = DrawnLuck(5, laws), DrawnLuck(5, laws)
    made, foreseen = group(luck, range(200), 30, "chat"), 0
    for step in range(100):
        drafts = 2 if 40 <= step < 60 else 3
        made.give_drafts(drafts)
        made.ask(made.wanted(1_000, 1_000), 0, 1_000)
        seen = luck.foreseen(made)
        gained = seen[0] if seen is not None else luck.accepted(made, made.drafts_asked) + 1
        assert seen is None or seen[1] == gained.sum()
        expected = [accepted(alone, range(i, i + 1), n, drafts, "chat")[0] for i, n in _where(made)[::50]]
        assert (gained - 1)[::50].tolist() == expected, f"at step {step}"
        foreseen += seen is not None
        made.take_due()
        made.verify(DraftRows(made.sequences, made.rows, {}), Verified(gained), ahead=False)
        if step == 80:
            made.leave(made.sequences[0])
    assert 70 < foreseen < 90, "in the steps after a change one looks at them alone"


def _where(made: DraftGroup) -> list[tuple[int, int]]:
    """The ids of the members, each with its computed tokens."""
    return [(seq.request.id, seq.num_computed_tokens) for seq in made.sequences]


def test_an_end_is_not_missed_where_rows_become_fewer() -> None:
    """Of two members with 3 and 5 tokens to go, all drafts right, the first ends in a step of four rows; the second in
    the next one, of a single row."""
    luck = DrawnLuck(0, {"": (1.0, 1.0, 1.0)})
    made = group(luck, range(2), 30)
    made.give_drafts(3)
    made.ends[:] = (33, 35)
    found: list[list[int]] = []
    for rows in (4, 1):
        made.take_alike(rows)
        verified, ended = outcome(luck, made)
        found.append([seq.request.id for seq in ended])
        made.verify(DraftRows(made.sequences, made.rows, {}), verified, ahead=False)
        for seq in ended:
            made.leave(seq)
    assert found == [[0], [1]]


def test_a_class_has_its_law_and_others_theirs() -> None:
    """Of three laws each request has that of its class."""
    luck = DrawnLuck(0, {"code": (1.0, 1.0), "": (0.0, 0.0)})
    assert set(accepted(luck, range(99), 5, 2, "code")) == {2} and set(accepted(luck, range(99), 5, 2, "chat")) == {0}


def test_a_drafter_that_finds_nothing_gives_no_drafts() -> None:
    """In its share of steps it gives all, for members and for those whose prompt ends; one that always drafts says
    nothing."""
    luck = DrawnLuck(0, {"": SHARES}, share_found=0.25)
    made = group(luck, range(4_000), 9)
    first = [Sequence(Request(i, 0, 9, 5)) for i in range(2_000)]
    proposed = luck.proposed(made, np.ones(4_000, np.int64), first)
    assert proposed is not None
    for counts in (proposed[0], np.array(list(proposed[1].values()))):
        assert set(counts.tolist()) == {0, 3} and (counts == 3).mean() == pytest.approx(0.25, abs=0.03)
    assert DrawnLuck(0, {"": SHARES}).proposed(made, np.ones(4_000, np.int64), first) is None
    made.computed += 1  # what was proposed for the next step is what can be right in it, asked for or not
    right = luck.accepted(made, np.full(4_000, 3))
    assert set(right[proposed[0] == 0]) == {0} and set(right[proposed[0] == 3]) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"acceptance": (0.8, 0.6)}, "acceptance has 2 positions, num_speculative_tokens is 3"),
        ({"acceptance": (0.5, 0.6, 0.4)}, "acceptance rises: 0.5, 0.6, 0.4"),
        ({"acceptance": {}}, "acceptance names no class"),
        ({"acceptance": 1.2}, "acceptance is 1.2. It must be from 0 to 1"),
        ({"acceptance": {"code": (0.5,)}}, "acceptance of class code has 1 positions"),
        ({"acceptance": 0.5, "found": 0.5}, "found is 0.5, but eagle always drafts"),
        ({"acceptance": 0.5, "num_speculative_tokens": 0}, "num_speculative_tokens is 0"),
        ({"acceptance": 0.5, "prompt_lookup_max": 4}, "prompt_lookup_max is 4, but eagle looks nothing up. Leave it"),
        (
            {"method": "ngram", "acceptance": 0.5, "prompt_lookup_min": 4, "prompt_lookup_max": 3},
            "prompt_lookup_min 4 must be at most prompt_lookup_max 3",
        ),
    ],
)
def test_what_does_not_fit_is_refused(knobs: dict[str, Any], message: str) -> None:
    """In one line with the numbers."""
    with pytest.raises(ValueError, match=message):
        SpeculativeConfig(**{"method": "eagle", "num_speculative_tokens": 3} | knobs)


@pytest.mark.parametrize(
    ("knobs", "found"),
    [
        ({}, (5, 5)),
        ({"prompt_lookup_min": 2}, (2, 2)),
        ({"prompt_lookup_max": 3}, (3, 3)),
        ({"prompt_lookup_min": 2, "prompt_lookup_max": 4}, (2, 4)),
    ],
)
def test_lengths_of_ngrams_are_as_the_engine_has_them(knobs: dict[str, int], found: tuple[int, int]) -> None:
    """5 tokens where none is stated; one that is stated stands for both."""
    assert SpeculativeConfig("ngram", 3, 0.5, **knobs).lookup == PromptLookup(3, *found)


def test_a_number_is_a_geometric_law() -> None:
    """Each draft is right with that probability where those before it are."""
    assert SpeculativeConfig("mtp", 3, 0.5).positions == {"": (0.5, 0.25, 0.125)}


def test_what_was_counted_is_a_law() -> None:
    """By position of the decodes that had drafts, and the share of those; two counts make one."""
    counts = DraftCounts([0, 0, 0])
    for drafts, accepted in ((3, 3), (2, 1), (0, 0), (3, 0)):
        counts.note(drafts, accepted)
    assert counts == DraftCounts([2, 1, 1], decodes=4, drafted=3) and counts.tokens_per_decode == 2
    assert counts.law == "acceptance: [0.667, 0.333, 0.333], found: 0.75"
    assert counts + DraftCounts([1, 0, 0], 4, 1) == DraftCounts([3, 1, 1], 8, 4)
    assert DraftCounts([0]).law == "acceptance: [0], found: 0" and DraftCounts([0]).tokens_per_decode == 1


SCENARIO = """
model: llama-3.1-8b
cost: {kind: linear, base: 5ms, per_token: 20us}
kv: {tokens: 100000}
max_model_len: 4096
workload:
  arrivals: {kind: all_at_once}
  lengths: {prompt: {kind: fixed, tokens: 50}, output: {kind: fixed, tokens: 101}}
  output_cap: 101
  requests: 20
policies:
  POLICY
slo: ttft<1s @ 99%
seeds: 1
"""
VLLM = (
    "vllm: {async_scheduling: false, speculative_config: {method: eagle3, num_speculative_tokens: 3, acceptance: LAW}}"
)
SGLANG = (
    "sglang: {disable_overlap_schedule: true, speculative_algorithm: EAGLE3, speculative_num_steps: 3,"
    " speculative_eagle_topk: 1, acceptance: LAW}"
)
TENSORRT_LLM = (
    "tensorrt_llm: {disable_overlap_scheduler: true,"
    " speculative_config: {decoding_type: NGram, max_draft_len: 3, acceptance: LAW}}"
)


def setup_of(tmp_path: Path, law: str, policy: str = VLLM) -> Setup:
    path = tmp_path / "drafts.yaml"
    path.write_text(SCENARIO.replace("POLICY", policy).replace("LAW", law))
    return Setup.of(load_scenario(str(path)))


def run_of(tmp_path: Path, law: str, policy: str = VLLM) -> Records:
    setup = setup_of(tmp_path, law, policy)
    return simulate_point(setup, setup.scenario.points()[0]).records


@pytest.mark.parametrize("policy", [VLLM, SGLANG, TENSORRT_LLM])
def test_a_scenario_says_what_drafts_are_worth(tmp_path: Path, policy: str) -> None:
    """With all right 100 tokens take 25 steps after the first, with none of them 100; the answers are as long."""
    for law, steps in (("1.0", 26), ("[0, 0, 0]", 101)):
        records = run_of(tmp_path, law, policy)
        assert len(records.steps) == steps and (records.requests["output_tokens"] == 101).all()
        assert records.steps["num_decode_tokens"].sum() == 4 * records.steps["num_decode"].sum()


def test_a_law_of_no_class_is_refused(tmp_path: Path) -> None:
    """One line says which classes there are, or which has no law."""
    for law, message in (
        ("{code: 0.5, '': 0.3}", "acceptance of class code; the workload has no classes"),
        ("{}", "acceptance names no class"),
    ):
        with pytest.raises(ScenarioError, match=message):
            run_of(tmp_path, law)


@pytest.mark.parametrize("policy", [VLLM, TENSORRT_LLM])
def test_no_drafts_of_a_model_on_a_real_executor(tmp_path: Path, policy: str) -> None:
    """They are refused in one line, which names the method that needs no model; so is another engine's search."""
    setup = setup_of(tmp_path, "0.5", policy)
    point = setup.scenario.points()[0]
    workload, kv = setup.workload(point.load, 0), setup.new_kv(point.spec.config)
    with pytest.raises(
        ScenarioError, match=r": no draft model runs here, and no search but.* Use method ngram of vllm"
    ):
        setup.engine_on(cast("Executor", object()), point.spec, workload, kv, None)


# ---- of each request, by a trace

TRACE = "{path: t.csv, columns: {arrival: ms, prompt: in, output: out, acceptance: right}, time_unit: ms}"


def traced(tmp_path: Path, rows: list[str], *overrides: str) -> Setup:
    """The setup of a scenario whose requests are `rows` of arrival in ms, prompt, output and acceptance."""
    (tmp_path / "t.csv").write_text("\n".join(["ms,in,out,right", *rows]) + "\n")
    (tmp_path / "traced.yaml").write_text(SCENARIO.replace("POLICY", VLLM).replace("LAW", "trace"))
    keys = ("arrivals={kind: trace}", "lengths=null", "requests=null", f"trace={TRACE}")
    given = {text.partition("=")[0] for text in overrides}
    changes = [f"workload.{key}" for key in keys if f"workload.{key.partition('=')[0]}" not in given]
    changes += ["cost.per_token=0ns", *overrides]
    return Setup.of(load_scenario(str(tmp_path / "traced.yaml"), overrides=changes))


def test_a_probability_of_each_request_is_its_geometric_law() -> None:
    """Rounded to 0.4 %; requests beside it have theirs."""
    own = [0.0, 0.5, 1.0, 0.7011]
    luck = DrawnLuck.of_requests(0, 3, lambda request: own[request.id % 4])
    found = np.array(accepted(luck, range(8_000), 50)).reshape(-1, 4)
    for column, p in zip(found.T, own, strict=True):
        assert [(column > n).mean() for n in range(3)] == pytest.approx([p, p**2, p**3], abs=0.02)


@pytest.mark.parametrize(
    "others",
    [
        (),
        ("workload.arrivals={kind: all_at_once}", "workload.requests=40", "workload.lengths={kind: trace}"),
        (
            "workload.arrivals={kind: closed_loop, users: 4, think_time: 1ms}",
            "workload.requests=40",
            "workload.lengths={kind: trace}",
        ),
    ],
    ids=["replayed", "drawn", "users"],
)
def test_a_trace_says_how_likely_the_drafts_of_each_request_are_right(tmp_path: Path, others: tuple[str, ...]) -> None:
    """One of 101 tokens takes 25 steps after the first where all are right, 100 where none is; rows of 101 are all
    right, of 61 none."""
    setup = traced(tmp_path, [f"{10 * i},50,{(61, 101)[i % 2]},{i % 2}" for i in range(40)], *others)
    requests = simulate_point(setup, setup.scenario.points()[0]).records.requests
    steps = np.rint((requests["ended_ns"] - requests["first_token_ns"]) / 5e6).astype(int)
    expected = np.where(requests["output_tokens"] == 101, 25, 60)
    assert len(requests) == 40 and set(requests["output_tokens"]) == {61, 101} and (steps == expected).all()


@pytest.mark.parametrize(
    ("row", "overrides", "message"),
    [
        ("0,50,9,1.5", (), "t.csv:2: right '1.5' is no number from 0 to 1"),
        ("0,50,9,", (), "t.csv:2: right is missing"),
        ("0,50,9,0.5", (f"workload.trace={TRACE.replace(', acceptance: right', '')}",), "no trace tells it of all"),
        (
            "0,50,9,0.5",
            ("workload.lengths={prompt: {kind: fixed, tokens: 5}, output: {kind: fixed, tokens: 9}}",),
            "no trace tells it of all",
        ),
        ("0,50,9,0.5", (f"workload.trace={TRACE.replace('right', 'out')}",), "name one column twice"),
    ],
)
def test_a_trace_that_does_not_say_it_is_refused(
    tmp_path: Path, row: str, overrides: tuple[str, ...], message: str
) -> None:
    """The row, or what to write."""
    with pytest.raises((ScenarioError, TraceError), match=message):
        setup = traced(tmp_path, [row], *overrides)
        simulate_point(setup, setup.scenario.points()[0])
