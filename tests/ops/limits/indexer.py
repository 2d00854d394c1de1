"""Limits of the lightning indexer."""

import torch

from tests.ops.limits.tensors import BF16, INT32, row

PAGED = ["fp8_paged_mqa_logits", "paged_indexer_select", "paged_indexer_select of slots"]
LIMITS = [
    *(
        (op, change, message)
        for op in ("fp8_mqa_logits", "indexer_select")
        for change, message in [
            (lambda a: {"kv": a["kv"][0]}, "kv: must be a pair"),
            (lambda a: {"accumulators": BF16}, "accumulators: must be float32 or float16, got bfloat16"),
        ]
    ),
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
            (lambda a: {"accumulators": BF16}, "accumulators: must be float32 or float16, got bfloat16"),
        ]
    ),
    ("get_paged_mqa_logits_metadata", lambda a: {"block_kv": 96}, "block_kv: must be a divisor of 256, got 96"),
    (
        "get_paged_mqa_logits_metadata",
        lambda a: {"context_lens": torch.zeros(2, 0, dtype=INT32)},
        "context_lens: next_n must be at least 1, got shape",
    ),
    (
        "paged_indexer_select",
        lambda a: {"max_context_len": 2**30, "block_table": torch.zeros(2, 2**25, dtype=INT32)},
        f"max_context_len: the kernel takes less than {2**30} keys, got",
    ),
    ("paged_indexer_select", lambda a: {"top_k": 0}, "top_k: must be at least 1, got 0"),
    ("topk_indices", lambda a: {"k": 0}, "k: must be at least 1, got 0"),
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
