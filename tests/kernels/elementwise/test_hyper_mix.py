"""SASS of the streams' projection: the numbers of loads and of mma instructions."""

from dsa.kernels.elementwise import hyper_mix_few_tokens_sm90, hyper_mix_sm90
from tests.kernels.variants import assert_counts, shipped


@shipped(hyper_mix_few_tokens_sm90.compile_hyper_mix_few_tokens)
def test_few_tokens(sass, arguments):
    (rows,) = arguments
    blocks = 64 // rows
    assert_counts(sass, LDG=blocks * 2 * (3 + rows // 8), HMMA=blocks * 2 * 2 * 3 * rows // 16)


@shipped(hyper_mix_sm90.compile_hyper_mix, hyper_mix_sm90.compile_hyper_mix_persistent)
def test_many_tokens(sass, arguments):
    (rows,) = arguments
    assert_counts(sass, HMMA=2 * 2 * 9 * 2, UTMALDG=2 * 256 // rows)
    assert sass.registers <= 168  # registers per thread at the launch; consumer threads then increase theirs to 232
