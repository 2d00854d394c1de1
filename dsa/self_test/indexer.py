"""Index scores, their inputs and the selection."""

import math
from collections.abc import Sequence

import torch

import dsa
from dsa.self_test.comparisons import check_diff, check_rounded, hadamard


def _index_case(device: str) -> tuple[torch.Tensor, ...]:
    q = torch.randn(3, 64, 128, device=device).to(torch.float8_e4m3fn)
    k = torch.randn(100, 128, device=device).to(torch.float8_e4m3fn)
    scale, weights = torch.rand(100, device=device) + 0.1, torch.randn(3, 64, device=device)
    dots = torch.einsum("thd,sd->ths", q.double(), k.double()).relu()
    return q, k, scale, weights, torch.einsum("th,ths->ts", weights.double(), dots) * scale.double()


def fp8_mqa_logits(device: str) -> None:
    q, k, scale, weights, expected = _index_case(device)
    starts, ends = (torch.tensor(v, dtype=torch.int32, device=device) for v in ([0, 10, 5], [100, 50, 5]))
    got = dsa.fp8_mqa_logits(q, (k, scale), weights, starts, ends)
    column = torch.arange(100, device=device)
    expected = expected.masked_fill((column < starts[:, None]) | (column >= ends[:, None]), -torch.inf)
    check_diff("logits", got, expected)
    got = dsa.mqa_logits(q.bfloat16(), k.bfloat16(), weights, starts, ends)
    check_diff("mqa_logits", got, expected / scale)


def fp8_paged_mqa_logits(device: str) -> None:
    q, k, scale, weights, expected = _index_case(device)
    cache = torch.full((4, 64, 1, 132), 0xFF, dtype=torch.uint8, device=device)
    slots = torch.arange(100, device=device) + 64
    dsa.write_indexer_cache(k, scale, cache, slots)
    lengths = torch.tensor([100, 70, 0], dtype=torch.int32, device=device)
    table = torch.tensor([[1, 2]] * 3, dtype=torch.int32, device=device)
    plan = dsa.get_paged_mqa_logits_metadata(lengths, 64, dsa.num_sms(device))
    got = dsa.fp8_paged_mqa_logits(q[:, None], cache, weights, lengths, table, plan, 128, clean_logits=True)
    expected = torch.nn.functional.pad(expected, (0, 28))
    expected = expected.masked_fill(torch.arange(128, device=device) >= lengths[:, None], -torch.inf)
    check_diff("logits", got, expected)


def indexer_inputs(device: str) -> None:
    """Norm, rope on the first 64 channels in halves, Hadamard, and the scores that come of it."""
    angles = torch.randn(40, 32, device=device)
    cos, sin = angles.cos(), angles.sin()

    def turned(x: torch.Tensor) -> torch.Tensor:
        pair = torch.complex(x[..., :32], x[..., 32:64]) * torch.exp(1j * angles.double().cpu())[:, None]
        return torch.cat((pair.real, pair.imag, x[..., 64:]), -1) @ hadamard()

    q, k = (torch.randn(shape, device=device).bfloat16() for shape in ((40, 16, 128), (40, 128)))
    weights, gain, bias = (torch.randn(n, device=device) for n in ((40, 16), 128, 128))
    weights = torch.where(weights < 0, weights - 0.1, weights + 0.1)  # of a weight of 0 nothing could be read back
    q8, w8 = dsa.quantize_indexer_queries(q, weights, cos, sin)
    back = q8.double() * (w8 / weights).double()[..., None]
    check_rounded("q", back.cpu(), turned(q.double().cpu()), abs_tol=3e-2, rel_tol=0.075, cos_tol=2e-3)
    cache = torch.full((3, 64, 1, 132), 0xFF, dtype=torch.uint8, device=device)
    slots = torch.arange(40, device=device) + 50
    dsa.write_indexer_keys(k, gain, bias, cos, sin, cache, slots)
    k8, scale = dsa.read_indexer_cache(cache, slots)
    x = k.double().cpu()
    x = (x - x.mean(1, keepdim=True)) / (x.var(1, correction=0, keepdim=True) + 1e-6).sqrt()
    expected = turned((x * gain.double().cpu() + bias.double().cpu())[:, None])[:, 0]
    back = k8.double().cpu() * scale.double().cpu()[:, None]
    check_rounded("k", back, expected, abs_tol=6e-2, rel_tol=0.075, cos_tol=2e-3)


