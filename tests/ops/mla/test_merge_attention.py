"""`merge_attention` on the CPU: the branches that the kernel gets."""

import math

import pytest
import torch

import dsa
from dsa.kernels.mla import merge_attention_sm90 as kernels
from dsa.kernels.mla.limits import MAX_MERGE_ROWS

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def branches(count=2, shape=(3, 4, 16), dtype=torch.bfloat16):
    """Return outs and lses. The first row of the first branch has no keys: its LSE is infinite."""
    outs = [torch.randn(shape).to(dtype) for _ in range(count)]
    lses = [torch.randn(shape[:-1]) for _ in range(count)]
    lses[0].view(-1)[:1] = math.inf
    return outs, lses


def test_the_kernel_takes_what_the_limits_say():
    assert MAX_MERGE_ROWS == 2**31 - 2 * kernels.WARPS
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        assert (kernels.compile_merge_attention, (name, 3, True)) in kernels.shipped_variants()


SHAPES = [
    ((5, 8), (1, 1, 5, 8)),
    ((3, 5, 8), (1, 3, 5, 8)),
    ((2, 3, 5, 8), (2, 3, 5, 8)),
    ((7, 2, 3, 5, 8), (14, 3, 5, 8)),
    ((1, 1, 1, 1, 1, 8), (1, 1, 1, 8)),
]


@pytest.mark.parametrize(("shape", "seen"), SHAPES, ids=str)
def test_the_kernel_sees_four_dimensions(shape, seen, launches):
    outs, lses = branches(2, shape)
    got = dsa.merge_attention(outs, lses)
    assert got[0].shape == shape and got[1].shape == shape[:-1]
    [(_, (got_outs, got_lses, _, out, lse))] = launches
    assert all(x.shape == seen for x in (*got_outs, out)) and all(x.shape == seen[:-1] for x in (*got_lses, lse))
    assert [x.data_ptr() for x in (out, lse)] == [x.data_ptr() for x in got]
    assert all(torch.equal(x.view(-1), y.view(-1)) for x, y in zip(got_outs + got_lses, outs + lses, strict=True))


def test_parts_of_larger_tensors_are_used_where_they_are(launches):
    outs, lses = branches(2, (6, 4, 16))
    wide = [torch.nn.functional.pad(x, (8, 24))[..., 8:24] for x in outs]
    dsa.merge_attention([wide[0], outs[1].transpose(0, 1).contiguous().transpose(0, 1)], lses)
    assert [x.stride() for x in launches[0][1][0]] == [(1152, 192, 48, 1), (96, 16, 96, 1)]
    # Strides of dimensions of size 1 are arbitrary.
    one = outs[0][:1, :1].as_strided((1, 1, 16), (7, 3, 1))
    dsa.merge_attention([one, one], [lses[0][:1, :1]] * 2)
    for got in launches[1][1][0]:
        assert got.data_ptr() == one.data_ptr() and all(stride % 8 == 0 for stride in got.stride()[:-1])
