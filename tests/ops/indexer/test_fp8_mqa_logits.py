"""The bridge of the index scores, on the CPU: a single key."""

import torch

import dsa


def inputs(queries=5, keys=70, heads=8, dim=32):
    q = torch.randn(queries, heads, dim).to(torch.float8_e4m3fn)
    k = torch.randn(keys, dim).to(torch.float8_e4m3fn)
    ends = torch.full((queries,), keys, dtype=torch.int32)
    return q, (k, torch.rand(keys)), torch.randn(queries, heads), ends // 2, ends


def test_a_single_key_may_have_any_stride(launches):
    q, (k, scale), weights, starts, ends = inputs(keys=1)
    dsa.fp8_mqa_logits(q, (k.as_strided((1, 32), (7, 1)), scale), weights, starts, ends)
    assert launches[0][1][1].stride() == (32, 1)
