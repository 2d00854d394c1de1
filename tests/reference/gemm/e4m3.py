"""FP8 e4m3, decoded bit by bit for tests: 1 sign bit, 4 exponent bits with bias 7, 3 mantissa bits. There are no
infinities; 0x7f and 0xff are NaN."""


def decode(byte: int) -> float:
    sign, exponent, mantissa = byte >> 7, (byte >> 3) & 15, byte & 7
    magnitude = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -magnitude if sign else magnitude


MANTISSAS = {decode(byte): byte & 7 for byte in range(256) if byte & 0x7F != 0x7F}


def encode_value(x: float) -> float:
    """Return the nearest e4m3 value, with ties to an even mantissa; |x| must be at most 448."""
    return min(MANTISSAS, key=lambda value: (abs(x - value), MANTISSAS[value] % 2))
