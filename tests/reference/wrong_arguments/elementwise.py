"""Wrong arguments of norms, rope and hyper-connections."""

from tests.reference.common import BF16, INT32, zeros


def other_streams(n, channels):
    """Return arguments of `hyper_collapse_norm_cast_to_fp8` for 3 tokens."""
    count = (2 + n) * n
    return {
        "streams": zeros(3, n, channels, dtype=BF16),
        "mix": zeros(3, count),
        "base": zeros(count),
        "weight": zeros(channels),
    }


WRONG = {
    "rms_norm": [
        ({"x": [1.0]}, "x: must be a torch.Tensor, got list"),
        ({"x": zeros(2, 16, dtype=INT32)}, "x: dtype must be float32, bfloat16 or float16, got int32"),
        ({"x": zeros()}, "x: must have at least 1 dimension, got shape []"),
        ({"weight": zeros(7)}, "weight: shape must be [16], got [7]"),
        ({"weight": zeros(16, dtype=BF16)}, "weight: dtype must be float32, got bfloat16"),
        ({"weight": 1.0}, "weight: must be a torch.Tensor, got float"),
    ],
    "rms_norm_rotary": [
        ({"x": zeros(3, 80)}, "x: shape must be [T, H, D], got [3, 80]"),
        ({"x": zeros(3, 2, 56), "weight": None}, "x: the last dimension must be at least 64 for these cos and sin"),
        ({"weight": zeros(8)}, "weight: shape must be [80], got [8]"),
        ({"cos": zeros(4, 32)}, "cos: shape must be [3, R / 2], got [4, 32]"),
        ({"sin": zeros(3, 8)}, "sin: shape must be [3, 32], got [3, 8]"),
        ({"eps": -1.0}, "eps: must be at least 0, got -1.0"),
    ],
    "apply_rotary": [
        ({"x": [1.0]}, "x: must be a torch.Tensor, got list"),
        ({"x": zeros(8)}, "x: must have at least 2 dimensions, got shape [8]"),
        ({"x": zeros(3, 6)}, "x: the last dimension must be at least 64 for these cos and sin, got 6"),
        ({"x": zeros(3, 80, dtype=INT32)}, "x: dtype must be float32, bfloat16 or float16, got int32"),
        ({"cos": zeros(2, 32)}, "cos: shape must be [3, R / 2], got [2, 32]"),
        ({"sin": zeros(3, 3)}, "sin: shape must be [3, 32], got [3, 3]"),
        ({"sin": zeros(3, 32, dtype=BF16)}, "sin: dtype must be float32, got bfloat16"),
        ({"dims": "middle"}, "dims: must be 'first' or 'last', got 'middle'"),
    ],
    "hyper_collapse": [
        ({"streams": zeros(3, 4, 16).double()}, "streams: dtype must be"),
        ({"streams": [1]}, "streams: must be a torch.Tensor, got list"),
        ({"streams": zeros(3, 24, dtype=BF16)}, "streams: shape must be [T, n, D], got [3, 24]"),
        ({"streams": zeros(3, 4, 0, dtype=BF16)}, "streams: D must be at least 1, got 0"),
        ({"mix": zeros(3, 23)}, "mix: shape must be [3, 24], got [3, 23]"),
        ({"mix": zeros(3, 24, dtype=BF16)}, "mix: dtype must be float32, got bfloat16"),
        ({"base": zeros(20)}, "base: shape must be [24]"),
        ({"scale": zeros(1)}, "scale: shape must be [3]"),
        ({"iterations": 0}, "iterations: must be at least 1, got 0"),
        ({"iterations": 2.0}, "iterations: must be an integer, got 2.0"),
        ({"iterations": True}, "iterations: must be an integer, got True"),
    ],
    "hyper_expand": [
        ({"y": zeros(3, 16).half()}, "streams: dtype must be y's float16, got bfloat16"),
        ({"y": zeros(2, 16, dtype=BF16)}, "streams: shape must be [2, n, 16], got [3, 4, 16] (sizes as of y)"),
        ({"post": zeros(3, 3)}, "post: shape must be [3, 4]"),
        ({"comb": zeros(3, 4, 3)}, "comb: shape must be [3, 4, 4]"),
        ({"comb": 1.0}, "comb: must be a torch.Tensor, got float"),
    ],
    "hyper_collapse_independent": [
        ({"mix": zeros(3, 24)}, "mix: shape must be [3, 8], got [3, 24]"),
        ({"base": zeros(24)}, "base: shape must be [8]"),
        ({"scale": zeros(3)}, "scale: shape must be [2]"),
        ({"magnitude": float("inf")}, "magnitude: must be finite in fp32, got inf"),
        ({"hc_eps": -1.0}, "hc_eps: must be at least 0, got -1.0"),
    ],
    "hyper_head": [
        ({"mix": zeros(3, 24)}, "mix: shape must be [3, 4], got [3, 24]"),
        ({"scale": zeros(3)}, "scale: shape must be [1]"),
    ],
    "hyper_mix": [
        ({"parts": zeros(3, 24, 63, dtype=BF16)}, "parts: shape must be [3, C, 64], got [3, 24, 63]"),
        ({"parts": zeros(2, 24, 64, dtype=BF16)}, "parts: shape must be [3, C, 64]"),
        ({"parts": zeros(3, 0, 64, dtype=BF16)}, "parts: C must be at least 1, got 0"),
        ({"parts": zeros(3, 24, 64)}, "parts: dtype must be bfloat16, got float32"),
        (
            {"streams": zeros(3, 4, 0, dtype=BF16), "parts": zeros(3, 24, 0, dtype=BF16)},
            "streams: D must be at least 1, got 0",
        ),
        ({"streams": zeros(3, 16, dtype=BF16)}, "streams: shape must be [T, n, D]"),
        ({"streams": zeros(3, 4, 16)}, "streams: dtype must be bfloat16, got float32"),
    ],
    "hyper_expand_mix": [
        ({"y": zeros(3, 16)}, "y: dtype must be bfloat16, got float32"),
        ({"streams": zeros(2, 4, 16, dtype=BF16)}, "streams: shape must be [3, n, 16], got [2, 4, 16]"),
        ({"post": zeros(3, 3)}, "post: shape must be [3, 4]"),
        ({"comb": zeros(3, 4, 3)}, "comb: shape must be [3, 4, 4]"),
        ({"parts": zeros(3, 24, 63, dtype=BF16)}, "parts: shape must be [3, C, 64], got [3, 24, 63]"),
        ({"parts": zeros(3, 0, 64, dtype=BF16)}, "parts: C must be at least 1, got 0"),
    ],
    "hyper_collapse_norm_cast_to_fp8": [
        ({"streams": zeros(3, 4, 256)}, "streams: dtype must be bfloat16, got float32"),
        ({"mix": zeros(3, 23)}, "mix: shape must be [3, 24], got [3, 23]"),
        ({"base": zeros(20)}, "base: shape must be [24]"),
        ({"scale": zeros(1)}, "scale: shape must be [3]"),
        ({"weight": zeros(128)}, "weight: shape must be [256], got [128]"),
        (other_streams(4, 192), "streams: D must be a multiple of 128, at least 128, got 192"),
        (other_streams(4, 0), "streams: D must be a multiple of 128, at least 128, got 0"),
        (other_streams(0, 256), "streams: n must be at least 1, got 0"),
    ],
    "hyper_collapse_independent_norm_cast_to_fp8": [
        ({"mix": zeros(3, 24)}, "mix: shape must be [3, 8], got [3, 24]"),
        ({"streams": zeros(3, 4, 256)}, "streams: dtype must be bfloat16, got float32"),
        ({"weight": zeros(128)}, "weight: shape must be [256], got [128]"),
        ({"magnitude": "2"}, "magnitude: must be a number, got '2'"),
    ],
}
