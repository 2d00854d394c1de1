"""Attention over caches, selections and windows."""

import torch

import dsa
from dsa.self_test.comparisons import D_V, D, H, attention, check_attention, check_lse, check_rounded, rows
from dsa.testing import assert_close


def flash_mla_with_kvcache(device: str) -> None:
    q = torch.randn(1, 1, H, D, device=device).bfloat16()
    cache = torch.randn(3, 64, 1, D, device=device).bfloat16()
    table = torch.tensor([[2, 0]], dtype=torch.int32, device=device)
    length = torch.tensor([100], dtype=torch.int32, device=device)
    keys = torch.cat((cache[2, :, 0], cache[0, :36, 0]))
    expected, expected_lse, size = attention(q[0, 0], keys, D**-0.5)
    out, lse = dsa.flash_mla_with_kvcache(q, cache, table, length, D_V, dsa.get_mla_metadata()[0])
    check_attention("dense", out[0, 0], expected, size, 5e-6)
    check_lse("dense lse", lse[0, :, 0], expected_lse)
    pages = torch.full((3, 64, 1, 656), 0xFF, dtype=torch.uint8, device=device)
    slots = torch.arange(100, device=device) + 64
    dsa.write_kv_cache(keys, pages, slots)
    cached = dsa.read_kv_cache(pages, slots)
    check_rounded("FP8 cache", cached, keys.double(), abs_tol=1e-2, rel_tol=0.075, cos_tol=1e-3)
    given, options = torch.empty_like(out), {"is_fp8_kvcache": True, "indices": slots.int().view(1, 1, -1)}
    out, lse = dsa.flash_mla_with_kvcache(q, pages, None, None, D_V, dsa.get_mla_metadata()[0], **options)
    dsa.flash_mla_with_kvcache(q, pages, None, None, D_V, None, **options, out=given)
    expected, expected_lse, size = attention(q[0, 0], cached, D**-0.5)
    check_attention("sparse", out[0, 0], expected, size, 5e-6)
    check_attention("sparse, out that is given", given[0, 0], expected, size, 5e-6)
    check_lse("sparse lse", lse[0, :, 0], expected_lse)


def flash_mla_sparse_fwd(device: str) -> None:
    q, kv = torch.randn(2, H, D, device=device).bfloat16(), torch.randn(200, 1, D, device=device).bfloat16()
    indices = torch.full((2, 1, 64), -1, dtype=torch.int32, device=device)
    indices[0, 0, :50] = torch.randperm(200, device=device)[:50]
    out, max_logits, lse = dsa.flash_mla_sparse_fwd(q, kv, indices, D**-0.5)
    keys = kv[indices[0, 0, :50].long(), 0]
    expected, expected_lse, size = attention(q[0], keys, D**-0.5)
    empty, infinite = torch.zeros_like(expected), torch.full_like(expected_lse, torch.inf)
    check_attention("out", out, torch.stack((expected, empty)), torch.stack((size, empty)), 7e-6)
    dsa.flash_mla_sparse_fwd(q, kv, indices, D**-0.5, out=out.zero_())
    check_attention("out that is given", out, torch.stack((expected, empty)), torch.stack((size, empty)), 7e-6)
    check_lse("lse", lse, torch.stack((expected_lse, infinite)))
    largest = (q[0].double() @ keys.double().T * D**-0.5).amax(-1)
    check_lse("max_logits", max_logits, torch.stack((largest, -infinite)))


