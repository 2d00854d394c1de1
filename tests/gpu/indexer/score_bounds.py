"""How far an index score may be from the reference's: `calc_diff` over a matrix of them does not see a single one.

A score's terms are w k_scale q[d] k[d] over heads and channels, and roundings are relative to the sum of their
magnitudes, not to a score, in which they cancel.

fp32 accumulators: Hopper's FP8 wgmma aligns 32 products and the sum so far to the largest of them and cuts them off 13
bits below its first. That is up to 2^-13 = 1.2e-4 of the largest for each addend, which is a tenth to a third of a
head's terms, and errors of addends and heads have either sign: together below 5e-5 of all terms. What follows is fp32.
fp16 accumulators: sums over 32 channels, weights, and sums over a lane's heads, eight at most, are rounded to 11 bits,
4.9e-4 of each, again of either sign: together below 3e-4.
The tolerances are ten times and more of that. A score of ordinary size is 1.4% of its terms with 64 heads of 128
channels, and more with fewer of either.
"""

import torch

from dsa.testing import calc_diff

OF_TERMS = {torch.float32: 1e-3, torch.float16: 3e-3}  # by the accumulators
OF_MATRIX = {torch.float32: 5e-6, torch.bfloat16: 3e-5}  # of calc_diff, by the scores' type
_OF_BF16 = 2.0**-7  # of a score: ours and the reference's are rounded


def check_scores(
    got: torch.Tensor, expected: torch.Tensor, terms: torch.Tensor, accumulators: torch.dtype = torch.float32
) -> float:
    """Fail unless every score is as near to the expected one as its terms let it be, -inf is where it is expected, and
    calc_diff, which is returned, is small.

    terms  the reference's sums of |terms|, at least where scores are finite: its scores of `magnitudes` and |weights|
    """
    diff = calc_diff(got, expected)
    assert diff < OF_MATRIX[got.dtype]
    of_score = _OF_BF16 if got.dtype == torch.bfloat16 else 0.0
    seen = expected != -torch.inf
    got, expected, terms = (x[seen].float() for x in (got, expected, terms))
    excess = (got - expected).abs() - of_score * expected.abs() - OF_TERMS[accumulators] * terms
    assert (excess <= 0).all(), (
        f"{int((~(excess <= 0)).sum())} of {excess.numel()} scores are off by more than rounding"
    )
    return diff


def magnitudes(numbers: torch.Tensor) -> torch.Tensor:
    """|x| of e4m3."""
    return (numbers.view(torch.uint8) & 0x7F).view(torch.float8_e4m3fn)
