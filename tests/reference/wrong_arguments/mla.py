"""Wrong arguments of the attention ops."""

import math

from dsa import FlashMLASchedMeta
from dsa.reference import per_block_cast_to_fp8
from tests.reference.common import BF16, BYTE, INT32, i32, i64, zeros

LISTED = "flash_mla_with_kvcache sparse"
DENSE = "flash_mla_with_kvcache dense"
QUERY_BOUNDS = "cu_seqlens_q: must be non-decreasing numbers from 0 to 4, got"
KEY_BOUNDS = "cu_seqlens_k: must be non-decreasing numbers from 0 to 5, got"


def bf16(*shape):
    return zeros(*shape, dtype=BF16)


def kv_b(rows):
    return per_block_cast_to_fp8(zeros(rows, 512))


WITHOUT_EXTRA = {"extra_k_cache": None, "extra_indices_in_kvcache": None, "extra_topk_length": None}
BRANCHES = {"outs": [zeros(2, 3, 4)] * 2, "lses": [zeros(2, 3)] * 2, "attn_sink": None}
WINDOWS = [
    ({"window": 0}, "window: must be at least 1, got 0"),
    ({"cu_seqlens_q": i32([0, 2, 6])}, f"{QUERY_BOUNDS} [0, 2, 6]"),
    ({"cu_seqlens_k": i32([0, 3, 1])}, f"{KEY_BOUNDS} [0, 3, 1]"),
    ({"cu_seqlens_k": i32([0, 3, 6])}, f"{KEY_BOUNDS} [0, 3, 6]"),
    ({"cu_seqlens_k": i32([0, 1, 4, 5])}, "cu_seqlens_k: shape must be [3], got [4] (sizes as of cu_seqlens_q"),
    ({"d_v": 1024}, "d_v: must be at most d = 512, got 1024"),
    ({"attn_sink": zeros(3)}, "attn_sink: shape must be [2], got [3]"),
]
WRONG = {
    "flash_mla_sparse_fwd": [
        ({"kv": bf16(5, 576)}, "kv: shape must be [s_kv, 1, 576], got [5, 576]"),
        (lambda a: {"indices": a["indices"][:, 0]}, "indices: shape must be [3, 1, K], got [3, 4]"),
        (lambda a: {"indices": a["indices"].long()}, "indices: dtype must be int32, got int64"),
        ({"d_v": 600}, "d_v: must be at most d = 576, got 600"),
        ({"attn_sink": bf16(2)}, "attn_sink: dtype must be float32, got bfloat16"),
        ({"topk_length": i32([1] * 4)}, "topk_length: shape must be [3], got [4]"),
        ({"q": zeros(3, 2, 576).double()}, "q: dtype must be float32, bfloat16 or float16, got float64"),
    ],
    LISTED: [
        ({"causal": True}, "causal: must be False with indices, got True"),
        ({"attn_sink": zeros(4)}, "attn_sink: shape must be [2], got [4]"),
        ({"topk_length": i32([1])}, "topk_length: shape must be [2], got [1]"),
        (lambda a: {"indices": a["indices"].long()}, "indices: dtype must be int32, got int64"),
        (lambda a: {"indices": a["indices"][:1]}, "indices: shape must be [2, 1, K], got [1, 1, 3]"),
        ({"k_cache": bf16(3, 4, 5, 576)}, "k_cache: shape must be [pages, P, 1, row], got [3, 4, 5, 576]"),
        ({"k_cache": bf16(3, 4, 1, 20)}, "k_cache: a last dimension of 20 means d = 20, but q has d = 576"),
        (
            {"k_cache": zeros(3, 4, 1, 656, dtype=BYTE)},
            "k_cache: dtype must be float32, bfloat16 or float16 with is_fp8_kvcache=False, got uint8",
        ),
        ({"is_fp8_kvcache": True}, "k_cache: dtype must be uint8"),
        (
            {"q": bf16(2, 1, 2, 512), "k_cache": zeros(3, 4, 1, 656, dtype=BYTE), "is_fp8_kvcache": True}
            | WITHOUT_EXTRA,
            "of 656 means d = 576, but q has d = 512",
        ),
        ({"head_dim_v": 577}, "head_dim_v: must be at most d = 576, got 577"),
        (
            WITHOUT_EXTRA | {"extra_topk_length": i32([1] * 2)},
            "extra_topk_length: must be None without extra_k_cache",
        ),
        (
            WITHOUT_EXTRA | {"extra_indices_in_kvcache": i32([[[0]]] * 2)},
            "extra_indices_in_kvcache: must be None without extra_k_cache",
        ),
        ({"extra_indices_in_kvcache": None}, "extra_indices_in_kvcache: must be a torch.Tensor, got NoneType"),
    ],
    DENSE: [
        ({"attn_sink": zeros(2)}, "attn_sink: must be None without indices, got Tensor"),
        ({"topk_length": i32([1] * 2)}, "topk_length: must be None without indices, got Tensor"),
        ({"k_cache": bf16(3, 16, 3, 576)}, "k_cache: its h_k heads must divide q's h_q = 2, got h_k = 3"),
        ({"cache_seqlens": i32([1])}, "cache_seqlens: shape must be [2], got [1]"),
        ({"block_table": None}, "block_table: must be a torch.Tensor, got NoneType"),
    ],
    "merge_attention": [
        (BRANCHES | {"lses": [zeros(2, 3)]}, "lses: must be a list of as many tensors as outs, 2, got 1"),
        (BRANCHES | {"outs": [], "lses": []}, "outs: must be a list of at least one tensor, got none"),
        (BRANCHES | {"lses": [zeros(2, 3), zeros(3, 2)]}, "lses[1]: shape must be [2, 3], got [3, 2]"),
        (BRANCHES | {"attn_sink": zeros(2)}, "attn_sink: shape must be [3], got [2]"),
    ],
    "mha_varlen_fwd": [
        ({"q": bf16(5, 3, 192), "attn_sink": None}, "q: heads must be a multiple of k's 2, at least as many, got 3"),
        ({"q": bf16(5, 0, 192), "attn_sink": None}, "q: heads must be a multiple of k's 2, at least as many, got 0"),
        ({"attn_sink": zeros(3)}, "attn_sink: shape must be [4], got [3]"),
        ({"softmax_scale": 0.0}, "softmax_scale: must be above 0, got 0.0"),
        ({"softmax_scale": math.inf}, "softmax_scale: must be finite in fp32, got inf"),
        (
            {"max_seqlen_k": 300, "selected": zeros(5, 8, dtype=INT32)},
            "selected: must have a multiple of 4 words a query, at least 12 of max_seqlen_k=300 keys, got 8",
        ),
        ({"max_seqlen_k": 300, "selected": zeros(5, 13, dtype=INT32)}, "max_seqlen_k=300 keys, got 13"),
        ({"selected": zeros(3, 4, dtype=INT32)}, "selected: shape must be [5, words], got [3, 4]"),
        ({"cu_seqlens_k": i32([0, 0, 0, 0])}, "cu_seqlens_k: shape must be [3], got [4]"),
        ({"dense_keys": -1}, "dense_keys: must be at least 0, got -1"),
        ({"v": bf16(5, 2, 128)}, "v: shape must be [9, 2"),
        ({"k_rope": None}, "k: must have q's 192 channels, got 128 and no k_rope"),
        ({"k_rope": bf16(9, 0)}, "k: must have q's 192 channels, got 128 and 0 in k_rope"),
        ({"k_rope": bf16(9, 67)}, "k: must have q's 192 channels, got 128 and 67 in k_rope"),
        ({"k_rope": bf16(5, 64)}, "k_rope: shape must be [9"),
    ],
    "sliding_window_attention": [*WINDOWS, ({"indices": i32([[0]] * 4)}, "indices: shape must be [4, 2], got [4, 1]")],
    "window_sparse_attention": [
        *WINDOWS,
        ({"compressed": bf16(5, 512)}, "compressed: shape must be [n, 1, 512], got [5, 512]"),
        ({"indices": i32([[0, 1]] * 2)}, "indices: shape must be [4, K], got [2, 2]"),
        (lambda a: {"indices": a["indices"].long()}, "indices: dtype must be int32, got int64"),
        ({"topk_length": i32([1, 2])}, "topk_length: shape must be [4], got [2]"),
        ({"window_indices": i32([[0]] * 4)}, "window_indices: shape must be [4, 2], got [4, 1]"),
    ],
    "sliding_window_decode": [
        ({"q": bf16(1, 3, 576)}, "q: shape must be [B, s_q, H, d], got [1, 3, 576]"),
        ({"cache": bf16(3, 16, 1, 16)}, "cache: a last dimension of 16 means d = 16, but q has d = 576"),
        ({"cache": bf16(3, 16, 576)}, "cache: shape must be [pages, P, 1, row], got [3, 16, 576]"),
        ({"is_fp8_kvcache": True}, "cache: dtype must be uint8, int8 or float8_e4m3fn with is_fp8_kvcache=True, got"),
        (
            {"cache": bf16(1, 1, 1, 576).expand(2**26, 33, 1, 576)},
            "cache: pages * P must be at most 2147483648, got 2214592512",
        ),
        ({"block_table": i32([[1, 0]])}, "block_table: shape must be [2, max_pages], got [1, 2]"),
        ({"cache_seqlens": i32([5])}, "cache_seqlens: shape must be [2], got [1]"),
        ({"window": 0}, "window: must be at least 1, got 0"),
        ({"block_table": None, "window": 16}, "at least window + s_q - 1 = 17 keys"),
        ({"block_table": None, "cache": bf16(1, 16, 1, 576)}, "for each of 2 sequences"),
        ({"d_v": 600}, "d_v: must be at most d = 576, got 600"),
        ({"attn_sink": zeros(4)}, "attn_sink: shape must be [2], got [4]"),
        ({"softmax_scale": None}, "softmax_scale: must be a number, got None"),
    ],
    "window_indices": [
        ({"cu_seqlens_q": i64([0, 2, 4])}, "cu_seqlens_q: dtype must be int32, got int64"),
        ({"cu_seqlens_q": i32([]), "cu_seqlens_k": i32([])}, "cu_seqlens_q: must have B + 1 entries, got shape [0]"),
        ({"cu_seqlens_k": i32([0])}, "cu_seqlens_k: shape must be [3], got [1] (sizes as of cu_seqlens_q"),
        ({"total_q": -1}, "total_q: must be at least 0, got -1"),
        ({"total_q": 4.0}, "total_q: must be an integer, got 4.0"),
        ({"window": 0}, "window: must be at least 1, got 0"),
    ],
    "window_slots": [
        ({"block_table": i32([0, 1])}, "block_table: shape must be [2, max_pages], got [2]"),
        ({"cache_seqlens": i32([[0, 1]])}, "cache_seqlens: shape must be [B], got [1, 2]"),
        ({"s_q": -2}, "s_q: must be at least 0, got -2"),
        ({"s_q": True}, "s_q: must be an integer, got True"),
        ({"page_size": 0}, "page_size: must be at least 1, got 0"),
        ({"window": 0}, "window: must be at least 1, got 0"),
    ],
    "window_slots ring": [
        ({"page_size": 3}, "page_size: a ring must hold window + s_q - 1 = 4 keys"),
        ({"page_size": 2**30 + 1}, "2 sequences must have at most 2^31 slots to"),
    ],
    "mla_absorb_queries": [
        ({"kv_b": kv_b(513)}, "kv_b[0]: rows must be a multiple of the 2 heads of q_nope, got 513"),
        ({"kv_b": kv_b(128)}, "kv_b[0]: must have at least 128 rows a head, got 128 for 2 heads"),
    ],
    "mla_values_cast_to_fp8": [
        ({"v_dim": 200}, "v_dim: must be a multiple of 128, got 200"),
        ({"kv_b": kv_b(513)}, "kv_b[0]: rows must be a multiple of the 2 heads of attended, got 513"),
        ({"v_dim": 384}, "kv_b[0]: must have at least 384 rows a head, got 512 for 2 heads"),
    ],
    "get_mla_metadata": [
        ({"cache_seqlens": i64([1, 2])}, "cache_seqlens: dtype must be int32, got int64"),
        ({"num_heads_k": 0}, "num_heads_k: must be at least 1, got 0"),
    ],
    "flash_mla_with_kvcache old plan": [
        ({"num_splits": i32([0, 0])}, "num_splits: shape must be [3], got [2]"),
        ({"num_splits": None}, "num_splits: must be a torch.Tensor, got NoneType"),
        (
            lambda a: {"tile_scheduler_metadata": a["tile_scheduler_metadata"][:, :7]},
            "tile_scheduler_metadata: shape must be [num_sm_parts, 8], got [1, 7]",
        ),
        (
            {"tile_scheduler_metadata": FlashMLASchedMeta()},
            "num_splits: must be None with a FlashMLASchedMeta, got Tensor",
        ),
        ({"tile_scheduler_metadata": "plan"}, "tile_scheduler_metadata: must be a FlashMLASchedMeta"),
    ],
}
