"""Every shipped variant of the gate and of the sort compiles to sm_90a without spills."""

from dsa.kernels.moe import moe_gate_sm90, sort_by_expert_sm90
from dsa.runtime.compile_cache import cubin
from dsa.runtime.sass import disassemble
from tests.kernels.variants import shipped


@shipped(moe_gate_sm90.compile_moe_gate, sort_by_expert_sm90.compile_sort_by_expert)
def test_sass(compile_function, arguments):
    sass = disassemble(cubin(compile_function, *arguments))
    assert sass.stack == 0 and not sass.instructions["STL"] and not sass.instructions["LDL"]
    assert sass.registers <= 96
    if compile_function is moe_gate_sm90.compile_moe_gate:
        experts, top_k, _, n_group, topk_group, _ = arguments
        groups = 2 * n_group if n_group > topk_group else 0
        assert sass.instructions["REDUX"] == 2 * top_k + groups
        assert sass.instructions["LDG"] == 2 * (experts // 32)
