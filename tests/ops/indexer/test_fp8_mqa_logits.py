"""The bridge of the index scores, on the CPU: dispatch, torch.compile, and errors that name the argument."""

import pytest
import torch

import dsa


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
