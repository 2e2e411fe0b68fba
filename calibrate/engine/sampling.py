"""Sampling: from logits to one token a row, the likeliest or one drawn at random."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from batchsim.base.errors import ScenarioError


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is chosen from logits. Temperature 0 takes the likeliest. Equal logits and `seed` give equal tokens.

    `top_k` keeps the k likeliest tokens, `top_p` the fewest whose probabilities reach p; None keeps all.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ScenarioError(f"temperature {self.temperature} must be 0 or more. 0 takes the likeliest token.")
        if self.top_k is not None and self.top_k < 1:
            raise ScenarioError(f"top_k {self.top_k} must be at least 1. Leave it out to keep all tokens.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ScenarioError(f"top_p {self.top_p} must be above 0 and at most 1. Leave it out to keep all tokens.")
        if self.temperature == 0 and (self.top_k is not None or self.top_p is not None):
            raise ScenarioError("temperature 0 leaves nothing to top_k and top_p. Give a temperature above 0.")


GREEDY = Sampling()


def sample(logits: Tensor, sampling: Sampling) -> Tensor:
    """One token id for each row of `logits` [rows, vocab]: int64 [rows], on their device, without waiting for it."""
    if sampling.temperature == 0:
        return logits.argmax(dim=-1)
    scores = logits.float() / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < scores.shape[-1]:
        least = scores.topk(sampling.top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < least, -math.inf)
    probabilities = scores.softmax(dim=-1)
    if sampling.top_p is not None and sampling.top_p < 1:
        ranked, tokens = probabilities.sort(dim=-1, descending=True)
        ranked = ranked.masked_fill(ranked.cumsum(dim=-1) - ranked >= sampling.top_p, 0.0)
        probabilities = torch.zeros_like(ranked).scatter_(-1, tokens, ranked)
    generator = torch.Generator(logits.device).manual_seed(sampling.seed)
    waits = torch.empty_like(probabilities).exponential_(generator=generator)
    return (probabilities / waits).argmax(dim=-1)  # the first of racing exponential clocks is a draw by their rates
