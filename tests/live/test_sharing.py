"""Blocks shared through a prefix cache: tokens equal those of a run without sharing, and wrong sharing is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the executor runs on torch: pip install 'batchsim[live]'")

from batchsim.base.errors import PolicyError
from batchsim.calibrate.engine.prompts import RandomPrompts
from batchsim.calibrate.engine.runner import ModelRunner, build_runner
from batchsim.kernel.tokens import TokenIds, output_stream, prompt_stream
from batchsim.kernel.types import Arrival, Request
from tests.live.checkpoints import SHAPE, checkpoint, expected
from tests.live.engines import MAX_MODEL_LEN, generate, prompt_of
from tests.support.engine import arrival

VOCAB = SHAPE["vocab_size"]
SYSTEM, DOCUMENT = prompt_stream(1), prompt_stream(2)
VLLM = {"max_num_seqs": 8, "max_num_batched_tokens": 16}
TENSORRT_LLM = {
    "max_batch_size": 8,
    "max_num_tokens": 16,
    "enable_chunked_prefill": True,
    "disable_overlap_scheduler": True,
}
PAUSING = {
    "max_batch_size": 8,
    "max_num_tokens": 40,
    "capacity_scheduler_policy": "MAX_UTILIZATION",
    "backend": "tensorrt",
}
SYSTEMS: dict[str, dict[str, Any]] = {
    "vllm": VLLM | {"async_scheduling": False},
    "vllm async": VLLM | {"async_scheduling": True},
    "sglang": {"max_running_requests": 8, "chunked_prefill_size": 16, "disable_overlap_schedule": True},
    "tensorrt_llm": TENSORRT_LLM,
    "tensorrt_llm pausing": PAUSING,
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelRunner, Any]:
    """A runner of a tiny checkpoint with 60 blocks of 4 tokens, and the model of transformers that wrote it."""
    folder: Path = tmp_path_factory.mktemp("llama")
    model = checkpoint("llama", folder)
    sizes = {"num_blocks": 60, "block_size": 4, "max_num_seqs": 16, "max_num_batched_tokens": 400}
    return build_runner(str(folder), device="cpu", max_model_len=MAX_MODEL_LEN, **sizes), model


def requests() -> list[Arrival]:
    """Prompts that begin alike, some at the same time, one that goes on after another's answer."""
    kinds = [
        [(SYSTEM, 0, 18), (prompt_stream(10), 0, 5)],
        [(SYSTEM, 0, 18), (DOCUMENT, 0, 9)],
        [(SYSTEM, 0, 18), (DOCUMENT, 0, 9)],
        [(DOCUMENT, 0, 24)],
        [(SYSTEM, 0, 18), (prompt_stream(10), 0, 5), (output_stream(0), 0, 9), (prompt_stream(11), 0, 6)],
        [(SYSTEM, 0, 16)],
    ]
    times_ms, outputs = (0, 0, 3, 3, 400, 420), (9, 12, 7, 20, 15, 4)
    made = []
    for number, segments in enumerate(kinds):
        tokens = TokenIds.of(segments)
        one = arrival(number, times_ms[number], tokens.num_tokens, outputs[number])
        made.append(replace(one, request=replace(one.request, tokens=tokens)))
    return made


@pytest.mark.parametrize("num_blocks", [60, 22])
@pytest.mark.parametrize("kind", SYSTEMS)
def test_tokens_equal_those_without_sharing(llama: tuple[ModelRunner, Any], kind: str, num_blocks: int) -> None:
    """Every answer is the one that transformers gives to the whole prompt, with blocks to spare and without."""
    runner, model = llama
    executor, core = generate(runner, kind.split()[0], SYSTEMS[kind], requests(), num_blocks=num_blocks)
    found = core.recorder.records()
    for one in requests():
        answer = expected(model, prompt_of(one, VOCAB, executor.answers), one.output_tokens or 0)
        assert executor.answers[one.request.id] == answer, f"request {one.request.id}"
    cached = dict(zip(found.requests["request_id"].tolist(), found.requests["cached_tokens"].tolist(), strict=True))
    if num_blocks == 60:
        assert cached[0] == 0 and cached[2] > 0 and cached[4] >= 20  # its first turn, the answer included
    core.check_returned()


