"""What a micro-batch takes, in time and in memory, on each of the GPUs that share it."""

from __future__ import annotations

from dataclasses import dataclass

from batchsim.base.units import NS_PER_S, format_duration
from batchsim.deployment.gpus import load_gpu
from batchsim.deployment.models import read_model
from batchsim.training import flops
from batchsim.training.config import LinearCost, RanksConfig, RooflineCost, TrainingConfig
from batchsim.training.steps import MicroBatch

WEIGHT_BYTES = 2
"""Of a weight in bf16, as matrices are multiplied."""
STATE_BYTES = 16
"""Of a weight with its gradient and the states of Adam, in mixed precision."""
WEIGHT_READS = 2
"""How often a micro-batch reads all weights: forward and backward."""
ACTIVATION_BYTES = 34
"""Bytes a token, layer and unit of width that the backward pass needs, without scores (Korthikanti et al. 2022)."""
RECOMPUTED_BYTES = 2
"""The same where all but a layer's input is computed again."""
SCORE_BYTES = 5
"""Bytes of a layer's scores a head and pair of tokens."""
LOGIT_BYTES = 6
"""Bytes of a logit: in bf16, and in 32 bits for the loss."""


@dataclass(frozen=True)
class Roofline:
    """FLOPs over what is reached of the peak, of matrices and of attention; weights are read twice."""

    config: RooflineCost
    shape: flops.Shape
    peak: float
    matrices: float
    attention: float
    bandwidth: float | None
    memory: float | None
    vocab: int
    heads: int
    params: float
    text: str

    def stage_s(self, tokens: float, squares: float, stages: int) -> float:
        """Seconds of a stage's forward and backward pass of these tokens and squares on one GPU."""
        config = self.config
        matrices, attention = flops.done(
            self.shape, tokens, squares, flash=config.flash, recompute=config.recompute, lora=config.lora
        )
        time = matrices / self.matrices
        if self.bandwidth is not None and tokens:
            time = max(time, WEIGHT_READS * WEIGHT_BYTES * self.shape.params / self.bandwidth)
        return (time + attention / self.attention) / stages + config.t0 / NS_PER_S

    def memory_bytes(self, micro_batch: MicroBatch, ranks: RanksConfig, *, sharded: bool) -> float | None:
        """Weights, gradients and optimizer, activations of as many micro-batches as a first stage holds, and logits."""
        state = self.config.state_bytes or (WEIGHT_BYTES if self.config.lora else STATE_BYTES)
        held = self.params * state / ranks.pipeline / (ranks.data * ranks.context if sharded else 1)
        together = max(ranks.context, micro_batch.ranks)
        tokens, squares = micro_batch.computed / together, micro_batch.squares / together
        token_bytes = (RECOMPUTED_BYTES if self.config.recompute else ACTIVATION_BYTES) * self.shape.width
        layers = token_bytes * tokens * self.shape.layers
        if not self.config.flash:
            layers += SCORE_BYTES * self.heads * squares * self.shape.layers
        return held + layers + LOGIT_BYTES * tokens * self.vocab

    @property
    def limit_bytes(self) -> float | None:
        """Bytes that a GPU has; None where that is not known."""
        return self.memory


@dataclass(frozen=True)
class Linear:
    """A base, so much a token, and squares that count as tokens."""

    config: LinearCost
    text: str
    shape: flops.Shape | None = None
    peak: float | None = None
    limit_bytes: float | None = None

    def stage_s(self, tokens: float, squares: float, stages: int) -> float:
        """Seconds of a stage's forward and backward pass."""
        work = tokens + squares / self.config.tokens_per_square
        return (self.config.base + self.config.per_token * work / stages) / NS_PER_S

    def memory_bytes(self, micro_batch: MicroBatch, ranks: RanksConfig, *, sharded: bool) -> float | None:
        """None: nothing is known of memory."""
        return None


TrainingCost = Roofline | Linear


def training_cost(config: TrainingConfig) -> TrainingCost:
    """The cost that a scenario names. ScenarioError for a model or a GPU that is not known."""
    cost = config.cost
    if isinstance(cost, LinearCost):
        times = f"{format_duration(cost.base)} and {format_duration(cost.per_token)} a token"
        text = f"{times}, {cost.tokens_per_square:,.0f} squares as one"
        return Linear(cost, text)
    if cost.model is not None:
        model = read_model(cost.model)
        active = model.matmul_flops_per_token / 2 + model.head_parameters
        shape = flops.Shape(active, model.num_hidden_layers, model.q_size)
        vocab, heads, params = model.vocab_size, model.num_attention_heads, float(model.num_parameters)
        name = cost.model
    else:
        shape = flops.Shape(cost.params or 0, cost.layers or 0, cost.hidden or 0)
        vocab, heads, params = cost.vocab or 0, cost.heads or 0, cost.all_params or shape.params
        name = f"{shape.params / 1e9:.3g}B parameters"
    gpu = None if cost.gpu is None else load_gpu(cost.gpu)
    peak = cost.peak if gpu is None else gpu.peak_flops
    assert peak is not None
    if cost.efficiency is not None or gpu is None:
        reached = (cost.efficiency or 1.0,) * 2
        how = f"{reached[0]:.0%} of {peak / 1e12:g} TFLOP/s reached, as stated"
    else:
        reached = gpu.efficiencies.matmul, gpu.efficiencies.attention
        how = f"{reached[0]:.0%} of the peak reached by matrices, {reached[1]:.0%} by attention: of inference, assumed"
    bandwidth, memory = cost.bandwidth, cost.memory
    if gpu is not None:
        bandwidth = bandwidth or gpu.memory_bandwidth
        memory = memory or gpu.memory_bytes
    text = f"{name} on {cost.gpu or 'a GPU as stated'}, {how}"
    speeds = peak * reached[0], peak * reached[1]
    return Roofline(cost, shape, peak, *speeds, bandwidth, memory, vocab, heads, params, text)
