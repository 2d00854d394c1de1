"""The kernel that writes selections as bits compiles to sm_90a: an atomic in shared memory, no spills."""

from dsa.kernels.mla import selection_bits_sm90 as kernels
from dsa.kernels.mla.mha_limits import SELECTION_KEYS, SELECTION_WORDS
from dsa.reference.mla import selection_bits as reference
from dsa.runtime.compile_cache import cubin
from dsa.runtime.sass import disassemble
from tests.kernels.variants import shipped


@shipped(kernels.compile_selection_bits)
def test_sass(arguments):
    sass = disassemble(cubin(kernels.compile_selection_bits, *arguments))
    assert sass.stack == 0 and not sass.instructions["STL"] and not sass.instructions["LDL"]
    assert sass.instructions["ATOMS"] == kernels.UNROLL and sass.registers <= 32


def test_words_are_those_of_the_reference():
    assert (SELECTION_KEYS, SELECTION_WORDS) == (reference.KEYS, reference.WORDS)
