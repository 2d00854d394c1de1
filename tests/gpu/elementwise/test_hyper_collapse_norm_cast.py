"""hyper_collapse_norm_cast (collapse, norm and FP8 cast in one kernel) on the GPU: every tile and option, strides, and
non-finite numbers."""

import pytest
import torch

from dsa.cases import cases_of
from tests.gpu.case_checks import by_sizes, check_calls_in_a_row, check_far_rows, check_layouts, grid, verify

CASES = MIXED, INDEPENDENT = cases_of("hyper_collapse_norm_cast")
by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
# The largest number of channels of each tile configuration, the next larger multiple of 128, and the numbers of
# channels in models.
LENGTHS = [128, 256, 384, 512, 640, 1024, 1152, 1536, 2048, 2176, 3968, 4096, 4224, 6144, 7168, 8192]
OPTIONS = [{"hc_eps": 0.1}, {"eps": 0.5}, {"norm_eps": 0.5, "use_ue8m0": False}]
OWN_OPTIONS = [
    *((MIXED, {"iterations": n}) for n in (1, 3)),
    *((INDEPENDENT, {"channels": channels, "pad_scales": True}) for channels in LENGTHS),
    (INDEPENDENT, {"magnitude": -3.0}),
]


@by_case
@by_sizes(
    grid(tokens=(1, 37), channels=LENGTHS, use_ue8m0=(True, False)),
    # A CTA gets 1 to 4 tokens, more in calls with more tokens. In some calls the last CTA has fewer.
    grid(tokens=[2, 8, 132, 1024, 1025, 2047, 2050, 4096, 9001], channels=(256, 4096, 7168)),
    [{"tokens": 50, "channels": 512, **options} for options in OPTIONS],
)
def test_every_size_and_option_is_right(case, sizes, record_error):
    verify(case, sizes, record_error)


@pytest.mark.parametrize(("case", "options"), OWN_OPTIONS)
def test_options_of_one_op_are_right(case, options, record_error):
    for tokens in (1, 50, 4099):
        verify(case, {"tokens": tokens, "channels": 512, **options}, record_error)


@by_case
@pytest.mark.parametrize("channels", [128, 640, 4096])
def test_layouts_change_no_bit(channels, case):
    check_layouts(case, ("streams",), tokens=30, channels=channels)


@by_case
@pytest.mark.parametrize("value", [torch.nan, torch.inf, 0.0])
@pytest.mark.parametrize("of", ["streams", "mix"])
@pytest.mark.parametrize("tokens", [10, 4099])
def test_special_values_are_where_the_two_ops_have_them(tokens, of, value, case):
    """Token 2 is all zeros, so with eps and norm_eps 0 both norms divide by 0."""
    given = case.arguments("cuda", tokens=tokens, channels=256)
    given[of][6].view(-1)[3], given["streams"][2] = value, 0.0
    case.check_call(given)
    case.check_call(given | {"eps": 0.0, "norm_eps": 0.0})


@by_case
def test_offsets_beyond_32_bits(case):
    given = case.arguments("cuda", tokens=100, channels=8192)
    check_far_rows(case, given, ("streams", "mix"), 2**31 // (4 * 8192) + 50)


@pytest.mark.parametrize(("case", "options"), [(MIXED, {"iterations": 20}), (INDEPENDENT, {})])
@pytest.mark.parametrize("tokens", [1, 33])
def test_each_call_of_a_graph_waits_for_the_previous_one(tokens, case, options):
    check_calls_in_a_row(case, tokens=tokens, channels=4096, **options)
