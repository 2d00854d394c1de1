"""The bridge of the index scores, on the CPU: dispatch, torch.compile, and errors that name the argument."""

import pytest
import torch

import dsa
from dsa.ops.indexer import fp8_mqa_logits as op
from dsa.reference.indexer import fp8_mqa_logits as reference


def inputs(queries=5, keys=70, heads=8, dim=32):
    q = torch.randn(queries, heads, dim).to(torch.float8_e4m3fn)
    k = torch.randn(keys, dim).to(torch.float8_e4m3fn)
    ends = torch.full((queries,), keys, dtype=torch.int32)
    return q, (k, torch.rand(keys)), torch.randn(queries, heads), ends // 2, ends


@pytest.mark.parametrize("options", [{}, {"max_seqlen_k": 40}, {"clean_logits": False, "logits_dtype": torch.bfloat16}])
def test_runs_the_reference_without_a_gpu(options):
    arguments = inputs()
    assert torch.equal(dsa.fp8_mqa_logits(*arguments, **options), reference.fp8_mqa_logits(*arguments, **options))


def test_is_one_node_of_a_compiled_graph():
    arguments = inputs()
    compiled = torch.compile(lambda *a: dsa.fp8_mqa_logits(*a), fullgraph=True, backend="aot_eager")
    got, expected = compiled(*arguments), dsa.fp8_mqa_logits(*arguments)
    assert torch.equal(got, expected) and got.stride() == expected.stride()


def test_what_the_kernel_does_not_take():
    q, (k, scale), weights, starts, ends = inputs()
    op._check_kernel_takes(q, k, scale, weights, starts, ends)
    cases = [
        ((q[:, :6].contiguous(), k, scale, weights), r"q: the Hopper kernel takes \(8, 16, 32, 64\) heads, got 6"),
        ((q[..., :16].contiguous(), k[:, :16], scale, weights), r"q: .* head dimensions \(32, 64, 128\), got 16"),
        ((q.transpose(0, 1).contiguous().transpose(0, 1), k, scale, weights), "q: must be contiguous, got shape"),
        ((q, k, scale.expand(2, 70).T.reshape(-1)[::2], weights), r"kv\[1\]: the last dimension must be contiguous"),
        (
            (q, k.view(torch.uint8).repeat(1, 2)[:, 8:40].view(torch.float8_e4m3fn), scale, weights),
            r"kv\[0\]: rows must",
        ),
    ]
    for arguments, message in cases:
        with pytest.raises(ValueError, match=message):
            op._check_kernel_takes(*arguments, starts, ends)


def test_errors_name_the_argument():
    q, kv, weights, starts, ends = inputs()
    with pytest.raises(ValueError, match=r"weights: shape must be \[5, 8\], got \[5, 7\]"):
        dsa.fp8_mqa_logits(q, kv, weights[:, :7], starts, ends)
    with pytest.raises(TypeError, match="kv: must be a pair"):
        dsa.fp8_mqa_logits(q, kv[0], weights, starts, ends)
