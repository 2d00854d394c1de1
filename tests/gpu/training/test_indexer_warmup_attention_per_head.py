"""The kernels of the per-head warm-up loss against the reference in float64, on the GPU."""

import copy

import pytest
import torch

from dsa.ops.training import _warmup_per_head as bridge
from tests.gpu.op_checks import assert_same_bits
from tests.gpu.training.test_indexer_warmup_attention import Case, check, relative


def make_case(queries, keys=None, heads=4, key_heads=1, dims=(128, 64), causal=True):
    """dims: the channels of the attention's and of the indexer's heads."""
    lengths = list(zip(queries, queries if keys is None else keys))
    (dim, index_dim) = dims
    return Case(lengths, heads, key_heads, (dim, min(dim, 128)), (heads, index_dim), causal, "per_head")


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dims", [(64, 64), (64, 128), (128, 64), (128, 128), (192, 64), (192, 128)], ids=str)
def test_dims(dims, causal, record_error):
    check(make_case([200, 1, 64, 513], key_heads=2, dims=dims, causal=causal), record_error)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("queries", "keys"),
    [
        ([127, 1], [127, 1]),
        ([128], [128]),
        ([129], [129]),
        ([64, 65, 63], [64, 65, 63]),
        ([1, 0, 130, 300, 64, 3], [1, 5, 130, 333, 700, 0]),
        ([300, 2, 0], [70, 1, 9]),
        ([1000], [100]),
        ([5, 256], [1000, 384]),
    ],
)
def test_lengths(queries, keys, causal, record_error):
    check(make_case(queries, keys, causal=causal), record_error)


@pytest.mark.parametrize(("heads", "key_heads"), [(1, 1), (3, 3), (16, 1), (64, 8), (128, 128)])
def test_heads(heads, key_heads, record_error):
    check(make_case([150, 33], heads=heads, key_heads=key_heads), record_error)


def test_mass_on_one_key(record_error):
    """The attention's: kl is large. And the indexer's: powers of scores in the hundreds."""
    case = make_case([300, 40])
    case.q[:, :, 0], case.k[:, :, 0] = 40.0, 0.0
    case.k[0, :, 0] = case.k[300, :, 0] = 60.0
    check(case, record_error)
    case.q_idx[:, :, 0], case.k_idx[:, 0] = 8.0, 0.0
    case.k_idx[0, 0] = case.k_idx[300, 0] = 12.5
    check(case, record_error)


def test_scores_that_grow(record_error):
    """Tiles come from the last to the first: every one's scores are far above those of all before it."""
    case = make_case([700, 300])
    for first, count in ((0, 700), (700, 300)):
        growth = torch.linspace(60.0, 1.0, count, device="cuda")[:, None]
        case.k_idx[first : first + count] = (case.k_idx[first : first + count] * growth).bfloat16()
    case.w_idx = case.w_idx.abs() * 4
    check(case, record_error)


def test_exact_zeros():
    """relu has no gradient at 0: not of orthogonal rows, nor of rows of zeros."""
    case = make_case([200])
    case.q_idx[:, :, 32:], case.k_idx[:, :32] = 0.0, 0.0
    for got, expected in zip(case.run()[3:], case.expected()[3:]):
        assert (expected == 0).all() and (got == 0).all()


def of_heads(case, heads):
    part = copy.copy(case)
    part.q, part.q_idx, part.w_idx = (x[:, heads] for x in (case.q, case.q_idx, case.w_idx))
    part.per_token = case.per_token[:, heads]
    return part


def test_large_is_always_the_same(record_error, monkeypatch):
    """Whether many q tiles of a head are under way at the same time, or few."""
    case = make_case([2048, 2048], heads=64)
    results = case.run()
    parts = [of_heads(case, slice(first, first + 8)).expected()[2:] for first in range(0, 64, 8)]
    kl, dq, dk, dw = zip(*parts)
    for got, expected in zip(results[2:], (torch.cat(kl, 1), torch.cat(dq, 1), sum(dk), torch.cat(dw, 1)), strict=True):
        error = relative(got, expected)
        record_error(error)
        assert error < 1e-2
    for together in (4, 64):
        monkeypatch.setattr(bridge, "LEAST_TOGETHER", together)
        monkeypatch.setattr(bridge, "MOST_TOGETHER", together)
        for _ in range(5):
            assert_same_bits(case.run(), results)
