"""Wrong arguments of the ops on caches."""

import torch

from tests.reference.common import BF16, BYTE, i32, i64, zeros

OUTSIDE = [
    ({"slots": i64([0, -1, 2, 48])}, "slots: must be -1 or in [0, 48), got 48"),
    ({"slots": i64([0, -2, 2, 3])}, "slots: must be -1 or in [0, 48), got -2"),
]
PAGES = "cache: shape must be [pages, P >= 1, 1, D + 4 >= 5], got"
BOUNDS = "cu_seqlens: must not decrease, from at least 0 to at most kv's T=7, got"
WRONG = {
    "write_indexer_cache": [
        ({"slots": i64([0, 1, 48])}, "slots: must be -1 or in [0, 48), got 48"),
        ({"slots": i64([0, -2, 3])}, "slots: must be -1 or in [0, 48), got -2"),
        ({"cache": zeros(3, 16, 1, 52, dtype=BYTE)}, "k: shape must be [T, 48], got [3, 32] (sizes as of cache)"),
        ({"k": zeros(3, 32)}, "k: dtype must be float8_e4m3fn, got float32"),
    ],
    "read_indexer_cache": [
        ({"cache": zeros(3, 16, 1, 72, dtype=BYTE)[..., :36]}, "cache: every page must be contiguous"),
        ({"cache": zeros(2, 4, 1, 4, dtype=BYTE)}, PAGES),
        ({"cache": zeros(2, 0, 1, 20, dtype=BYTE)}, PAGES),
        ({"cache": zeros(2, 4, 1, 3, dtype=BYTE)}, "cache: must have D + 4 entries, got shape [2, 4, 1, 3]"),
        ({"slots": zeros(4)}, "slots: dtype must be int32 or int64, got float32"),
    ],
    "write_kv_cache v32": [
        *OUTSIDE,
        ({"kv": zeros(4, 512, dtype=BF16)}, "kv: shape must be [T, 576], got [4, 512]"),
    ],
    "write_kv_cache v4": [
        ({"kv": zeros(4, 576, dtype=BF16)}, "kv: shape must be [T, 512], got [4, 576]"),
        ({"use_ue8m0": False}, "use_ue8m0: must be True for the V4 layout"),
    ],
    "read_kv_cache v32": [
        (lambda a: {"cache": a["cache"][..., :576]}, "cache: the last dimension of a byte cache must be 656"),
        (lambda a: {"cache": a["cache"][:, :, 0]}, "cache: shape must be [pages, P, 1, d], got [3, 16, 656]"),
        (lambda a: {"cache": a["cache"].int()}, "cache: dtype must be"),
        (lambda a: {"cache": a["cache"][..., :584]}, "cache: every page of a V4 cache must be contiguous"),
        ({"slots": [0]}, "slots: must be a torch.Tensor, got list"),
        ({"dtype": torch.float64}, "dtype: must be float32, bfloat16 or float16, got float64"),
        ({"dtype": "float16"}, "dtype: must be a torch.dtype, got str"),
    ],
    "make_v4_cache": [({"page_size": 0}, "page_size: must be at least 1, got 0")],
    "write_mla_cache v32": [
        *OUTSIDE,
        ({"kv": None}, "kv: must be a torch.Tensor, got NoneType"),
        ({"kv": zeros(4, 576).double()}, "kv: dtype must be float32, bfloat16 or float16, got float64"),
        ({"kv": zeros(4, 512, dtype=BF16)}, "kv: shape must be [T, 576], got [4, 512]"),
        ({"norm_weight": 1.0}, "norm_weight: must be a torch.Tensor, got float"),
        ({"norm_weight": zeros(512, dtype=BF16)}, "norm_weight: dtype must be float32, got bfloat16"),
        ({"norm_weight": zeros(2, 512)}, "norm_weight: shape must be [N], got [2, 512]"),
        ({"norm_weight": zeros(577)}, "norm_weight: must have 1 to 576 channels, as kv has them, got 577"),
        ({"norm_weight": zeros(0)}, "norm_weight: must have 1 to 576 channels, as kv has them, got 0"),
        ({"cos": zeros(3, 32)}, "cos: shape must be [4, R / 2], got [3, 32]"),
        ({"sin": zeros(4, 31)}, "sin: shape must be [4, 32], got [4, 31]"),
        ({"cache": zeros(2, 4, 1, 700, dtype=BYTE)}, "cache: the last dimension of a byte cache must be 656"),
        ({"slots": zeros(4)}, "slots: dtype must be int32 or int64, got float32"),
        ({"out": zeros(4, 576).half()}, "out: dtype must be kv's bfloat16, got float16"),
        ({"out": zeros(1, 576, dtype=BF16)}, "out: shape must be [4, 576], got [1, 576]"),
        ({"out": 1}, "out: must be a torch.Tensor, got int"),
    ],
    "write_mla_cache v4": [({"use_ue8m0": False}, "use_ue8m0: must be True for the V4 layout")],
    "slot_mapping": [
        ({"block_table": i32([0, 1])}, "block_table: shape must be [B, max_pages], got [2]"),
        ({"cu_seqlens": i64([0, 3, 4])}, "cu_seqlens: dtype must be int32, got int64"),
        ({"cu_seqlens": i32([0])}, "cu_seqlens: shape must be [3], got [1]"),
        ({"cache_seqlens": i32([9])}, "cache_seqlens: shape must be [2], got [1]"),
        ({"num_tokens": -1}, "num_tokens: must be at least 0, got -1"),
        ({"page_size": 0}, "page_size: must be at least 1, got 0"),
        ({"ratio": 0}, "ratio: must be at least 1, got 0"),
        ({"ring": 1}, "ring: must be True or False, got 1"),
    ],
    "compress_kv without a state": [
        ({"starts": i32([0, 3])}, "starts: must be at least 0, and 0 without a state, got [0, 3]"),
        ({"state": zeros(1, 8, 2, 16)}, "state, state_slots: must be given together, got one of them"),
    ],
    "write_compressed_kv": [
        ({"gate": zeros(7, 3, dtype=BF16)}, "gate: shape must be [7, 1024], got [7, 3]"),
        ({"ape": zeros(4, 7)}, "ape: shape must be [m, 1024], got [4, 7]"),
        ({"ape": zeros(0, 1024)}, "ape: must have rows and kv's channels"),
        ({"starts": i32([0])}, "starts: shape must be [2], got [1]"),
        ({"starts": i32([-1, 0])}, "starts: must be at least 0, and 0 without a state, got [-1, 0]"),
        ({"state": None}, "state: must be a torch.Tensor, got NoneType"),
        (
            {"state": zeros(1, 3, 2, 1024)},
            "state: shape must be [S, n, 2, 1024] with n at least 8, got [1, 3, 2, 1024]",
        ),
        ({"state_slots": i32([-1, 0])}, "state_slots: must be from 0 to 2, got [-1, 0]"),
        ({"state_slots": i32([0, 3])}, "state_slots: must be from 0 to 2, got [0, 3]"),
        ({"norm_weight": zeros(4)}, "norm_weight: shape must be [512], got [4]"),
        ({"slots": i32([99] * 7)}, "slots: "),
        ({"cu_seqlens": i32([0, 4, 8])}, f"{BOUNDS} [0, 4, 8]"),
        ({"cu_seqlens": i32([-1, 4, 7])}, f"{BOUNDS} [-1, 4, 7]"),
        ({"cu_seqlens": i32([0, 7, 3])}, f"{BOUNDS} [0, 7, 3]"),
        ({"cache": zeros(1, 4, 1, 9, dtype=BF16)}, "cache: must have entries of 512 channels, got 9"),
        ({"cache": zeros(1, 4, 1, 10, dtype=BYTE)}, "cache: the last dimension of a byte cache must be 656"),
        ({"cos": zeros(7, 257), "sin": zeros(7, 257)}, "kv: the last dimension must be at least 514 for these"),
    ],
}
