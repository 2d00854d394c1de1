"""The shipped variants of slots compile to sm_90a without spills, and load several boundaries together."""

from dsa.kernels.cache import slot_mapping_sm90 as kernels
from dsa.runtime.compile_cache import cubin
from dsa.runtime.sass import disassemble
from tests.kernels.variants import shipped


@shipped(kernels.compile_slot_mapping)
def test_slots(arguments):
    sass = disassemble(cubin(kernels.compile_slot_mapping, *arguments))
    assert sass.stack == 0 and not sass.instructions["STL"] and not sass.instructions["LDL"]
    assert sass.registers <= 32  # 64 warps a multiprocessor
    # Of a scan the first boundary and those of a step; then the sequence's two numbers, and the page.
    assert sass.instructions["LDG"] >= 1 + kernels.AT_ONCE + 3 and sass.instructions["STG"] == 1
    # The CTA agrees on whether boundaries ascend.
    assert sass.instructions["BAR"] == 1


def test_every_variant_is_shipped_once():
    assert len(kernels.shipped_variants()) == len({arguments for _, arguments in kernels.shipped_variants()}) == 4
