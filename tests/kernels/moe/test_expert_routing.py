"""SASS of the gate and of the sort by expert."""

from dsa.kernels.moe import moe_gate_sm90, sort_by_expert_sm90
from tests.kernels.moe.routing import gate_reductions
from tests.kernels.variants import assert_counts, shipped


@shipped(moe_gate_sm90.compile_moe_gate)
def test_gate(sass, arguments):
    experts, top_k, _, n_group, topk_group, _ = arguments
    assert_counts(sass, REDUX=gate_reductions(top_k, n_group, topk_group), LDG=2 * (experts // 32))
    assert sass.registers <= 96


@shipped(sort_by_expert_sm90.compile_sort_by_expert)
def test_sort(sass):
    assert sass.registers <= 96
