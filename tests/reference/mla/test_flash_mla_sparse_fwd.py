"""The reference of flash_mla_sparse_fwd: large logits, NaN, no queries, keys or indices, and gradients."""

import pytest
import torch

from dsa.cases.attention import attend_lists, valid
from dsa.reference import flash_mla_sparse_fwd
from tests.reference.common import INF, NAN, assert_same_bits, assert_same_gradients, i32

INDICES = i32([[0, 6, 3, 3, -1], [-1] * 5, [7, 2**31 - 1, -(2**31), 8, -9], [6, 5, 4, 3, 2], [7, 7, 1, -1, 1]])[:, None]


@pytest.mark.parametrize(("sink", "expected"), [(None, 2.0), (torch.tensor([750.0]), 2.0), (torch.tensor([1e6]), 0.0)])
def test_large_logits_do_not_overflow(sink, expected):
    q, kv = torch.full((1, 1, 4), 100.0), torch.tensor([1.0, 2.0]).view(2, 1, 1).expand(2, 1, 4)
    out, _, lse = flash_mla_sparse_fwd(q, kv, i32([[[0, 1]]]), 1.0, 4, sink)
    assert out[0, 0, 0].item() == pytest.approx(expected) and lse.item() == pytest.approx(800.0)


def test_nan_reaches_only_the_queries_that_select_it():
    q, kv = torch.randn(5, 4, 24), torch.randn(9, 1, 24)
    clean, kv[[1, 7, 8]] = kv.clone(), NAN
    lengths = i32([5, 5, 0, 5, 0])
    got, expected = (flash_mla_sparse_fwd(q, x, INDICES, 0.7, 16, None, lengths) for x in (kv, clean))
    assert_same_bits(got, expected)
    out, _, _ = flash_mla_sparse_fwd(q, kv, INDICES, 0.7, 16)
    assert out[[0, 1, 3]].isfinite().all() and out[[2, 4]].isnan().all()


@pytest.mark.parametrize(("queries", "keys", "k"), [(0, 7, 5), (5, 0, 5), (5, 7, 0)])
def test_no_queries_no_keys_and_no_indices(queries, keys, k):
    q, kv = torch.randn(queries, 4, 24), torch.randn(keys, 1, 24)
    out, max_logits, lse = flash_mla_sparse_fwd(q, kv, INDICES[:queries, :, :k], 1.0, 16, torch.zeros(4))
    assert out.shape == (queries, 4, 16) and lse.shape == max_logits.shape == (queries, 4)
    assert out.eq(0).all() and lse.eq(INF).all() and max_logits.eq(-INF).all()


def test_gradients_are_those_of_the_formula():
    def formula(q, kv):
        return attend_lists(q, kv[:, 0], valid(INDICES[:, 0], 7), 0.5, 6).out

    inputs = torch.randn(5, 2, 8), torch.randn(7, 1, 8)
    assert_same_gradients(lambda *x: flash_mla_sparse_fwd(*x, INDICES, 0.5, 6)[0], formula, inputs)
