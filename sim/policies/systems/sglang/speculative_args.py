"""What SGLang 0.5.23 makes of its arguments of speculative decoding, and which of them are simulated.

Source: python/sglang/srt/arg_groups/speculative_hook.py, mem_cache/allocation_sizing.py and speculative/spec_info.py of
the 0.5.23 wheel.
"""

from __future__ import annotations

from dataclasses import dataclass

from batchsim.kernel.policy_config import DraftMethod, Speculation
from batchsim.policies.systems.acceptance_law import MAX_DRAFTS, Laws, shares_by_class

MAX_RUNNING_REQUESTS = 48
"""What `max_running_requests` is with speculative decoding, unless set."""
NGRAM_DRAFT_TOKENS = 12
STANDALONE = (3, 1, 4)  # steps, topk, draft tokens
EAGLES = ("EAGLE", "EAGLE3", "NEXTN")
METHODS: dict[str, DraftMethod] = {
    "EAGLE": "eagle",
    "EAGLE3": "eagle3",
    "NEXTN": "mtp",
    "STANDALONE": "draft_model",
    "NGRAM": "ngram",
}
"""The algorithms that are simulated, and the method by which a cost names the time of drafting."""


@dataclass(frozen=True, slots=True)
class Drafting:
    """How a decode of SGLang drafts and verifies.

    Each sequence verifies `width` tokens a step, of which one is its own and up to `depth` drafts, one behind the
    other, may be accepted. The drafter, where it is a model that has KV of its own in the same pages, makes them in
    `steps` passes of `topk` tokens. `key_lookahead`: the number of tokens after those of a page on which it depends in
    the radix cache, since the draft head of the EAGLE family reads the next one.
    """

    width: int
    depth: int
    steps: int
    topk: int
    key_lookahead: int

    def reserve(self, page: int) -> int:
        """Tokens beyond the computed for which each decode has pages of `page` tokens before a step: twice what a step
        may write, so that they suffice where results are a step late, and as many where they are not."""
        if page == 1 or self.topk == 1:
            return 2 * max(self.steps * self.topk, self.width)
        branch = (page - 1 + self.steps + page - 1) // page * page
        return 2 * max(branch * self.topk, self.width)


@dataclass(frozen=True, slots=True)
class SpeculativeArgs:
    """The arguments that decide how an engine drafts, as they are stated; None: not at all."""

    algorithm: str | None
    num_steps: int | None
    eagle_topk: int | None
    num_draft_tokens: int | None
    acceptance: Laws | None
    enable_mixed_chunk: bool


def drafting_of(args: SpeculativeArgs) -> Drafting | None:
    """How an engine with `args` drafts; None if it does not. ValueError for what SGLang or the simulation refuses."""
    algorithm = args.algorithm
    if algorithm is None:
        _refuse_any(args, ("num_steps", "eagle_topk", "num_draft_tokens"), "needs speculative_algorithm. Name it, or")
        if args.acceptance is not None:
            raise ValueError("acceptance is of draft tokens: it needs speculative_algorithm. Name it, or leave it out")
        return None
    if algorithm not in METHODS:
        raise ValueError(f"speculative_algorithm: {algorithm} is not simulated yet. Choose from {', '.join(METHODS)}")
    if args.acceptance is None:
        raise ValueError(
            f"speculative_algorithm: {algorithm} needs to be told how many drafts are right. State acceptance, such as"
            " 0.7"
        )
    if args.enable_mixed_chunk and algorithm not in EAGLES:
        raise ValueError(f"enable_mixed_chunk: true: SGLang turns it off under {algorithm}. Leave it out")
    drafting = _ngram(args) if algorithm == "NGRAM" else _model(args, algorithm)
    if not 2 <= drafting.width <= MAX_DRAFTS:
        raise ValueError(
            f"speculative_num_draft_tokens is {drafting.width}: a decode's own token and its drafts must be 2 to"
            f" {MAX_DRAFTS}. Change it"
        )
    return drafting


def speculation_of(args: SpeculativeArgs) -> Speculation | None:
    """What is supposed of the drafts by `args`; None if there are none. ValueError for a law that does not fit."""
    drafting = drafting_of(args)
    if drafting is None or args.acceptance is None:
        return None
    positions = shares_by_class(args.acceptance, drafting.depth, "the most drafts that can be accepted")
    return Speculation(METHODS[args.algorithm or ""], drafting.depth, positions, branches=drafting.topk)


def _ngram(args: SpeculativeArgs) -> Drafting:
    # The shape of the tree that the n-grams make decides nothing here: what it is worth is what is stated.
    _refuse_any(args, ("num_steps", "eagle_topk"), "does not count under NGRAM:")
    width = args.num_draft_tokens
    width = NGRAM_DRAFT_TOKENS if width is None else width
    return Drafting(width, width - 1, steps=1, topk=1, key_lookahead=0)


def _model(args: SpeculativeArgs, algorithm: str) -> Drafting:
    steps, topk = args.num_steps, args.eagle_topk
    width = args.num_draft_tokens
    if algorithm == "STANDALONE" and steps is None:
        _refuse_any(args, ("eagle_topk", "num_draft_tokens"), "needs speculative_num_steps. Write it, or")
        steps, topk, width = STANDALONE
    if steps is None or topk is None:
        missing = "speculative_num_steps" if steps is None else "speculative_eagle_topk"
        raise ValueError(
            f"speculative_algorithm: {algorithm} needs {missing}. SGLang chooses by the model's architecture: steps 5,"
            " topk 4, draft tokens 8 for LlamaForCausalLM, 3, 1, 4 for most others. Write them"
        )
    if topk == 1:
        if width not in (None, steps + 1):
            raise ValueError(
                f"speculative_num_draft_tokens {width}: with speculative_eagle_topk 1 SGLang makes it"
                f" speculative_num_steps + 1, {steps + 1}. Write that or leave it out"
            )
        width = steps + 1
    if width is None:
        raise ValueError(
            f"speculative_eagle_topk {topk} needs speculative_num_draft_tokens, the tokens of the tree. Write it"
        )
    key_lookahead = int(algorithm in EAGLES)
    return Drafting(width, min(steps, width - 1), steps, topk, key_lookahead=key_lookahead)


def _refuse_any(args: SpeculativeArgs, names: tuple[str, ...], words: str) -> None:
    for name in names:
        value = getattr(args, name)
        if value is not None:
            raise ValueError(f"speculative_{name} {value} {words} leave it out")
