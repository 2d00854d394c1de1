"""Wrong arguments of the indexer's ops."""

import torch

from tests.reference.common import BF16, BYTE, i32, i64, zeros

ROPE = [
    ({"cos": None}, "cos: must be a torch.Tensor, got NoneType"),
    ({"cos": zeros(2)}, "cos: shape must be [3, R / 2], got [2]"),
    ({"cos": zeros(2, 32)}, "cos: shape must be [3, R / 2], got [2, 32]"),
    ({"cos": zeros(3, 32, dtype=BF16)}, "cos: dtype must be float32, got bfloat16"),
    ({"sin": [0.0]}, "sin: must be a torch.Tensor, got list"),
    ({"sin": zeros(3, 31)}, "sin: shape must be [3, 32], got [3, 31]"),
    ({"sin": zeros(3, 32).double()}, "sin: dtype must be float32, got float64"),
    ({"dims": "middle"}, "dims: must be 'first' or 'last', got 'middle'"),
    (
        {"cos": zeros(3, 65), "sin": zeros(3, 65)},
        "the last dimension must be at least 130 for these cos and sin, got 128",
    ),
]
WRONG = {
    "quantize_indexer_queries": [
        *ROPE,
        ({"q": [1.0]}, "q: must be a torch.Tensor, got list"),
        ({"q": zeros(3, 2, 128).double()}, "q: dtype must be float32, bfloat16 or float16"),
        ({"q": zeros(3, 128)}, "q: shape must be [T, H, 128], got [3, 128]"),
        ({"q": zeros(3, 2, 64)}, "q: shape must be [T, H, 128], got [3, 2, 64]"),
        ({"weights": 1.0}, "weights: must be a torch.Tensor, got float"),
        ({"weights": zeros(3, 4)}, "weights: shape must be [3, 2], got [3, 4]"),
        ({"weights": zeros(3, 2, dtype=BF16)}, "weights: dtype must be float32, got bfloat16"),
    ],
    "write_indexer_keys": [
        *ROPE,
        ({"k": None}, "k: must be a torch.Tensor, got NoneType"),
        ({"k": zeros(3, 128).int()}, "k: dtype must be float32, bfloat16 or float16, got int32"),
        ({"k": zeros(3, 1, 128)}, "k: shape must be [T, 128], got [3, 1, 128]"),
        ({"norm_weight": 1.0}, "norm_weight: must be a torch.Tensor, got float"),
        ({"norm_weight": zeros(128).half()}, "norm_weight: dtype must be float32, got float16"),
        ({"norm_bias": None}, "norm_bias: must be a torch.Tensor, got NoneType"),
        ({"norm_bias": zeros(1)}, "norm_bias: shape must be [128], got [1]"),
        ({"cache": []}, "cache: must be a torch.Tensor, got list"),
        (lambda a: {"cache": a["cache"].char()}, "cache: dtype must be uint8, got int8"),
        ({"cache": zeros(3, 16, 1, 264, dtype=BYTE)[..., :132]}, "cache: every page must be contiguous"),
        (lambda a: {"cache": a["cache"].view(3, 32, 1, 66)}, "cache: shape must be [pages, P, 1, 132], got"),
        (lambda a: {"cache": a["cache"].squeeze(2)}, "cache: shape must be [pages, P, 1, 132]"),
        ({"slots": [0, 1]}, "slots: must be a torch.Tensor, got list"),
        ({"slots": zeros(3)}, "slots: dtype must be int32 or int64, got float32"),
        ({"slots": i64([0])}, "slots: shape must be [3], got [1]"),
        ({"slots": i64([0, 1, 48])}, "slots: must be -1 or in [0, 48), got 48"),
        ({"slots": i64([-2, 0, 1])}, "slots: must be -1 or in [0, 48), got -2"),
    ],
    "fp8_mqa_logits": [
        ({"q": zeros(3, 8, 32)}, "q: dtype must be float8_e4m3fn, got float32"),
        (lambda a: {"kv": (a["kv"][0], zeros(6))}, "kv[1]: shape must be [7], got [6]"),
        (lambda a: {"kv": a["kv"][0]}, "kv: must be a pair"),
        ({"weights": zeros(3, 3)}, "weights: shape must be [3, 8], got [3, 3]"),
        ({"cu_seq_len_k_end": i64([7, 7, 7])}, "cu_seq_len_k_end: dtype must be int32, got int64"),
        ({"max_seqlen_k": -1}, "max_seqlen_k: must be at least 0, got -1"),
        ({"logits_dtype": torch.float16}, "logits_dtype: must be float32 or bfloat16"),
    ],
    "mqa_logits": [({"k": zeros(7, 8, dtype=BF16)}, "k: shape must be [Skv, 32], got [7, 8]")],
    "fp8_paged_mqa_logits": [
        ({"q": zeros(2, 2, 8, 32)}, "q: dtype must be float8_e4m3fn, got float32"),
        ({"context_lens": i32([[20, 20, 20]] * 2)}, "context_lens: shape must be [2] or [2, 2], got [2, 3]"),
        ({"context_lens": i32([[20], [20]])}, "context_lens: shape must be [2] or [2, 2], got [2, 1]"),
        ({"weights": zeros(2, 8)}, "weights: shape must be [4, 8], got [2, 8]"),
        (lambda a: {"kv_cache": a["kv_cache"][..., :35]}, "kv_cache: shape must be [pages, P, 1, 36], got"),
        ({"block_table": i64([[2, 0], [1, 0]])}, "block_table: dtype must be int32, got int64"),
        ({"max_context_len": 0}, "max_context_len: must be at least 1, got 0"),
        ({"schedule_meta": i32([0, 0])}, "schedule_meta: shape must be [SMs + 1, 2], got [2]"),
    ],
    "get_paged_mqa_logits_metadata": [
        ({"block_kv": 48}, "block_kv: must be a divisor of 256, got 48"),
        ({"num_sms": 0}, "num_sms: must be at least 1, got 0"),
        ({"context_lens": [1]}, "context_lens: must be a torch.Tensor, got list"),
    ],
    "topk_indices": [
        ({"scores": zeros(3, 20).double()}, "scores: dtype must be float32 or bfloat16, got float64"),
        ({"scores": zeros(8)}, "scores: shape must be [rows, cols], got [8]"),
        ({"k": 0}, "k: must be at least 1, got 0"),
        ({"lengths": i32([1, 1])}, "lengths: shape must be [3], got [2]"),
        ({"starts": i64([0, 0, 0])}, "starts: dtype must be int32, got int64"),
        ({"block_table": i32([[0]] * 3)}, "page_size: must be given with block_table, got None"),
        ({"page_size": 64}, "page_size: must be None without block_table, got int"),
        ({"row_to_seq": i32([0, 0, 0])}, "row_to_seq: must be None without block_table, got Tensor"),
    ],
    "topk_indices paged": [
        ({"row_to_seq": None}, "block_table: must have a row for each of the 3 rows"),
    ],
}
