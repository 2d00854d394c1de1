"""Wrong arguments of casts and matrix products."""

import math

import torch

from tests.reference.common import BF16, INT32, i32, i64, zeros

E8M0 = torch.float8_e8m0fnu
FLOATS = "must be float32, bfloat16 or float16, got"
FP4 = [
    ({"scale": zeros(2, 140, 4, dtype=E8M0)}, "scale: shape must be [2, 140, 5], got [2, 140, 4] (sizes as of packed)"),
    ({"scale": zeros(1, 140, 5, dtype=E8M0)}, "scale: shape must be [2, 140, 5], got [1, 140, 5]"),
    (lambda a: {"packed": a["packed"][0, 0]}, "packed: must have at least 2 dimensions, got shape [80]"),
    (
        lambda a: {"packed": a["packed"][..., :72]},
        "packed: must have a multiple of 32 channels, two a byte, got 144 channels",
    ),
    (lambda a: {"packed": a["packed"].short()}, "packed: dtype must be int8 or uint8, got int16"),
    (lambda a: {"scale": a["scale"].float()}, "scale: dtype must be float8_e8m0fnu, got float32"),
    (
        lambda a: {"packed": a["packed"].to("meta"), "scale": a["scale"].to("meta")},
        "packed: must be on a device with memory",
    ),
]
HALVES = "b[0]: N must be a multiple of 256, got 192"
ASCEND = "ends: must ascend from at least 0 to at most M="
PAIR = "must be a pair (e4m3 values, fp32 scales), got"
TRIPLE = "must be (FP4 values, e8m0 scales, fp32 block scales), got"


def part(name, i, change):
    """Return a function for WRONG that applies `change` to tensor i of the argument `name` (a or b)."""
    return lambda a: {name: (*a[name][:i], change(a[name][i]), *a[name][i + 1 :])}


def three_quarters_of_the_rows(a):
    return {"b": [x[:, : math.ceil(x.shape[1] * 3 / 4)] for x in a["b"]]}


