"""Limits of attention."""

import math

import torch

from tests.ops.limits.tensors import BF16, BYTES, INT32, angles, bf16, kv_b, row, zeros


def narrow(a, cache, d):
    """Attention of d channels, all of which are values."""
    return {"q": a["q"][..., :d], cache: a[cache][..., :d].contiguous(), "d_v": d}


PREFILL, DECODE = "flash_mla_sparse_fwd", "flash_mla_with_kvcache"
WINDOWS = ["sliding_window_attention", "window_sparse_attention"]
POSITIVE = "softmax_scale: the kernel takes a positive number, got "
LIMITS = [
    (PREFILL, lambda a: {"sm_scale": 0.0}, "sm_scale: the kernel takes a positive number"),
    (PREFILL, lambda a: {"d_v": 256}, "d_v: the kernel takes 512, got 256"),
    (PREFILL, lambda a: {"d_v": 1000}, "d_v: must be at most d = 576"),
    (PREFILL, lambda a: narrow(a, "kv", 320), "q: the kernel takes d = 576 or 512"),
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
    (f"{DECODE} sparse", lambda a: {"softmax_scale": -1.0}, f"{POSITIVE}-1.0"),
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
    (
        f"{DECODE} old plan",
        lambda a: {"q": a["q"][..., :512], "k_cache": a["k_cache"][..., :512]},
        r"q: .* takes d = 576, got shape \[2, 1, 4, 512\]",
    ),
    (f"{DECODE} old plan", lambda a: {"head_dim_v": 256}, "head_dim_v: the kernel takes 512, got 256"),
    (
        f"{DECODE} old plan",
        lambda a: {"k_cache": a["k_cache"][:, :15]},
        "k_cache: the kernel takes pages of a multiple of 16 keys, got 15",
    ),
    *((f"{DECODE} old plan", lambda a, x=x: {"softmax_scale": x}, f"{POSITIVE}{x}") for x in (0.0, -1.0)),
    *(
        (f"{DECODE} old plan", lambda a, x=x: {"softmax_scale": x}, f"must be finite in fp32, got {x}")
        for x in (math.inf, -math.inf, math.nan)
    ),
    *(
        (
            f"{DECODE} old plan",
            lambda a, n=n: {"tile_scheduler_metadata": torch.zeros(n, 8, dtype=INT32)},
            f"takes 1 to 160 parts, got {n}",
        )
        for n in (161, 0)
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
    (
        "get_mla_metadata",
        lambda a: {"cache_seqlens": torch.zeros(32769, dtype=INT32)},
        "plans for at most 32768 .* got 32769",
    ),
    *(
        (op, change, message)
        for op in WINDOWS
        for change, message in [
            (lambda a: {"window": 0}, "window: must be at least 1, got 0"),
            (lambda a: {"softmax_scale": 0.0}, f"{POSITIVE}0.0"),
            (lambda a: {"d_v": 256}, "d_v: the kernel takes 512, got 256"),
            (lambda a: {"d_v": 1000}, "d_v: must be at most d = 512, got 1000"),
            (lambda a: {"kv": a["kv"].half()}, "kv: dtype must be q's bfloat16, got float16"),
        ]
    ),
    (WINDOWS[0], lambda a: narrow(a, "kv", 320), r"q: the kernel takes d = 576 or 512, got shape \[4, 2, 320\]"),
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
    ("sliding_window_decode", lambda a: {"softmax_scale": -1.0}, f"{POSITIVE}-1.0"),
    ("sliding_window_decode", lambda a: {"d_v": 256}, "d_v: the kernel takes 512, got 256"),
    ("sliding_window_decode", lambda a: narrow(a, "cache", 320), "q: the kernel takes d = 576 or 512"),
    *(
        ("window_attention_cast_to_fp8", change, message)
        for change, message in [
            (lambda a: {"groups": 3}, "groups: must divide the 2 heads of q, got 3"),
            (lambda a: {"compressed": None}, "compressed: must be given with indices, got None"),
            (lambda a: {"indices": None, "topk_length": None}, "indices: must be given with compressed, got None"),
            (lambda a: {"indices": None, "compressed": None}, "indices: must be given with topk_length, got None"),
            (
                lambda a: {"q": bf16(4, 2, 256), "kv": bf16(5, 1, 256), "compressed": bf16(3, 1, 256)},
                "q: the kernel takes d = 512, got shape",
            ),
            (lambda a: angles(4, 16), "cos: the kernel takes 32 angles a token, got"),
            (lambda a: {"softmax_scale": 0.0}, f"{POSITIVE}0.0"),
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
    (
        "window_indices",
        lambda a: {"total_q": 2**30 + 1, "window": 1},
        "total_q: the kernel takes at most 1073741824, got",
    ),
    ("window_indices", lambda a: {"window": 2**30 + 1}, "window: the kernel takes at most 1073741824, got"),
    ("window_slots", lambda a: {"page_size": 2**30 + 1}, "page_size: the kernel takes at most"),
    ("window_slots", lambda a: {"window": 2**30 + 1}, "window: the kernel takes at most"),
    ("window_slots", lambda a: {"s_q": 2**30, "window": 1}, r"B \* s_q: the kernel takes at most .*, got 2147483648"),
    ("window_slots ring", lambda a: {"page_size": 4, "window": 4}, "page_size: a ring must hold"),
    (
        "merge_attention",
        lambda a: {"outs": a["outs"] * 3, "lses": a["lses"] * 3},
        "outs: the kernel merges 1 to 4 branches, got 6",
    ),
    *(
        (
            "merge_attention",
            lambda a, d=d: {"outs": [x[..., :d] for x in a["outs"]]},
            r"outs\[0\]: the kernel takes d_v a multiple of 8, got shape",
        )
        for d in (12, 0)
    ),
    (
        "merge_attention",
        lambda a: {"outs": [bf16(2**20, 2**11, 8)], "lses": [zeros(2**20, 2**11)], "attn_sink": None},
        r"outs\[0\]: the kernel takes at most 2147483640 rows, got shape",
    ),
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
    (
        "mla_absorb_queries",
        lambda a: {"q_nope": bf16(3, 2, 64)},
        r"q_nope: the kernel takes 128 or 192 channels, got shape \[3, 2, 64\]",
    ),
    (
        "mla_absorb_queries",
        lambda a: {"q_pe": bf16(3, 2, 32), **angles(3, 16)},
        r"q_pe: the kernel takes 64 channels, got shape \[3, 2, 32\]",
    ),
    *(
        (op, change, message)
        for op in ("mla_absorb_queries", "mla_values_cast_to_fp8")
        for change, message in [
            (
                lambda a: {"kv_b": kv_b(512, 256)} | ({"attended": bf16(3, 2, 256)} if "attended" in a else {}),
                r"kv_b\[0\]: the kernel takes 512 columns, got shape \[512, 256\]",
            ),
            (
                lambda a: {"kv_b": kv_b(528, 512)},
                r"kv_b\[0\]: the kernel takes a multiple of 32 rows a head, got 528 for 2 heads",
            ),
        ]
    ),
]
