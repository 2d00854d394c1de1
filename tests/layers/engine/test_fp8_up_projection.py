"""Tests of decoding with kv_b's FP8 weight as stored, against decoding with its dequantised parts W_UK and W_UV."""

import pytest
import torch

import dsa
from dsa_layers import DSAAttention, LightningIndexer, SequenceBatch, fuse
from dsa_layers.cache.kv_cache import PagedKVCache
from dsa_layers.engine import attention_form
from dsa_layers.engine.attention_form import MOST_TOKENS, stored_up_projection
from dsa_layers.engine.split import rank_part
from tests.layers.layers.calls import record
from tests.layers.layers.small_layers import ROTARY

HIDDEN, HEADS = 128, 4
OPS = ("mla_absorb_queries", "mla_values_cast_to_fp8")


@pytest.fixture
def called(monkeypatch):
    """Make layers call OPS on a CPU too, with reference implementations. Return the growing list of called ops."""
    monkeypatch.setattr(attention_form, "has_kernels", lambda _: True)
    return record(monkeypatch, *OPS)


def make_layer(nope=128, value=128, top_k=16, **options):
    options = {"fp8": True, "dtype": torch.bfloat16} | options
    indexer = LightningIndexer(HIDDEN, 128, n_heads=2, head_dim=128, top_k=top_k, **options)
    return fuse(DSAAttention(HIDDEN, HEADS, indexer, q_lora_rank=128, nope_dim=nope, v_dim=value, **options))


def decode(layer, x, latent):
    """Prefill 20 tokens of each sequence of x [2, T, hidden], then decode the others. Return [2, T - 20, hidden]."""
    cache = PagedKVCache(1, 4, 16, latent=latent, index="fp8").layer(0)
    for part in (cache.latent, cache.index):
        part.zero_()
    tables, out = [[0, 2], [3, 1]], []
    for done, new in ((0, 20), *((20 + i, 1) for i in range(x.shape[1] - 20))):
        batch = SequenceBatch.paged([new] * 2, [done + new] * 2, tables, 16)
        y, _ = layer(x[:, done : done + new].flatten(0, 1), *ROTARY(batch.positions), batch, cache)
        out.append(y)
    return torch.stack(out[1:], 1)


@pytest.mark.parametrize(("sizes", "latent"), [((128, 128, 16), "fp8"), ((192, 256, 64), torch.bfloat16)])
def test_decoding_equals_that_with_dequantised_weights(sizes, latent, called, monkeypatch):
    torch.manual_seed(3)
    layer, x = make_layer(*sizes), torch.randn(2, 24, HIDDEN).bfloat16()
    got = decode(layer, x, latent)
    assert called == [*OPS] * 4  # in each of the 4 decoding steps, not in the prefill
    monkeypatch.setattr(attention_form, "has_kernels", lambda _: False)
    expected = decode(layer, x, latent)
    assert len(called) == 8
    # The two runs may round bf16 and FP8 values differently.
    assert (got.double() - expected.double()).norm() < 0.01 * expected.double().norm()


def queries(layer, tokens=2):
    return torch.randn(tokens, HEADS, layer.nope_dim + 64).bfloat16()


def stored(layer, tokens=2):
    return stored_up_projection(layer, queries(layer, tokens))


def test_only_few_16_bit_queries_of_layers_that_kernels_take_use_the_stored_weight(called, monkeypatch):
    layer = make_layer(192, 256)
    weight, scale = stored(layer, MOST_TOKENS)
    assert weight is layer.kv_b_proj.weight and scale is layer.kv_b_proj.weight_scale_inv
    assert stored(layer, MOST_TOKENS + 1) is None
    assert stored_up_projection(layer, queries(layer).float()) is None
    for options in ({"nope": 64}, {"value": 64}, {"fp8": False}):
        assert stored(make_layer(**options)) is None, options
    monkeypatch.setattr(attention_form, "has_kernels", lambda _: False)
    assert stored(layer) is None


def test_a_part_of_the_heads_uses_views_of_whole_blocks(called):
    layer = make_layer(192, 256)
    q, latents = queries(layer), torch.randn(2, HEADS, 512).bfloat16()
    angles = torch.randn(2, 32)
    whole = dsa.mla_absorb_queries(q[..., :192], q[..., 192:], angles, angles, stored(layer))
    values = dsa.mla_values_cast_to_fp8(latents, stored(layer), 256)
    for number, heads in enumerate((slice(0, 2), slice(2, 4))):
        kv_b = stored(rank_part(layer, number, 2))
        assert kv_b[0].untyped_storage().data_ptr() == layer.kv_b_proj.weight.untyped_storage().data_ptr()
        got = dsa.mla_absorb_queries(q[:, heads, :192], q[:, heads, 192:], angles, angles, kv_b)
        torch.testing.assert_close(got, whole[:, heads])
        # The tolerances let a value round to the next e4m3 number.
        for one, all_heads in zip(dsa.mla_values_cast_to_fp8(latents[:, heads], kv_b, 256), values, strict=True):
            torch.testing.assert_close(one.float(), all_heads.float().chunk(2, 1)[number], rtol=2**-3, atol=2**-9)
    assert stored(rank_part(layer, 1, 4)) is None  # a rank's 192 + 256 rows are not a multiple of a block's 128
