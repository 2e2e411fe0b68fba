"""Draft tokens by n-grams on a model: greedy tokens are transformers' whatever ends, is preempted or shares blocks, in
lockstep and ahead of results; records are those of a simulation that is told how many drafts were right.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="the executor runs on torch: pip install 'batchsim[live]'")

from batchsim.base.errors import CalibrationError, PolicyError
from batchsim.calibrate.engine.drafts import proposed
from batchsim.calibrate.engine.executor import TorchExecutor
from batchsim.calibrate.engine.mirror import BlockMirror
from batchsim.calibrate.engine.prompts import RandomPrompts
from batchsim.calibrate.engine.runner import ModelRunner, build_runner
from batchsim.check.conform.recorded_drafts import RecordedDrafts
from batchsim.drive.live import VirtualClock, live
from batchsim.kernel.acceptance import DraftCounts
from batchsim.kernel.batch import Batch, Landed, StepResult
from batchsim.kernel.core import EngineCore
from batchsim.kernel.draft_group import Verified
from batchsim.kernel.kv_blocks import TableKV
from batchsim.kernel.policy_config import PromptLookup
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.record import Recorder
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.kernel.tokens import TokenIds, prompt_stream
from batchsim.kernel.types import Arrival, Request, Sequence
from batchsim.policies.systems.vllm.speculative_config import SpeculativeConfig
from batchsim.policies.systems.vllm.vllm_config import VllmConfig
from batchsim.policies.systems.vllm.vllm_drafts import VllmWithDrafts
from batchsim.testing.by_hand import same
from batchsim.testing.on_model import of_prompts
from batchsim.testing.random_configs import MAX_MODEL_LEN as CASE_MODEL_LEN
from batchsim.testing.random_engines import Case, Listed, built, cases
from tests.conformance.ahead import LaneTokenCost
from tests.live.checkpoints import SHAPE, checkpoint, expected
from tests.live.engines import MAX_MODEL_LEN, Timed, generate, likeliest, prompt_of
from tests.live.test_executor import runner_of
from tests.support.engine import arrival

VOCAB = SHAPE["vocab_size"]
REPEATING = RandomPrompts(6)  # of so few tokens that n-grams come again
SIZES: dict[str, Any] = {"num_blocks": 100, "block_size": 4, "max_num_seqs": 40, "max_num_batched_tokens": 100}
SPEC = SpeculativeConfig("ngram", 3, 0.5, prompt_lookup_min=1, prompt_lookup_max=3)
KNOBS = {"enable_prefix_caching": False, "max_num_seqs": 4, "max_num_batched_tokens": 24, "speculative_config": SPEC}
LENGTHS = [(17, 60), (5, 40), (22, 60), (9, 80), (3, 1), (40, 60)]  # prompt, output
MODES = pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A tiny checkpoint, and the model of transformers that wrote it."""
    folder = tmp_path_factory.mktemp("llama")
    return folder, checkpoint("llama", folder)


@pytest.fixture(scope="module")
def runner(llama: tuple[Path, Any]) -> ModelRunner:
    return loaded(llama[0])


def loaded(folder: Path) -> ModelRunner:
    return build_runner(str(folder), device="cpu", max_model_len=MAX_MODEL_LEN, **SIZES)


def answer_of(model: Any, one: Arrival) -> list[int]:
    """What transformers answers."""
    return expected(model, prompt_of(one, VOCAB), one.request.max_output_tokens)


@MODES
@pytest.mark.parametrize("num_blocks", [100, 32], ids=["room", "preempted"])
def test_tokens_are_those_of_transformers(
    llama: tuple[Path, Any], runner: ModelRunner, ahead: bool, num_blocks: int
) -> None:
    """In steps of several tokens each, of which the first, second and third draft are right now and then; fewer steps
    than tokens, and rejected drafts harm nobody."""
    arrivals = [arrival(i, 7 * i, prompt, output) for i, (prompt, output) in enumerate(LENGTHS)]
    knobs = KNOBS | {"async_scheduling": ahead}
    executor, core = generate(runner, "vllm", knobs, arrivals, num_blocks=num_blocks)
    for one in arrivals:
        assert executor.answers[one.request.id] == answer_of(llama[1], one), f"request {one.request.id}"
    steps, counts = core.recorder.records().steps, executor.draft_counts
    assert counts is not None and min(counts.right) > 0 and 0 < counts.drafted < counts.decodes
    assert steps["num_accepted_tokens"].sum() == sum(counts.right)
    rejected = (steps["num_decode_tokens"] - steps["num_decode"] - steps["num_accepted_tokens"]).sum()
    assert rejected > 0 and (steps["num_preempted"].sum() > 0) == (num_blocks == 32)
    core.check_returned()


