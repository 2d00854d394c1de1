"""The kernel that writes selections as bit masks: SASS with atomics in shared memory, and constants of the layout that
equal the reference's."""

from dsa.kernels.mla import selection_bits_sm90 as kernels
from dsa.kernels.mla.limits import SELECTION_KEYS, SELECTION_WORDS
from dsa.reference.mla import selection_bits as reference
from tests.kernels.variants import assert_counts, shipped


@shipped(kernels.compile_selection_bits)
def test_sass(sass):
    assert_counts(sass, ATOMS=kernels.UNROLL)
    assert sass.registers <= 32


def test_words_are_those_of_the_reference():
    assert (SELECTION_KEYS, SELECTION_WORDS) == (reference.KEYS, reference.WORDS)
