"""The `training:` block of a scenario: examples, packers, ranks, and what a step costs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

from batchsim.base.ranges import Config, NonNegativeInt, PositiveInt, Range, check_ranges
from batchsim.base.units import Bandwidth, Duration, Flops, PartDuration, Share, Size
from batchsim.training.lengths import AnyExampleLengths
from batchsim.training.packers.bins import PackerConfig
from batchsim.training.packers.registry import CLASSES
from batchsim.training.stream import STREAMED, StreamConfig
from batchsim.workload.tagged import ByKind

if TYPE_CHECKING:
    Packer = PackerConfig
else:
    Packer = Annotated[Union[CLASSES], ByKind()]  # noqa: UP007 - of classes that a registry lists
Ranks = Annotated[int, Range(1, 100_000)]
Stages = Annotated[int, Range(1, 1_000)]
Params = Annotated[float, Range(1e3, 1e14)]


@dataclass(frozen=True)
class RanksConfig(Config):
    """How many GPUs share the work, and how."""

    data: Ranks = 1
    """Data-parallel ranks: each takes micro-batches of its own."""
    context: Ranks = 1
    """Ranks that share each document, by zig-zag pieces of equal work."""
    pipeline: Stages = 1
    """Stages of layers, which micro-batches pass one forward one backward."""

    @property
    def gpus(self) -> int:
        """All GPUs."""
        return self.data * self.context * self.pipeline


@dataclass(frozen=True)
class RooflineCost(Config):
    """FLOPs over the peak that is reached, at least the time to read the weights twice, and a launch.

    The model and the GPU are of the catalog, or each number is stated.
    """

    model: str | None = None
    """A model as at the top of other scenarios. Null: params, layers, hidden and vocab are stated."""
    params: Params | None = None
    """Active parameters, with the output head and without the input embeddings."""
    layers: PositiveInt | None = None
    """Layers."""
    hidden: PositiveInt | None = None
    """Heads times head size, the width of attention."""
    vocab: PositiveInt | None = None
    """Entries of the vocabulary, for the memory of logits. Null without a model: logits are not counted."""
    heads: PositiveInt | None = None
    """Heads of attention, for the memory of its scores without FlashAttention."""
    all_params: Params | None = None
    """Parameters in memory: more than the active ones in a mixture of experts. Null: those of the model, or params."""
    gpu: str | None = None
    """A GPU of the catalog. Null: peak is stated, and memory and bandwidth if they are to count."""
    peak: Flops | None = None
    """The GPU's FLOP/s."""
    efficiency: Share | None = None
    """Part of the peak that is reached. Null with a GPU of the catalog: what its inference kernels reach, of matrices
    and of attention; no training was measured."""
    bandwidth: Bandwidth | None = None
    """Bytes a second of the GPU's memory. Null without a GPU: reading weights is never the limit."""
    memory: Size | None = None
    """The GPU's memory. Null without a GPU: nothing is said of what fits."""
    t0: Duration = 0
    """What each micro-batch takes beside: launches, and the host."""
    flash: bool = True
    """Whether attention's backward does 2.5 times its forward, and keeps no scores."""
    recompute: bool = False
    """Whether activations are computed again in the backward pass."""
    lora: bool = False
    """Whether the matrices are frozen, so that their gradients are left out."""
    state_bytes: Annotated[float, Range(1, 64)] | None = None
    """Bytes a parameter of weights, gradients and optimizer. Null: 16, as of mixed precision with Adam, and 2 with
    lora."""
    kind: Literal["roofline"] = "roofline"

    def __post_init__(self) -> None:
        check_ranges(self)
        stated = {"params": self.params, "layers": self.layers, "hidden": self.hidden}
        beside = {"vocab": self.vocab, "heads": self.heads, "all_params": self.all_params}
        given = [name for name, value in {**stated, **beside}.items() if value is not None]
        if self.model is not None and given:
            raise ValueError(f"model {self.model} and {given[0]} are given. Keep one of them.")
        if self.model is None and (missing := [name for name, value in stated.items() if value is None]):
            raise ValueError(f"without a model {missing[0]} is needed. Name a model, or state {', '.join(missing)}.")
        if self.gpu is not None and self.peak is not None:
            raise ValueError(f"gpu {self.gpu} and peak are given. Keep one of them.")
        if self.gpu is None and self.peak is None:
            raise ValueError("neither gpu nor peak is given. Name a GPU of the catalog, or state peak and efficiency.")
        if self.gpu is None and self.efficiency is None:
            raise ValueError("peak needs an efficiency, like 45%. State what part of it is reached.")
        if not self.flash and self.model is None and self.heads is None and self.memory is not None:
            raise ValueError("flash false keeps scores by head, and heads is not given. State heads.")
        if self.efficiency == 0:
            raise ValueError("efficiency is 0%. Nothing would ever be done.")


