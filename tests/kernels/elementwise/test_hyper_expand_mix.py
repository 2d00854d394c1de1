"""SASS of the expansion with projection. A warp loads all operands of `at_once` tokens before it computes their new
streams. No fence waits for the stores of the new streams."""

from dsa.kernels.elementwise import hyper_expand_mix_sm90 as kernels
from dsa.kernels.elementwise import hyper_mix_few_tokens_sm90
from tests.kernels.variants import assert_counts, shipped


@shipped(kernels.compile_hyper_expand_mix)
def test_no_load_waits_for_another(sass, in_order, arguments):
    most, mixed = arguments
    # A token's old streams and y, and their weights; an independent old stream has no weight.
    at_once, loads = min(most, kernels.AT_ONCE), 5 + 5 if mixed else 2 + 1
    assert_counts(sass, LDG=at_once * loads, LDGSTS=3 * kernels.OWN_OUTPUTS, STG=at_once + 2)
    # A warp multiplies 4 blocks of 64 channels at a time. Each block needs 4 steps of 16 channels, with three bf16
    # parts of the matrix.
    assert_counts(sass, HMMA=4 * 4 * 3)
    # A thread sends its partial sums to another CTA by st.async (STAS). A cluster barrier would need a fence (MEMBAR),
    # which also waits for the stores of the new streams.
    assert_counts(sass, STAS=1, MEMBAR=0)
    (instructions,) = in_order
    loads_and_products = [name for name in instructions if name in ("LDG", "FFMA")]
    assert loads_and_products[: loads * at_once] == loads * at_once * ["LDG"]
    assert "LDGSTS" not in instructions[instructions.index("LDG") :]


def test_the_slices_are_those_of_the_projection():
    """With the slices of hyper_mix_few_tokens, sums are added in the same order and have the same bits."""
    assert kernels.THREADS == hyper_mix_few_tokens_sm90.THREADS and kernels.CTAS == hyper_mix_few_tokens_sm90.CTAS
