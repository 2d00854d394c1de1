"""Limits of norm, rotation and hyper connections."""

import torch

from dsa.kernels.elementwise.limits import MAX_MIX_OUTPUTS, MAX_MIX_TOKENS, MAX_MIX_WIDTH
from tests.ops.limits.tensors import F32, angles, bf16, row, streams, zeros

NORM_LIMIT = "x: .* a multiple of 8 up to {} for {}, got shape"
EIGHT = "the kernel rotates a multiple of 8 channels, got shape"
LIMITS = [
    ("rms_norm", lambda a: {"x": zeros(3, 2, 12), "weight": None}, NORM_LIMIT.format(16384, "float32")),
    ("rms_norm", lambda a: {"x": zeros(3, 2, 0), "weight": None}, NORM_LIMIT.format(16384, "float32")),
    ("rms_norm", lambda a: {"x": zeros(1, 16392), "weight": None}, NORM_LIMIT.format(16384, "float32")),
    ("rms_norm", lambda a: {"x": zeros(1, 32776).half(), "weight": None}, NORM_LIMIT.format(32768, "float16")),
    ("rms_norm", lambda a: {"x": zeros(2**31, 8), "weight": None}, "x: the kernel takes at most 2147483616 rows"),
    (
        "rms_norm",
        lambda a: {"x": torch.zeros(2, 3, 4, 16).transpose(0, 1), "weight": None},
        "x: dimensions 0 to 1 must be mergeable",
    ),
    ("rms_norm_rotary", lambda a: angles(3, 2), f"cos: {EIGHT}"),
    ("rms_norm_rotary", lambda a: angles(3, 0), f"cos: {EIGHT}"),
    ("rms_norm_rotary", lambda a: {"x": bf16(3, 1, 1032), "weight": None}, NORM_LIMIT.format(1024, "bfloat16")),
    ("rms_norm_rotary", lambda a: {"x": zeros(3, 1, 520), "weight": None}, NORM_LIMIT.format(512, "float32")),
    ("rms_norm_rotary", lambda a: {"x": zeros(3, 1, 76), "weight": None}, NORM_LIMIT.format(512, "float32")),
    (
        "rms_norm_rotary",
        lambda a: {"x": bf16(2**20, 2**11, 80), "cos": zeros(2**20, 32), "sin": zeros(2**20, 32)},
        "x: .* at most 214",
    ),
    (
        "rms_norm_cast_to_fp8",
        lambda a: {"x": a["x"][:, :192], "weight": a["weight"][:192]},
        r"x: the last dimension must be a multiple of 128, got .* 192\]",
    ),
    (
        "add_rms_norm_cast_to_fp8",
        lambda a: {name: a[name][..., :0] for name in ("x", "residual", "weight")},
        "x: the kernel takes a last dimension of 128 to 16384 for bfloat16",
    ),
    (
        "rms_norm_cast_to_fp8",
        lambda a: {"x": zeros(1, 16512), "weight": zeros(16512)},
        "x: the kernel takes a last dimension of 128 to 8192 for float32, got .* 16512",
    ),
    ("apply_rotary", lambda a: {"x": a["x"][..., :79]}, "x: the kernel takes an even last dimension, got shape"),
    ("apply_rotary", lambda a: angles(3, 0), r"cos: the kernel rotates at least 2 channels, got shape \[3, 0\]"),
    ("apply_rotary", lambda a: {"x": torch.zeros(3, 2, 4, 80).transpose(1, 2)}, "x: dimensions 1 to 2 must be mergeab"),
    (
        "apply_rotary",
        lambda a: {"x": torch.zeros(3, 4, 2, 80), "out": torch.zeros(3, 2, 4, 80).transpose(1, 2)},
        "out: dimensions 1 to 2 must be mergeable",
    ),
    (
        "apply_rotary",
        lambda a: {"x": bf16(2**20, 2**12, 66), "cos": zeros(2**20, 32), "sin": zeros(2**20, 32)},
        "x: the kernel takes at most 4294966272 numbers in rows like these",
    ),
    ("apply_rotary into out", lambda a: {"out": row(a["out"], 3)}, "out: its numbers must not share memory, got str"),
    *(
        (op, change, message)
        for op in ("hyper_collapse", "hyper_collapse_norm_cast_to_fp8")
        for change, message in [
            (lambda a: streams(3, 2, a["streams"].shape[2]), "streams: the kernel takes n 4 streams")
        ]
    ),
    ("hyper_collapse", lambda a: streams(3, 4, 12), "streams: the kernel takes D a multiple of 8, got 12"),
    ("hyper_collapse", lambda a: streams(1, 4, 16392), "streams: .* D at most 16384 of bfloat16, got 16392"),
    ("hyper_collapse", lambda a: streams(1, 4, 8200, F32), "streams: .* D at most 8192 of float32, got 8200"),
    ("hyper_collapse", lambda a: streams(2**30, 4, 8), "streams: the kernel takes T D at most 8589926400 channels"),
    (
        "hyper_collapse_norm_cast_to_fp8",
        lambda a: streams(3, 4, 192, weight=zeros(192)),
        "streams: must have at least one stream and D a multiple of 128, got shape",
    ),
    (
        "hyper_collapse_norm_cast_to_fp8",
        lambda a: streams(1, 4, 8320, weight=zeros(8320)),
        "streams: the kernel takes D at most 8192, got 8320",
    ),
    (
        "hyper_collapse_norm_cast_to_fp8",
        lambda a: streams(2**26, 4, 128, weight=zeros(128)),
        "streams: the kernel takes T D at most 8589926400 channels",
    ),
    *(
        (op, change, message)
        for op in ("hyper_expand", "hyper_expand_mix")
        for change, message in [
            (
                lambda a: (
                    {"streams": bf16(3, 2, 16), "post": zeros(3, 2), "comb": zeros(3, 2, 2)}
                    | ({"parts": bf16(3, 24, 32)} if "parts" in a else {})
                ),
                "streams: the kernel takes n 4 streams, got 2",
            ),
            (
                lambda a: (
                    {"y": bf16(3, 12), "streams": bf16(3, 4, 12)} | ({"parts": bf16(3, 24, 48)} if "parts" in a else {})
                ),
                "streams: the kernel takes D a multiple of 8, got 12",
            ),
        ]
    ),
    (
        "hyper_mix",
        lambda a: {"streams": bf16(3, 4, 12), "parts": bf16(3, 24, 48)},
        "streams: the kernel takes D a multiple of 8, got 12",
    ),
    *(
        (
            "hyper_mix",
            lambda a, sizes=sizes: {"streams": bf16(*sizes[0]), "parts": bf16(*sizes[1])},
            message,
        )
        for sizes, message in [
            (((MAX_MIX_TOKENS + 1, 1, 8), (3, 1, 8)), "streams: the kernel takes at most 2147483136 tokens"),
            (((1, 1, MAX_MIX_WIDTH + 8), (3, 1, MAX_MIX_WIDTH + 8)), "parts: the kernel takes n D at most 1073741824"),
            (((1, 1, 8), (3, MAX_MIX_OUTPUTS + 1, 8)), "and C at most 524280, got shape"),
        ]
    ),
]
