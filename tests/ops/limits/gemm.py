"""Limits of casts and products."""

import math

import torch

from dsa.kernels.gemm.limits import MAX_ROWS
from tests.ops.limits.tensors import BYTES, INT32, angles, bf16, e4m3, zeros

EIGHT = "the kernel rotates a multiple of 8 channels, got shape"


def part(pair, rows=slice(None), columns=slice(None)):
    """Of e4m3 values [N, K], and their scales."""
    return pair[0][..., rows, columns], pair[1][..., columns][..., : -(-pair[0][..., columns].shape[-1] // 128)]


MULTIPLES = r"b\[0\]: the kernel takes K that is a multiple of 16 and N of 8, got \[N, K\] = "
GROUPED = ["grouped_fp8_gemm_nt", "grouped_fp8_gemm_swiglu", "grouped_fp8_fp4_gemm_nt", "grouped_fp8_fp4_gemm_swiglu"]
NO_ROWS = {"rows": None, "weights": None}
LIMITS = [
    ("fp8_gemm_nt", lambda a: {"b": part(a["b"], slice(130))}, MULTIPLES + r"\[130, 160\]"),
    (
        "fp8_gemm_nt",
        lambda a: {name: (a[name][0][:, :100], a[name][1][:, :1]) for name in ("a", "b")},
        MULTIPLES + r"\[136, 100\]",
    ),
    (
        "fp8_gemm_nt",
        lambda a: {"a": (e4m3(MAX_ROWS + 1, 160), zeros(MAX_ROWS + 1, 2))},
        r"a\[0\]: the kernel takes at most 134217728 rows",
    ),
    (
        "fp8_gemm_nt",
        lambda a: {"a": (e4m3(4, 16), zeros(4, 1)), "b": (e4m3(2**31, 16), zeros(2**24, 1))},
        r"b\[0\]: the kernel takes at most 2147483647 rows of all weights, got 2147483648",
    ),
    ("fp8_gemm_nt", lambda a: {"a": a["a"][0]}, r"a: must be a pair \(e4m3 values, fp32 scales\), got"),
    *(
        (
            op,
            lambda a: (
                {"rows": torch.zeros(1, dtype=INT32).expand(MAX_ROWS + 1)}
                | ({"weights": None} if "weights" in a else {})
            ),
            "rows: the kernel takes at most 134217728 rows, got 134217729",
        )
        for op in GROUPED
    ),
    *(
        (op, lambda a, number=number: {"expected_rows": number}, f"expected_rows: {message}")
        for op in GROUPED
        for number, message in [
            (-1, "must be at least 0, got -1"),
            (5, r"must be at most M = 4, got 5 \(sizes as of rows\)"),
            (2.0, "must be an int, got float"),
        ]
    ),
    (
        "grouped_fp8_gemm_nt",
        lambda a: {**NO_ROWS, "expected_rows": 6},
        r"expected_rows: must be at most M = 5, got 6 \(sizes as of a\[0\], without rows\)",
    ),
    (
        "grouped_fp8_gemm_nt",
        lambda a: {"b": (e4m3(1025, 8, 160), zeros(1025, 1, 2)), "ends": torch.zeros(1025, dtype=INT32)},
        r"b\[0\]: the kernel takes at most 1024 weights, got 1025",
    ),
    (
        "grouped_fp8_fp4_gemm_nt",
        lambda a: {
            "b": tuple(x.view(torch.uint8)[:1].expand(1025, -1, -1).view(x.dtype) for x in a["b"]),
            "ends": torch.zeros(1025, dtype=INT32),
        },
        r"b\[0\]: the kernel takes at most 1024 weights, got 1025",
    ),
    (
        "grouped_fp8_fp4_gemm_nt",
        lambda a: {"b": (a["b"][0][:, :12], a["b"][1][:, :12], a["b"][2])},
        r"b\[0\]: the kernel takes N that is a multiple of 8, got shape \[3, 12, 80\]",
    ),
    (
        "grouped_fp8_fp4_gemm_nt",
        lambda a: {
            "a": (e4m3(5, 32), zeros(5, 1)),
            "b": (
                zeros(2, 2**30, 16, dtype=torch.int8),
                torch.zeros(1, dtype=BYTES).view(torch.float8_e8m0fnu).expand(2, 2**30, 1),
                zeros(2, 2**23, 1),
            ),
            "ends": torch.zeros(2, dtype=INT32),
        },
        r"b\[0\]: the kernel takes at most 2147483647 rows of all weights, got 2147483648",
    ),
    ("linear_fp32", lambda a: {"x": bf16(65, 64)}, "x: the kernel takes up to 64 tokens, got 65"),
    (
        "linear_fp32",
        lambda a: {"x": a["x"][:, :48], "weight": a["weight"][:, :48]},
        "x: the kernel takes I a multiple of 32, got 48",
    ),
    ("linear_fp32", lambda a: {"weight": bf16(2**20, 64)}, "weight: the kernel takes up to 1048560 rows, got 1048576"),
    (
        "per_token_cast_to_fp8",
        lambda a: {"gran_k": 64, "hadamard": False},
        "gran_k: the kernel takes 128, got 64",
    ),
    ("per_token_cast_to_fp8", lambda a: {"x": zeros(2, 100)}, "x: the last dimension must be a multiple of gran_k=128"),
    ("per_token_cast_to_fp8", lambda a: {"x": torch.tensor(1.0)}, r"x: must have at least 1 dimension, got shape \[\]"),
    ("per_token_cast_to_fp8", lambda a: {"x": torch.zeros(4, 6, 128)[:, :3]}, "x: dimensions 0 to 1 must be mergeable"),
    ("rotary_cast_to_fp8", lambda a: angles(3, 3), f"cos: {EIGHT}"),
    ("rotary_cast_to_fp8", lambda a: angles(3, 0), f"cos: {EIGHT}"),
    (
        "swiglu_cast_to_fp8",
        lambda a: {"gate": zeros(3, 100), "up": zeros(3, 100)},
        r"gate: the kernel takes I a multiple of 8, got \[3, 100\]",
    ),
    (
        "swiglu_cast_to_fp8",
        lambda a: {"gate": torch.zeros(4, 6, 128)[:, :3], "up": zeros(4, 3, 128)},
        "gate: dimensions 0 to 1 must be mergeable",
    ),
    *(
        ("swiglu_cast_to_fp8", lambda a, value=value: {"limit": value}, f"limit: {message}")
        for value, message in [
            (0.0, "must be positive or None, got 0.0"),
            (math.nan, "must be finite in fp32, got nan"),
            ("7", "must be a number, got str"),
        ]
    ),
]
