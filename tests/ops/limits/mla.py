"""Limits of attention."""

import math

import torch

from tests.ops.limits.tensors import BF16, BYTES, INT32, bf16, kv_b, row, zeros

PREFILL, DECODE = "flash_mla_sparse_fwd", "flash_mla_with_kvcache"
WINDOWS = ["sliding_window_attention", "window_sparse_attention"]
LIMITS = [
    (PREFILL, lambda a: {"d_v": 1000}, "d_v: must be at most d = 576"),
    *(
        (
            PREFILL,
            lambda a, value=value: {"enable_batch_invariant": value},
            "enable_batch_invariant: must be True or False",
        )
        for value in (1, None)
    ),
    (f"{PREFILL} into out", lambda a: {"out": row(a["out"], 3)}, "out: its numbers must not share memory"),
    (
        f"{PREFILL} into out",
        lambda a: {"out": torch.zeros(3, 2, 1024, dtype=BF16)[..., :512]},
        "out: dimensions 1 to 2 must be mergeable into one",
    ),
    (
        f"{PREFILL} into out",
        lambda a: {"q": a["out"], "kv": a["kv"][..., :512].contiguous()},
        "out: is written, must not share memory with q",
    ),
    (
        f"{PREFILL} into out",
        lambda a: {"kv": a["out"].view(6, 1, 512), "q": a["q"][..., :512]},
        "out: is written, must not share memory with kv",
    ),
    (
        f"{DECODE} sparse",
        lambda a: {"k_cache": a["k_cache"].half()},
        "k_cache: dtype must be q's bfloat16 or .*, got float16",
    ),
    (f"{DECODE} v32", lambda a: {"q": a["q"].half()}, "q: the kernel takes bfloat16 with a byte cache"),
    (f"{DECODE} v4", lambda a: {"k_cache": zeros(3, 5, 1, 584, dtype=BYTES)}, "k_cache: pages must start at multiples"),
    (
        f"{DECODE} sparse",
        lambda a: {"extra_k_cache": None, "extra_indices_in_kvcache": None},
        "extra_topk_length: must be None without extra_k_cache",
    ),
    (
        f"{DECODE} sparse",
        lambda a: {"extra_k_cache": zeros(2, 5, 1, 656, dtype=BYTES)},
        "extra_k_cache: dtype must be",
    ),
    (f"{DECODE} sparse", lambda a: {"tile_scheduler_metadata": (1, 2)}, "tile_scheduler_metadata: must be"),
    (
        f"{DECODE} v32 into out",
        lambda a: {"out": torch.zeros(2, 1, 2, 1024, dtype=BF16)[..., :512]},
        "out: dimensions 2 to 3 must be mergeable into one",
    ),
    (
        f"{DECODE} old plan",
        lambda a: {"k_cache": zeros(3, 16, 1, 656, dtype=BYTES), "is_fp8_kvcache": True},
        "k_cache: the kernel takes q's dtype bfloat16 without indices, got uint8",
    ),
    *(
        (f"{DECODE} old plan", lambda a, x=x: {"softmax_scale": x}, f"must be finite in fp32, got {x}")
        for x in (math.inf, -math.inf, math.nan)
    ),
    (
        f"{DECODE} old plan",
        lambda a: {"out": torch.zeros(2, 1, 4, 1024, dtype=BF16)[..., :512]},
        "out: dimensions 2 to 3 must be mergeable into one",
    ),
    (
        f"{DECODE} dense into out",
        lambda a: {"out": a["k_cache"].flatten()[: 8 * 512].view(2, 2, 2, 512)},
        "out: is written, must not share memory with k_cache",
    ),
    *(
        (op, change, message)
        for op in WINDOWS
        for change, message in [
            (lambda a: {"window": 0}, "window: must be at least 1, got 0"),
            (lambda a: {"d_v": 1000}, "d_v: must be at most d = 512, got 1000"),
            (lambda a: {"kv": a["kv"].half()}, "kv: dtype must be q's bfloat16, got float16"),
        ]
    ),
    (
        f"{WINDOWS[0]} listed",
        lambda a: {"indices": a["indices"][:, :1]},
        r"indices: shape must be \[4, 2\], got \[4, 1\]",
    ),
    (
        f"{WINDOWS[1]} listed",
        lambda a: {"window_indices": a["window_indices"][:, :1]},
        r"window_indices: shape must be \[4, 2\], got \[4, 1\]",
    ),
    (
        "sliding_window_decode ring",
        lambda a: {"window": 16},
        r"cache: must have a page of at least window \+ s_q - 1 = 17 keys",
    ),
    (
        "sliding_window_decode ring",
        lambda a: {"q": a["q"].half()},
        "q: the kernel takes bfloat16 with a byte cache, got",
    ),
    (
        "sliding_window_decode ring",
        lambda a: {"is_fp8_kvcache": False},
        "cache: dtype must be float32, bfloat16 or float16 with",
    ),
    (
        "sliding_window_decode ring",
        lambda a: {"cache": zeros(2, 16, 1, 656, dtype=BYTES)},
        "cache: a last dimension of 656 means d = 576, but q has d = 512",
    ),
    (
        "sliding_window_decode",
        lambda a: {"cache": a["cache"].half()},
        "cache: dtype must be q's bfloat16 or .*, got float16",
    ),
    *(
        ("window_attention_cast_to_fp8", change, message)
        for change, message in [
            (lambda a: {"groups": 3}, "groups: must divide the 2 heads of q, got 3"),
            (lambda a: {"compressed": None}, "compressed: must be given with indices, got None"),
            (lambda a: {"indices": None, "topk_length": None}, "indices: must be given with compressed, got None"),
            (lambda a: {"indices": None, "compressed": None}, "indices: must be given with topk_length, got None"),
        ]
    ),
    (
        "mha_varlen_fwd",
        lambda a: {"q": bf16(5, 4, 264), "k": bf16(9, 2, 264), "v": bf16(9, 2, 64), "k_rope": None},
        r"q, v: the kernel takes up to \(d, dv\) = \(256, 256\) channels, got \(264, 64\)",
    ),
    (
        "mha_varlen_fwd",
        lambda a: {"selected": torch.zeros(1, dtype=INT32).expand(5, 2**29)},
        "selected: the kernel takes at most 2147483",
    ),
    ("mha_varlen_fwd", lambda a: {"softmax_scale": -1.0}, "softmax_scale: must be above 0, got -1.0"),
    ("window_slots ring", lambda a: {"page_size": 4, "window": 4}, "page_size: a ring must hold"),
    (
        "merge_attention",
        lambda a: {
            "outs": [torch.zeros(2, 3, 2, 4, 16).transpose(0, 2)],
            "lses": [torch.zeros(2, 3, 2, 4)],
            "attn_sink": None,
        },
        r"outs\[0\]: dimensions 0 to 1 must be mergeable into one with a single stride",
    ),
    ("merge_attention", lambda a: {"lses": a["lses"][:1]}, "lses: must be a list of as many tensors as outs, 2, got 1"),
    ("merge_attention", lambda a: {"outs": [], "lses": []}, "outs: must be a list of at least one tensor, got none"),
    *(
        (op, change, message)
        for op in ("mla_absorb_queries", "mla_values_cast_to_fp8")
        for change, message in [
            (
                lambda a: {"kv_b": kv_b(528, 512)},
                r"kv_b\[0\]: the kernel takes a multiple of 32 rows a head, got 528 for 2 heads",
            ),
        ]
    ),
]
