"""Limits of the training ops."""

import math

from tests.ops.limits.tensors import bf16

WARM_UP = "indexer_warmup_attention"
LIMITS = [
    *(("sparse_mla_attention", lambda a, x=x: {"d_v": x}, f"d_v: must be at least 1, got {x}") for x in (-1, 0)),
    *(
        ("sparse_mla_attention", lambda a, x=x: {"d_v": x}, f"d_v: must be at most d = 576, got {x}")
        for x in (577, 10**6)
    ),
    *(
        ("sparse_mla_attention", lambda a, x=x: {"softmax_scale": x}, "softmax_scale: must be finite")
        for x in (math.nan, math.inf)
    ),
    ("sparse_mla_attention", lambda a: {"deterministic": 1}, "deterministic: must be True or False, got 1"),
    ("sparse_indexer_loss", lambda a: {"softmax_scale": math.inf}, "softmax_scale: must be finite in fp32, got inf"),
    (
        "sparse_indexer_loss",
        lambda a: {"softmax_scale": 0.0, "lse": None},
        "softmax_scale: the kernel takes a positive number without lse, got 0.0",
    ),
    *(
        (op, lambda a: {"w_idx": a["w_idx"].half()}, "w_idx: dtype must be q_idx's bfloat16 or float32, got float16")
        for op in ("sparse_indexer_loss", "indexer_topk", WARM_UP)
    ),
    (
        WARM_UP,
        lambda a: {"q": bf16(5, 8, 96), "k": bf16(7, 2, 96)},
        r"q, v: the kernel takes channels .* got \(96, 64\)",
    ),
    (
        WARM_UP,
        lambda a: {"q": bf16(5, 8, 576), "k": (k := bf16(7, 2, 576)), "v": k[..., :512]},
        "k: the kernel takes one head of 576 channels, got 2",
    ),
    (
        WARM_UP,
        lambda a: {"q": bf16(5, 8, 576), "k": bf16(7, 1, 576), "v": bf16(7, 1, 512)},
        r"v: the kernel takes k\[..., :512\]",
    ),
]
