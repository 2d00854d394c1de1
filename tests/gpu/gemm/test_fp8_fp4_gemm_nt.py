"""Products of FP4 weights on the GPU: bit by bit those of the widened weights."""

import itertools

import pytest
import torch

import dsa
from dsa.testing import poison_free_memory

E4M3 = torch.float8_e4m3fn


def weights(experts, columns, channels, spread=14):
    """Any codes, and scales that e4m3 holds, as `grouped_fp8_fp4_gemm_nt` takes them."""
    packed = torch.randint(-128, 128, (experts, columns, channels // 2), dtype=torch.int8, device="cuda")
    shape = experts, columns, channels // 32
    scale = torch.randint(120 - spread, 121, shape, dtype=torch.uint8, device="cuda").view(torch.float8_e8m0fnu)
    return packed, scale, dsa.fp4_block_scales(packed, scale)


def activations(tokens, channels):
    q = torch.randn(tokens, channels, device="cuda").to(E4M3)
    return q, torch.rand(tokens, -(-channels // 128), device="cuda") + 0.5


def check(a, b, ends, out_dtype, record_error=None, **options):
    poison_free_memory(mebibytes=64)
    got = dsa.grouped_fp8_fp4_gemm_nt(a, b, ends, out_dtype, **options)
    expected = dsa.grouped_fp8_gemm_nt(a, dsa.widen_fp4(*b[:2]), ends, out_dtype, **options)
    assert got.dtype == out_dtype and got.is_contiguous() and torch.equal(got, expected)
    if record_error:
        record_error((got.float() - expected.float()).abs().max() if got.numel() else 0.0)


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("columns", "channels"), [(128, 128), (256, 2048), (136, 160), (8, 32), (4096, 1024)])
@pytest.mark.parametrize(
    "sizes",
    [[0, 5, 0, 0, 300, 64, 1, 0], [0] * 7 + [1], [129] * 4, [1] * 64, [3000, 1]],
    ids=lambda sizes: f"{len(sizes)} of {sum(sizes)}",
)
def test_shapes(sizes, columns, channels, out_dtype, record_error):
    ends = torch.tensor(list(itertools.accumulate(sizes)), dtype=torch.int32, device="cuda")
    check(activations(sum(sizes), channels), weights(len(sizes), columns, channels), ends, out_dtype, record_error)


@pytest.mark.parametrize("tokens", [1, 32, 128, 2000])
def test_rows_and_weights(tokens, record_error):
    """As a mixture has them, 6 of 16 experts."""
    a, b = activations(tokens, 1024), weights(16, 512, 1024)
    chosen = torch.rand(tokens, 16, device="cuda").argsort(-1)[:, :6]
    order, _, ends = dsa.sort_by_expert(chosen, 16)
    factors = torch.rand(6 * tokens, device="cuda")
    check(a, b, ends, torch.bfloat16, record_error, rows=order // 6)
    check(a, b, ends, torch.bfloat16, record_error, rows=order // 6, weights=factors)
    check(a, b, ends, torch.float32, record_error, rows=order // 6, weights=factors)


def test_every_code_at_every_scale():
    """Rows of one code and groups of every exponent, beside the block's largest."""
    codes = torch.arange(16, device="cuda").repeat_interleave(8)[:, None] * 17
    packed = codes.to(torch.uint8).view(torch.int8).expand(1, 128, 256).contiguous()
    exponents = (torch.arange(16, device="cuda") % 15).expand(1, 128, 16)
    scale = (exponents + 100).to(torch.uint8).view(torch.float8_e8m0fnu).contiguous()
    b = packed, scale, dsa.fp4_block_scales(packed, scale)
    check(activations(64, 512), b, torch.tensor([64], dtype=torch.int32, device="cuda"), torch.float32)


def test_ends_of_the_scale_range():
    """Scales of zeros are anything, and scales near 2^-127 make subnormal products."""
    packed, scale, _ = weights(2, 128, 256)
    packed[0, 7, :16] = 0
    scale.view(torch.uint8)[0, 7, 0], scale.view(torch.uint8)[1] = 254, 0
    b = packed, scale, dsa.fp4_block_scales(packed, scale)
    ends = torch.tensor([20, 64], dtype=torch.int32, device="cuda")
    check(activations(64, 256), b, ends, torch.float32)


def test_a_row_depends_on_no_other():
    a, b = activations(300, 512), weights(4, 512, 512)
    ends = torch.tensor([100, 100, 250, 300], dtype=torch.int32, device="cuda")
    got = dsa.grouped_fp8_fp4_gemm_nt(a, b, ends)
    for row, e in ((0, 0), (99, 0), (100, 2), (249, 2), (250, 3)):
        one = torch.tensor([row], dtype=torch.int32, device="cuda")
        only = (torch.arange(4, device="cuda") >= e).int()
        assert torch.equal(dsa.grouped_fp8_fp4_gemm_nt(a, b, only, rows=one)[0], got[row])
    assert torch.equal(got, dsa.grouped_fp8_fp4_gemm_nt(a, b, ends))


def test_graph_replay_with_new_sizes():
    a, b = activations(64, 256), weights(8, 256, 256)
    ends = torch.full((8,), 256, dtype=torch.int32, device="cuda")
    rows, factors = torch.zeros(256, dtype=torch.int32, device="cuda"), torch.zeros(256, device="cuda")
    dsa.grouped_fp8_fp4_gemm_nt(a, b, ends, rows=rows, weights=factors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = dsa.grouped_fp8_fp4_gemm_nt(a, b, ends, rows=rows, weights=factors)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        cuts = torch.randint(0, 257, (7,), generator=generator).sort().values
        ends.copy_(torch.cat((cuts, torch.tensor([256]))))
        rows.copy_(torch.randint(0, 64, (256,), generator=generator))
        factors.copy_(torch.rand(256, generator=generator))
        graph.replay()
        assert torch.equal(out, dsa.grouped_fp8_gemm_nt(a, dsa.widen_fp4(*b[:2]), ends, rows=rows, weights=factors))