@MODES
def test_shared_blocks_hold_what_was_said(llama: tuple[Path, Any], runner: ModelRunner, ahead: bool) -> None:
    """Under a prefix cache prompts with the same beginning share its blocks, whose tokens the executor compares; one
    preempted amid its answer finds in them what drafts have stored."""
    shared = [(prompt_stream(9), 0, 12)]
    arrivals = [
        Arrival(Request(i, 40 * i, 12 + i, 40, tokens=TokenIds.of([*shared, (prompt_stream(i), 0, i)])), 40)
        for i in (1, 2, 3, 4)
    ]
    knobs = KNOBS | {"async_scheduling": ahead, "enable_prefix_caching": True}
    executor, core = generate(runner, "vllm", knobs, arrivals, num_blocks=30)
    for one in arrivals:
        assert executor.answers[one.request.id] == answer_of(llama[1], one), f"request {one.request.id}"
    found = core.recorder.records()
    assert found.requests["cached_tokens_all"].max() > 12 and found.steps["num_preempted"].sum() > 0
    assert found.steps["num_accepted_tokens"].sum() > 0


class Given:
    """Prompts given in full, by request id."""

    def __init__(self, *prompts: list[int]) -> None:
        self.prompts = prompts

    def ids(self, request: Request, answers: Any) -> Any:
        return np.array(self.prompts[request.id], np.int64)


@pytest.fixture(scope="module")
def turning(llama: tuple[Path, Any]) -> tuple[list[int], list[int]]:
    """A prompt after which the model goes on in a circle that has begun in it, and this answer."""
    prompt = prompt_of(arrival(5, 0, 40, 60), VOCAB)
    answer = expected(llama[1], prompt, 60)
    assert answer[42:47] == answer[48:53] and answer[50] not in answer[48:50]
    return prompt + answer[:48], answer[48:]


@MODES
@pytest.mark.parametrize("by", ["cap", "end of text"])
def test_an_answer_ends_amid_the_drafts_accepted(
    llama: tuple[Path, Any], turning: tuple[list[int], list[int]], tmp_path: Path, ahead: bool, by: str
) -> None:
    """All three drafts of its only decode are right and the second ends it: the third is in no answer, and ahead of
    results the step in flight is computed in vain."""
    prompt, answer = turning
    checkpoint("llama", tmp_path, eos_token_id=answer[2] if by == "end of text" else None)
    one = Arrival(Request(0, 0, len(prompt), 3 if by == "cap" else 20), 3 if by == "cap" else None)
    knobs = KNOBS | {"async_scheduling": ahead, "max_num_batched_tokens": 100}
    executor, core = generate(loaded(tmp_path), "vllm", knobs, [one], num_blocks=60, prompts=Given(prompt))
    assert executor.answers[0] == answer[:3]
    found = core.recorder.records()
    assert executor.draft_counts == DraftCounts([1, 1, 1], decodes=1, drafted=1)
    assert found.requests["output_tokens"].tolist() == [3] and found.steps["num_accepted_tokens"].sum() == 3
    assert found.lanes["wasted_tokens"].sum() == (4 if ahead else 0)
    core.check_returned()


# ---- n-grams


