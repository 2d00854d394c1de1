"""What the self tests compare with, and how closely.

Tolerances are those of the ops' contracts, for kernels on a GPU as for references on a CPU:
- attention rounds its softmax weights, the values of an FP8 cache and its result: `check_attention`;
- FP8 products are summed in about 14 bits within a block of 128 channels: `check_product`;
- quantised numbers are each off by up to 2^-4, but in no direction: `check_rounded` allows the one and not the other.
A result that is 1% too large, a key too many or a tile too few is outside of all of them.
"""

import torch

from dsa.testing import assert_close, calc_diff

D, D_V, H = 576, 512, 16


def check_attention(name: str, got: torch.Tensor, expected: torch.Tensor, size: torch.Tensor, cos_tol: float) -> None:
    """The softmax weights and the result are rounded to bf16, each by up to 2^-8 of itself: together by up to 2^-7 of
    `size`. 0.8 of that was seen on an H200, with windows of 8 keys. cos_tol: the peers' own."""
    error = (got.double() - expected).abs()
    if not (error <= 2**-7 * size).all():
        raise AssertionError(f"{name}: off by up to {(error / size).nan_to_num(0.0).max():.3g} of the values' size")
    check_diff(name, got, expected, cos_tol)


def check_lse(name: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    """Relative: the peers' own. Absolute: a sum of 576 products of order 1 in fp32, of which a logit near 0 may be."""
    assert_close(name, got, expected, abs_tol=1e-5, rel_tol=8.01 / 65536)


def check_diff(name: str, got: torch.Tensor, expected: torch.Tensor, tolerance: float = 5e-6) -> None:
    if not (diff := calc_diff(got, expected)) <= tolerance:
        raise AssertionError(f"{name}: calc_diff {diff:.3g} is above {tolerance}")


def check_same(name: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    if not torch.equal(got, expected):
        raise AssertionError(f"{name}: {(got != expected).sum()} numbers of {expected.numel()} are others")


def check_rounded(
    name: str, got: torch.Tensor, expected: torch.Tensor, abs_tol: float, rel_tol: float, cos_tol: float
) -> None:
    """Errors of rounding single numbers point in no direction: the mean ratio of numbers that are not small is 1."""
    assert_close(name, got, expected, abs_tol=abs_tol, rel_tol=rel_tol, cos_tol=cos_tol)
    got, expected = got.double().to(expected.device), expected.double()
    large = expected.abs() > expected.abs().max() / 20
    if abs((ratio := (got[large] / expected[large]).mean().item()) - 1) > 4e-3:
        raise AssertionError(f"{name}: {ratio:.4f} times what it should be")


def check_gradient(name: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    """Products of bf16 operands, of which single sums may cancel: the error's norm beside the gradient's."""
    error = ((got.double() - expected).norm() / expected.norm()).item()
    if not error <= 7e-3:
        raise AssertionError(f"{name}: {error:.2e} from the definition")


def check_product(name: str, got: torch.Tensor, expected: torch.Tensor, size: torch.Tensor) -> None:
    """size: the root of the summed squares of what each number is a sum of."""
    error = (got.double() - expected).abs()
    if not (error <= 4e-3 * size).all():
        raise AssertionError(f"{name}: off by up to {(error / size).max():.3g} of the size of its products")
    check_diff(name, got, expected, 1e-7)


def hadamard() -> torch.Tensor:
    """The matrix of 128 channels, from its definition."""
    signs = [[(-1.0) ** (i & j).bit_count() for j in range(128)] for i in range(128)]
    return torch.tensor(signs, dtype=torch.double) / 128**0.5
