"""What a scenario says of the time that encoding images, audios and videos takes: `encoder:` of a cost."""

from __future__ import annotations

from dataclasses import dataclass

from batchsim.base.ranges import Config
from batchsim.base.units import HostDuration, PartDuration, format_duration


@dataclass(frozen=True, slots=True)
class EncoderConfig(Config):
    """Time of the encoder, stated: each item takes `base`, and `per_token` for each of its embeddings.

    All requests of the step wait for it. Items of one step are computed one after another.
    """

    base: HostDuration
    """Time of each image, audio or video."""
    per_token: PartDuration = 0
    """Time for each of its embeddings, of which there is one a placeholder token."""

    def __str__(self) -> str:
        per_token = f" + {format_duration(self.per_token)} a token" if self.per_token else ""
        return f"{format_duration(self.base)}{per_token} an item"
