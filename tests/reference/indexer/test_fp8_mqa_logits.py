"""The references of the index scores: row strides, NaN, no queries or keys, and gradients."""

import pytest
import torch

from dsa.cases import cases_of
from dsa.cases.indexer import scores
from dsa.reference import fp8_mqa_logits, mqa_logits
from tests.reference.common import BF16, BYTE, F32, INF, NAN, assert_same_gradients, i32

CASE, _, _ = cases_of("fp8_mqa_logits")


def scored(starts, ends, keys, **options):
    given = CASE.arguments(queries=len(starts), keys=keys, heads=4, dim=16, **options)
    return given | {"cu_seq_len_k_start": i32(starts), "cu_seq_len_k_end": i32(ends)}


# Rows have room for 300 + 256 columns, or with max_seqlen_k for 257. They are rounded up to multiples of 1024 bytes.
@pytest.mark.parametrize(("columns", "stride", "bf16_stride"), [(0, 768, 1024), (257, 512, 512)])
def test_row_stride_is_a_multiple_of_1024_bytes_and_bf16_is_the_rounded_fp32(columns, stride, bf16_stride):
    given = scored([0, 5], [300, 200], 300, max_seqlen_k=columns)
    wide, half = (fp8_mqa_logits(**given | {"logits_dtype": dtype}) for dtype in (F32, BF16))
    assert wide.stride() == (stride, 1) and half.stride() == (bf16_stride, 1)
    assert half.dtype == BF16 and torch.equal(half, wide.bfloat16())


def test_nan_keys_reach_only_their_column():
    given = scored([0, 4], [8, 8], 8)
    clean, (k, k_scale) = fp8_mqa_logits(**given), given["kv"]
    k.view(BYTE)[2], k_scale[3] = 0x7F, NAN
    got, keep = fp8_mqa_logits(**given), [0, 1, 4, 5, 6, 7]
    assert got[0, 2:4].isnan().all() and got[1, :4].eq(-INF).all()
    assert torch.equal(got[:, keep], clean[:, keep])


@pytest.mark.parametrize(
    ("queries", "keys", "width", "shape"), [(0, 5, 0, (0, 5)), (3, 0, 0, (3, 0)), (3, 0, 4, (3, 4))]
)
def test_no_queries_and_no_keys(queries, keys, width, shape):
    given = scored([0, 0, 0], [1, 0, 5], 5, max_seqlen_k=width)
    given |= {name: x[:queries] for name, x in given.items() if isinstance(x, torch.Tensor)}
    got = fp8_mqa_logits(**given | {"kv": tuple(x[:keys] for x in given["kv"])})
    assert got.shape == shape and got.eq(-INF).all()


def test_gradients_of_the_unquantised_form():
    inputs, (starts, ends) = [torch.randn(n) for n in ((3, 2, 4), (5, 4), (3, 2))], i32([[0, 1, 4], [5, 3, 4]])
    seen = (torch.arange(5) >= starts[:, None]) & (torch.arange(5) < ends[:, None])

    def logits(q, k, weights):
        return mqa_logits(q, k, weights, starts, ends).where(seen, 0.0)

    assert_same_gradients(logits, lambda *x: scores(*x)[0].where(seen, 0.0), inputs)
