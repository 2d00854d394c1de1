"""The shipped variants of the window's lists compile to sm_90a without spills, and load pages together."""

from dsa.kernels.mla import window_indices_sm90 as kernels
from dsa.runtime.compile_cache import cubin
from dsa.runtime.sass import disassemble
from tests.kernels.variants import shipped


def instructions_of(compile_function, *arguments):
    sass = disassemble(cubin(compile_function, *arguments))
    assert sass.stack == 0 and not sass.instructions["STL"] and not sass.instructions["LDL"]
    assert sass.registers <= 40  # 48 warps a multiprocessor
    return sass.instructions


@shipped(kernels.compile_window_indices)
def test_indices(arguments):
    instructions = instructions_of(kernels.compile_window_indices, *arguments)
    # The boundaries of several sequences at once, and those of the one that it finds.
    assert (instructions["LDG"], instructions["STG"]) == (2 * kernels.UNROLL + 4, kernels.UNROLL)


@shipped(kernels.compile_window_slots)
def test_slots(arguments):
    (ring,) = arguments
    instructions = instructions_of(kernels.compile_window_slots, *arguments)
    # The length, and of pages their numbers.
    assert (instructions["LDG"], instructions["STG"]) == (1 if ring else 1 + kernels.UNROLL, kernels.UNROLL)


def test_every_variant_is_shipped_once():
    assert len(kernels.shipped_variants()) == len({(f.__name__, a) for f, a in kernels.shipped_variants()}) == 3
