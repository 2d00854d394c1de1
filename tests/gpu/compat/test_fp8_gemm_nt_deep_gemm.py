"""FP8 GEMMs with one weight matrix, contiguous groups and masked groups, called through DeepGEMM's signatures
(`dsa.compat.deep_gemm`) at sizes of DeepGEMM's own tests."""

import random
from itertools import accumulate

import pytest
import torch

from dsa.compat import deep_gemm
from dsa.testing import poison_free_memory
from tests.gpu.attention import case_of, int32
from tests.gpu.op_checks import captured

ONE, GROUPED = case_of("fp8_gemm_nt"), case_of("grouped_fp8_gemm_nt")
EXPERTS = [(6144, 7168), (7168, 3072), (4096, 4096), (4096, 2048)]


def column_major(scales):
    """Return the scales in the layout of DeepGEMM's `get_mn_major_tma_aligned_tensor`: by columns, each padded to a
    multiple of 16 bytes."""
    *groups, count, blocks = scales.shape
    wide = scales.new_full((*groups, blocks, -(-count // 4) * 4), torch.nan)
    wide[..., :count] = scales.mT
    return wide.mT[..., :count, :]


def inputs(sizes, columns, channels, after=0):
    """Return (arguments, a tensor of NaN for the result). sizes: rows of each group. after: unused rows after the last
    group"""
    options = {"columns": columns, "channels": channels, "weighted": False, "after": after}
    given = GROUPED.arguments("cuda", sizes=sizes, **options)
    return given, torch.full((sum(sizes) + after, columns), torch.nan, dtype=torch.bfloat16, device="cuda")


def check_groups(given, d, starts, sizes):
    """Check the rows of d that belong to groups, and that all other rows are still NaN. starts, sizes: first row and
    number of rows of each group. -> the largest error"""
    rows = int32([row for start, size in zip(starts, sizes, strict=True) for row in range(start, start + size)])
    error = GROUPED.check(given | {"rows": rows, "ends": int32([*accumulate(sizes)])}, [d[rows]])
    d[rows] = torch.nan
    assert d.isnan().all()
    return error


def aligned(size):
    return -(-size // 128) * 128


def sizes_of(groups, expected, empty):
    random.seed(0)
    sizes = [int(expected * random.uniform(0.7, 1.3)) for _ in range(groups)]
    sizes[empty] = 0
    return sizes


@pytest.mark.parametrize("rows", [1, 128, 4096])
@pytest.mark.parametrize(
    ("columns", "channels"),
    [(2112, 7168), (576, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048)],
)
def test_one_matrix_is_right(rows, columns, channels, record_error):
    given = ONE.arguments("cuda", rows=rows, columns=columns, channels=channels, out_dtype=torch.bfloat16)
    q, s = given["a"]
    for scales, before, after in ((s, 0, 0), (column_major(s), 0, 8), (s, 1, 0)):
        whole = torch.full((rows, before + columns + after), torch.nan, dtype=torch.bfloat16, device="cuda")
        d = whole[:, before : before + columns]
        poison_free_memory(mebibytes=64)
        deep_gemm.fp8_gemm_nt((q, scales), given["b"], d)
        record_error(ONE.check(given, [d]))
        d.fill_(torch.nan)
        assert whole.isnan().all()


@pytest.mark.parametrize("by_ends", [False, True])
@pytest.mark.parametrize(("groups", "expected"), [(4, 8192), (8, 4096)])
@pytest.mark.parametrize(("columns", "channels"), EXPERTS)
def test_contiguous_groups_are_right(groups, expected, columns, channels, by_ends, record_error):
    """As in a buffer for the largest possible number of rows, `expected` rows after the last group are unused."""
    sizes = sizes_of(groups, expected, empty=2)
    padded = [aligned(size) for size in sizes]
    starts = [end - size for end, size in zip(accumulate(padded), padded)]
    given, d = inputs(padded, columns, channels, after=expected)
    groups_of_rows = [e if row < size else -1 for e, size in enumerate(sizes) for row in range(aligned(size))]
    numbers, options = int32([*groups_of_rows, *[-1] * expected]), {}
    if by_ends:
        numbers = int32([start + size for start, size in zip(starts, sizes)])
        options = {"use_psum_layout": True, "expected_m_for_psum_layout": expected}
    q, s = given["a"]
    deep_gemm.m_grouped_fp8_fp4_gemm_nt_contiguous((q, column_major(s)), given["b"], d, numbers, **options)
    record_error(check_groups(given, d, starts, padded))


@pytest.mark.parametrize(("groups", "expected"), [(32, 192), (6, 1024), (32, 20), (6, 20)])
@pytest.mark.parametrize(("columns", "channels"), EXPERTS[1:])
def test_masked_groups_are_right(groups, expected, columns, channels, record_error):
    sizes, most = sizes_of(groups, expected, empty=3), aligned(int(1.3 * expected))
    given, d = inputs([most] * groups, columns, channels)
    q, s = (x.view(groups, most, -1) for x in given["a"])
    of_groups, counts = d.view(groups, most, columns), int32(sizes)
    deep_gemm.m_grouped_fp8_gemm_nt_masked((q, column_major(s)), given["b"], of_groups, counts, int(1.2 * expected))
    record_error(check_groups(given, d, range(0, len(d), most), sizes))


def test_a_graph_takes_new_groups():
    (given, d), (halves, e) = inputs([512, 0, 0], 256, 256), inputs([256, 256], 256, 256)
    numbers, masked = torch.zeros(512, dtype=torch.int32, device="cuda"), int32([256, 256])

    def call():
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(given["a"], given["b"], d, numbers)
        a = tuple(x.view(2, 256, -1) for x in halves["a"])
        deep_gemm.m_grouped_fp8_gemm_nt_masked(a, halves["b"], e.view(2, 256, 256), masked, 128)

    graph, _ = captured(call)
    for sizes, counts in (([128, 384, 0], [1, 256]), ([0, 512, 0], [0, 77]), ([384, 0, 128], [256, 0])):
        numbers.copy_(torch.arange(3).repeat_interleave(torch.tensor(sizes)))
        masked.copy_(int32(counts))
        e.fill_(torch.nan)
        graph.replay()
        check_groups(given, d, [0, *accumulate(sizes[:-1])], sizes)
        check_groups(halves, e, [0, 256], counts)
