"""rms_norm_rotary (RMS norm of heads, then rope, in one kernel) on the GPU: every kernel configuration, strides, and
NaN."""

import torch

from dsa.cases import cases_of
from tests.gpu.case_checks import by_sizes, check_far_rows, check_layouts, grid, verify

(CASE,) = cases_of("rms_norm_rotary")
COUNTS = [(1, 1), (1, 64), (7, 3), (300, 64)]
# (channels, rotated channels): the longest row of each kernel configuration, the next longer one, and V4's query heads
# (512, 64).
ROTATED = [(64, 64), (72, 64), (128, 8), (136, 64), (256, 128), (264, 8), (512, 64), (512, 512), (520, 64), (1024, 64)]
IN_FLOAT32 = [sizes for sizes in ROTATED if sizes[0] <= 512]  # in fp32 the kernel accepts at most 512 channels


@by_sizes(
    grid(rotated=ROTATED, dtype=(torch.bfloat16, torch.float16), weighted=(True, False)),
    grid(rotated=IN_FLOAT32, dtype=(torch.float32,), weighted=(True, False)),
)
def test_every_length_is_right(sizes, record_error):
    channels, rotated = sizes["rotated"]
    for tokens, heads in COUNTS:
        shape = {"tokens": tokens, "heads": heads, "channels": channels, "rotated": rotated}
        verify(CASE, sizes | shape, record_error)


def test_layouts_change_no_bit():
    check_layouts(CASE, ("x", "cos", "sin"), tokens=60, heads=8, channels=512)


def test_nan_is_where_the_two_ops_have_it():
    given = CASE.arguments("cuda", tokens=40, heads=4, channels=512, weighted=False)
    given["x"][3, 1, 5], given["x"][17, 2, -1] = torch.nan, torch.nan
    CASE.check_call(given)


def test_offsets_beyond_32_bits():
    given = CASE.arguments("cuda", tokens=100, heads=64, channels=512, weighted=False)
    check_far_rows(CASE, given, ("x", "cos", "sin"), 2**31 // (64 * 512) + 50)