@dataclass(frozen=True)
class LinearCost(Config):
    """A base time, a time a token, and squared tokens that count as tokens, as a fit to measured steps gives.

    Without FLOPs and memory nothing is said of MFU and of what fits.
    """

    base: Duration
    """The time of a micro-batch before its first token."""
    per_token: PartDuration
    """The time of a computed token, like `20us`."""
    tokens_per_square: Annotated[float, Range(1, 1e12)] = 24_576.0
    """Squared tokens of attention that take as long as one token: 24,576 is verl's for a model of 7 billion."""
    kind: Literal["linear"] = "linear"


AnyTrainingCost = Annotated[RooflineCost | LinearCost, ByKind(default="roofline")]


@dataclass(frozen=True)
class TrainingConfig(Config):
    """An epoch of training, once with each packer."""

    lengths: AnyExampleLengths
    """Tokens of the examples."""
    packers: dict[str, Packer]
    """The packers that are compared, by label: each a `kind` and options by the framework's own names."""
    cost: AnyTrainingCost
    """What a micro-batch takes."""
    capacity: PositiveInt | None = None
    """Tokens of a row or a micro-batch, of each packer that does not say its own."""
    longer: Literal["drop", "truncate"] | None = None
    """What is done with examples longer than the capacity before packing. Null: what the framework does, and an
    error where it fails."""
    micro_batch: PositiveInt = 1
    """Rows that a rank puts through the model at once."""
    samples: PositiveInt | None = None
    """The same of packers that make no rows, in samples. Null: micro_batch."""
    accumulate: PositiveInt = 1
    """Micro-batches of a rank between two updates of the weights."""
    global_batch: PositiveInt | None = None
    """Samples of a step, for packers that pack each step's samples. Null: samples x accumulate x data ranks."""
    ranks: RanksConfig = field(default_factory=RanksConfig)
    """How many GPUs, and how they share the work."""
    sharding: Literal["ddp", "fsdp", "async"] = "ddp"
    """Whether ranks meet once a step (DDP, ZeRO-1 and 2), at every micro-batch (FSDP, ZeRO-3), or never: each updates
    the weights by itself, with gradients of older ones."""
    staleness_bound: NonNegativeInt | None = None
    """Updates that an asynchronous rank may be ahead of the slowest. Null: any number."""
    mask: Literal["document", "cross", "padded"] | None = None
    """What attends to what: tokens of the same document, of the same row, or of padded samples. Null: as the framework
    has it."""
    pads: Literal["none", "longest", "capacity"] | None = None
    """Whether rows lie end to end, or are padded to the longest of the micro-batch or to the capacity. Null: as the
    framework has it."""
    shuffle_rows: bool | None = None
    """Whether packed rows are shuffled before training. Null: as the framework does."""
    drop_last: bool = True
    """Whether a last step of fewer micro-batches is left out."""
    reduce: Duration = 0
    """What each step takes beside its micro-batches: the reduction of gradients that is not hidden, the optimizer."""
    send: Duration = 0
    """What it takes a pipeline to pass a micro-batch on to the next stage."""
    variable_lengths: bool = False
    """Whether pipeline stages take micro-batches of unequal tokens; else all of a step are padded to the longest."""
    stream: StreamConfig | None = None
    """Examples that arrive while training goes on. Null: all are there from the start."""
    mfu: Literal["megatron", "palm"] = "megatron"
    """Which convention counts attention's FLOPs: with the causal halving, or without."""
    seed: NonNegativeInt = 0
    """Chooses what is drawn: lengths, permutations, the order of rows."""

    @property
    def samples_at_once(self) -> int:
        """Samples of a micro-batch of packers that make no rows."""
        return self.samples or self.micro_batch

    @property
    def step_samples(self) -> int:
        """Samples of a step of packers that pack each step's."""
        return self.global_batch or self.samples_at_once * self.accumulate * self.ranks.data

    def __post_init__(self) -> None:
        check_ranges(self)
        if not self.packers:
            raise ValueError("packers is empty. Name at least one; `batchsim train --packers` lists them.")
        if self.sharding == "fsdp" and self.ranks.pipeline > 1:
            raise ValueError(
                f"sharding fsdp with {self.ranks.pipeline} pipeline stages is not simulated. Use ddp, or one stage."
            )
        if self.staleness_bound is not None and self.sharding != "async":
            raise ValueError(f"staleness_bound is of sharding async, and sharding is {self.sharding}. Drop it.")
        if self.sharding == "async" and (self.ranks.pipeline > 1 or self.stream is not None):
            what = "a stream" if self.stream is not None else f"{self.ranks.pipeline} pipeline stages"
            raise ValueError(f"sharding async with {what} is not simulated. Use ddp.")
        for label, packer in self.packers.items():
            self._check_packer(label, packer)
            self._check_ranks(label, packer)
        self._check_used()

    def _check_used(self) -> None:
        """ValueError for a key that would change nothing."""
        packers = self.packers.values()
        if self.ranks.pipeline == 1 and (self.send or self.variable_lengths):
            name = "send" if self.send else "variable_lengths"
            raise ValueError(f"{name} is of a pipeline, and ranks.pipeline is 1. Drop it.")
        steps = [each for each in packers if each.per_step or each.makes == "rank_samples"]
        counted = [each for each in packers if each.makes in ("order", "rank_orders", "parts")]
        if self.samples is not None and not counted and (self.global_batch is not None or not steps):
            raise ValueError("samples is given, and no packer here takes samples by count. Drop it.")
        if self.global_batch is not None and not steps:
            raise ValueError("global_batch is given, and no packer here packs each step's samples. Drop it.")
        if self.capacity is not None and not any(
            each.capacity_option and getattr(each, each.capacity_option) is None for each in packers
        ):
            raise ValueError("capacity is given, and every packer here has its own or none. Drop it.")
        if self.longer is not None and not any(each.capacity_option for each in packers):
            raise ValueError(f"longer {self.longer} needs a capacity, and no packer here has one. Drop it.")
        if self.shuffle_rows is not None and not any(each.makes in ("rows", "pieces", "samples") for each in packers):
            raise ValueError("shuffle_rows is given, and no packer here makes rows of an epoch. Drop it.")

    def _check_ranks(self, label: str, packer: Any) -> None:
        """ValueError where a packer's own ranks or accumulation are not those of the scenario."""
        ranks = self.ranks.data * (self.ranks.context if packer.makes == "groups" else 1)
        stated = getattr(packer, packer.ranks_option) if packer.ranks_option else None
        multiple = packer.ranks_option == "bin_count_multiple"
        if stated is not None and (stated % ranks if multiple else stated != ranks):
            what = "no multiple of the" if multiple else "not the"
            raise ValueError(f"packers.{label}.{packer.ranks_option} is {stated}, {what} {ranks} ranks. Leave it out.")
        own = getattr(packer, "grad_accum", None)
        if own is not None and own != self.accumulate:
            raise ValueError(f"packers.{label}.grad_accum is {own}, accumulate is {self.accumulate}. Leave it out.")
        if packer.per_step and not self.drop_last:
            raise ValueError(f"packers.{label} packs whole steps, so that drop_last: false cannot be. Drop it.")

    def _check_packer(self, label: str, packer: Any) -> None:
        if not label.strip() or len(label) > 40:
            raise ValueError(f"packers has the label {label[:40]!r}. Write one of 1 to 40 letters.")
        option = packer.capacity_option
        if option and getattr(packer, option) is None and self.capacity is None:
            raise ValueError(f"packers.{label} has no {option}. State it, or training.capacity.")
        packs = packer.makes in ("rows", "pieces", "row_batches")
        if packs and self.mask == "padded":
            raise ValueError(f"mask padded is for packers of samples, and packers.{label} packs rows. Write cross.")
        if not packs and self.mask == "cross":
            raise ValueError(f"mask cross is for packers of rows, and packers.{label} packs none. Write padded.")
        if not packs and self.pads == "none" and (self.mask or packer.mask) == "padded":
            raise ValueError(f"pads none lays the samples of packers.{label} end to end. Write mask: document too.")
        if not packs and self.pads == "capacity" and not option:
            raise ValueError(f"pads capacity needs one, and packers.{label} has none. Write longest.")
        if self.stream is not None and (packer.per_step or packer.makes not in STREAMED):
            raise ValueError(f"stream is for packers of windows, and packers.{label} packs steps or whole epochs.")
        if packer.makes == "groups" and self.ranks.pipeline > 1:
            raise ValueError(f"packers.{label} runs without a pipeline, and ranks.pipeline is {self.ranks.pipeline}.")
        if packer.makes == "groups" and self.sharding == "async":
            raise ValueError(f"packers.{label} has ranks share documents, and under sharding async none meet.")


@dataclass(frozen=True)
class TrainingFile(Config):
    """A scenario of training, key by key."""

    training: TrainingConfig
    """The whole of it."""