@pytest.mark.parametrize(
    ("tokens", "lengths", "drafts"),
    [
        ([1, 2, 3, 4, 2, 3], (2, 3), [4, 2, 3]),  # the example in the engine's source
        ([1, 2, 3, 4, 2, 3], (3, 3), []),
        ([2, 3, 7, 9, 2, 3, 8, 2, 3], (2, 2), [7, 9, 2]),  # the earliest place
        ([3, 7, 9, 2, 3, 8, 2, 3], (1, 2), [8, 2, 3]),  # the longest n-gram comes first
        ([5, 5, 5, 5], (1, 3), [5]),  # it may overlap itself
        ([5, 5, 5, 5], (1, 2), [5, 5]),
        ([1, 2, 3], (1, 3), []),
        ([4], (1, 3), []),
    ],
)
def test_drafts_follow_the_earliest_place_of_the_longest_ngram(
    tokens: list[int], lengths: tuple[int, int], drafts: list[int]
) -> None:
    """At most three tokens, fewer where the text or the model's length ends, none without an n-gram long enough."""
    lookup = PromptLookup(3, *lengths)
    assert proposed(np.array(tokens), lookup, 100).tolist() == drafts
    assert proposed(np.array(tokens), lookup, 1).tolist() == drafts[:1]
    assert proposed(np.array(tokens), lookup, 0).tolist() == []


@given(st.lists(st.integers(0, 2), min_size=1, max_size=30), st.integers(1, 4), st.integers(0, 3), st.integers(1, 5))
def test_ngrams_are_found_as_by_looking_at_every_place(tokens: list[int], low: int, more: int, most: int) -> None:
    """Lengths from the longest, places from the left."""
    wanted: list[int] = []
    for length in range(min(low + more, len(tokens) - 1), low - 1, -1):
        places = [at for at in range(len(tokens) - length) if tokens[at : at + length] == tokens[-length:]]
        if places:
            wanted = tokens[places[0] + length :][:most]
            break
    assert proposed(np.array(tokens), PromptLookup(most, low, low + more), 100).tolist() == wanted


# ---- what is refused


def test_a_scheduler_with_drafts_needs_a_drafter(runner: ModelRunner) -> None:
    """An executor that was not told how to find drafts refuses the first decode."""
    unknown = SpeculativeConfig("eagle", 3, 0.5)
    knobs = KNOBS | {"async_scheduling": False, "speculative_config": unknown}
    with pytest.raises(CalibrationError, match="nobody drafts them here"):
        generate(runner, "vllm", knobs, [arrival(0, 0, 4, 3)], num_blocks=60)


class Twice(TableKV):
    """Deals out its first block again and again."""

    def table(self, seq: Sequence) -> list[int]:
        return super().table(seq)[:1] * self.held(seq)


def test_a_block_that_is_dealt_twice_holds_no_drafts(runner: ModelRunner) -> None:
    """The step whose drafts would overwrite the prompt is an error, not wrong tokens."""
    kv = Twice(60, 4)
    scheduler = VllmWithDrafts(VllmConfig(**KNOBS, async_scheduling=False), PolicyContext(kv, MAX_MODEL_LEN))
    executor = TorchExecutor(runner, kv, max_model_len=MAX_MODEL_LEN, lookup=SPEC.lookup, prompts=Given([7, 7, 7, 7]))
    core = EngineCore(scheduler, executor, Recorder(), max_model_len=MAX_MODEL_LEN)
    core.submit(arrival(0, 0, 4, 9))
    for now_ns in (0, 1):
        batch = core.schedule(now_ns, drain=True)
        assert isinstance(batch, Batch)
        if now_ns:
            with pytest.raises(PolicyError, match="which holds tokens of executor row"):
                core.execute(batch, now_ns)
        else:
            core.execute(batch, now_ns)
            core.complete(now_ns)


def test_blocks_for_drafts_are_nobody_elses() -> None:
    """A block that holds another's tokens cannot be claimed, nor one a second time by its own sequence; claiming what
    is claimed changes nothing."""
    mirror = BlockMirror(9, 4, 8)
    first, second = mirror.new_row(), mirror.new_row()
    mirror.extend(first, [0, 1, 2], 3, "request 0")
    mirror.claim(first, 2)
    mirror.claim(first, 1)
    mirror.claim(first, 3)
    mirror.extend(second, [5, 2], 2, "request 1")
    mirror.claim(second, 1)
    with pytest.raises(PolicyError, match="KV block 2, which holds tokens of executor row"):
        mirror.claim(second, 2)
    mirror.extend(first, [0, 1, 2, 1], 4, "request 0")
    with pytest.raises(PolicyError, match="KV block 1, which holds tokens"):
        mirror.claim(first, 4)


