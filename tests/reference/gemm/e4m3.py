"""FP8 e4m3 decoded bit by bit: 1 sign, 4 exponent bits with bias 7, 3 mantissa bits, no infinities, 0x7f is NaN."""

import math


def decode(byte: int) -> float:
    sign, exponent, mantissa = byte >> 7, (byte >> 3) & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    magnitude = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -magnitude if sign else magnitude


FINITE = sorted({decode(b) for b in range(256) if b & 0x7F != 0x7F})


def encode_value(x: float) -> float:
    """The nearest e4m3 value, ties to an even mantissa, by trying all of them; |x| at most 448."""
    best = min(abs(x - v) for v in FINITE)
    nearest = [v for v in FINITE if abs(x - v) == best]
    return next((v for v in nearest if _mantissa(v) % 2 == 0), nearest[0])


def _mantissa(value: float) -> int:
    return next(b & 7 for b in range(256) if decode(b) == value)
