"""verl 0.9.1 (`utils/seqlen_balancing.py`): the sequences of a step shared out so that their work is alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from batchsim.base.errors import ScenarioError
from batchsim.base.ranges import PositiveInt
from batchsim.training.packers.bins import Bins, PackerConfig, chunks, tokens
from batchsim.training.packers.differencing import karmarkar_karp

LINEAR = 24_576
"""Work of a token beside 1 of each pair of tokens, of a model of 7 billion parameters: verl's estimate."""


def work(length: int) -> int:
    """verl's estimate of the work of a sequence."""
    return LINEAR * length + length**2


@dataclass(frozen=True)
class _Parts(PackerConfig):
    k_partitions: PositiveInt | None = None
    """Parts, one a rank. In a scenario null is the number of data-parallel ranks."""
    follows: ClassVar = "verl 0.9.1"
    makes: ClassVar = "parts"
    per_step: ClassVar = True
    ranks_option: ClassVar = "k_partitions"

    def check_count(self, count: int, parts: int, what: str) -> None:
        """ScenarioError unless `count` items make `parts` parts of equal counts."""
        if count % parts:
            raise ScenarioError(
                f"{self.name}: {count:,} {what} are no multiple of {parts} parts. Choose a batch that is."
            )


@dataclass(frozen=True)
class VerlKarmarkarKarp(_Parts):
    """`balance_batch`: Karmarkar-Karp on the work of sequences, equally many in each part, indices ascending.

    Inside a rank a scenario orders micro-batches as verl does: small ones at both ends.
    """

    equal_size: bool = True
    """Whether each part has as many sequences."""
    values: Literal["workload", "lengths"] = "workload"
    """What is balanced: verl's estimate of the work, or tokens."""
    kind: Literal["verl.karmarkar_karp"] = "verl.karmarkar_karp"
    rule: ClassVar = "Karmarkar-Karp on work, equally many sequences a rank"

    def pack(self, lengths: Sequence[int], order: Sequence[int]) -> Bins:
        parts = self.k_partitions or 1
        if self.equal_size:
            self.check_count(len(order), parts, "sequences")
        check_enough(len(order), parts, self.name)
        values = [work(lengths[i]) if self.values == "workload" else lengths[i] for i in order]
        return [[order[i] for i in sorted(part)] for part in karmarkar_karp(values, parts, equal=self.equal_size)]


@dataclass(frozen=True)
class VerlGroupBalanced(_Parts):
    """Karmarkar-Karp on whole groups, the answers to a prompt, which stand side by side; equally many groups a part."""

    group_size: PositiveInt = 8
    """Answers of a prompt."""
    kind: Literal["verl.group_balanced"] = "verl.group_balanced"
    rule: ClassVar = "Karmarkar-Karp on the work of whole groups of answers"

    def pack(self, lengths: Sequence[int], order: Sequence[int]) -> Bins:
        parts = self.k_partitions or 1
        groups = chunks(order, self.group_size)
        self.check_count(len(groups), parts, "groups")
        values = [sum(work(lengths[i]) for i in group) for group in groups]
        return [sorted(i for g in part for i in groups[g]) for part in karmarkar_karp(values, parts, equal=True)]


@dataclass(frozen=True)
class VerlGreedy(_Parts):
    """Each sequence in the order given to the part of the least sum; of equal counts where `equal_size`."""

    equal_size: bool = True
    """Whether each part has as many sequences."""
    kind: Literal["verl.greedy_partition"] = "verl.greedy_partition"
    rule: ClassVar = "in the order given to the least sum"

    def pack(self, lengths: Sequence[int], order: Sequence[int]) -> Bins:
        parts = self.k_partitions or 1
        if self.equal_size:
            self.check_count(len(order), parts, "sequences")
        bias = sum(lengths[i] for i in order) + 1 if self.equal_size else 0
        bins, sums = [list[int]() for _ in range(parts)], [0] * parts
        for i in order:
            least = min(range(parts), key=lambda part: sums[part])
            bins[least].append(i)
            sums[least] += lengths[i] + bias
        return bins


@dataclass(frozen=True)
class VerlDynamic(PackerConfig):
    """`use_dynamic_bsz`: a rank's sequences in as few micro-batches as `max_token_len` lets, by Karmarkar-Karp on work;
    small ones at both ends."""

    max_token_len: PositiveInt | None = None
    """Tokens of a micro-batch at most, `ppo_max_token_len_per_gpu`. Null: the scenario's capacity."""
    num_batches_divided_by: PositiveInt | None = None
    """The number of micro-batches is a multiple of this. Null: any number."""
    min_num_micro_batch: PositiveInt | None = None
    """Micro-batches at least: in a scenario null is the most that a rank of the step has."""
    use_dynamic_bsz_balance: bool = True
    """Whether micro-batches are sorted so that small ones stand at both ends."""
    force_group_size: PositiveInt = 1
    """Neighbours that stay together as one item."""
    kind: Literal["verl.rearrange_micro_batches"] = "verl.rearrange_micro_batches"
    follows: ClassVar = "verl 0.9.1"
    rule: ClassVar = "Karmarkar-Karp on work into as few micro-batches as the tokens let"
    makes: ClassVar = "samples"
    per_step: ClassVar = True
    per_rank: ClassVar = True
    capacity_option: ClassVar = "max_token_len"
    least_option: ClassVar = "min_num_micro_batch"

    def pack(self, lengths: Sequence[int], order: Sequence[int]) -> Bins:
        most, step = tokens(self.max_token_len), self.num_batches_divided_by or 1
        self.refuse_longer(lengths, order, most)
        items = chunks(order, self.force_group_size)
        values = [sum(work(lengths[i]) for i in item) for item in items]
        total = sum(lengths[i] for i in order)
        count = max(min(len(items), -(-total // most)), self.min_num_micro_batch or 1)
        count += -count % step
        while True:
            check_enough(len(items), count, self.name)
            parts = [sorted(part) for part in karmarkar_karp(values, count, equal=False)]
            if max(sum(lengths[i] for item in part for i in items[item]) for part in parts) <= most:
                break
            count += step
        if self.use_dynamic_bsz_balance:
            parts.sort(key=lambda part: (sum(values[item] for item in part), part[0]), reverse=True)
            parts = parts[::2][::-1] + parts[1::2]
        return [[i for item in part for i in items[item]] for part in parts]


def small_at_both_ends(part: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """A rank's sequences in the order of `balance_batch`."""
    ranked = sorted(part, key=lambda i: (work(lengths[i]), i))
    return ranked[::2] + ranked[1::2][::-1]


def check_enough(count: int, parts: int, kind: str) -> None:
    """ScenarioError where `parts` parts cannot have an item each."""
    if count < parts:
        raise ScenarioError(f"{kind}: {parts} parts are asked for and there are {count} items. Take fewer or more.")