# ---- the simulation, told how many drafts were right


class Logged(Timed):
    """Notes what became of the drafts of each step, as a recording does."""

    def __init__(self, *args: Any, **knobs: Any) -> None:
        super().__init__(*args, **knobs)
        self.log: list[dict[str, Any]] = []

    def execute(self, batch: Batch) -> StepResult:
        result = super().execute(batch)
        if result.landing is None:
            self.note(batch, result.verified)
            return result
        landing = result.landing

        def landed() -> Landed:
            found = landing()
            self.note(batch, found.verified)
            return found

        return replace(result, landing=landed)

    def note(self, batch: Batch, verified: Verified | None) -> None:
        assert batch.drafting is not None and verified is not None
        ids = [seq.request.id for seq in batch.drafting.sequences]
        rows = zip(ids, batch.drafting.rows, verified.accepted.tolist(), verified.gained.tolist(), strict=True)
        step: dict[str, Any] = {"spec": [[i, int(n) - 1, accepted, gained] for i, n, accepted, gained in rows]}
        if verified.drafts is not None and verified.first_drafts is not None:
            first = [(seq.request.id, count) for seq, count in verified.first_drafts.items()]
            step["drafts"] = [*zip(ids, verified.drafts.tolist(), strict=True), *first]
        self.log.append(step)

    def host_ns(self, batch: Batch | None) -> tuple[int, int]:
        return LaneTokenCost().host_ns(batch)


class Counting(SimExecutor):
    """Knows which step it runs."""

    number = -1

    def execute(self, batch: Batch) -> StepResult:
        self.number += 1
        return super().execute(batch)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_drafts_are_verified_on_the_model_as_in_simulation(llama: tuple[Path, Any], data: st.DataObject) -> None:
    """Random vLLM engines: the records of a simulation told of as many accepted drafts, and likely tokens only."""
    case: Case | None = data.draw(cases("vllm"))
    assume(case is not None)
    assert case is not None
    low, high = sorted(data.draw(st.tuples(st.integers(1, 3), st.integers(1, 4))))
    spec = SpeculativeConfig("ngram", data.draw(st.integers(1, 5)), 0.5, 1.0, low, high)
    # Under priority vLLM shares blocks never computed; drafts are of the latest version alone.
    others = {"policy": "fcfs", "prefill_schedule_interval": 1, "version": None}
    config = replace(case.config, speculative_config=spec, async_scheduling=data.draw(st.booleans()), **others)
    following = tuple((think_ns, of_prompts(one)) for think_ns, one in case.workload.following)
    workload = Listed(tuple(map(of_prompts, case.workload.known)), following)
    case = replace(case, config=config, stages=1, workload=workload)
    assume(built(case))
    loop, cost = config.traits.loop, LaneTokenCost(per_context_ns=0)  # which is known late, ahead of results
    played, simulated = case.engine(ids=True), case.engine(ids=True)
    kv, runner = played.scheduler.kv, runner_of(case, llama[0])
    played.executor = logged = Logged(runner, kv, cost, CASE_MODEL_LEN, loop, spec.lookup, REPEATING)
    live(played, workload, VirtualClock())
    simulated.executor = told = Counting(cost, CASE_MODEL_LEN, loop)
    most = spec.num_speculative_tokens if loop.is_ahead else None
    told.luck = RecordedDrafts(logged.log, most, lambda: told.number)
    live(simulated, workload, VirtualClock())
    found, wanted = played.recorder.records(), simulated.recorder.records()
    same(found, wanted)
    for one in (*workload.known, *(one for _, one in following)):
        if answer := logged.answers.get(one.request.id):
            assert answer == likeliest(llama[1], REPEATING.ids(one.request, {}).tolist(), answer)
