"""Wrong arguments of the training ops."""

from tests.reference.common import BF16, i32, zeros

WRONG = {
    "indexer_topk": [
        ({"k_idx": zeros(7, 5, dtype=BF16)}, "k_idx: shape must be [Tk, 64], got [7, 5] (sizes as of q_idx)"),
        ({"w_idx": zeros(5, 8).half()}, "w_idx: dtype must be q_idx's bfloat16 or float32, got float16"),
        ({"top_k": 0}, "top_k: must be at least 1, got 0"),
        ({"cu_seqlens_q": i32([0, 3, 6])}, "cu_seqlens_q: must ascend from 0 to 5, got [0, 3, 6] (sizes as of q_idx)"),
        ({"max_seqlen_k": -1}, "max_seqlen_k: must be at least 0, got -1"),
    ],
    "indexer_warmup_attention": [
        ({"q": zeros(5, 0, 64, dtype=BF16)}, "q: H must be at least 1, got 0"),
        ({"k": zeros(7, 3, 64, dtype=BF16)}, "v: shape must be"),
        (
            {"k": zeros(7, 3, 64, dtype=BF16), "v": zeros(7, 3, 64, dtype=BF16)},
            "k: its 3 heads must divide q's 8",
        ),
        ({"cu_seqlens_k": i32([0, 5, 6])}, "cu_seqlens_k: must ascend from 0 to 7, got [0, 5, 6]"),
        ({"w_idx": zeros(5, 2)}, "w_idx: shape must be [5, 8], got [5, 2]"),
    ],
    "sparse_indexer_loss": [
        ({"w_idx": zeros(5, 8).half()}, "w_idx: dtype must be q_idx's bfloat16 or float32, got float16"),
    ],
}
