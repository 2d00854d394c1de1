"""Limits of casts and products."""

import math

import torch

from tests.ops.limits.tensors import zeros

GROUPED = ["grouped_fp8_gemm_nt", "grouped_fp8_gemm_swiglu", "grouped_fp8_fp4_gemm_nt", "grouped_fp8_fp4_gemm_swiglu"]
NO_ROWS = {"rows": None, "weights": None}
LIMITS = [
    ("fp8_gemm_nt", lambda a: {"a": a["a"][0]}, r"a: must be a pair \(e4m3 values, fp32 scales\), got"),
    *(
        (op, lambda a, number=number: {"expected_rows": number}, f"expected_rows: {message}")
        for op in GROUPED
        for number, message in [
            (-1, "must be at least 0, got -1"),
            (5, r"must be at most M = 4, got 5 \(sizes as of rows\)"),
            (2.0, "must be an integer, got 2.0"),
        ]
    ),
    (
        "grouped_fp8_gemm_nt",
        lambda a: {**NO_ROWS, "expected_rows": 6},
        r"expected_rows: must be at most M = 5, got 6 \(sizes as of a\[0\], without rows\)",
    ),
    ("per_token_cast_to_fp8", lambda a: {"x": zeros(2, 100)}, "x: the last dimension must be a multiple of gran_k=128"),
    ("per_token_cast_to_fp8", lambda a: {"x": torch.tensor(1.0)}, r"x: must have at least 1 dimension, got shape \[\]"),
    ("per_token_cast_to_fp8", lambda a: {"x": torch.zeros(4, 6, 128)[:, :3]}, "x: dimensions 0 to 1 must be mergeable"),
    (
        "swiglu_cast_to_fp8",
        lambda a: {"gate": torch.zeros(4, 6, 128)[:, :3], "up": zeros(4, 3, 128)},
        "gate: dimensions 0 to 1 must be mergeable",
    ),
    *(
        ("swiglu_cast_to_fp8", lambda a, value=value: {"limit": value}, f"limit: {message}")
        for value, message in [
            (0.0, "must be a positive number, got 0.0"),
            (math.nan, "must be finite in fp32, got nan"),
            ("7", "must be a number, got '7'"),
        ]
    ),
]
