"""FP4 weights by their definition: codes, exponents of groups, and what they are worth."""

import torch

VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
VALUES += [-v for v in VALUES]
SMALLEST, LARGEST = 1, 7  # codes


def pack(codes):
    """[..., O, I] codes -> [..., O, I / 2] int8, the low nibble for the even column."""
    return (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8).view(torch.int8)


def e8m0(exponents):
    return (exponents + 127).to(torch.uint8).view(torch.float8_e8m0fnu)


def weight(codes, exponents):
    """The weight by the definition, element by element, in fp64."""
    scale = torch.ldexp(torch.ones((), dtype=torch.float64), exponents.double()).repeat_interleave(32, 1)
    return torch.tensor(VALUES, dtype=torch.float64)[codes] * scale


def random_codes(*shape):
    return torch.randint(0, 16, shape, generator=torch.Generator().manual_seed(0))