def mha_varlen_fwd(device: str) -> None:
    """A sequence behind a cached prefix and one without, all keys and selected ones."""
    q, k = torch.randn(70, 2, 192, device=device).bfloat16(), torch.randn(180, 2, 192, device=device).bfloat16()
    v = torch.randn(180, 2, 128, device=device).bfloat16()
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 30, 70], [0, 140, 180]))
    indices = torch.rand(70, 180, device=device).argsort(-1)[:, :60].int()
    starts = torch.tensor([0] * 30 + [140] * 40, dtype=torch.int32, device=device)
    bits = dsa.selection_bits(indices, starts, 140)
    row = torch.arange(180, device=device)
    first, last = starts[:, None], torch.cat((row[110:140], row[140:180]))[:, None]
    causal = (row >= first) & (row <= last)
    chosen = torch.zeros(70, 180, dtype=torch.bool, device=device).scatter_(1, indices.long(), True)
    for selected, visible in ((None, causal), (bits, causal & chosen)):
        out, lse = dsa.mha_varlen_fwd(q, k, v, cu_q, cu_k, 140, 0.07, selected=selected)
        logits = (q.double().transpose(0, 1) @ k.double().permute(1, 2, 0) * 0.07).masked_fill(~visible, -torch.inf)
        weights, values = logits.softmax(-1).nan_to_num(0.0), v.double().transpose(0, 1)
        check_attention("out", out.transpose(0, 1), weights @ values, weights @ values.abs(), 1e-5)
        check_lse("lse", lse, logits.logsumexp(-1).where(visible.any(-1), torch.inf))


def selection_bits(device: str) -> None:
    indices = torch.tensor([[7, -1, 300, 137], [9, 8, 7, 2000]], dtype=torch.int32, device=device)
    starts = torch.tensor([5, 8], dtype=torch.int32, device=device)
    expected = torch.zeros(2, 12, dtype=torch.int32)
    # Keys 2, 295 and 132 of the first query: 295 is 256 + 4 * 8 + 7; keys 1 and 0 of the second one.
    expected[0, 1], expected[0, 8 + 3], expected[0, 4 + 2], expected[1, 0] = 1, 1 << 9, 1, 3
    if not torch.equal(dsa.selection_bits(indices, starts, 300).cpu(), expected):
        raise AssertionError("not the bits of the selected keys")


def window_indices(device: str) -> None:
    """Three sequences, one of them without queries, and queries of none; pages, one of which is missing, and rings."""
    q_ends, k_ends = (torch.tensor(v, dtype=torch.int32, device=device) for v in ([0, 5, 5, 12], [0, 9, 11, 18]))
    got = dsa.window_indices(q_ends, k_ends, 14, 4)
    last = [4, 5, 6, 7, 8, *range(11, 18)]
    rows = [[j for j in range(p - 3, p + 1) if j >= (0 if p < 9 else 11)] for p in last]
    expected = [row + [-1] * (4 - len(row)) for row in [*rows, [], []]]
    if got.tolist() != expected:
        raise AssertionError("not the keys of the windows")
    lengths = torch.tensor([20, 0, 3], dtype=torch.int32, device=device)
    table = torch.tensor([[7, -1, 2], [0, 1, 3], [5, 4, 6]], dtype=torch.int32, device=device)
    pages = [[[61, 62, 63, *[-1] * 8, 16, 17, 18], [62, 63, *[-1] * 8, 16, 17, 18, 19]], [[-1] * 14] * 2]
    pages += [[[40, 41, *[-1] * 12], [40, 41, 42, *[-1] * 11]]]
    if dsa.window_slots(table, lengths, 2, 8, 14).tolist() != pages:
        raise AssertionError("not the slots of the pages")
    ring = [[[5, 6, 7, 0, 1, 2], [6, 7, 0, 1, 2, 3]], [[-1] * 6] * 2, [[16, 17, *[-1] * 4], [16, 17, 18, *[-1] * 3]]]
    if dsa.window_slots(None, lengths, 2, 8, 6).tolist() != ring:
        raise AssertionError("not the slots of the rings")


