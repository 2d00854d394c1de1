"""Index scores over paged keys: bytes a second, beside DeepGEMM; and the plan."""

from collections.abc import Callable
from typing import Any

import torch

import dsa
from benchmarks.table import row
from dsa.testing import bench, copy_bandwidth

# batch, queries a sequence, mean context
SHAPES = [
    (128, 1, 32768),
    (64, 1, 8192),
    (64, 1, 32768),
    (64, 2, 32768),
    (64, 4, 32768),
    (128, 1, 8192),
    (8, 1, 131072),
    (1, 1, 131072),
    (1024, 1, 2048),
]
HEADS, DIM, PAGE = 64, 128, 64
_L2_BYTES = 64 << 20


def _inputs(batch: int, next_n: int, mean: int) -> tuple[Any, ...]:
    low, high = (mean, mean + 1) if batch == 1 else (int(0.7 * mean), int(1.3 * mean))
    lengths = torch.randint(low, high, (batch,), dtype=torch.int32)
    used = -(-lengths // PAGE)
    pages, width = int(used.sum()), int(used.max())
    keys = torch.randn(pages, PAGE * DIM, device="cuda").to(torch.float8_e4m3fn).view(torch.uint8)
    scales = (torch.rand(pages, PAGE, device="cuda") + 0.5).view(torch.uint8)
    cache = torch.cat((keys, scales), 1).view(pages, PAGE, 1, DIM + 4)
    table = torch.full((batch, width), -1, dtype=torch.int32)
    table[torch.arange(width) < used[:, None]] = torch.randperm(pages, dtype=torch.int32)
    q = torch.randn(batch, next_n, HEADS, DIM, device="cuda").to(torch.float8_e4m3fn)
    weights = torch.randn(batch * next_n, HEADS, device="cuda")
    return q, cache, weights, lengths.cuda(), table.cuda(), int(lengths.max())


def _call(q, cache, weights, lengths, table, columns) -> Callable[[], object]:
    plan = dsa.get_paged_mqa_logits_metadata(lengths, PAGE, dsa.num_sms("cuda"))
    return lambda: dsa.fp8_paged_mqa_logits(q, cache, weights, lengths, table, plan, columns)


def _peer(q, cache, weights, lengths, table, columns) -> Callable[[], object] | None:
    try:
        import deep_gemm
    except ImportError:
        return None
    if q.shape[1] > 2:  # its Hopper kernel takes no more
        return None
    lengths = lengths[:, None].expand(-1, q.shape[1]).contiguous()
    plan = deep_gemm.get_paged_mqa_logits_metadata(lengths, PAGE, deep_gemm.get_num_sms())
    return lambda: deep_gemm.fp8_paged_mqa_logits(q, cache, weights, lengths, table, plan, columns, clean_logits=False)


def _metadata_row() -> dict[str, Any]:
    lengths = torch.randint(1, 32768, (128,), dtype=torch.int32, device="cuda")
    calls = {"dsa": [lambda: dsa.get_paged_mqa_logits_metadata(lengths, PAGE, dsa.num_sms("cuda"))] * 8}
    try:
        import deep_gemm

        pair, sms = lengths[:, None].contiguous(), deep_gemm.get_num_sms()
        calls["deepgemm"] = [lambda: deep_gemm.get_paged_mqa_logits_metadata(pair, PAGE, sms)] * 8
    except ImportError:
        pass
    return row("plan, B 128", bench(calls, graph=True), "")


def run() -> list[dict[str, Any]]:
    ceiling = copy_bandwidth()
    rows = []
    for batch, next_n, mean in SHAPES:
        sets = max(2, -(-2 * _L2_BYTES // (batch * mean * (DIM + 4))))
        inputs = [_inputs(batch, next_n, mean) for _ in range(sets)]
        calls = {"dsa": [_call(*i) for i in inputs]}
        peers = [_peer(*i) for i in inputs]
        if peers[0]:
            calls["deepgemm"] = peers
        times = bench(calls, graph=True)
        tokens = sum(int(i[3].sum()) for i in inputs) / sets
        rate = tokens * (DIM + 4 + 4 * next_n) / (times["dsa"] * 1e-3)
        figure = f"{rate / 1e9:.0f} GB/s, {rate / ceiling:.0%} of copy"
        rows.append(row(f"B {batch}, next_n {next_n}, mean context {mean}, H {HEADS}, D {DIM}", times, figure))
        del inputs, calls, peers
    return [*rows, _metadata_row()]