WRONG = {
    "per_token_cast_to_fp8": [
        ({"x": zeros(2, 100)}, "x: the last dimension must be a multiple of gran_k=128, got 100"),
    ],
    "scatter_cast_to_fp8": [
        ({"x": zeros(3, 100)}, "x: K must be a multiple of 128"),
        ({"x": zeros(3, 128, dtype=INT32)}, f"x: dtype {FLOATS} int32"),
        ({"places": i32([[0], [1]])}, "places: shape must be [3, k], got [2, 1]"),
        ({"places": zeros(3, 1)}, "places: dtype must be int32, got float32"),
    ],
    "rotary_cast_to_fp8": [
        ({"x": zeros(3, 4, 200)}, "x: d must be a multiple of 128, got 200"),
        ({"x": zeros(3, 512)}, "x: shape must be [T, H, d], got [3, 512]"),
        ({"x": zeros(3, 4, 128, dtype=INT32)}, f"x: dtype {FLOATS} int32"),
        ({"groups": 3}, "groups: must divide the 4 heads of x, got 3"),
        ({"groups": 0}, "groups: must be at least 1, got 0"),
        ({"cos": zeros(4, 32)}, "cos: shape must be [3, R / 2], got [4, 32]"),
        ({"sin": zeros(3, 16)}, "sin: shape must be [3, 32], got [3, 16]"),
        ({"cos": zeros(3, 200), "sin": zeros(3, 200)}, "x: the last dimension must be at least 400"),
    ],
    "per_block_cast_to_fp8": [
        ({"w": zeros(1, 2, 128)}, "w: shape must be [O, I], got [1, 2, 128]"),
        ({"w": zeros(2, 128, dtype=INT32)}, f"w: dtype {FLOATS} int32"),
        ({"w": [[1.0]]}, "w: must be a torch.Tensor, got list"),
        ({"use_ue8m0": 1}, "use_ue8m0: must be True or False, got 1"),
        ({"block": 0}, "block: must be at least 1, got 0"),
        ({"block": 1.0}, "block: must be an integer, got 1.0"),
    ],
    "dequantize_per_block": [
        ({"q": zeros(150, 140)}, "q: dtype must be float8_e4m3fn, got float32"),
        ({"scale": zeros(2, 2).double()}, "scale: dtype must be float32 or float8_e8m0fnu, got float64"),
        ({"scale": zeros(2, 2).to("meta")}, "scale: must be on q's device cpu, got meta"),
        ({"scale": None}, "scale: must be a torch.Tensor, got NoneType"),
        ({"scale": zeros(1, 2)}, "scale: shape must be [2, 2], got [1, 2] (sizes as of q and block"),
        ({"dtype": torch.int32}, "dtype: must be float32, bfloat16, float16 or float64, got int32"),
    ],
    "fp4_block_scales": FP4,
    "widen_fp4": FP4,
    "fp8_gemm_nt": [
        (part("b", 1, lambda x: x[:1]), "b[1]: shape must be [2, 2] or [2, 4], got [1, 2]"),
        (part("a", 1, lambda x: x[:, :1]), "a[1]: shape must be [3, 2] or [3, 4], got [3, 1]"),
        (part("a", 0, lambda x: x.float()), "a[0]: dtype must be float8_e4m3fn, got float32"),
        (part("a", 0, lambda x: x[:, :128]), "a[0]: shape must be [3, 160], got [3, 128]"),
        ({"out_dtype": torch.int32}, f"out_dtype: {FLOATS} int32"),
        (lambda a: {"a": a["a"][0]}, f"a: {PAIR} Tensor"),
    ],
    "grouped_fp8_gemm_nt": [
        *(({"rows": i32([0, row, 1, 0])}, f"rows: must be from 0 to 4, got {row} at 1") for row in (-1, 5, 2**31 - 1)),
        ({"rows": None, "weights": zeros(4)}, "weights: shape must be [5], got [4] (sizes as of a[0], without rows)"),
        ({"weights": zeros(5)}, "weights: shape must be [4], got [5] (sizes as of rows)"),
        ({"rows": i64([0, 1, 2, 3])}, "rows: dtype must be int32, got int64"),
        ({"weights": zeros(4).double()}, "weights: dtype must be float32, got float64"),
        (
            lambda a: {"rows": a["rows"][:3], "weights": a["weights"][:3]},
            f"{ASCEND}3 (as of rows), got [2, 2, 4]",
        ),
        *(
            (
                {"rows": None, "weights": None, "ends": i32(ends)},
                f"{ASCEND}5 (as of a[0], without rows), got {ends}",
            )
            for ends in ([2, 1, 5], [2, 5, 4], [-1, 3, 5], [-1, -1, -1], [2, 3, 6])
        ),
    ],
    "grouped_fp8_fp4_gemm_nt": [
        (lambda a: {"b": a["b"][:2]}, f"b: {TRIPLE} 2 of them"),
        (lambda a: {"b": a["b"][0]}, f"b: {TRIPLE} Tensor"),
        (lambda a: {"a": a["a"][:1]}, f"a: {PAIR} 1 of them"),
        (part("b", 0, lambda x: x[..., :72]), "b[0]: must have a multiple of 32 channels, two a byte, got 144"),
        (part("b", 0, lambda x: x.short()), "b[0]: dtype must be int8 or uint8, got int16"),
        (part("b", 1, lambda x: x[..., :4]), "b[1]: shape must be [3, 16, 5], got [3, 16, 4]"),
        (part("b", 1, lambda x: x.float()), "b[1]: dtype must be float8_e8m0fnu, got float32"),
        (part("b", 2, lambda x: x[..., :1]), "b[2]: shape must be [3, 1, 2], got [3, 1, 1]"),
        (part("a", 0, lambda x: x[:, :128]), "a[0]: shape must be [A, 160], got [5, 128]"),
        (part("a", 1, lambda x: x[:, :1]), "a[1]: shape must be [5, 2] or [5, 4], got [5, 1]"),
        ({"rows": None, "weights": zeros(6)}, "weights: shape must be [5], got [6] (sizes as of a[0], without rows)"),
    ],
    "grouped_fp8_fp4_gemm_swiglu": [
        (three_quarters_of_the_rows, HALVES),
    ],
    "grouped_fp8_gemm_swiglu": [
        (three_quarters_of_the_rows, HALVES),
        ({"limit": 0.0}, "limit: must be a positive number, got 0.0"),
        ({"rows": i32([5, 0, 0, 2])}, "rows: must be from 0 to 4, got 5 at 0"),
        ({"dtype": torch.float64}, f"dtype: {FLOATS} float64"),
        ({"rows": i32([4, 0, 0])}, f"{ASCEND}3 (as of rows), got [2, 2, 4]"),
        ({"use_ue8m0": 1}, "use_ue8m0: must be True or False, got 1"),
    ],
    "linear_fp32": [
        ({"x": [1.0]}, "x: must be a torch.Tensor, got list"),
        ({"x": zeros(3, 64)}, "x: dtype must be bfloat16 or float16, got float32"),
        ({"x": zeros(64, dtype=BF16)}, "x: shape must be [T, I], got [64]"),
        ({"weight": zeros(40, 64).half()}, "weight: dtype must be x's bfloat16, got float16"),
        ({"weight": zeros(40, 32, dtype=BF16)}, "weight: shape must be [O, 64], got [40, 32]"),
        ({"scale": "1"}, "scale: must be a number, got '1'"),
        ({"scale": float("nan")}, "scale: must be finite in fp32, got nan"),
        ({"scaled_from": -1}, "scaled_from: must be at least 0, got -1"),
        ({"scaled_from": 41}, "scaled_from: must be at most O = 40, got 41"),
    ],
}