def sliding_window_attention(device: str) -> None:
    """The window alone; with selected keys and a sink that halves the first head; and in a cache."""
    q, kv = torch.randn(40, H, D_V, device=device).bfloat16(), torch.randn(40, 1, D_V, device=device).bfloat16()
    ends = torch.tensor([0, 40], dtype=torch.int32, device=device)
    windows = [kv[max(0, t - 7) : t + 1, 0] for t in range(40)]
    out, lse = dsa.sliding_window_attention(q, kv, ends, ends, 8, D_V**-0.5)
    expected, expected_lse, size = rows(attention(*row, D_V**-0.5) for row in zip(q, windows))
    check_attention("out", out, expected, size, 7e-6)
    check_lse("lse", lse, expected_lse)

    table = torch.tensor([[1, 0, 2]], dtype=torch.int32, device=device)
    cache = kv.new_full((3, 16, 1, D_V), torch.nan)
    dsa.write_kv_cache(kv[:, 0], cache, table[0].repeat_interleave(16)[:40] * 16 + torch.arange(40, device=device) % 16)
    ring = kv[24:].roll(24, 0)[None]
    for where, pages in ((table, cache), (None, ring)):
        length = torch.full((1,), 40, dtype=torch.int32, device=device)
        out, lse = dsa.sliding_window_decode(q[None, 38:], pages, where, length, 8, D_V**-0.5)
        check_attention("decode", out[0], expected[38:], size[38:], 5e-6)
        check_lse("decode lse", lse[0].T, expected_lse[38:])

    more = torch.randn(30, 1, D_V, device=device).bfloat16()
    topk_indices = torch.rand(40, 30, device=device).argsort(1)[:, :5].int()
    keys = [torch.cat((near, more[p.long(), 0])) for near, p in zip(windows, topk_indices)]
    expected, expected_lse, size = rows(attention(*row, D_V**-0.5) for row in zip(q, keys))
    sink = torch.full((H,), -torch.inf, device=device)
    sink[0] = expected_lse[:, 0].mean()
    share = expected_lse[:, 0].exp() / (expected_lse[:, 0].exp() + sink[0].double().exp())
    expected[:, 0] *= share[:, None]
    out, lse = dsa.window_sparse_attention(q, kv, ends, ends, 8, more, topk_indices, D_V**-0.5, attn_sink=sink)
    check_attention("out with selected", out, expected, size, 7e-6)
    check_lse("lse with selected", lse, expected_lse)


