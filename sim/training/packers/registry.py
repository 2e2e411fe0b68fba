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

_RECORDED: dict[type[PackerConfig], int] = {
    Padded: 0,
    LengthGrouped: 12,
    LengthGroupedDistributed: 3,
    BatchRebalance: 9,
    Fairseq: 12,
    Torchdata: 9,
    DeepSpeed: 12,
    Bfd: 8,
    BfdSplit: 8,
    Wrapped: 8,
    Multipack: 12,
    BridgeShuffle: 6,
    BridgeDecreasing: 6,
    TorchtunePacked: 12,
    GreedyKnapsack: 6,
    PackedSupervised: 6,
    SwiftBinpack: 6,
    SwiftSequential: 6,
    NemoRlConcatenative: 6,
    NemoRlDecreasing: 6,
    NemoRlShuffle: 6,
    NemoRlModified: 6,
    NemoRlDynamic: 0,
    SkyRlDecreasing: 6,
    SkyRlBalanced: 6,
    VerlKarmarkarKarp: 24,
    VerlGroupBalanced: 0,
    VerlGreedy: 6,
    VerlDynamic: 15,
    ArealFfd: 9,
    ArealKk: 9,
    ArealBalanced: 3,
    ArealContiguous: 3,
    HybridContextParallel: 12,
}
CLASSES = tuple(_RECORDED)
PACKERS: dict[str, type[PackerConfig]] = {each.__dataclass_fields__["kind"].default: each for each in CLASSES}
"""The packers' configs by kind."""
RECORDED: dict[str, int] = {kind: _RECORDED[each] for kind, each in PACKERS.items()}
"""How many results of the framework's own code each packer makes again, bin by bin and in order; of `areal.ffd`, whose
sort is not stable, the lengths in each group. 0: followed by its source or documentation alone."""
