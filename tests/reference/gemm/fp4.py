"""FP4 weights for tests, made from e2m1 codes and the exponents of their groups' scales (see
dsa/reference/gemm/fp4_cast.py for the format)."""

import torch

from dsa.cases.gemm import E2M1, fp4_values

VALUES = [*E2M1, *(-x for x in E2M1)]
SMALLEST, LARGEST = 1, 7  # the codes of 0.5 and 6


def pack(codes):
    """Pack codes [..., O, I] to int8 [..., O, I / 2], the low nibble for the even column."""
    return (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8).view(torch.int8)


def e8m0(exponents):
    return (exponents + 127).to(torch.uint8).view(torch.float8_e8m0fnu)


def weight(codes, exponents):
    """Return the weight [..., O, I] in float64, for exponents [..., O, I / 32] of the groups' scales."""
    return fp4_values(pack(codes), e8m0(exponents))


def random_codes(*shape):
    return torch.randint(0, 16, shape, generator=torch.Generator().manual_seed(0))
