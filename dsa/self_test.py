"""A quick test of every public op on one device, against short float64 formulas. `dsa check` runs it.

Tolerances are those of the ops' contracts, for kernels on a GPU as for references on a CPU:
- attention rounds its softmax weights, the values of an FP8 cache and its result: `_check_attention`;
- FP8 products are summed in about 14 bits within a block of 128 channels: `_check_product`;
- quantised numbers are each off by up to 2^-4, but in no direction: `_check_rounded` allows the one and not the other.
A result that is 1% too large, a key too many or a tile too few is outside of all of them.
"""

from collections.abc import Callable, Iterable

import torch

import dsa
from dsa.testing import assert_close, calc_diff

D, D_V, H = 576, 512, 16


def _attention(q: torch.Tensor, kv: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [H, D], kv [N, D] -> out [H, D_V], lse [H] and size [H, D_V] = sum_j p_j |v_j|, in float64."""
    logits, v = q.double() @ kv.double().T * scale, kv.double()[:, :D_V]
    p = logits.softmax(-1)
    return p @ v, logits.logsumexp(-1), p @ v.abs()


def _rows(parts: Iterable[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
    """The results of `_attention` for several queries, stacked."""
    return [torch.stack(part) for part in zip(*parts)]


def _check_attention(name: str, got: torch.Tensor, expected: torch.Tensor, size: torch.Tensor, cos_tol: float) -> None:
    """Each softmax weight, value and result may be off by half a step of bf16, 2^-9; cos_tol: the peers' own."""
    error = (got.double() - expected).abs()
    if not (error <= 3 * 2**-9 * size).all():
        raise AssertionError(f"{name}: off by up to {(error / size).nan_to_num(0.0).max():.3g} of the values' size")
    _check_diff(name, got, expected, cos_tol)


def _check_lse(name: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    assert_close(name, got, expected, abs_tol=1e-6, rel_tol=8.01 / 65536)


def _check_diff(name: str, got: torch.Tensor, expected: torch.Tensor, tolerance: float = 5e-6) -> None:
    if not (diff := calc_diff(got, expected)) <= tolerance:
        raise AssertionError(f"{name}: calc_diff {diff:.3g} is above {tolerance}")


def _check_rounded(
    name: str, got: torch.Tensor, expected: torch.Tensor, abs_tol: float, rel_tol: float, cos_tol: float
) -> None:
    """Errors of rounding single numbers point in no direction: the mean ratio of numbers that are not small is 1."""
    assert_close(name, got, expected, abs_tol=abs_tol, rel_tol=rel_tol, cos_tol=cos_tol)
    got, expected = got.double().to(expected.device), expected.double()
    large = expected.abs() > expected.abs().max() / 20
    if abs((ratio := (got[large] / expected[large]).mean().item()) - 1) > 4e-3:
        raise AssertionError(f"{name}: {ratio:.4f} times what it should be")


def _check_product(name: str, got: torch.Tensor, expected: torch.Tensor, size: torch.Tensor) -> None:
    """size: the root of the summed squares of what each number is a sum of."""
    error = (got.double() - expected).abs()
    if not (error <= 4e-3 * size).all():
        raise AssertionError(f"{name}: off by up to {(error / size).max():.3g} of the size of its products")
    _check_diff(name, got, expected, 1e-7)


def _hadamard() -> torch.Tensor:
    """The matrix of 128 channels, from its definition."""
    signs = [[(-1.0) ** (i & j).bit_count() for j in range(128)] for i in range(128)]
    return torch.tensor(signs, dtype=torch.double) / 128**0.5


def _per_token_cast_to_fp8(device: str) -> None:
    x = torch.randn(33, 256, device=device).bfloat16()
    q, scale = dsa.per_token_cast_to_fp8(x)
    back = q.double() * scale.double().repeat_interleave(128, -1)
    _check_rounded("x", back, x.double(), abs_tol=1e-2, rel_tol=2**-4, cos_tol=1e-3)
    q, scale = dsa.per_token_cast_to_fp8(x, hadamard=True)
    back = q.double().cpu() * scale.double().cpu().repeat_interleave(128, -1)
    expected = (x.double().cpu().view(33, 2, 128) @ _hadamard()).view(33, 256)
    _check_rounded("Hadamard x", back, expected, abs_tol=1e-2, rel_tol=2**-4, cos_tol=1e-3)


def _index_case(device: str) -> tuple[torch.Tensor, ...]:
    q = torch.randn(3, 64, 128, device=device).to(torch.float8_e4m3fn)
    k = torch.randn(100, 128, device=device).to(torch.float8_e4m3fn)
    scale, weights = torch.rand(100, device=device) + 0.1, torch.randn(3, 64, device=device)
    dots = torch.einsum("thd,sd->ths", q.double(), k.double()).relu()
    return q, k, scale, weights, torch.einsum("th,ths->ts", weights.double(), dots) * scale.double()


def _fp8_mqa_logits(device: str) -> None:
    q, k, scale, weights, expected = _index_case(device)
    starts, ends = (torch.tensor(v, dtype=torch.int32, device=device) for v in ([0, 10, 5], [100, 50, 5]))
    got = dsa.fp8_mqa_logits(q, (k, scale), weights, starts, ends)
    column = torch.arange(100, device=device)
    expected = expected.masked_fill((column < starts[:, None]) | (column >= ends[:, None]), -torch.inf)
    _check_diff("logits", got, expected)
    got = dsa.mqa_logits(q.bfloat16(), k.bfloat16(), weights, starts, ends)
    _check_diff("mqa_logits", got, expected / scale)


def _fp8_paged_mqa_logits(device: str) -> None:
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
    _check_diff("logits", got, expected)


def _indexer_inputs(device: str) -> None:
    """Norm, rope on the first 64 channels in halves, Hadamard, and the scores that come of it."""
    angles = torch.randn(40, 32, device=device)
    cos, sin = angles.cos(), angles.sin()

    def turned(x: torch.Tensor) -> torch.Tensor:
        pair = torch.complex(x[..., :32], x[..., 32:64]) * torch.exp(1j * angles.double().cpu())[:, None]
        return torch.cat((pair.real, pair.imag, x[..., 64:]), -1) @ _hadamard()

    q, k = (torch.randn(shape, device=device).bfloat16() for shape in ((40, 16, 128), (40, 128)))
    weights, gain, bias = (torch.randn(n, device=device) for n in ((40, 16), 128, 128))
    q8, w8 = dsa.quantize_indexer_queries(q, weights, cos, sin)
    back = q8.double() * (w8 / weights).double()[..., None]
    _check_rounded("q", back.cpu(), turned(q.double().cpu()), abs_tol=3e-2, rel_tol=0.075, cos_tol=2e-3)
    cache = torch.full((3, 64, 1, 132), 0xFF, dtype=torch.uint8, device=device)
    slots = torch.arange(40, device=device) + 50
    dsa.write_indexer_keys(k, gain, bias, cos, sin, cache, slots)
    k8, scale = dsa.read_indexer_cache(cache, slots)
    x = k.double().cpu()
    x = (x - x.mean(1, keepdim=True)) / (x.var(1, correction=0, keepdim=True) + 1e-6).sqrt()
    expected = turned((x * gain.double().cpu() + bias.double().cpu())[:, None])[:, 0]
    back = k8.double().cpu() * scale.double().cpu()[:, None]
    _check_rounded("k", back, expected, abs_tol=6e-2, rel_tol=0.075, cos_tol=2e-3)


def _mla_cache_inputs(device: str) -> None:
    """V3.2: norm of the latent, rope on the 64 channels behind it, floats; V4: both on the same 512, to FP8."""
    angles, gain = torch.randn(40, 32, device=device), torch.randn(512, device=device)
    slots = torch.arange(40, device=device) + 50
    v4 = dsa.make_v4_cache(3, 64, device).fill_(0xFF)
    for cache in (torch.full((3, 64, 1, D), torch.nan, dtype=torch.bfloat16, device=device), v4):
        kv = torch.randn(40, 512 if cache is v4 else D, device=device).bfloat16()
        out = torch.full_like(kv, torch.nan)
        dsa.write_mla_cache(kv, gain, angles.cos(), angles.sin(), cache, slots, out=out)
        x = kv.double()
        x[:, :512] *= gain.double() / (x[:, :512].square().mean(1, keepdim=True) + 1e-6).sqrt()
        pair = torch.complex(x[:, -64::2], x[:, -63::2]) * torch.exp(1j * angles.double())
        x[:, -64:] = torch.view_as_real(pair).flatten(1)
        assert_close("out", out, x, abs_tol=4e-2, rel_tol=2**-7, cos_tol=1e-5)
        back = dsa.read_kv_cache(cache, slots)
        if cache is v4:
            _check_rounded("FP8 cache", back, x, abs_tol=6e-2, rel_tol=0.075, cos_tol=2e-3)
        else:
            assert_close("cache", back, x, abs_tol=4e-2, rel_tol=2**-7, cos_tol=1e-5)


def _compressed_kv(device: str) -> None:
    """Overlapping blocks of 4 in two passes, the second of which needs what the first left, to floats and to bytes."""
    for d, kind in ((512, "floats"), (128, "bytes")):
        kv, gate = torch.randn(2, 42, 2 * d, device=device)
        ape, gain, angles = torch.randn(4, 2 * d, device=device), torch.rand(d, device=device), torch.randn(42, 32)
        cos, sin = angles.cos().to(device), angles.sin().to(device)
        if kind == "floats":
            cache = torch.full((1, 64, 1, d), torch.nan, dtype=torch.bfloat16, device=device)
        else:
            cache = torch.full((1, 64, 1, d + 4), 0xFF, dtype=torch.uint8, device=device)
        slots = torch.full((42,), -1, device=device)
        slots[3::4] = torch.arange(10, device=device)
        state, lanes = torch.full((1, 8, 2, 2 * d), torch.nan, device=device), torch.zeros(1, dtype=torch.int32)
        for low, high in ((0, 27), (27, 42)):
            ends, start = (torch.tensor(v, dtype=torch.int32, device=device) for v in ([0, high - low], [low]))
            part = (x[low:high] for x in (kv, gate))
            turn = (x[low:high] for x in (cos, sin))
            where = (cache, slots[low:high], ends, start, state, lanes.to(device))
            dsa.write_compressed_kv(*part, ape, gain, *turn, *where, overlap=True)
        k, z = (x[:40].double().unflatten(0, (10, 4)) for x in (kv, gate))
        z = z + ape.double()
        before = [torch.cat((x[:1] * 0 + pad, x[:-1]))[..., :d] for x, pad in ((k, 0), (z, -torch.inf))]
        k, z = (torch.cat((a, b[..., d:]), 1) for a, b in zip(before, (k, z)))
        x = (z.softmax(1) * k).sum(1)
        x *= gain.double() / (x.square().mean(1, keepdim=True) + 1e-6).sqrt()
        pair = torch.complex(x[:, -64::2], x[:, -63::2]) * torch.exp(1j * angles[3::4].double().to(device))
        x[:, -64:] = torch.view_as_real(pair).flatten(1)
        if kind == "floats":
            assert_close("entries", cache[0, :10, 0], x, abs_tol=1e-3, rel_tol=2**-7, cos_tol=1e-5)
        else:
            x = x.cpu() @ _hadamard()
            values, scales = cache.flatten().split((64 * d, 64 * 4))
            back = values.view(torch.float8_e4m3fn).view(64, d).double() * scales.view(torch.float32)[:, None]
            back = back[:10].cpu()
            _check_rounded("FP8 entries", back, x, abs_tol=6e-2, rel_tol=0.075, cos_tol=2e-3)


def _hyper_connections(device: str) -> None:
    """Four streams of three tokens, and what a sublayer gives back; Sinkhorn in float64, as the definition has it."""
    streams, y = (torch.randn(s, device=device).bfloat16() for s in ((3, 4, 264), (3, 264)))
    mix, base, scale = torch.randn(3, 24, device=device), torch.randn(24, device=device), torch.rand(3, device=device)
    x, post, comb = dsa.hyper_collapse(streams, mix, base, scale)
    v = streams.double()
    z = mix.double() / (v.square().mean((1, 2)) + 1e-6).sqrt()[:, None]
    z = z * scale.double().repeat_interleave(torch.tensor((4, 4, 16), device=device)) + base.double()
    pre, given = 1 / (1 + (-z[:, :4]).exp()) + 1e-6, 2 / (1 + (-z[:, 4:8]).exp())
    weights = z[:, 8:].view(3, 4, 4).softmax(2) + 1e-6
    for step in range(39):
        weights = weights / (weights.sum(1 + step % 2, keepdim=True) + 1e-6)
    assert_close("x", x, (pre[..., None] * v).sum(1), abs_tol=1e-3, rel_tol=2**-8, cos_tol=1e-5)
    assert_close("post", post, given, abs_tol=1e-5, rel_tol=1e-4)
    assert_close("comb", comb, weights, abs_tol=1e-5, rel_tol=1e-4)
    expected = post.double()[..., None] * y.double()[:, None] + comb.double().transpose(1, 2) @ v
    assert_close(
        "streams", dsa.hyper_expand(y, streams, post, comb), expected, abs_tol=1e-3, rel_tol=2**-8, cos_tol=1e-5
    )


def _topk_indices(device: str) -> None:
    scores = torch.randn(5, 300, device=device).round(decimals=1)
    got = dsa.topk_indices(scores, 64).cpu()
    for row, picked in zip(scores.tolist(), got.tolist()):
        if picked != sorted(sorted(range(300), key=lambda i: (-row[i], i))[:64]):
            raise AssertionError("not the 64 largest with ties to the lowest index")


def _flash_mla_with_kvcache(device: str) -> None:
    q = torch.randn(1, 1, H, D, device=device).bfloat16()
    cache = torch.randn(3, 64, 1, D, device=device).bfloat16()
    table = torch.tensor([[2, 0]], dtype=torch.int32, device=device)
    length = torch.tensor([100], dtype=torch.int32, device=device)
    keys = torch.cat((cache[2, :, 0], cache[0, :36, 0]))
    expected, expected_lse, size = _attention(q[0, 0], keys, D**-0.5)
    out, lse = dsa.flash_mla_with_kvcache(q, cache, table, length, D_V, dsa.get_mla_metadata()[0])
    _check_attention("dense", out[0, 0], expected, size, 5e-6)
    _check_lse("dense lse", lse[0, :, 0], expected_lse)
    pages = torch.full((3, 64, 1, 656), 0xFF, dtype=torch.uint8, device=device)
    slots = torch.arange(100, device=device) + 64
    dsa.write_kv_cache(keys, pages, slots)
    out, lse = dsa.flash_mla_with_kvcache(
        q, pages, None, None, D_V, dsa.get_mla_metadata()[0], is_fp8_kvcache=True, indices=slots.int().view(1, 1, -1)
    )
    expected, expected_lse, size = _attention(q[0, 0], dsa.read_kv_cache(pages, slots), D**-0.5)
    _check_attention("sparse", out[0, 0], expected, size, 5e-6)
    _check_lse("sparse lse", lse[0, :, 0], expected_lse)


def _flash_mla_sparse_fwd(device: str) -> None:
    q, kv = torch.randn(2, H, D, device=device).bfloat16(), torch.randn(200, 1, D, device=device).bfloat16()
    indices = torch.full((2, 1, 64), -1, dtype=torch.int32, device=device)
    indices[0, 0, :50] = torch.randperm(200, device=device)[:50]
    out, max_logits, lse = dsa.flash_mla_sparse_fwd(q, kv, indices, D**-0.5)
    keys = kv[indices[0, 0, :50].long(), 0]
    expected, expected_lse, size = _attention(q[0], keys, D**-0.5)
    empty, infinite = torch.zeros_like(expected), torch.full_like(expected_lse, torch.inf)
    _check_attention("out", out, torch.stack((expected, empty)), torch.stack((size, empty)), 7e-6)
    _check_lse("lse", lse, torch.stack((expected_lse, infinite)))
    largest = (q[0].double() @ keys.double().T * D**-0.5).amax(-1)
    _check_lse("max_logits", max_logits, torch.stack((largest, -infinite)))


def _window_indices(device: str) -> None:
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


def _sliding_window_attention(device: str) -> None:
    """The window alone; with selected keys and a sink that halves the first head; and in a cache."""
    q, kv = torch.randn(40, H, D_V, device=device).bfloat16(), torch.randn(40, 1, D_V, device=device).bfloat16()
    ends = torch.tensor([0, 40], dtype=torch.int32, device=device)
    windows = [kv[max(0, t - 7) : t + 1, 0] for t in range(40)]
    out, lse = dsa.sliding_window_attention(q, kv, ends, ends, 8, D_V**-0.5)
    expected, expected_lse, size = _rows(_attention(*row, D_V**-0.5) for row in zip(q, windows))
    _check_attention("out", out, expected, size, 7e-6)
    _check_lse("lse", lse, expected_lse)

    table = torch.tensor([[1, 0, 2]], dtype=torch.int32, device=device)
    cache = kv.new_full((3, 16, 1, D_V), torch.nan)
    dsa.write_kv_cache(kv[:, 0], cache, table[0].repeat_interleave(16)[:40] * 16 + torch.arange(40, device=device) % 16)
    ring = kv[24:].roll(24, 0)[None]
    for where, pages in ((table, cache), (None, ring)):
        length = torch.full((1,), 40, dtype=torch.int32, device=device)
        out, lse = dsa.sliding_window_decode(q[None, 38:], pages, where, length, 8, D_V**-0.5)
        _check_attention("decode", out[0], expected[38:], size[38:], 5e-6)
        _check_lse("decode lse", lse[0].T, expected_lse[38:])

    more = torch.randn(30, 1, D_V, device=device).bfloat16()
    picks = torch.rand(40, 30, device=device).argsort(1)[:, :5].int()
    keys = [torch.cat((near, more[p.long(), 0])) for near, p in zip(windows, picks)]
    expected, expected_lse, size = _rows(_attention(*row, D_V**-0.5) for row in zip(q, keys))
    sink = torch.full((H,), -torch.inf, device=device)
    sink[0] = expected_lse[:, 0].mean()
    share = expected_lse[:, 0].exp() / (expected_lse[:, 0].exp() + sink[0].double().exp())
    expected[:, 0] *= share[:, None]
    out, lse = dsa.window_sparse_attention(q, kv, ends, ends, 8, more, picks, D_V**-0.5, attn_sink=sink)
    _check_attention("out with selected", out, expected, size, 7e-6)
    _check_lse("lse with selected", lse, expected_lse)


def _merge_attention(device: str) -> None:
    """Attention in two parts, and a row whose parts are both empty, with a sink that halves the first head."""
    q, kv = torch.randn(H, D, device=device), torch.randn(40, D, device=device)
    expected, expected_lse, _ = _attention(q, kv, D**-0.5)
    sink = torch.full((H,), -torch.inf, device=device)
    sink[0], expected[0] = expected_lse[0], expected[0] / 2
    outs, lses = [], []
    for keys, mark in zip(kv.split((32, 8)), (torch.inf, -torch.inf)):
        out, lse, _ = (x.float() for x in _attention(q, keys, D**-0.5))
        outs.append(torch.stack((out, torch.full_like(out, torch.nan))))
        lses.append(torch.stack((lse, torch.full_like(lse, mark))))
    out, lse = dsa.merge_attention(outs, lses, sink)
    assert_close("out", out, torch.stack((expected, torch.zeros_like(expected))), abs_tol=1e-5, rel_tol=1e-4)
    _check_lse("lse", lse, torch.stack((expected_lse, torch.full_like(expected_lse, torch.inf))))


def _fp8_gemm_nt(device: str) -> None:
    x, w = torch.randn(5, 384, device=device), torch.randn(200, 384, device=device)
    a, b = dsa.per_token_cast_to_fp8(x, False), dsa.per_block_cast_to_fp8(w, False)
    wide = a[0].double() * a[1].double().repeat_interleave(128, 1), dsa.dequantize_per_block(*b).double().T
    expected, size = wide[0] @ wide[1], (wide[0].square() @ wide[1].square()).sqrt()
    _check_product("y", dsa.fp8_gemm_nt(a, b, torch.float32), expected, size)
    ends = torch.tensor((2, 2, 5), dtype=torch.int32, device=device)
    weights = b[0].expand(3, -1, -1).contiguous(), b[1] * torch.tensor((1.0, 8.0, 2.0), device=device)[:, None, None]
    expected, size = (torch.cat((x[:2], 2 * x[2:])) for x in (expected, size))
    _check_product("grouped y", dsa.grouped_fp8_gemm_nt(a, weights, ends, torch.float32), expected, size)


def _expert_routing(device: str) -> None:
    # Two of four groups of four stay: by their two best, 1.5 and 1.15, not by the one that has 0.9 alone.
    chosen_by = torch.tensor([[0.9, 0.1, 0, 0, 0.8, 0.7, 0, 0, 0.5, 0.4, 0, 0, 0.6, 0.55, 0.05, 0]], device=device)
    logits = torch.randn(1, 16, device=device)
    s = torch.sigmoid(logits)
    options = {"n_group": 4, "topk_group": 2, "scale": 2.5}
    experts, weights = dsa.moe_gate(logits, (chosen_by - s)[0], 3, **options)
    if experts.tolist() != [[4, 5, 12]]:
        raise AssertionError(f"experts: expected 4, 5, 12, got {experts.tolist()}")
    picked = s.gather(1, experts)
    assert_close("weights", weights, 2.5 * picked / picked.sum(), abs_tol=0.0, rel_tol=1e-5)
    logits = torch.tensor([[-9.0, 3.0, 1.0, 25.0]], device=device)
    experts, weights = dsa.moe_gate(logits, torch.zeros(4, device=device), 4, scores="sqrtsoftplus", normalise=False)
    if experts.tolist() != [[3, 1, 2, 0]]:
        raise AssertionError(f"experts: expected 3, 1, 2, 0, got {experts.tolist()}")
    expected = torch.log1p(logits.double().exp()).sqrt().gather(1, experts)
    assert_close("weights", weights, expected, abs_tol=0.0, rel_tol=1e-5)
    found = dsa.sort_by_expert(torch.tensor([[2, 0], [7, 2], [0, -1]], device=device), 4)
    expected_parts = ([1, 4, 0, 3, 2, 5], [[2, 0], [-1, 3], [1, -1]], [2, 2, 4, 4])
    for name, x, expected_part in zip(("order", "rows", "ends"), found, expected_parts):
        if x.tolist() != expected_part:
            raise AssertionError(f"{name}: expected {expected_part}, got {x.tolist()}")


def _rotary(device: str) -> None:
    """Neighbours and halves, first and last; and the same in place, in a part of a wider tensor."""
    x, angles = torch.randn(9, 3, 96, device=device).bfloat16(), torch.randn(9, 32, device=device)
    turn = torch.exp(1j * angles.double().cpu())[:, None]
    for interleaved, dims in ((True, "first"), (True, "last"), (False, "first"), (False, "last")):
        begin = 32 if dims == "last" else 0
        expected = x.double().cpu()
        part = expected[..., begin : begin + 64]
        pair = (part[..., ::2], part[..., 1::2]) if interleaved else part.chunk(2, -1)
        turned = torch.complex(*(p.contiguous() for p in pair)) * turn
        expected[..., begin : begin + 64] = (
            torch.view_as_real(turned).flatten(-2) if interleaved else torch.cat((turned.real, turned.imag), -1)
        )
        kind = {"interleaved": interleaved, "dims": dims}
        wide = torch.nn.functional.pad(x, (0, 32))
        part = wide[..., :96]
        new = dsa.apply_rotary(x, angles.cos(), angles.sin(), **kind)
        dsa.apply_rotary(part, angles.cos(), angles.sin(), **kind, out=part)
        for name, got in (("rotated", new), ("rotated in place", part)):
            assert_close(name, got.cpu(), expected, abs_tol=1e-6, rel_tol=2**-7, cos_tol=5e-6)


def _rms_norm(device: str) -> None:
    x, weight = 3 * torch.randn(40, 2, 1536, device=device).bfloat16(), torch.randn(1536, device=device)
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-2).sqrt()
    assert_close("y", dsa.rms_norm(x, None, 1e-2), expected, abs_tol=1e-6, rel_tol=2**-7, cos_tol=5e-6)
    assert_close(
        "y", dsa.rms_norm(x, weight, 1e-2), expected * weight.double(), abs_tol=1e-6, rel_tol=2**-7, cos_tol=5e-6
    )


def _swiglu_cast_to_fp8(device: str) -> None:
    """The halves of one tensor, with a last block that ends early; then with a limit that many exceed."""
    gate, up = (2 * torch.randn(33, 400, device=device)).bfloat16().chunk(2, -1)
    for limit in (None, 1.0):
        q, scale = dsa.swiglu_cast_to_fp8(gate, up, limit=limit)
        g, u = gate.double(), up.double()
        if limit is not None:
            g, u = g.clamp(max=limit), u.clamp(-limit, limit)
        back = q.double() * scale.double().repeat_interleave(128, -1)[:, :200]
        expected, tolerance = g / (1 + (-g).exp()) * u, {"abs_tol": 4e-2, "rel_tol": 0.075, "cos_tol": 2e-3}
        if limit is None:
            _check_rounded("h", back, expected, **tolerance)
        else:  # many numbers are the limit, and all of these are rounded alike
            assert_close("limited h", back, expected, **tolerance)


def _combine_experts(device: str) -> None:
    """Three rows a token, one of them outside, and the shared expert's."""
    y, shared = torch.randn(50, 72, device=device), torch.randn(20, 72, device=device)
    rows, weights = torch.randint(50, (20, 3), device=device, dtype=torch.int32), torch.rand(20, 3, device=device)
    expected = (y.double()[rows.long()] * weights.double()[..., None])[:, :2].sum(1)
    rows[:, 2] = torch.tensor([-1, 50], device=device).repeat(10)
    assert_close("out", dsa.combine_experts(y, rows, weights), expected, abs_tol=1e-5, rel_tol=1e-5)
    got = dsa.combine_experts(y, rows, weights, shared)
    assert_close("out with shared", got, expected + shared.double(), abs_tol=1e-5, rel_tol=1e-5)


def _indexer_warmup_attention(device: str) -> None:
    """Two sequences, one of them with more keys than queries: each query's row by the definitions, in float64."""
    shapes = (5, 4, 64), (7, 2, 64), (7, 2, 64), (5, 8, 64), (7, 64)
    q, k, v, q_idx, k_idx = (torch.randn(*shape, device=device).bfloat16() for shape in shapes)
    w_idx = torch.randn(5, 8, device=device) / 8
    bounds = [torch.tensor(x, dtype=torch.int32, device=device) for x in ((0, 3, 5), (0, 5, 7))]
    learned = [x.requires_grad_() for x in (q_idx, k_idx, w_idx)]
    out, lse, kl = dsa.indexer_warmup_attention(q, k, v, *learned, *bounds, 3, 5, 0.125)
    got = torch.autograd.grad(kl.sum(), learned)
    exact = [x.detach().double().requires_grad_() for x in learned]
    losses = []
    for t, keys in enumerate([range(3), range(4), range(5), range(5, 6), range(5, 7)]):
        rows = torch.tensor(keys, device=device)
        logits = 0.125 * torch.einsum("hd,shd->hs", q[t].double(), k[rows].double().repeat_interleave(2, 1))
        assert_close("lse", lse[:, t], logits.logsumexp(-1), abs_tol=1e-5, rel_tol=1e-5)
        values = v[rows].double().repeat_interleave(2, 1)
        expected = torch.einsum("hs,shd->hd", logits.softmax(-1), values)
        assert_close("out", out[t], expected, abs_tol=1e-2, rel_tol=2e-2, cos_tol=2e-5)
        scores = (exact[2][t, :, None] * (exact[0][t] @ exact[1][rows].T).relu()).sum(0)
        p = logits.softmax(-1).mean(0)
        losses.append((p * (p.log() - scores.log_softmax(0))).sum())
    expected = torch.stack(losses)
    assert_close("kl", kl, expected.detach(), abs_tol=2e-5, rel_tol=1e-3)
    for name, x, y in zip(("dq_idx", "dk_idx", "dw_idx"), got, torch.autograd.grad(expected.sum(), exact)):
        _check_rounded(name, x, y, abs_tol=1e-2, rel_tol=2e-2, cos_tol=2e-4)


def _indexer_topk(device: str) -> None:
    """Two sequences, causal; scores of small whole numbers, many of them equal: each query's keys by the definition."""
    q, k = (torch.randint(-1, 2, shape, device=device).bfloat16() for shape in ((9, 8, 64), (40, 64)))
    w = torch.randint(-4, 5, (9, 8), device=device) / 8
    bounds = [torch.tensor(x, dtype=torch.int32, device=device) for x in ((0, 5, 9), (0, 30, 40))]
    picks = dsa.indexer_topk(q, k, w, 12, *bounds, 5, 30)[:, 0].tolist()
    for t in range(9):
        first, seen = (0, 26 + t) if t < 5 else (30, 2 + t)
        scores = (w[t, :, None] * (q[t].float() @ k[first : first + seen].float().T).relu()).sum(0).tolist()
        best = sorted(sorted(range(seen), key=lambda s, of=scores: (-of[s], s))[:12])
        expected = [first + s for s in best] + [-1] * (12 - len(best))
        if picks[t] != expected:
            raise AssertionError(f"query {t}: picked {picks[t]}, expected {expected}")


def _sparse_indexer_loss(device: str) -> None:
    """A query of two keys, one of them twice, beside what is none, and the gradients, by the definitions in float64."""
    q, kv = torch.randn(1, H, D, device=device).bfloat16(), torch.randn(9, 1, D, device=device).bfloat16()
    q_idx, k_idx = torch.randn(1, 8, 64, device=device).bfloat16(), torch.randn(9, 64, device=device).bfloat16()
    w, scale = torch.randn(1, 8, device=device) / 8, 8 * D**-0.5
    picks = torch.tensor([[[6, -1, 5, 9, 5]]], dtype=torch.int32, device=device)
    learned = [x.requires_grad_() for x in (q_idx, k_idx, w)]
    kl = dsa.sparse_indexer_loss(q, kv, *learned, picks, scale)
    got = torch.autograd.grad(kl.sum(), learned)
    rows = torch.tensor([6, 5, 5], device=device)
    p = (scale * q[0].double() @ kv[rows, 0].double().T).softmax(-1).mean(0)
    exact = [x.detach().double().requires_grad_() for x in learned]
    scores = exact[2][0] @ (exact[0][0] @ exact[1][rows].T).relu()
    expected = (p * (p.log() - scores.log_softmax(0))).sum()
    assert_close("sparse kl", kl[0], expected.detach(), abs_tol=2e-5, rel_tol=1e-3)
    for name, x, y in zip(("dq_idx", "dk_idx", "dw_idx"), got, torch.autograd.grad(expected, exact)):
        _check_rounded(name, x, y, abs_tol=1e-2, rel_tol=2e-2, cos_tol=2e-4)


def _sparse_mla_attention(device: str) -> None:
    """Results and gradients of two queries, one of which has no keys, by the definition in float64."""
    q, kv = torch.randn(2, H, D, device=device).bfloat16(), torch.randn(90, 1, D, device=device).bfloat16()
    picks = torch.full((2, 1, 70), -1, dtype=torch.int32, device=device)
    picks[0, 0, :50] = torch.randperm(90, device=device)[:50]
    sink, leaves = torch.full((H,), 4.0, device=device), [x.requires_grad_() for x in (q, kv)]
    sink.requires_grad_()
    out, lse = dsa.sparse_mla_attention(*leaves, picks, D**-0.5, D_V, sink)
    dout = torch.randn_like(out)
    dq, dkv, dsink = torch.autograd.grad(out, (*leaves, sink), dout)
    wide = [x.detach().double().requires_grad_() for x in (*leaves, sink)]
    keys = wide[1][picks[0, 0, :50].long(), 0]
    logits = wide[0][0] @ keys.T * D**-0.5
    p = torch.cat((logits, wide[2][:, None]), 1).softmax(-1)[:, :50]
    expected = p @ keys[:, :D_V]
    gradients = torch.autograd.grad(expected, wide, dout[0].double())
    _check_attention("out", out[0], expected, p @ keys[:, :D_V].abs(), 7e-6)
    _check_lse("lse", lse[:, 0], logits.logsumexp(-1))
    for name, got, true in zip(("dq", "dkv", "dsink"), (dq, dkv, dsink), gradients):
        if (error := ((got.double() - true).norm() / true.norm()).item()) > 7e-3:
            raise AssertionError(f"{name}: {error:.2e} from the definition")
    if any(x.ne(0).any() for x in (out[1], dq[1])):
        raise AssertionError("not zeros without keys")


SELF_TESTS: dict[str, Callable[[str], None]] = {
    "per_token_cast_to_fp8": _per_token_cast_to_fp8,
    "fp8_gemm_nt": _fp8_gemm_nt,
    "expert_routing": _expert_routing,
    "swiglu_cast_to_fp8": _swiglu_cast_to_fp8,
    "combine_experts": _combine_experts,
    "indexer_warmup_attention": _indexer_warmup_attention,
    "indexer_topk": _indexer_topk,
    "sparse_indexer_loss": _sparse_indexer_loss,
    "fp8_mqa_logits": _fp8_mqa_logits,
    "fp8_paged_mqa_logits": _fp8_paged_mqa_logits,
    "indexer_inputs": _indexer_inputs,
    "mla_cache_inputs": _mla_cache_inputs,
    "compressed_kv": _compressed_kv,
    "hyper_connections": _hyper_connections,
    "topk_indices": _topk_indices,
    "flash_mla_with_kvcache": _flash_mla_with_kvcache,
    "flash_mla_sparse_fwd": _flash_mla_sparse_fwd,
    "sparse_mla_attention": _sparse_mla_attention,
    "window_indices": _window_indices,
    "sliding_window_attention": _sliding_window_attention,
    "merge_attention": _merge_attention,
    "rotary": _rotary,
    "rms_norm": _rms_norm,
}
