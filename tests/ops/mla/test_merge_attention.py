"""The bridge of the merge, on the CPU: dispatch, what it launches, torch.compile, and errors with a name."""

import math

import pytest
import torch

import dsa
from dsa.kernels.mla import merge_attention_sm90 as kernels
from dsa.kernels.mla.limits import MAX_MERGE_ROWS
from dsa.ops.mla import merge_attention as op  # noqa: F401, for the fixture `launches`

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def branches(count=2, shape=(3, 4, 16), dtype=torch.bfloat16):
    """outs, of which the first has an empty row, and lses."""
    outs = [torch.randn(shape).to(dtype) for _ in range(count)]
    lses = [torch.randn(shape[:-1]) for _ in range(count)]
    lses[0].view(-1)[:1] = math.inf
    return outs, lses


def test_the_kernel_takes_what_the_limits_say():
    assert MAX_MERGE_ROWS == 2**31 - 2 * kernels.WARPS
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        assert (kernels.compile_merge_attention, (name, 3, True)) in kernels.shipped_variants()


def test_what_is_no_tensor_is_named():
    outs, lses = branches()
    for position, name in enumerate(("outs[0]", "outs[1]", "lses[0]", "lses[1]")):
        tensors = [*outs, *lses]
        tensors[position] = [1.0]
        with pytest.raises(TypeError, match=rf"{name[:4]}\[{name[5]}\]: must be a torch.Tensor, got list"):
            dsa.merge_attention(tensors[:2], tensors[2:])
    with pytest.raises(ValueError, match="lses: must be a list of as many tensors as outs, 2, got 1"):
        dsa.merge_attention(outs, lses[:1])
    with pytest.raises(ValueError, match="outs: must be a list of at least one tensor, got none"):
        dsa.merge_attention([], [])
    with pytest.raises(ValueError, match=r"outs\[0\]: must have at least 2 dimensions, got shape \[16\]"):
        dsa.merge_attention([outs[0][0, 0]], [lses[0][0, 0]])


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


@pytest.mark.parametrize("shape", [(0, 4, 16), (3, 0, 16), (2, 0, 3, 4, 8)])
def test_nothing_to_merge(shape, launches):
    out, lse = dsa.merge_attention(*branches(2, shape))
    assert out.shape == shape and lse.shape == shape[:-1] and not launches


def test_parts_of_larger_tensors_are_used_where_they_are(launches):
    outs, lses = branches(2, (6, 4, 16))
    wide = [torch.nn.functional.pad(x, (8, 24))[..., 8:24] for x in outs]
    dsa.merge_attention([wide[0], outs[1].transpose(0, 1).contiguous().transpose(0, 1)], lses)
    assert [x.stride() for x in launches[0][1][0]] == [(1152, 192, 48, 1), (96, 16, 96, 1)]
    # Strides of single elements mean nothing.
    one = outs[0][:1, :1].as_strided((1, 1, 16), (7, 3, 1))
    dsa.merge_attention([one, one], [lses[0][:1, :1]] * 2)
    for got in launches[1][1][0]:
        assert got.data_ptr() == one.data_ptr() and all(stride % 8 == 0 for stride in got.stride()[:-1])


def test_what_the_kernel_does_not_take(launches):
    outs, lses = branches(2)
    merged = "dimensions 0 to 1 must be mergeable into one with a single stride, got "
    aligned = r"outs\[1\]: rows must start at multiples of 16 bytes, got "
    odd = torch.nn.functional.pad(outs[1], (0, 1))[..., :16]
    shifted = torch.nn.functional.pad(outs[1], (4, 4))[..., 4:20]
    columns = outs[1].repeat_interleave(2, 2)[..., ::2]
    six, logs = branches(2, (2, 3, 2, 4, 16))
    apart = six[0].transpose(0, 2).contiguous().transpose(0, 2)
    logs_apart = logs[1].transpose(0, 1).contiguous().transpose(0, 1)
    many = torch.zeros(8).bfloat16().expand(2**20, 2**11, 8), torch.zeros(1).expand(2**20, 2**11)
    narrow = [x[..., :12] for x in outs]
    for arguments, message in [
        ((outs * 3, lses * 3), "outs: the kernel merges 1 to 4 branches, got 6"),
        ((narrow, lses), r"outs\[0\]: the kernel takes d_v a multiple of 8, got shape \[3, 4, 12\]"),
        (([x[..., :0] for x in outs], lses), r"outs\[0\]: .* takes d_v a multiple of 8, got shape \[3, 4, 0\]"),
        (([outs[0], outs[1].float()], lses), r"outs\[1\]: dtype must be outs\[0\]'s bfloat16, got float32"),
        (([outs[0], odd], lses), aligned + r"an address 0 bytes past one and strides of \[136, 34\] bytes"),
        (([outs[0], shifted], lses), aligned + r"an address 8 bytes past one and strides of \[192, 48\] bytes"),
        (([outs[0], columns], lses), r"outs\[1\]: the last dimension must be contiguous, got strides \[128, 32, 2\]"),
        (([six[0], apart], logs), r"outs\[1\]: " + merged + r"shape \[2, 3, 2, 4, 16\]"),
        (
            (six, [logs[0], logs_apart]),
            r"lses\[1\]: dimensions 0 to 1 must be mergeable .* got shape \[2, 3, 2, 4\]",
        ),
        (([many[0]], [many[1]]), r"outs\[0\]: the kernel takes at most 2147483640 rows, got shape"),
        (([outs[0], outs[1].to("meta")], lses), r"outs\[1\]: must be on outs\[0\]'s device cpu, got meta"),
        ((outs, [lses[0].to("meta"), lses[1]]), r"lses\[0\]: must be on outs\[0\]'s device cpu, got meta"),
        ((outs, lses, torch.zeros(4, device="meta")), r"attn_sink: must be on outs\[0\]'s device cpu, got meta"),
    ]:
        with pytest.raises(ValueError, match=message):
            dsa.merge_attention(*arguments)
    assert not launches
