"""DeepGEMM's signatures over the FP8 product kernels, at the sizes of DeepGEMM's own tests, on the GPU."""

import random

import pytest
import torch

import dsa
from dsa.compat import deep_gemm
from dsa.testing import calc_diff, poison_free_memory
from tests.gpu.op_checks import replays

BF16, INT32 = torch.bfloat16, torch.int32
MAX_DIFF = 1e-3  # between the product of casts and that of the numbers cast, as DeepGEMM's tests ask
ONE = [(2112, 7168), (576, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048)]
GROUPED = [(6144, 7168), (7168, 3072), (4096, 4096), (4096, 2048)]


def weight(columns, channels):
    w = torch.randn(columns, channels, device="cuda").to(BF16)
    return w, dsa.per_block_cast_to_fp8(w, False)


def weights(groups, columns, channels):
    """A matrix a group, and all of them cast."""
    pairs = [weight(columns, channels) for _ in range(groups)]
    return [w for w, _ in pairs], tuple(torch.stack(parts) for parts in zip(*(b for _, b in pairs)))


def rows(*shape):
    x = torch.randn(*shape, device="cuda").to(BF16)
    return x, dsa.per_token_cast_to_fp8(x, False)


def column_major(scales):
    """The layout of `get_mn_major_tma_aligned_tensor`."""
    count, blocks = scales.shape[-2:]
    wide = scales.new_full((*scales.shape[:-2], blocks, -(-count // 4) * 4), torch.nan)
    wide[..., :count] = scales.mT
    return wide.mT[..., :count, :]


def check(got, x, w, q, s, b, record_error):
    """Near the product of the numbers that were cast, and bit by bit dsa's of the casts."""
    difference = calc_diff(got, (x @ w.T).float())
    record_error(difference)
    assert difference < MAX_DIFF
    assert torch.equal(got, dsa.fp8_gemm_nt((q, s), b))


def aligned(size):
    return -(-size // 128) * 128


def sizes_of(groups, expected):
    random.seed(0)
    return [int(expected * random.uniform(0.7, 1.3)) for _ in range(groups)]


@pytest.mark.parametrize("count", [1, 128, 4096])
@pytest.mark.parametrize(("columns", "channels"), ONE)
def test_one_matrix(count, columns, channels, record_error):
    x, (q, s) = rows(count, channels)
    w, b = weight(columns, channels)
    for scales, padding in ((s, 0), (column_major(s), 8)):
        d = torch.full((count, columns + padding), torch.nan, dtype=BF16, device="cuda")
        poison_free_memory(mebibytes=64)
        deep_gemm.fp8_gemm_nt((q, scales), b, d[:, :columns])
        check(d[:, :columns], x, w, q, s, b, record_error)
        assert d[:, columns:].isnan().all()


@pytest.mark.parametrize(("groups", "expected"), [(4, 8192), (8, 4096)])
@pytest.mark.parametrize(("columns", "channels"), GROUPED)
def test_contiguous_groups(groups, expected, columns, channels, record_error):
    sizes = sizes_of(groups, expected)
    sizes[2] = 0
    starts = [sum(map(aligned, sizes[:e])) for e in range(groups)]
    # Behind the last group as many rows again, of a buffer for the most that there can be.
    total = sum(map(aligned, sizes)) + expected
    x, (q, s) = rows(total, channels)
    w, b = weights(groups, columns, channels)
    numbers = torch.full((total,), -1, dtype=INT32)
    for e, (start, size) in enumerate(zip(starts, sizes)):
        numbers[start : start + size] = e
    ends = torch.tensor([start + size for start, size in zip(starts, sizes)], dtype=INT32, device="cuda")
    for given, psum in ((numbers.cuda(), False), (ends, True)):
        d = torch.full((total, columns), torch.nan, dtype=BF16, device="cuda")
        options = {"use_psum_layout": psum, "expected_m_for_psum_layout": expected if psum else None}
        deep_gemm.m_grouped_fp8_fp4_gemm_nt_contiguous((q, column_major(s)), b, d, given, **options)
        for e, (start, size) in enumerate(zip(starts, sizes)):
            part = slice(start, start + aligned(size))  # padding has its products, too
            if size:
                check(d[part], x[part], w[e], q[part], s[part], (b[0][e], b[1][e]), record_error)
        assert d[-expected:].isnan().all()


@pytest.mark.parametrize(("groups", "expected"), [(32, 192), (6, 1024), (32, 20), (6, 20)])
@pytest.mark.parametrize(("columns", "channels"), GROUPED[1:])
def test_masked_groups(groups, expected, columns, channels, record_error):
    sizes, most = sizes_of(groups, expected), aligned(int(1.3 * expected))
    sizes[3] = 0
    x, (q, s) = rows(groups, most, channels)
    w, b = weights(groups, columns, channels)
    d = torch.full((groups, most, columns), torch.nan, dtype=BF16, device="cuda")
    masked = torch.tensor(sizes, dtype=INT32, device="cuda")
    deep_gemm.m_grouped_fp8_gemm_nt_masked((q, column_major(s)), b, d, masked, int(1.2 * expected))
    for e, size in enumerate(sizes):
        if size:
            check(d[e, :size], x[e, :size], w[e], q[e, :size], s[e, :size], (b[0][e], b[1][e]), record_error)
        assert d[e, size:].isnan().all()


def test_a_result_whose_rows_are_at_no_multiple_of_16_bytes():
    _, (q, s) = rows(100, 512)
    _, b = weight(264, 512)
    d = torch.full((100, 265), torch.nan, dtype=BF16, device="cuda")
    deep_gemm.fp8_gemm_nt((q, s), b, d[:, 1:])
    assert torch.equal(d[:, 1:], dsa.fp8_gemm_nt((q, s), b)) and d[:, 0].isnan().all()


def test_a_graph_takes_new_groups():
    _, (q, s) = rows(512, 256)
    _, b = weights(3, 256, 256)
    numbers, masked = torch.zeros(512, dtype=INT32, device="cuda"), torch.full((2,), 256, dtype=INT32, device="cuda")
    d, e = (torch.empty(512, 256, dtype=BF16, device="cuda") for _ in range(2))
    halves = tuple(t.view(2, 256, -1) for t in (q, s)), tuple(t[:2] for t in b), e.view(2, 256, 256)
    sizes = iter((([128, 384, 0], [1, 256]), ([0, 512, 0], [0, 77]), ([384, 0, 128], [256, 0])))

    def call(*_):
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous((q, s), b, d, numbers)
        deep_gemm.m_grouped_fp8_gemm_nt_masked(*halves, masked, 128)

    def renew():
        d.fill_(torch.nan)
        e.fill_(torch.nan)
        of_groups, counts = next(sizes)
        return torch.repeat_interleave(torch.arange(3), torch.tensor(of_groups)), torch.tensor(counts)

    for _ in replays(call, (numbers, masked), renew):
        for group in range(3):
            part = numbers == group
            # FP8 rows cannot be picked by a mask, their bytes can.
            chosen = q.view(torch.uint8)[part].view(q.dtype), s[part]
            assert torch.equal(d[part], dsa.fp8_gemm_nt(chosen, (b[0][group], b[1][group])))
        for half, count in enumerate(masked.tolist()):
            part = slice(256 * half, 256 * half + count)
            assert torch.equal(e[part], dsa.fp8_gemm_nt((q[part], s[part]), (b[0][half], b[1][half])))
            assert e[256 * half + count : 256 * (half + 1)].isnan().all()


@pytest.mark.parametrize(
    "numbers", [[3, 2, 1, 0], [2**31 - 1] * 4, [-(2**31)] * 4, [0, 2**31 - 1, -(2**31), 1], [1, -1, 0, 2]], ids=str
)
def test_nothing_outside_the_result_is_written(numbers):
    """Whatever the indices, the ends and the counts say."""
    _, (q, s) = rows(64, 256)
    _, b = weights(4, 256, 256)
    around = torch.full((192, 256), 7.0, dtype=BF16, device="cuda")
    d, given = around[64:128], torch.tensor(numbers, dtype=INT32, device="cuda")
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous((q, s), b, d, given.repeat_interleave(16))
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous((q, s), b, d, given, use_psum_layout=True)
    groups = tuple(t.view(4, 16, -1) for t in (q, s))
    deep_gemm.m_grouped_fp8_gemm_nt_masked(groups, b, d.view(4, 16, 256), given, 4)
    torch.cuda.synchronize()
    assert (around[:64] == 7).all() and (around[128:] == 7).all() and not d.isnan().any()
