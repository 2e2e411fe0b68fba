"""TensorRT-LLM's `speculative_config`: the drafter, the number of drafts, and their assumed acceptance in a simulation.

Source: DecodingBaseConfig and its classes in tensorrt_llm/llmapi/llm_args.py, SpeculativeDecodingMode in tensorrt_llm/
_torch/speculative/interface.py, get_num_extra_kv_tokens in tensorrt_llm/_torch/speculative/utils.py, all of 2026.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from batchsim.base.ranges import Config, Range
from batchsim.kernel.policy_config import DraftMethod, Speculation
from batchsim.policies.systems.acceptance_law import MAX_DRAFTS, Laws, Probability, shares_by_class

METHODS: dict[str, DraftMethod] = {
    "Eagle": "eagle3",
    "Eagle3": "eagle3",
    "MTP": "mtp",
    "Draft_Target": "draft_model",
    "NGram": "ngram",
}
"""The decoding types that are simulated, and the method by which a cost names the time of drafting. The PyTorch backend
reads Eagle as Eagle3."""
NumDrafts = Annotated[int, Range(1, MAX_DRAFTS)]


@dataclass(frozen=True)
class DecodingConfig(Config):
    """Every decode verifies draft tokens beside its own, by the names of TensorRT-LLM's LLM API.

    `acceptance` and `found` are supposed in a simulation. The time that drafting takes is the cost's
    (`batchsim.cost.drafter`).
    """

    decoding_type: str
    """How drafts are made."""
    acceptance: Laws
    """A law of accepted drafts, or one by request class, "" being all others; or `trace`, as for vLLM."""
    max_draft_len: NumDrafts | None = None
    """Draft tokens that a decode verifies beside its own."""
    num_nextn_predict_layers: NumDrafts | None = None
    """Their number by its name for MTP; 1 unless set."""
    eagle3_one_model: bool | None = None
    """Whether the drafter is a part of the model, as there by default."""
    mtp_eagle_one_model: bool | None = None
    """Whether the drafter is a part of the model, as there by default."""
    found: Probability = 1.0
    """Part of the steps for which NGram finds drafts, which it does only where the text repeats itself."""

    def __post_init__(self) -> None:
        super().__post_init__()
        kind = self.decoding_type
        if kind not in METHODS:
            raise ValueError(f"decoding_type: {kind} is not simulated. Choose from {', '.join(METHODS)}")
        eagle, mtp = self.method == "eagle3", kind == "MTP"
        for name, belongs in (
            ("num_nextn_predict_layers", mtp),
            ("mtp_eagle_one_model", mtp),
            ("eagle3_one_model", eagle),
        ):
            if getattr(self, name) is not None and not belongs:
                raise ValueError(f"{name} is no knob of decoding_type {kind}. Leave it out")
        if self.max_draft_len is not None and mtp:
            raise ValueError(
                f"max_draft_len {self.max_draft_len} does not count under decoding_type MTP: TensorRT-LLM makes it"
                " num_nextn_predict_layers. Write that"
            )
        if self.max_draft_len is None and not mtp:
            raise ValueError(f"decoding_type {kind} needs max_draft_len. Write it")
        if self.found != 1 and kind != "NGram":
            raise ValueError(f"found is {self.found:g}, but {kind} always drafts. Leave it out")
        _ = self.speculation  # refuses a law that is none

    @property
    def method(self) -> DraftMethod:
        """By which name a cost and reports know the drafter."""
        return METHODS[self.decoding_type]

    @property
    def num_drafts(self) -> int:
        """Draft tokens of each decode and step: there are never fewer, since the engine fills up those of NGram."""
        return self.max_draft_len or self.num_nextn_predict_layers or 1

    @property
    def is_one_model(self) -> bool:
        """Whether the drafter is a part of the model, and drafts in the step that verifies."""
        if self.method == "eagle3":
            return self.eagle3_one_model is not False
        return self.method == "mtp" and self.mtp_eagle_one_model is not False

    @property
    def extra_kv_tokens(self) -> int:
        """Tokens beyond its own for which each sequence has KV blocks from its start to its end: the drafter's."""
        return self.num_drafts - 1 if self.is_one_model else 0

    @property
    def speculation(self) -> Speculation:
        """What the world, of which the scheduler knows nothing, is supposed to do with drafts."""
        counted_by = "max_draft_len" if self.decoding_type != "MTP" else "num_nextn_predict_layers"
        positions = shares_by_class(self.acceptance, self.num_drafts, counted_by)
        return Speculation(self.method, self.num_drafts, positions, self.found)

    def refuse_overlap(self) -> None:
        """ValueError if the drafter is not simulated, or not run by TensorRT-LLM, where scheduling overlaps."""
        if self.is_one_model:
            return
        if self.method == "ngram":
            why = "TensorRT-LLM turns its overlap scheduler off under it"
        else:
            why = "a draft model of its own in an engine whose scheduling overlaps is not simulated yet"
        raise ValueError(f"speculative_config: {self.decoding_type}: {why}. Set disable_overlap_scheduler: true")


def by_names_of_vllm(stated: Mapping[str, Any]) -> dict[str, Any]:
    """A `speculative_config` of TensorRT-LLM, as a scenario states it, by the names of vLLM's."""
    number = stated.get("max_draft_len") or stated.get("num_nextn_predict_layers") or 1
    both = {name: stated[name] for name in ("acceptance", "found") if name in stated}
    return {"method": METHODS[stated["decoding_type"]], "num_speculative_tokens": number, **both}
