"""Tests that selected keys have the largest scores in float64, and that attention over pages equals plain attention."""

import pytest
import torch

import dsa
from dsa_layers import DSAAttention, LightningIndexer, SequenceBatch, fuse
from dsa_layers.cache.kv_cache import PagedKVCache
from dsa_layers.engine.paged_attention import PagedAttention
from dsa_layers.engine.paged_indexer import PagedIndexer
from tests.layers.layers.small_layers import ROTARY

HIDDEN, RANK, HEADS, TOP_K, N = 128, 128, 4, 16, 50


def make_indexer(kind=PagedIndexer, **options):
    indexer = kind(HIDDEN, RANK, n_heads=64, top_k=TOP_K, **options)
    torch.nn.init.normal_(indexer.k_norm.weight, 1, 0.2)
    torch.nn.init.normal_(indexer.k_norm.bias, std=0.2)
    return indexer


def rotate(x, interleaved, first):
    """Apply rope at positions 0 to T - 1 to the first or last 64 of the 128 channels of x [T, ..., 128], in float64."""
    x = x.double()
    part, rest = (x[..., :64], x[..., 64:]) if first else (x[..., 64:], x[..., :64])
    a, b = (part[..., ::2], part[..., 1::2]) if interleaved else (part[..., :32], part[..., 32:])
    angle = torch.arange(len(x)).double()[:, None] * 1e4 ** (-torch.arange(0, 64, 2).double() / 64)
    angle = angle.view(-1, *[1] * (x.dim() - 2), 32)
    z = torch.complex(a, b) * torch.polar(torch.ones_like(angle), angle)
    out = torch.stack((z.real, z.imag), -1).flatten(-2) if interleaved else torch.cat((z.real, z.imag), -1)
    return torch.cat((out, rest) if first else (rest, out), -1)


def scores(indexer, x, qr, fp8):
    """Return float64 scores [tokens, keys] of one sequence. fp8: whether to quantise q and k as the indexer does."""
    rope = indexer.rope["interleaved"], indexer.rope["dims"] == "first"
    q = rotate((qr.double() @ indexer.wq_b.weight.double().T).view(len(x), 64, 128), *rope)
    k = x.double() @ indexer.wk.weight.double().T
    k = (k - k.mean(-1, keepdim=True)) / (k.var(-1, unbiased=False, keepdim=True) + 1e-6).sqrt()
    k = rotate(k * indexer.k_norm.weight.double() + indexer.k_norm.bias.double(), *rope)
    if fp8:
        hadamard = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(128)] for i in range(128)]).double()
        q, k = (simulate_fp8(v @ hadamard / 128**0.5) for v in (q, k))
    w = x.double() @ indexer.weights_proj.weight.double().T * 64**-0.5 * 128**-0.5
    return torch.einsum("th,ths->ts", w, torch.einsum("thd,sd->ths", q, k).relu())


def simulate_fp8(v):
    scale = torch.exp2(torch.ceil(torch.log2(v.abs().amax(-1, keepdim=True).clamp_min(1e-4) / 448)))
    return (v / scale).float().to(torch.float8_e4m3fn).double() * scale


@pytest.mark.parametrize("dims", ["first", "last"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("kind", [LightningIndexer, PagedIndexer])
def test_selected_keys_have_the_largest_scores(kind, fp8, interleaved, dims):
    torch.manual_seed(2)
    indexer = make_indexer(kind, quantize=fp8, rope_interleaved=interleaved, rope_dims=dims)
    x, qr = torch.randn(N, HIDDEN), torch.randn(N, RANK)
    batch, exact = SequenceBatch.without_cache([N]), scores(indexer, x, qr, fp8)
    topk_indices = indexer.select(x, qr, ROTARY(batch.positions), batch)
    assert topk_indices.dtype == torch.int32 and topk_indices.shape == (N, TOP_K)
    for t, row in enumerate(topk_indices.tolist()):
        chosen = [s for s in row if s >= 0]
        assert len(chosen) == min(TOP_K, t + 1) and chosen == sorted(set(chosen)) and max(chosen) <= t
        threshold = exact[t, : t + 1].topk(len(chosen)).values[-1]
        # If quantised, a number of q or k may be rounded to another e4m3 value in fp32 than in float64.
        assert (exact[t, chosen] >= threshold - 5e-3).all()


@pytest.mark.parametrize("pages", ["fp8", torch.float32], ids=str)
@pytest.mark.parametrize("length", [10, N])
@torch.no_grad()
def test_attention_over_pages_equals_plain_attention(length, pages):
    """`shared` attends to the keys that `full` selects. FP8 pages round the latents; fp32 pages do not."""
    torch.manual_seed(7)
    indexer = make_indexer(LightningIndexer)
    full = DSAAttention(HIDDEN, HEADS, indexer, q_lora_rank=RANK, softmax_scale=0.11)
    shared = DSAAttention(HIDDEN, HEADS, None, q_lora_rank=RANK)
    x = torch.randn(length, HIDDEN)

    def run(n, done, batch, caches=(None, None)):
        part, angles = slice(done, done + n), ROTARY(batch.positions)
        first, selected = full(x[part], *angles, batch, caches[0])
        second, passed_on = shared(x[part], *angles, batch, caches[1], selected)
        assert passed_on is selected or type(shared) is PagedAttention
        return torch.stack((first, second)), selected

    expected, selected = run(length, 0, SequenceBatch.without_cache([length]))
    assert (selected is None) == (length <= TOP_K)
    fuse(full), fuse(shared)
    outputs = []
    for chunks in ([length], [1] * length, [4, 3, *[1] * (length - 7)]):
        cache = PagedKVCache(2, 5, 16, latent=pages, index="fp8", index_layers=[0])
        for tensor in (cache.layer(0).index, cache.layer(0).latent, cache.layer(1).latent):
            tensor.view(torch.uint8).fill_(0xFF)
        out, done = [], 0
        for n in chunks:
            batch = SequenceBatch.paged([n], [done + n], [[3, 0, 4, 1]], 16)
            out.append(run(n, done, batch, (cache.layer(0), cache.layer(1)))[0])
            done += n
        outputs.append(torch.cat(out, 1))
    for got in outputs:
        for of_layer, of_prefill, exact in zip(got, outputs[0], expected):
            error = (of_layer - exact).norm() / exact.norm()
            assert 1e-3 < error < 0.05 if pages == "fp8" else error < 1e-5
            # Prefill and decoding write equal FP8 pages, except where fp32 rounding errors change an e4m3 value.
            assert (of_layer - of_prefill).norm() / exact.norm() < 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("length", [10, N])
def test_float_pages_change_no_bit(length, dtype, monkeypatch):
    indexer, lengths = make_indexer(LightningIndexer, dtype=dtype), [length, 9]
    layer = fuse(DSAAttention(HIDDEN, HEADS, indexer, q_lora_rank=RANK, dtype=dtype))
    x, cache = torch.randn(sum(lengths), HIDDEN).to(dtype), PagedKVCache(1, 6, 16, latent=dtype).layer(0)
    cache.latent.fill_(torch.nan)
    cache.index.fill_(0xFF)
    batch = SequenceBatch.paged(lengths, lengths, [[4, 1, 5, 0], [3]], 16)
    monkeypatch.setattr(dsa, "read_kv_cache", None)
    expected, _ = layer(x, *ROTARY(batch.positions), SequenceBatch.without_cache(lengths))
    assert torch.equal(layer(x, *ROTARY(batch.positions), batch, cache)[0], expected)
    assert expected.isfinite().all() and cache.latent.view(-1, 576)[batch.slots].isfinite().all()
