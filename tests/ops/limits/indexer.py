"""Limits of the lightning indexer."""

import torch

from dsa.kernels.indexer.select_limits import MAX_SELECTED
from tests.ops.limits.tensors import BF16, BYTES, INT32, angles, bf16, e4m3, row, zeros

ROTATES = r"cos: the kernel rotates R \(32, 64, 128\) channels, got "
HEADS, DIMS = r"q: the kernel takes \(8, 16, 32, 64\) heads, got 6", r"q: .* head dimensions \(32, 64, 128\), got 16"
PAGED = ["fp8_paged_mqa_logits", "paged_indexer_select", "paged_indexer_select of slots"]
LIMITS = [
    *(
        (op, lambda a, rotated=rotated: angles(3, rotated // 2), f"{ROTATES}{rotated}")
        for op in ("quantize_indexer_queries", "write_indexer_keys")
        for rotated in (0, 16, 96, 126)
    ),
    *(
        (op, change, message)
        for op in ("fp8_mqa_logits", "indexer_select")
        for change, message in [
            (lambda a: {"q": a["q"][:, :6].contiguous(), "weights": a["weights"][:, :6]}, HEADS),
            (lambda a: {"q": a["q"][..., :16].contiguous(), "kv": (a["kv"][0][:, :16], a["kv"][1])}, DIMS),
            (
                lambda a: {"kv": (e4m3(2**30, 32), zeros(2**30))},
                rf"kv\[0\]: the kernel takes less than {2**30} keys, got",
            ),
            (lambda a: {"kv": a["kv"][0]}, "kv: must be a pair"),
            (lambda a: {"accumulators": BF16}, "accumulators: must be float32 or float16, got bfloat16"),
        ]
    ),
    (
        "fp8_mqa_logits compressed",
        lambda a: {"max_seqlen_k": 2**30},
        f"max_seqlen_k: the kernel takes less than {2**30} col",
    ),
    ("indexer_select", lambda a: {"top_k": MAX_SELECTED + 1}, f"top_k: the kernel takes up to {MAX_SELECTED}, got"),
    ("indexer_select", lambda a: {"page_size": 64}, "page_size: must be None without block_table, got int"),
    (
        "indexer_select",
        lambda a: {"row_to_seq": torch.zeros(3, dtype=INT32)},
        "row_to_seq: must be None without block_table, got Tensor",
    ),
    ("indexer_select paged", lambda a: {"page_size": None}, "page_size: must be given with block_table, got None"),
    ("indexer_select paged", lambda a: {"row_to_seq": None}, "block_table: must have a row for each of the 3 rows"),
    *(
        (op, change, message)
        for op in PAGED
        for change, message in [
            (
                lambda a: {"q": e4m3(2, 2, 24, 32), "weights": zeros(4, 24)},
                r"q: the kernel takes heads \(8, 16, 32, 64\), got 24",
            ),
            (
                lambda a: {"q": e4m3(2, 2, 8, 16), "kv_cache": zeros(3, 32, 1, 20, dtype=BYTES)},
                r"q: the kernel takes head dimensions \(32, 64, 128\), got 16",
            ),
            (lambda a: {"kv_cache": a["kv_cache"].view(6, 16, 1, 36)}, r"kv_cache: .* page sizes \(32, 64\), got 16"),
            (lambda a: {"accumulators": BF16}, "accumulators: must be float32 or float16, got bfloat16"),
        ]
    ),
    *(
        (
            op,
            lambda a: {"q": e4m3(2, 5, 8, 32), "weights": zeros(10, 8), "context_lens": torch.ones(2, dtype=INT32)},
            r"q: .* queries a sequence \(next_n\) \(1, 2, 3, 4\), got 5",
        )
        for op in PAGED[:2]
    ),
    (
        "fp8_paged_mqa_logits",
        lambda a: {"max_context_len": 2**30},
        f"max_context_len: .* less than {2**30} columns, got",
    ),
    ("get_paged_mqa_logits_metadata", lambda a: {"block_kv": 96}, "block_kv: must be a divisor of 256, got 96"),
    (
        "paged_indexer_select",
        lambda a: {"max_context_len": 2**30, "block_table": torch.zeros(2, 2**25, dtype=INT32)},
        f"max_context_len: the kernel takes less than {2**30} keys, got",
    ),
    ("paged_indexer_select", lambda a: {"top_k": 5000}, "top_k: the kernel takes up to 4096, got 5000"),
    ("paged_indexer_select", lambda a: {"top_k": 0}, "top_k: must be at least 1, got 0"),
    ("topk_indices", lambda a: {"k": 5000}, "k: the kernel takes up to 4096, got 5000"),
    ("topk_indices", lambda a: {"k": 0}, "k: must be at least 1, got 0"),
    (
        "topk_indices",
        lambda a: {"scores": bf16(3, 2**30)},
        r"scores: the kernel takes less than 1073741824 columns, got \[3",
    ),
    ("topk_indices", lambda a: {"page_size": 64}, "page_size: must be None without block_table"),
    ("topk_indices paged", lambda a: {"page_size": None}, "page_size: must be given with block_table"),
    ("topk_indices paged", lambda a: {"row_to_seq": None}, "block_table: must have a row for each of the 3 rows"),
    (
        "topk_indices into out",
        lambda a: {"out": row(a["out"], 3)},
        "out: its numbers must not share memory, got strides",
    ),
    (
        "topk_indices into out",
        lambda a: {"out": a["scores"].view(INT32)[:, :4]},
        "out: is written, must not share memory with scores",
    ),
    (
        "topk_indices into out",
        lambda a: {"lengths": a["out"].view(-1)[:3]},
        "out: is written, must not share memory with lengths",
    ),
]
