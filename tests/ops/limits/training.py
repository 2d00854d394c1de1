"""Limits of the indexer's training."""

import math

import torch

from tests.ops.limits.tensors import INT32, bf16, zeros

POSITIVE = "softmax_scale: the kernel takes a positive number, got "
WARM_UP = "indexer_warmup_attention"
LIMITS = [
    ("sparse_mla_attention", lambda a: {"q": bf16(3, 2, 640), "kv": bf16(5, 1, 640)}, "q: .* d = 576"),
    *(("sparse_mla_attention", lambda a, x=x: {"d_v": x}, f"d_v: must be at least 1, got {x}") for x in (-1, 0)),
    *(
        ("sparse_mla_attention", lambda a, x=x: {"d_v": x}, f"d_v: must be at most d = 576, got {x}")
        for x in (577, 10**6)
    ),
    *(
        ("sparse_mla_attention", lambda a, x=x: {"softmax_scale": x}, "softmax_scale: must be finite")
        for x in (math.nan, math.inf)
    ),
    ("sparse_mla_attention", lambda a: {"deterministic": 1}, "deterministic: must be True or False, got int"),
    ("sparse_mla_attention", lambda a: {"d_v": 256}, "d_v: the kernel takes 512, got 256"),
    ("sparse_mla_attention", lambda a: {"softmax_scale": 0.0}, "softmax_scale: .* positive number, got 0.0"),
    ("sparse_indexer_loss", lambda a: {"q": bf16(5, 129, 512), "lse": None}, "q: the kernel takes at most 128 heads"),
    (
        "sparse_indexer_loss",
        lambda a: {"indices": torch.zeros(5, 1, 2049, dtype=INT32)},
        "indices: .* at most 2048 keys of a query",
    ),
    ("sparse_indexer_loss", lambda a: {"softmax_scale": math.inf}, "softmax_scale: must be finite in fp32, got inf"),
    (
        "sparse_indexer_loss",
        lambda a: {"softmax_scale": 0.0, "lse": None},
        "softmax_scale: must be a finite number, without lse above 0, got 0.0",
    ),
    *(
        (op, change, message)
        for op in ("sparse_indexer_loss", "indexer_topk", WARM_UP)
        for change, message in [
            (lambda a: {"q_idx": bf16(5, 8, 32), "k_idx": bf16(7, 32)}, "q_idx: .* 64 or 128"),
            (lambda a: {"q_idx": bf16(5, 65, 64), "w_idx": zeros(5, 65)}, "q_idx: .* 1 to 64 heads"),
        ]
    ),
    *(
        (op, lambda a: {"w_idx": a["w_idx"].half()}, "w_idx: dtype must be q_idx's bfloat16 or float32, got float16")
        for op in ("sparse_indexer_loss", "indexer_topk", WARM_UP)
    ),
    ("indexer_topk", lambda a: {"top_k": 5000}, "top_k: the kernel takes up to 4096, got 5000"),
    (
        WARM_UP,
        lambda a: {"q": bf16(5, 8, 96), "k": bf16(7, 2, 96)},
        r"q, v: the kernel takes channels .* got \(96, 64\)",
    ),
    (WARM_UP, lambda a: {"softmax_scale": 0.0}, f"{POSITIVE}0.0"),
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
