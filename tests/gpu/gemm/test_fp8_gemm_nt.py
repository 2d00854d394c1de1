"""The FP8 product kernel against the reference, on the GPU: one matrix and groups of them."""

import itertools

import pytest
import torch

import dsa
from dsa.kernels.gemm import fp8_gemm_sm90 as kernels
from dsa.ops._kernel_arguments import dtype_name
from dsa.ops.gemm import fp8_gemm_nt as op
from dsa.testing import calc_diff, poison_free_memory

E4M3 = torch.float8_e4m3fn
SHAPES = [(1, 7168, 1536), (7, 576, 7168), (64, 2112, 7168), (65, 128, 128), (128, 8, 16), (300, 1000, 400),
          (4096, 4096, 7168), (513, 24576, 1536)]  # fmt: skip


def operands(rows, columns, channels, matrices=None, powers=True):
    blocks = -(-channels // 128)
    lead = () if matrices is None else (matrices,)
    q = torch.randn(rows, channels, device="cuda").to(E4M3)
    w = torch.randn(*lead, columns, channels, device="cuda").to(E4M3)
    s, ws = (torch.rand(*shape, blocks, device="cuda") + 0.5 for shape in ((rows,), (*lead, -(-columns // 128))))
    if powers:
        s, ws = torch.exp2((8 * s).round() - 8), torch.exp2((8 * ws).round() - 8)
    return (q, s), (w, ws)


def check(got, a, b, ends=None, record_error=None):
    """Within a block the tensor cores keep about 14 bits of the largest product; all else is fp32."""
    with dsa.use_backend("reference"):
        expected = dsa.fp8_gemm_nt(a, b, torch.float32) if ends is None else (
            dsa.grouped_fp8_gemm_nt(a, b, ends, torch.float32)
        )  # fmt: skip
    # What a sum of products of random signs comes to.
    size = sum_of_squares(a, b, ends).sqrt()
    assert got.shape == expected.shape and not got.isnan().any()
    steps = {torch.float32: 0, torch.bfloat16: 2**-8, torch.float16: 2**-11}[got.dtype]
    error = (got.float() - expected).abs() - steps * expected.abs()
    if record_error and got.numel():
        record_error((error / size).max())
    assert (error <= 4e-3 * size).all()
    assert got.numel() == 0 or calc_diff(got, expected) < (1e-7 if got.dtype == torch.float32 else 1e-5)


def sum_of_squares(a, b, ends):
    """sum_k (q s w ws)^2, in fp32."""
    (q, s), (w, ws) = a, b
    rows, channels = w.shape[-2:]
    x = (q.float() * s.repeat_interleave(128, -1)[..., :channels]).square()
    scales = ws.repeat_interleave(128, -2)[..., :rows, :].repeat_interleave(128, -1)[..., :channels]
    y = (w.float() * scales).square()
    if ends is None:
        return x @ y.T
    ends = ends.tolist()
    return torch.cat([x[i:j] @ matrix.T for i, j, matrix in zip([0, *ends], ends, y)])


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_one_matrix(shape, out_dtype, record_error):
    a, b = operands(*shape)
    poison_free_memory(mebibytes=64)
    check(dsa.fp8_gemm_nt(a, b, out_dtype), a, b, record_error=record_error)


def test_any_scales():
    a, b = operands(200, 512, 1024, powers=False)
    check(dsa.fp8_gemm_nt(a, b, torch.float32), a, b)


@pytest.mark.parametrize(
    "sizes",
    [[0, 5, 0, 0, 300, 64, 1, 0], [0] * 7 + [1], [129] * 4, [1] * 256, [0] * 200 + [8] * 56 + [0] * 100, [3000, 1]],
    ids=lambda sizes: f"{len(sizes)} of {sum(sizes)}",
)
@pytest.mark.parametrize("columns, channels", [(512, 256), (136, 128)])
def test_groups(sizes, columns, channels, record_error):
    a, b = operands(sum(sizes), columns, channels, len(sizes))
    ends = torch.tensor(list(itertools.accumulate(sizes)), dtype=torch.int32, device="cuda")
    poison_free_memory(mebibytes=64)
    check(dsa.grouped_fp8_gemm_nt(a, b, ends, torch.float32), a, b, ends, record_error)
    check(dsa.grouped_fp8_gemm_nt(a, b, ends), a, b, ends)


def test_a_row_depends_on_no_other():
    a, b = operands(300, 512, 512, 4)
    ends = torch.tensor([100, 100, 250, 300], dtype=torch.int32, device="cuda")
    got = dsa.grouped_fp8_gemm_nt(a, b, ends)
    for row, e in ((0, 0), (99, 0), (100, 2), (249, 2), (250, 3)):
        alone = dsa.fp8_gemm_nt((a[0][row : row + 1], a[1][row : row + 1]), (b[0][e], b[1][e]))
        assert torch.equal(alone[0], got[row])
    assert torch.equal(got, dsa.grouped_fp8_gemm_nt(a, b, ends))


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_every_tile_gives_the_same_bits(out_dtype, monkeypatch):
    sizes = torch.tensor([0, 5, 300, 64, 1, 130])
    a, b = operands(500, 392, 400, len(sizes))
    ends = sizes.cumsum(0, dtype=torch.int32).cuda()
    expected = dsa.grouped_fp8_gemm_nt(a, b, ends, out_dtype)
    for config in kernels.CONFIGS:
        kernel = kernels.compile_fp8_gemm(dtype_name(out_dtype), config)
        monkeypatch.setattr(op, "_kernel", lambda *arguments, kernel=kernel: kernel)
        poison_free_memory(mebibytes=64)
        assert torch.equal(dsa.grouped_fp8_gemm_nt(a, b, ends, out_dtype), expected)


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("ends", "rows_of"),
    [
        ([10, 5, 200, 300], {0: (0, 10)}),
        ([-5, 10, 2**31 - 1, 64], {}),
        ([-(2**31), 2**31 - 1, 20, 64], {3: (20, 64)}),
        ([64, 0, 0, 0], {0: (0, 64)}),
        ([10, 20, 30, 2**31 - 1], {0: (0, 10), 1: (10, 20), 2: (20, 30), 3: (30, 64)}),
        ([10, 10, 17, 33], {0: (0, 10), 2: (10, 17), 3: (17, 33)}),
    ],
    ids=str,
)
def test_nothing_outside_the_rows_is_written(ends, rows_of, out_dtype):
    """Whatever the ends say: rows that are a weight's are right, rows that are none's stay as they were, and so do the
    rows in memory before and behind."""
    rows, columns = 64, 136
    a, b = operands(rows, columns, 128, 4)
    expected = torch.full((3 * rows, columns), 7.0, dtype=out_dtype, device="cuda")
    for e, (begin, end) in rows_of.items():
        part = slice(begin, end)
        expected[rows:][part] = dsa.fp8_gemm_nt((a[0][part], a[1][part]), (b[0][e], b[1][e]), out_dtype)
    for config in kernels.CONFIGS:
        launch = kernels.compile_fp8_gemm(dtype_name(out_dtype), config)
        guarded = torch.full_like(expected, 7.0)
        (q, s), (w, ws) = a, b
        numbers = torch.tensor(ends, dtype=torch.int32, device="cuda")
        multiprocessors = dsa.num_sms(q.device)
        launch(q, op._scales(s), w.view(-1, 128), op._scales(ws), numbers, guarded[rows : 2 * rows], multiprocessors)
        assert torch.equal(guarded, expected)


def test_strided_rows_leading_dimensions_and_empty_inputs():
    (q, s), b = operands(48, 256, 512)
    wide = torch.cat((q.view(torch.uint8), q.view(torch.uint8)), 1).view(E4M3)[:, :512]
    check(dsa.fp8_gemm_nt((wide, s), b), (q, s), b)
    check(dsa.fp8_gemm_nt((q.view(4, 12, 512), s.view(4, 12, 4)), b).view(48, 256), (q, s), b)
    assert dsa.fp8_gemm_nt((q[:0], s[:0]), b).shape == (0, 256)
    assert dsa.fp8_gemm_nt((q[:, :0], s[:, :0]), (b[0][:, :0], b[1][:, :0])).eq(0).all()


def test_graph_replay_with_new_sizes():
    a, b = operands(256, 256, 256, 8)
    ends = torch.full((8,), 256, dtype=torch.int32, device="cuda")
    dsa.grouped_fp8_gemm_nt(a, b, ends)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = dsa.grouped_fp8_gemm_nt(a, b, ends, torch.float32)
    for seed in range(3):
        cuts = torch.randint(0, 257, (7,), generator=torch.Generator().manual_seed(seed)).sort().values
        ends.copy_(torch.cat((cuts, torch.tensor([256]))))
        graph.replay()
        check(out, a, b, ends)


def test_shapes_without_a_kernel():
    a, b = operands(4, 12, 128)
    with pytest.raises(
        ValueError, match=r"b\[0\]: the kernel takes K that is a multiple of 16 and N of 8, got \[N, K\]"
    ):
        dsa.fp8_gemm_nt(a, b)