def _case_with_ties(device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, list[list[float]]]:
    """Queries, keys, their scales, weights, and the scores that come of them. All are small integers, so that sums are
    exact, and every key is there twice, so that scores tie."""
    q, k, weights = (torch.randint(-2, 3, shape, device=device) for shape in ((3, 64, 128), (50, 128), (3, 64)))
    k, scale = k.repeat(2, 1), torch.randint(1, 4, (50,), device=device).float().repeat(2)
    dots = torch.einsum("thd,sd->ths", q.double(), k.double()).relu()
    scores = (torch.einsum("th,ths->ts", weights.double(), dots) * scale).tolist()
    return q.to(torch.float8_e4m3fn), k.to(torch.float8_e4m3fn), scale, weights.float(), scores


def _check_selection(visible: list[float], names: Sequence[int], indices: list[int], values: list[float]) -> None:
    """Of one query: the scores of the keys that it sees, the index by which each key is named, and the op's results."""
    best = sorted(sorted(range(len(visible)), key=lambda s: (-visible[s], s))[:20])
    missing = 20 - len(best)
    if indices != [names[s] for s in best] + [-1] * missing:
        raise AssertionError("not the 20 largest with ties to the lowest key")
    if values != [visible[s] for s in best] + [-math.inf] * missing:
        raise AssertionError("not the scores of the 20 largest")


def indexer_select(device: str) -> None:
    """Over ranges of keys, of which one is empty. A key is named by its place in the range."""
    q, k, scale, weights, scores = _case_with_ties(device)
    first, behind = [0, 10, 5], [100, 50, 5]
    starts, ends = (torch.tensor(v, dtype=torch.int32, device=device) for v in (first, behind))
    got = dsa.indexer_select(q, (k, scale), weights, starts, ends, 20, return_values=True)
    for row, start, end, indices, values in zip(scores, first, behind, *(x.tolist() for x in got)):
        _check_selection(row[start:end], range(100), indices, values)


def paged_indexer_select(device: str) -> None:
    """Over pages, for sequences of which one has fewer keys than are wanted. A key is named by its position or slot."""
    q, k, scale, weights, scores = _case_with_ties(device)
    cache = torch.full((4, 64, 1, 132), 0xFF, dtype=torch.uint8, device=device)
    slots = torch.cat((torch.arange(64) + 128, torch.arange(36))).to(device)  # pages 2 and 0
    dsa.write_indexer_cache(k, scale, cache, slots)
    visible, table = [100, 70, 15], torch.tensor([[2, 0]] * 3, dtype=torch.int32, device=device)
    lengths = torch.tensor(visible, dtype=torch.int32, device=device)
    for in_slots, names in ((False, range(100)), (True, slots.tolist())):
        options = {"slots": in_slots, "return_values": True}
        got = dsa.paged_indexer_select(q[:, None], cache, weights, lengths, table, 128, 20, **options)
        for row, length, indices, values in zip(scores, visible, *(x.tolist() for x in got)):
            _check_selection(row[:length], names, indices, values)


def topk_indices(device: str) -> None:
    scores = torch.randn(5, 300, device=device).round(decimals=1)
    given = torch.empty(5, 80, dtype=torch.int32, device=device)[:, 8:72]
    dsa.topk_indices(scores, 64, out=given)
    for got in (dsa.topk_indices(scores, 64), given):
        for row, selected in zip(scores.tolist(), got.tolist()):
            if selected != sorted(sorted(range(300), key=lambda i: (-row[i], i))[:64]):
                raise AssertionError("not the 64 largest with ties to the lowest index")