def follow_up(earlier: Arrival, at_ms: int, answer: int, outputs: int) -> Arrival:
    """A request that says what `earlier` said and `answer` tokens of what it was told, and one token more."""
    assert earlier.request.tokens is not None
    segments = [*earlier.request.tokens.segments, (output_stream(earlier.request.id), 0, answer), (DOCUMENT, 0, 1)]
    tokens = TokenIds.of(segments)
    one = arrival(earlier.request.id + 1, at_ms, tokens.num_tokens, outputs)
    return replace(one, request=replace(one.request, tokens=tokens))


def test_a_begun_block_is_written_on_by_who_takes_it_over(llama: tuple[ModelRunner, Any]) -> None:
    """All but one of 32 tokens are found, 3 of them in a block that the second then fills; its answer is right."""
    runner, model = llama
    first = requests()[0]
    both = [first, follow_up(first, 400, 8, 7)]
    executor, core = generate(runner, "tensorrt_llm", TENSORRT_LLM, both, num_blocks=60)
    assert core.recorder.records().requests["cached_tokens"].tolist() == [0, 31]
    for one in both:
        answer = expected(model, prompt_of(one, VOCAB, executor.answers), one.output_tokens or 0)
        assert executor.answers[one.request.id] == answer


def test_what_a_pause_cuts_off_is_generated_again(llama: tuple[ModelRunner, Any]) -> None:
    """Two of 8 + 20 tokens in 10 blocks of 4: the second is paused with 21, keeps the 20 that fit a step, answers in
    full.
    """
    runner, model = llama
    knobs = {**PAUSING, "max_num_tokens": 20, "enable_block_reuse": False}
    both = [arrival(number, 0, 8, 20) for number in (0, 1)]
    executor, core = generate(runner, "tensorrt_llm", knobs, both, num_blocks=10)
    rows = core.recorder.records().requests
    assert (rows["num_preemptions"].tolist(), rows["output_tokens"].tolist()) == ([0, 1], [20, 20])
    for one in both:
        assert executor.answers[one.request.id] == expected(model, prompt_of(one, VOCAB), 20)


def test_a_block_that_a_pause_left_uncomputed_is_refused(llama: tuple[ModelRunner, Any]) -> None:
    """The engine would read what was never computed; here the run ends in one line."""
    knobs = {**TENSORRT_LLM, "capacity_scheduler_policy": "MAX_UTILIZATION", "backend": "tensorrt"}
    with pytest.raises(PolicyError, match="was never computed there"):
        generate(llama[0], "tensorrt_llm", knobs, requests(), num_blocks=22)


def test_equal_segments_are_equal_tokens() -> None:
    """A stream's tokens are the same from any start; answers are what was generated, and are made up beyond."""
    prompts = RandomPrompts(1000, seed=3)

    def ids(*segments: tuple[int, int, int]) -> list[int]:
        tokens = TokenIds.of(list(segments))
        request = Request(7, 0, tokens.num_tokens, 1, tokens=tokens)
        return prompts.ids(request, {output_stream(4): [11, 12, 13]}).tolist()

    assert ids((SYSTEM, 0, 30))[10:25] == ids((SYSTEM, 10, 15))
    assert ids((SYSTEM, 0, 30)) != ids((DOCUMENT, 0, 30))
    assert ids((DOCUMENT, 5, 2), (output_stream(4), 1, 2))[2:] == [12, 13]
    assert ids((output_stream(4), 0, 5))[:3] == [11, 12, 13] and ids((output_stream(4), 4, 1)) == [
        ids((output_stream(4), 0, 5))[4]
    ]


def test_a_cache_that_mixes_up_tokens_is_refused(
    llama: tuple[ModelRunner, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were two different prompts taken for one, the run would end in one line, not in wrong tokens."""

    def blind(values: tuple[int, ...]) -> int:
        """A hash that does not see which prompt text it is."""
        return hash((values[0], values[-1])) if values[1] % 2 == 0 else hash(values)

    monkeypatch.setattr("batchsim.kv.block_keys.hash", blind, raising=False)
    with pytest.raises(PolicyError, match="from the prefix cache, but its token"):
        generate(llama[0], "vllm", SYSTEMS["vllm"], requests(), num_blocks=60)
