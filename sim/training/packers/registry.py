"""Every packer by the name of the framework's own function. A new one is a class of its family's file, an entry here,
and a test."""

from __future__ import annotations

from batchsim.training.packers.areal import ArealBalanced, ArealContiguous, ArealFfd, ArealKk
from batchsim.training.packers.axolotl import Multipack
from batchsim.training.packers.bins import PackerConfig
from batchsim.training.packers.hf_transformers import BatchRebalance, LengthGrouped, LengthGroupedDistributed, Padded
from batchsim.training.packers.llama_factory import GreedyKnapsack, PackedSupervised
from batchsim.training.packers.megatron_core import HybridContextParallel
from batchsim.training.packers.nemo import BridgeDecreasing, BridgeShuffle
from batchsim.training.packers.nemo_rl import (
    NemoRlConcatenative,
    NemoRlDecreasing,
    NemoRlDynamic,
    NemoRlModified,
    NemoRlShuffle,
    SkyRlBalanced,
    SkyRlDecreasing,
)
from batchsim.training.packers.swift import SwiftBinpack, SwiftSequential
from batchsim.training.packers.token_budget import DeepSpeed, Fairseq, Torchdata
from batchsim.training.packers.torchtune import TorchtunePacked
from batchsim.training.packers.trl import Bfd, BfdSplit, Wrapped
from batchsim.training.packers.verl import VerlDynamic, VerlGreedy, VerlGroupBalanced, VerlKarmarkarKarp

CLASSES: tuple[type[PackerConfig], ...] = (
    Padded,
    LengthGrouped,
    LengthGroupedDistributed,
    BatchRebalance,
    Fairseq,
    Torchdata,
    DeepSpeed,
    Bfd,
    BfdSplit,
    Wrapped,
    Multipack,
    BridgeShuffle,
    BridgeDecreasing,
    TorchtunePacked,
    GreedyKnapsack,
    PackedSupervised,
    SwiftBinpack,
    SwiftSequential,
    NemoRlConcatenative,
    NemoRlDecreasing,
    NemoRlShuffle,
    NemoRlModified,
    NemoRlDynamic,
    SkyRlDecreasing,
    SkyRlBalanced,
    VerlKarmarkarKarp,
    VerlGroupBalanced,
    VerlGreedy,
    VerlDynamic,
    ArealFfd,
    ArealKk,
    ArealBalanced,
    ArealContiguous,
    HybridContextParallel,
)
PACKERS: dict[str, type[PackerConfig]] = {each.__dataclass_fields__["kind"].default: each for each in CLASSES}
"""The packers' configs by kind."""
RECORDED: dict[str, int] = {
    "transformers.padded": 0,
    "transformers.length_grouped": 12,
    "transformers.length_grouped_distributed": 3,
    "transformers.batch_rebalance": 9,
    "fairseq.batch_by_size": 12,
    "torchdata.max_token_bucketize": 9,
    "deepspeed.batch_by_seqlens": 12,
    "trl.bfd": 8,
    "trl.bfd_split": 8,
    "trl.wrapped": 8,
    "axolotl.multipack": 12,
    "megatron_bridge.first_fit_shuffle": 6,
    "megatron_bridge.first_fit_decreasing": 6,
    "torchtune.packed": 12,
    "llamafactory.greedy_knapsack": 6,
    "llamafactory.packed_supervised": 6,
    "swift.binpack": 6,
    "swift.sequential": 6,
    "nemo_rl.concatenative": 6,
    "nemo_rl.first_fit_decreasing": 6,
    "nemo_rl.first_fit_shuffle": 6,
    "nemo_rl.modified_first_fit_decreasing": 6,
    "nemo_rl.dynamic_batching": 0,
    "skyrl.first_fit_decreasing": 6,
    "skyrl.balanced": 6,
    "verl.karmarkar_karp": 24,
    "verl.group_balanced": 0,
    "verl.greedy_partition": 6,
    "verl.rearrange_micro_batches": 15,
    "areal.ffd": 9,
    "areal.kk": 9,
    "areal.balanced_greedy": 3,
    "areal.min_abs_diff": 3,
    "megatron_core.balanced_cp": 12,
}
"""How many results of the framework's own code each packer makes again, bin by bin and in order; of `areal.ffd`, whose
sort is not stable, the lengths in each group. 0: followed by its source or documentation alone."""
