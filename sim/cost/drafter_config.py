"""What a scenario says of the time that drafting takes: `draft:` of a cost."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from batchsim.base.ranges import Config, PositiveInt
from batchsim.base.units import HostDuration, PartDuration, format_duration


@dataclass(frozen=True)
class DrafterConfig(Config):
    """The parts of a drafter's time: at least `base`, or a draft model by `model` or `layers`, whose passes take what
    their roofline says."""

    base: HostDuration | None = None
    """Time of each of the drafter's passes."""
    per_sequence: PartDuration = 0
    """Time for each sequence of a pass."""
    per_token: PartDuration = 0
    """Time for each token of the step."""
    model: str | None = None
    """The draft model: a name of `batchsim catalog`, or the path of a config.json."""
    layers: PositiveInt | None = None
    """Layers of the engine's own model, with its output matrix, in the place of `model`."""
    draft_vocab_size: PositiveInt | None = None
    """Tokens of the output matrix beside `layers`, where these are fewer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model is not None and self.layers is not None:
            raise ValueError("model and layers are two draft models. Write one of them")
        if self.base is None and self.model is None and self.layers is None:
            raise ValueError("says no time. Write base, or a draft model by model or layers")
        if self.draft_vocab_size is not None and self.layers is None:
            raise ValueError("draft_vocab_size is of layers, which are not given. Write layers, or leave it out")

    def __str__(self) -> str:
        parts = [format_duration(self.base)] if self.base else []
        parts += [f"{format_duration(self.per_sequence)} a sequence"] if self.per_sequence else []
        parts += [f"{format_duration(self.per_token)} a token"] if self.per_token else []
        vocabulary = f" with {self.draft_vocab_size:,} tokens" if self.draft_vocab_size else ""
        parts += [f"{self.layers} of the model's layers{vocabulary} by roofline"] if self.layers else []
        parts += [f"{Path(self.model).name} by roofline"] if self.model else []
        return " + ".join(parts) or "no time"


@dataclass(frozen=True)
class DraftersConfig(Config):
    """What drafting costs by method; a method that is not named takes no time, and reports say so."""

    ngram: DrafterConfig | None = None
    """The cost of finding drafts in the text."""
    eagle: DrafterConfig | None = None
    """The cost of an EAGLE drafter."""
    eagle3: DrafterConfig | None = None
    """The cost of an EAGLE-3 drafter."""
    mtp: DrafterConfig | None = None
    """The cost of the model's own multi-token prediction."""
    draft_model: DrafterConfig | None = None
    """The cost of a drafter that is a model of its own."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ngram is not None and not self.ngram.model is self.ngram.layers is None:
            raise ValueError("draft: ngram has no draft model: it searches the text. Write base and per_sequence")

    @property
    def by_method(self) -> dict[str, DrafterConfig]:
        """The config of each method that has one."""
        said = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: config for name, config in said.items() if config is not None}

    def __str__(self) -> str:
        return ", ".join(f"{name} {config}" for name, config in self.by_method.items()) or "no time"
