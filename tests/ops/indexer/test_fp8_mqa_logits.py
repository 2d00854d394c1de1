"""The bridge of the index scores, on the CPU: dispatch, torch.compile, and errors that name the argument."""

import pytest
import torch

import dsa
from dsa.ops.indexer import fp8_mqa_logits as op


def inputs(queries=5, keys=70, heads=8, dim=32):
    q = torch.randn(queries, heads, dim).to(torch.float8_e4m3fn)
    k = torch.randn(keys, dim).to(torch.float8_e4m3fn)
    ends = torch.full((queries,), keys, dtype=torch.int32)
    return q, (k, torch.rand(keys)), torch.randn(queries, heads), ends // 2, ends


@pytest.mark.parametrize("accumulators", [torch.float32, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("compressed", "columns"), [(0, 128), (40, 40)])
def test_what_the_kernel_gets(compressed, columns, dtype, accumulators, launches):
    q, (k, scale), _, starts, ends = inputs()
    wide = torch.randn(5, 11)[:, 2:10]
    out = dsa.fp8_mqa_logits(q, (k, scale), wide, starts, ends, True, compressed, dtype, accumulators)
    [(variant, (flat, keys, scales, rows, *ranges, whole, count, chunk, work_tiles))] = launches
    assert variant == (8, 32, dtype, True, compressed > 0, accumulators == torch.float16) and count == columns
    assert flat.shape == (40, 32) and flat.data_ptr() == q.data_ptr() and keys is k and scales is scale and rows is wide
    assert ranges[0] is starts and ranges[1] is ends
    assert out.shape == (5, compressed or 70) and whole.shape == (5, columns) and whole.data_ptr() == out.data_ptr()
    assert whole.stride() == out.stride() and out.stride(0) * dtype.itemsize % 1024 == 0 and out.stride(0) >= columns
    assert (chunk, work_tiles) == (2, 1)


def test_a_single_key_may_have_any_stride(launches):
    q, (k, scale), weights, starts, ends = inputs(keys=1)
    dsa.fp8_mqa_logits(q, (k.as_strided((1, 32), (7, 1)), scale), weights, starts, ends)
    assert launches[0][1][1].stride() == (32, 1)


def test_nothing_to_score_launches_nothing(launches):
    q, (k, scale), weights, starts, ends = inputs()
    for arguments, shape in (
        ((q[:0], (k, scale), weights[:0], starts[:0], ends[:0]), (0, 70)),
        ((q, (k[:0], scale[:0]), weights, starts, ends), (5, 0)),
    ):
        assert dsa.fp8_mqa_logits(*arguments).shape == shape
    got = dsa.fp8_mqa_logits(q, (k[:0], scale[:0]), weights, starts, ends, False, 9)
    assert got.shape == (5, 9) and got.eq(-torch.inf).all()
    assert not launches


def test_what_the_kernel_does_not_take(launches):
    q, (k, scale), weights, starts, ends = inputs()
    cases = [
        (
            (q[:, :6].contiguous(), k, scale, weights[:, :6]),
            r"q: the kernel takes \(8, 16, 32, 64\) heads, got 6",
        ),
        ((q[..., :16].contiguous(), k[:, :16], scale, weights), r"q: .* head dimensions \(32, 64, 128\), got 16"),
        ((q.transpose(0, 1).contiguous().transpose(0, 1), k, scale, weights), "q: must be contiguous, got strides"),
        ((q, k, scale.expand(2, 70).T.reshape(-1)[::2], weights), r"kv\[1\]: the last dimension must be contiguous"),
        (
            (q, k, scale, weights.T.contiguous().T),
            r"weights: the last dimension must be contiguous, got strides \[1, 5\]",
        ),
        (
            (q, k.view(torch.uint8).repeat(1, 2)[:, 8:40].view(torch.float8_e4m3fn), scale, weights),
            r"kv\[0\]: rows must start at multiples of 16 bytes",
        ),
        ((q, k, scale.to("meta"), weights), r"kv\[1\]: must be on q's device cpu, got meta"),
    ]
    for (queries, keys, scales, rows), message in cases:
        with pytest.raises(ValueError, match=message):
            dsa.fp8_mqa_logits(queries, (keys, scales), rows, starts, ends)
    with pytest.raises(ValueError, match="cu_seq_len_k_end: the last dimension must be contiguous"):
        dsa.fp8_mqa_logits(q, (k, scale), weights, starts, ends.repeat(2)[::2])
    with pytest.raises(ValueError, match=f"max_seqlen_k: the kernel takes less than {2**30} columns, got {2**30}"):
        op._check_limits(q, k, 2**30)
    with pytest.raises(ValueError, match=rf"kv\[0\]: the kernel takes less than {2**30} keys, got {2**30}"):
        op._check_limits(q, torch.empty(2**30, 32, dtype=k.dtype, device="meta"), 0)
    op._check_limits(q, torch.empty(2**30 - 1, 32, dtype=k.dtype, device="meta"), 2**30 - 1)
    assert not launches
