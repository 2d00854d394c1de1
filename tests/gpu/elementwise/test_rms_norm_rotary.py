"""The norm with rope, with lengths, strides and numbers that its case leaves out."""

from itertools import product

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.testing import poison_free_memory

(CASE,) = cases_of("rms_norm_rotary")
# The longest rows of each configuration, and V4's query heads: channels, and how many are rotated.
ROTATED = [(64, 64), (72, 64), (128, 8), (136, 64), (256, 128), (264, 8), (512, 64), (512, 512), (520, 64), (1024, 64)]


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize(
    ("dtype", "channels", "rotated"),
    [
        *((dtype, *sizes) for dtype, sizes in product((torch.bfloat16, torch.float16), ROTATED)),
        *((torch.float32, *sizes) for sizes in ROTATED if sizes[0] <= 512),  # the most that the kernel takes in fp32
    ],
    ids=str,
)
def test_lengths(dtype, channels, rotated, weighted, record_error):
    sizes = {"channels": channels, "rotated": rotated, "dtype": dtype, "weighted": weighted}
    for tokens, heads in ((1, 1), (1, 64), (7, 3), (300, 64)):
        poison_free_memory(mebibytes=64)
        record_error(CASE.verify("cuda", tokens=tokens, heads=heads, **sizes))


def test_strided_heads():
    given = CASE.arguments("cuda", tokens=60, heads=8, channels=576, weighted=False)
    base = given["x"]
    for x in (base[..., :512], base[:, ::2, 64:], base[:, :1, :512], base.transpose(0, 1).contiguous().transpose(0, 1)):
        CASE.check_call(given | {"x": x})


def test_strided_angles():
    given = CASE.arguments("cuda", tokens=60, heads=8, channels=512, rotated=128)
    CASE.check_call(given | {"cos": given["cos"][:, :32], "sin": given["sin"][:, 4:36]})


def test_nan_is_where_the_two_ops_have_it():
    given = CASE.arguments("cuda", tokens=40, heads=4, channels=512, weighted=False)
    given["x"][3, 1, 5], given["x"][17, 2, -1] = torch.nan, torch.nan
    CASE.check_call(given)


def test_offsets_beyond_32_bits():
    tokens = 2**31 // (64 * 512) + 50
    x = torch.zeros(tokens, 64, 512, dtype=torch.bfloat16, device="cuda")
    some, _, cos, sin, _ = CASE.arguments("cuda", tokens=100, heads=64, channels=512).values()
    x[-100:] = some
    angles = torch.zeros(2, tokens, 32, device="cuda")
    angles[0, -100:], angles[1, -100:] = cos, sin
    got = dsa.rms_norm_rotary(x, None, *angles)
    assert torch.equal(got[-100:], dsa.rms_norm_rotary(some, None, cos, sin)) and not got[:-100].any()
