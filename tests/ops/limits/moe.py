"""Limits of the sum of experts."""

from tests.ops.limits.tensors import row

LIMITS = [
    (
        "combine_experts",
        lambda a: {
            "rows": row(a["rows"], 2**31),
            "weights": row(a["weights"], 2**31),
            "shared": None,
            "residual": None,
        },
        "rows: the kernel takes at most 2147483647 times 2048 bytes of tokens' channels, got 2147483648",
    ),
]
