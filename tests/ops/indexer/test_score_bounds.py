"""`check_scores` accepts scores with the rounding of Hopper's tensor cores, and finds a single wrong score."""

import pytest
import torch

from dsa.cases import cases_of
from dsa.cases.indexer import OF_TERMS, check_scores, scores
from dsa.testing import calc_diff

CASE = cases_of("fp8_mqa_logits")[0]
QUERIES, KEYS = 16, 150
SIZES = [(heads, dim) for heads in (8, 64) for dim in (32, 128)]


def _case(heads, dim):
    """Return (inputs, expected scores, sums of the terms' magnitudes). Queries see all but the last 20 keys."""
    given = CASE.arguments(queries=QUERIES, keys=KEYS, heads=heads, dim=dim)
    q, (k, scale), weights = (given[name] for name in ("q", "kv", "weights"))
    expected, terms = (x * scale for x in scores(q, k, weights))
    expected[:, KEYS - 20 :] = -torch.inf
    return (q, k, scale, weights), expected, terms


def _cut(x, bits, of=None):
    """Truncate x to multiples of p * 2^-bits. p is the largest power of two that is at most |x|, or at most `of` if
    given."""
    step = torch.exp2((x.abs() if of is None else of).clamp_min(1e-30).log2().floor() - bits)
    return (x / step).trunc() * step


def _on_hopper(q, k, scale, weights, half):
    """Return scores with rounding like Hopper's. fp16 values are truncated here, while the hardware rounds them to
    nearest. So the errors can be twice as large."""
    q, k = q.double(), k.double()
    products = q.new_zeros(*q.shape[:2], KEYS)
    for chunk_q, chunk_k in zip(q.split(32, 2), k.split(32, 1)):
        addends = torch.cat((chunk_q[:, :, None] * chunk_k, products[..., None]), -1)
        products = _cut(addends, 13, addends.abs().amax(-1, keepdim=True)).sum(-1)
        if half:
            products = _cut(products, 10)
    by_lane = (weights.half() if half else weights).double().unflatten(1, (-1, 8))
    sums = q.new_zeros(QUERIES, 8, KEYS)
    for w, x in zip(by_lane.unbind(1), products.relu().unflatten(1, (-1, 8)).unbind(1)):
        sums = sums + w[..., None] * x
        sums = _cut(sums, 10) if half else sums
    return (sums.sum(1) * scale).float()


@pytest.mark.parametrize("accumulators", OF_TERMS)
@pytest.mark.parametrize(("heads", "dim"), SIZES)
def test_rounding_is_far_inside_the_bounds(heads, dim, accumulators):
    given, expected, terms = _case(heads, dim)
    seen = expected != -torch.inf
    got = _on_hopper(*given, accumulators == torch.float16).where(seen, -torch.inf)
    check_scores(got, expected, terms, OF_TERMS[accumulators])
    assert ((got - expected).abs()[seen] < OF_TERMS[accumulators] / 5 * terms[seen]).all()
    check_scores(got.bfloat16(), expected, terms, OF_TERMS[accumulators])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("accumulators", OF_TERMS)
@pytest.mark.parametrize(("heads", "dim"), SIZES)
def test_one_wrong_score_is_found(heads, dim, accumulators, dtype):
    """One score of typical magnitude is wrong, or one query has a finite score for a key that it does not see. All
    other scores are correct. So calc_diff of a finite wrong score is at most 5e-6, too small to show the error."""
    _, expected, terms = _case(heads, dim)
    seen = expected != -torch.inf
    at = (expected[0, : KEYS - 20].abs() - expected[seen].square().mean().sqrt()).abs().argmin()
    expected, terms = expected.repeat(200, 1).to(dtype), terms.repeat(200, 1)
    for value in (0.0, 2 * expected[0, at].item(), torch.nan, -torch.inf):
        got = expected.clone()
        got[0, at] = value
        assert not 5e-6 < calc_diff(got, expected) < torch.inf
        with pytest.raises(AssertionError):
            check_scores(got, expected, terms, OF_TERMS[accumulators])
    got = expected.clone()
    got[3, KEYS - 1] = 0.0
    with pytest.raises(AssertionError):
        check_scores(got, expected, terms, OF_TERMS[accumulators])
