"""Limits of the gate, the order and the sum of experts."""

import torch

from dsa.kernels.moe.route_to_experts_limits import MAX_EXPERTS, MAX_TOKENS
from tests.ops.limits.tensors import INT32, bf16, row, zeros

ROUTERS = ["route_to_experts", "route_by_table"]
LIMITS = [
    (
        "combine_experts",
        lambda a: {"y": bf16(6, 12), "shared": None, "residual": None},
        "y: the kernel takes H a multiple of 8",
    ),
    ("combine_experts", lambda a: {"y": bf16(2**31, 16)}, r"y: the kernel takes at most 2147483647 rows, got shape"),
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
    (
        "moe_gate",
        lambda a: {"logits": zeros(2, 1056), "bias": zeros(1056)},
        "logits: the kernel takes up to 1024 experts, got 1056",
    ),
    (
        "moe_gate",
        lambda a: {"logits": zeros(2, 64), "bias": zeros(64), "top_k": 33, "n_group": 1, "topk_group": 1},
        "top_k: the kernel takes up to 32, got 33",
    ),
    (
        "moe_gate",
        lambda a: {"logits": zeros(2, 128), "bias": zeros(128), "n_group": 64, "topk_group": 64},
        "n_group: the kernel takes up to 32, got 64",
    ),
    (
        "sort_by_expert",
        lambda a: {"experts": torch.zeros(1, dtype=INT32).expand(2**31 - 511)},
        r"experts: the kernel takes up to 2147483136 entries, got shape \[2147483137\]",
    ),
    (
        "sort_by_expert",
        lambda a: {"count": 2**31 - 1},
        "count: the kernel takes up to 2147483646 experts, got 2147483647",
    ),
    *(
        (op, change, message)
        for op in ROUTERS
        for change, message in [
            (
                lambda a: (
                    {"x": bf16(MAX_TOKENS + 1, 64)}
                    | ({"tokens": torch.zeros(MAX_TOKENS + 1, dtype=torch.int64)} if "tokens" in a else {})
                ),
                "x: the kernel takes up to 64 tokens, got 65",
            ),
            (
                lambda a: {"x": a["x"][:, :48], "weight": a["weight"][:, :48]},
                "x: the kernel takes H a multiple of 32, at least one, got 48",
            ),
            (
                lambda a: (
                    {"weight": bf16(MAX_EXPERTS + 16, 64)} | ({"bias": zeros(MAX_EXPERTS + 16)} if "bias" in a else {})
                ),
                "weight: the kernel takes up to 512 experts, got 528",
            ),
        ]
    ),
    (
        ROUTERS[0],
        lambda a: {"weight": bf16(64, 64), "bias": zeros(64), "top_k": 33, "n_group": 1, "topk_group": 1},
        "top_k: the kernel takes up to 32, got 33",
    ),
    (
        ROUTERS[0],
        lambda a: {"weight": bf16(128, 64), "bias": zeros(128), "n_group": 64, "topk_group": 64},
        "n_group: the kernel takes up to 32, got 64",
    ),
    *(
        (
            ROUTERS[1],
            lambda a, k=k: {"table": torch.zeros(2, k, dtype=torch.int64)},
            f"table: the kernel takes from 1 to 32 experts of a token, got {k}",
        )
        for k in (33, 0)
    ),
]
