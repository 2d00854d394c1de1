"""hyper_mix (the projection of streams) on the GPU: every kernel, strides, non-finite numbers, and bits that do not
depend on other tokens."""

import pytest
import torch

from dsa.cases import cases_of
from tests.gpu.case_checks import by_sizes, check_layouts, check_rows_alone, grid, spoiled_rows, verify

(CASE,) = cases_of("hyper_mix")
TOKENS = [1, 7, 16, 17, 128, 129, 400, 801, 1025, 2049, 4100]
PARTS = [(0, 4100), (0, 1), (4001, 7), (100, 17), (99, 256), (5, 500), (9, 1500), (77, 2049)]


@by_sizes(
    grid(tokens=TOKENS, channels=(4096, 7168, 8, 264)),
    grid(tokens=TOKENS, channels=(4096,), outputs=(4,)),
    grid(tokens=TOKENS, n=(1,), channels=(64,)),
    grid(tokens=TOKENS, n=(3,), channels=(72,), outputs=(13,)),
)
def test_every_size_is_right(sizes, record_error):
    verify(CASE, sizes, record_error)


@pytest.mark.parametrize(("channels", "outputs"), [(256, 24), (832, 24), (4096, 24), (7168, 24), (264, 24), (4096, 4)])
def test_a_token_does_not_depend_on_the_others(channels, outputs):
    """The numbers of tokens in PARTS select all kernels. The first tokens vary, so a token has different positions in a
    tile."""
    given = CASE.arguments("cuda", tokens=4100, channels=channels, outputs=outputs)
    check_rows_alone(CASE.run, given, ("streams",), PARTS)


@pytest.mark.parametrize("tokens", [9, 300])
@pytest.mark.parametrize("channels", [256, 320])
def test_layouts_change_no_bit(channels, tokens):
    check_layouts(CASE, ("streams",), tokens=tokens, channels=channels)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("tokens", [10, 300, 700, 1300, 4100])
def test_what_is_not_finite_stays_in_its_token(tokens, value):
    given = CASE.arguments("cuda", tokens=tokens, channels=256)
    (mix,) = spoiled_rows(CASE.run, given, {("streams", 6, 2, 17): value})
    assert not mix[6].isfinite().any()
