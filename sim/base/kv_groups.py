"""Groups of layers that take KV blocks from one pool, as an engine keeps a model whose layers are of several kinds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from math import gcd, lcm
from typing import Literal

from batchsim.base.ranges import Config, NonNegativeInt, PositiveInt, check_ranges


@dataclass(frozen=True, slots=True)
class KvGroup(Config):
    """Layers of one kind that share a block table.

    `full` layers keep all tokens of a sequence. `window` layers let go of blocks whose tokens all lie `window` tokens
    or more back. `state` layers (linear attention, Mamba) keep states in place of tokens, one block each. With
    `aligned` a state is also kept at ends of blocks while prefixes are cached, and so can be found again: then there
    are at times two states, and a third where an engine can keep one within a step.
    """

    kind: Literal["full", "window", "state"]
    """Layers that keep all tokens, a window of them, or states."""
    block_size: PositiveInt
    """Tokens whose keys and values a block holds; of states the tokens between two that are kept."""
    window: PositiveInt | None = None
    """Tokens that a layer of a window attends to, its own among them."""
    states: NonNegativeInt = 0
    """States of a sequence at most: the running one, one for each draft token, and where `aligned` a second one, and
    with `checkpoint` a third."""
    aligned: bool = False
    """Whether states are kept at ends of blocks where prefixes are cached."""
    checkpoint: PositiveInt | None = None
    """Tokens between two places in a step at which the engine can keep a state; none if a step must end there."""

    def __post_init__(self) -> None:
        check_ranges(self)
        if (self.kind == "window") != (self.window is not None):
            raise ValueError(
                f"a group of kind {self.kind} has {'no' if self.window is None else 'a'} window."
                f" {'Write its tokens: window' if self.window is None else 'Leave window out'}"
            )
        if self.kind != "state":
            for name in ("states", "aligned", "checkpoint"):
                if getattr(self, name):
                    raise ValueError(f"{name} is of states, and the group is of kind {self.kind}. Leave it out")
        elif self.drafts < 0:
            raise ValueError(
                f"states is {self.states}, and a sequence has {self.states - self.drafts} at a time"
                f"{' where they are aligned' if self.aligned else ''}. Write at least that"
            )
        if self.checkpoint is not None and not self.aligned:
            raise ValueError("checkpoint is where aligned states are kept, and aligned is false. Leave it out")

    @property
    def drafts(self) -> int:
        """Draft tokens of a sequence in a step for each of which there is a state."""
        return self.states - 1 - self.aligned - (self.checkpoint is not None)


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The groups of a model's layers in the order in which they are given blocks, each of `block_bytes` on a GPU; None
    where that is not known."""

    groups: tuple[KvGroup, ...]
    block_bytes: PositiveInt | None = None

    def __post_init__(self) -> None:
        check_ranges(self)
        if not self.groups:
            raise ValueError("groups is empty. Write at least one")

    @property
    def unit(self) -> int:
        """Tokens at whose multiples alone a sequence may need another block: they divide the blocks of all groups."""
        sizes = [group.block_size for group in self.groups if group.kind != "state" or group.aligned]
        return gcd(*sizes) if sizes else 16

    @property
    def alignment(self) -> int:
        """Tokens at whose multiples blocks of all groups end, and so a prefix that can be found again."""
        return lcm(*(group.block_size for group in self.groups))

    @property
    def blocks_per_token(self) -> Fraction:
        """Blocks by which a sequence grows with each token."""
        return sum((Fraction(1, group.block_size) for group in self.groups if group.kind == "full"), Fraction(0))

    @property
    def fixed_blocks(self) -> int:
        """Blocks that a sequence holds besides while it decodes: of windows those it cannot do without, and states."""
        windows = sum(-(-(group.window - 1) // group.block_size) + 1 for group in self.groups if group.window)
        return windows + sum(group.states for group in self.groups)

    @property
    def per_request(self) -> str:
        """What a request holds, in words: by token, and besides."""
        grows, fixed = self.blocks_per_token, self.fixed_blocks
        if not grows:
            return f"{fixed} blocks a request"
        rate = f"{grows.numerator} block{'s'[: grows.numerator != 1]} for {grows.denominator:,} tokens"
        if self.block_bytes is not None:
            rate = f"{float(grows) * self.block_bytes:,.0f} B a token"
        return f"{rate}, and {float(fixed / grows):,.0f} tokens' worth a request"

    def __str__(self) -> str:
        parts = [f"{count} × {_words(group)}" for group, count in Counter(self.groups).items()]
        return ", ".join(parts)


def _words(group: KvGroup) -> str:
    if group.kind == "state":
        return f"{group.states} state{'s'[: group.states != 1]}"
    return f"{group.kind}{f' {group.window:,}' if group.window else ''} in blocks of {group.block_size}"
