"""The operations of a graph by what their times depend on, and the tables' messages in our words."""

from __future__ import annotations

import json
from typing import Any

import pytest

from batchsim.tables.graph import Phase, operations_of, window_of
from batchsim.tables.modes import NoTablesError
from batchsim.tables.refusals import reason_of


def spec(kind: str, name: str, **fields: Any) -> str:
    return json.dumps({kind: {"name": name, "scale_factor": 2.0, **fields}})


SCAN = {"nheads": 64, "head_dim": 64, "d_state": 128}
OPERATIONS = operations_of(
    [
        spec("Gemm", "generation_qkv_gemm"),
        spec("GenerationAttention", "generation_attention"),
        spec("GenerationAttention", "generation_attention", window_size=1_024),
        spec("DsaGeneration", "generation_attention", window_size=128),
        spec("Mamba2", "generation_mamba_conv1d", kernel_source="causal_conv1d_update", **SCAN),
        spec("Mamba2", "generation_mamba_ssm", kernel_source="selective_state_update", **SCAN),
        spec("Gdn", "generation_gdn_recurrence", kernel_source="any"),
        spec("Gemm", "generation_logits_gemm"),
        spec("MoeDispatch", "generation_moe_pre_dispatch"),
        spec("Moe", "generation_moe", workload_distribution="power_law_1.2"),
        spec("Overlap", "generation_moe_overlap", ops=[{"Moe": {"workload_distribution": "power_law_1.01"}}]),
        spec("Overlap", "generation_other_overlap"),
    ]
)


def test_operations_are_known_by_their_class_not_by_their_name() -> None:
    """What is called attention and holds projections is a block; a window inside such a block is the block's affair."""
    assert Phase.of(OPERATIONS, frozenset({1, 2, 3}), whole=True) == Phase(
        rest=(0, 8, 9, 10, 11),
        head=(7,),
        attention=(1,),
        windowed=(2,),
        blocks=(3,),
        recurrent=(4, 5, 6),
        experts=(8, 9, 10),
    )
    assert Phase.of(OPERATIONS, frozenset({1, 2, 3}), whole=False).attention == (1, 3)


def test_the_law_of_experts_is_found_within_an_overlap() -> None:
    assert [each.law for each in OPERATIONS if each.law] == ["power_law_1.2", "power_law_1.01"]


def test_attention_is_such_even_where_a_size_does_not_show_it() -> None:
    assert Phase.of(OPERATIONS, frozenset(), whole=True).keyed == {1, 2}


def test_only_the_state_update_of_mamba2_leaves_out_states() -> None:
    """2 layers of 64 heads, 64 × 128 each, in 4 bytes: of one sequence."""
    assert [each.state_bytes for each in OPERATIONS if each.state_bytes] == [2 * 64 * 64 * 128 * 4]


def test_a_profile_holds_one_window() -> None:
    assert window_of(OPERATIONS) == 1_024
    assert window_of(OPERATIONS[:2]) is None
    others = operations_of([spec("GenerationAttention", "a", window_size=width) for width in (512, 128)])
    with pytest.raises(NoTablesError, match="windows of 128 and 512 tokens"):
        window_of(others)


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        ("perf database error: GEMM perf data missing for quant 'int4' at /a/b", "no matrices in int4 were timed"),
        (
            'MoE data missing for MoeKey { quant: "w4a16_mxfp4", distribution: "d", topk: 16, num_experts: 896,'
            " hidden_size: 3584, inter_size: 3072 } at /x",
            "no experts in w4a16_mxfp4 were timed, 16 of 896 of width 3072",
        ),
        (
            'generation attention data missing for GenerationKey { kv_quant: "fp8", n_kv_lookup: 16, head_size: 256,'
            " window_size: 1024 }",
            "no attention of heads of 256 with 16 KV heads within 1,024 tokens and keys in fp8 was timed",
        ),
        (
            'context attention data missing for Key { kv_quant: "bfloat16", n_kv: 1, head_size: 192, window_size: 0 }',
            "no attention of heads of 192 with 1 KV heads and keys in bfloat16 was timed",
        ),
        (
            'DSV4 module data missing for ModuleKey { kv_quant: "bfloat16", gemm_quant: "fp8" }',
            "no blocks of sparse attention with keys in bfloat16, matrices in fp8 were timed",
        ),
        (
            "no DSA module rows loaded at /p from msa_generation_module_perf.parquet",
            "no blocks of block-sparse attention were timed",
        ),
        ("missing system flops: quant mode 'nvfp4' needs 'fp4_tc_flops'", "the GPU has no arithmetic in nvfp4"),
        ("perf database error:  something\n else at /home/x.py", "something else"),
    ],
)  # fmt: skip
def test_messages_of_the_tables_are_clauses_of_ours(problem: str, reason: str) -> None:
    assert reason_of(problem) == reason
