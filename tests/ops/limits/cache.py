"""Limits of the ops that write and read caches."""

import torch

from tests.ops.limits.tensors import BYTES, E4M3, F32, bf16, row, zeros

LIMITS = [
    ("read_indexer_cache into k", lambda a: {"k": None}, "k: must be given where k_scale is, got None"),
    ("read_indexer_cache into k", lambda a: {"k_scale": None}, "k_scale: must be given where k is, got None"),
    ("read_indexer_cache into k", lambda a: {"k": row(a["k"], 4)}, "k: its numbers must not share memory, got strides"),
    (
        "read_indexer_cache into k",
        lambda a: {"k_scale": a["k"].view(BYTES).view(-1)[:16].view(F32)},
        "k: is written, must not share memory with k_scale",
    ),
    (
        "read_indexer_cache into k",
        lambda a: {"k": a["cache"].view(-1)[:128].view(4, 32).view(E4M3)},
        "k: is written, must not share memory with cache",
    ),
    (
        "write_kv_cache float",
        lambda a: {"cache": zeros(3, 16, 1, 12), "kv": zeros(4, 12)},
        "cache: the kernel takes float rows of a multiple of 8",
    ),
    ("read_kv_cache float", lambda a: {"cache": zeros(3, 16, 1, 12)}, "cache: the kernel takes float rows of a mult"),
    ("read_kv_cache v4", lambda a: {"cache": zeros(3, 3, 1, 584, dtype=BYTES)}, "cache: pages must start at multiples"),
    ("write_mla_cache float", lambda a: {"out": a["kv"]}, "out: is written, must not share memory with kv"),
    (
        "write_compressed_kv",
        lambda a: {"kv": a["kv"].half(), "gate": a["gate"].half()},
        "kv: the kernel takes fp32 and bf16, got float16",
    ),
    (
        "write_compressed_kv",
        lambda a: {"ape": zeros(8, 1024), "state": torch.zeros(3, 16, 2, 1024)},
        "ape: the kernel takes entries of channels and tokens 512 of 4 with overlap",
    ),
    (
        "write_compressed_kv",
        lambda a: (
            {"kv": bf16(7, 512), "gate": bf16(7, 512), "ape": zeros(4, 512), "state": torch.zeros(3, 4, 2, 512)}
            | {"overlap": False}
        ),
        "got 512 of 4 without",
    ),
]