def window_attention_cast(device: str) -> None:
    """Of 40 tokens whose heads are in two groups, with a sink that halves the first head. A byte is off by at most a
    16th of its value or a 512th of its scale."""
    groups, dtype = 2, torch.bfloat16
    q, kv, more = (torch.randn(n, h, D_V, device=device).to(dtype) for n, h in ((40, H), (40, 1), (30, 1)))
    ends = torch.tensor([0, 40], dtype=torch.int32, device=device)
    topk_indices = torch.rand(40, 30, device=device).argsort(1)[:, :5].int()
    keys = [torch.cat((kv[max(0, t - 7) : t + 1, 0], more[p.long(), 0])) for t, p in enumerate(topk_indices)]
    expected, lse, size = rows(attention(*row, D_V**-0.5) for row in zip(q, keys))
    sink = torch.full((H,), -torch.inf, device=device)
    sink[0] = lse[:, 0].mean()
    share = lse[:, 0].exp() / (lse[:, 0].exp() + sink[0].double().exp())
    expected[:, 0], size[:, 0] = expected[:, 0] * share[:, None], size[:, 0] * share[:, None]
    angles = torch.randn(40, 32, device=device)
    turn = torch.exp(-1j * angles.double())[:, None]
    pairs = torch.view_as_complex(expected[..., -64:].unflatten(-1, (32, 2)).contiguous()) * turn
    expected = torch.cat((expected[..., :-64], torch.view_as_real(pairs).flatten(-2)), -1)
    cast, scale = dsa.window_attention_cast_to_fp8(
        *(q, kv, ends, ends, 8, more, topk_indices, angles.cos(), angles.sin(), groups, D_V**-0.5, sink)
    )
    blocks = (groups, 40, H // groups * 4, 128)
    value, step = cast.double().view(blocks), scale.double().view(blocks[:3])[..., None]
    expected, size = (x.view(40, groups, -1).transpose(0, 1).reshape(blocks) for x in (expected, size))
    ratio = 448 * step / expected.abs().amax(-1, keepdim=True)
    if not ((ratio > 0.97) & (ratio < 2.06)).all():
        raise AssertionError(f"scale: from {ratio.min():.3g} to {ratio.max():.3g} of the largest value / 448")
    # Attention rounds its weights and its result, whose pairs are rounded once more when they are turned.
    bound = expected.abs() / 16 * 1.01 + step / 512 + 2**-6 * size.amax(-1, keepdim=True)
    if not ((value * step - expected).abs() <= bound).all():
        raise AssertionError("out: off by more than rounding")
    check_rounded("out", value * step, expected, abs_tol=0.05, rel_tol=0.08, cos_tol=1e-3)


def merge_attention(device: str) -> None:
    """Attention in two parts, and a row whose parts are both empty, with a sink that halves the first head."""
    q, kv = torch.randn(H, D, device=device), torch.randn(40, D, device=device)
    expected, expected_lse, _ = attention(q, kv, D**-0.5)
    sink = torch.full((H,), -torch.inf, device=device)
    sink[0], expected[0] = expected_lse[0], expected[0] / 2
    outs, lses = [], []
    for keys, mark in zip(kv.split((32, 8)), (torch.inf, -torch.inf)):
        out, lse, _ = (x.float() for x in attention(q, keys, D**-0.5))
        outs.append(torch.stack((out, torch.full_like(out, torch.nan))))
        lses.append(torch.stack((lse, torch.full_like(lse, mark))))
    out, lse = dsa.merge_attention(outs, lses, sink)
    assert_close("out", out, torch.stack((expected, torch.zeros_like(expected))), abs_tol=1e-5, rel_tol=1e-4)
    check_lse("lse", lse, torch.stack((expected_lse, torch.full_like(expected_lse, torch.inf))))


def _up_projections(device: str) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """kv_b of heads with 128 and 128 rows, and in float64 as it is multiplied: rounded to bf16."""
    weight, scale = dsa.per_block_cast_to_fp8(torch.randn(H * 256, D_V, device=device), use_ue8m0=False)
    rows = dsa.dequantize_per_block(weight, scale, torch.bfloat16).double()
    return (weight, scale), rows.view(H, 256, D_V)


def mla_absorb_queries(device: str) -> None:
    """Nine tokens: an octet and one more. Sums of 128 products; the last channels turn."""
    q = torch.randn(9, H, 192, device=device).bfloat16()
    angles = torch.randn(9, 32, device=device)
    kv_b, rows = _up_projections(device)
    turn = torch.exp(1j * angles.double())[:, None]
    pairs = torch.view_as_complex(q[..., 128:].double().unflatten(-1, (32, 2)).contiguous()) * turn
    absorbed = torch.einsum("thd,hdc->thc", q[..., :128].double(), rows[:, :128])
    expected = torch.cat((absorbed, torch.view_as_real(pairs).flatten(-2)), -1)
    got = dsa.mla_absorb_queries(q[..., :128], q[..., 128:], angles.cos(), angles.sin(), kv_b)
    check_rounded("q", got, expected, abs_tol=2e-4, rel_tol=2**-8, cos_tol=5e-6)


def mla_values_cast_to_fp8(device: str) -> None:
    """Nine tokens, as above. A byte is off by at most a 16th of its value or a 512th of its scale."""
    attended = torch.randn(9, H, D_V, device=device).bfloat16()
    kv_b, rows = _up_projections(device)
    expected = torch.einsum("thc,hvc->thv", attended.double(), rows[:, 128:])
    cast, scale = dsa.mla_values_cast_to_fp8(attended, kv_b, 128)
    value, step = cast.double().view(expected.shape), scale.double()[..., None]
    ratio = 448 * step / expected.abs().amax(-1, keepdim=True)
    if not ((ratio > 0.97) & (ratio < 2.06)).all():
        raise AssertionError(f"scale: from {ratio.min():.3g} to {ratio.max():.3g} of the largest value / 448")
    # y is rounded to bf16 in front of the cast.
    if not ((value * step - expected).abs() <= expected.abs() * (1 / 16 + 2**-8) * 1.01 + step / 512).all():
        raise AssertionError("values: off by more than rounding")
    check_rounded("values", value * step, expected, abs_tol=0.05, rel_tol=0.08, cos_tol=1e-3)
