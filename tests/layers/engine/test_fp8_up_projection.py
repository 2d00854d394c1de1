"""Decoding that multiplies with kv_b as it is stored: where it does, and that it is decoding as before."""

import pytest
import torch

import dsa
from dsa_layers.batch.sequence_batch import SequenceBatch
from dsa_layers.cache.kv_cache import PagedKVCache
from dsa_layers.engine.paged_attention import PagedAttention
from dsa_layers.layers import fp8_up_projection
from dsa_layers.engine.fp8_up_projection import MOST_TOKENS, stored_up_projection
from dsa_layers.layers.indexer import LightningIndexer
from dsa_layers.layers.linear import BlockFP8Linear
from dsa_layers.layers.own_part import OwnPart
from dsa_layers.layers.rope import RotaryEmbedding, rope_frequencies
from tests.layers.layers.calls import record

HIDDEN, HEADS = 128, 4
ROTARY = RotaryEmbedding(rope_frequencies(64, 1e4))
OPS = ("mla_absorb_queries", "mla_values_cast_to_fp8")


@pytest.fixture
def asked(monkeypatch):
    """The ops that are called, of those that have kernels now; their references run."""
    monkeypatch.setattr(fp8_up_projection, "has_kernels", lambda _: True)
    return record(monkeypatch, *OPS)


def make_layer(nope=128, value=128, top_k=16, **options):
    options = {"fp8": True, "dtype": torch.bfloat16} | options
    indexer = LightningIndexer(HIDDEN, 128, n_heads=2, head_dim=128, top_k=top_k, **options)
    return PagedAttention(HIDDEN, HEADS, indexer, q_lora_rank=128, nope_dim=nope, v_dim=value, **options)


def decode(layer, x, latent):
    """Two sequences: 20 tokens of each at once, then the others one after another. -> what these get."""
    cache = PagedKVCache(1, 4, 16, latent=latent, index="fp8").layer(0)
    for part in (cache.latent, cache.index):
        part.zero_()
    tables, out = [[0, 2], [3, 1]], []
    with torch.no_grad():
        for done, new in ((0, 20), *((20 + i, 1) for i in range(x.shape[1] - 20))):
            batch = SequenceBatch.paged([new] * 2, [done + new] * 2, tables, 16)
            given = x[:, done : done + new].flatten(0, 1)
            out.append(layer(given, *ROTARY(batch.positions), batch, cache))
    return torch.stack(out[1:], 1)


@pytest.mark.parametrize("nope, value, latent", [(128, 128, "fp8"), (192, 256, torch.bfloat16)])
@pytest.mark.parametrize("top_k", [16, 64])
def test_decodes_as_with_dequantised_weights(nope, value, latent, top_k, asked, monkeypatch):
    torch.manual_seed(3)
    layer, x = make_layer(nope, value, top_k), torch.randn(2, 24, HIDDEN).bfloat16()
    got = decode(layer, x, latent)
    assert asked == [*OPS] * 4  # of the steps of one token each; the prompts are not decoding
    monkeypatch.setattr(fp8_up_projection, "has_kernels", lambda _: False)
    expected = decode(layer, x, latent)
    assert len(asked) == 8
    # Products are summed in another order, so that a number in bf16, or a byte of the cast, is another one at times.
    error = (got.double() - expected.double()).norm() / expected.double().norm()
    assert error < 0.01


def queries(layer, tokens=2):
    return torch.randn(tokens, HEADS, layer.nope_dim + 64).bfloat16()


def stored(layer, q=None):
    with torch.no_grad():
        return stored_up_projection(layer, queries(layer) if q is None else q)


@pytest.mark.parametrize(("nope", "value"), [(128, 128), (192, 256)])
def test_where_weights_are_used_as_stored(nope, value, asked):
    layer = make_layer(nope, value)
    weight, scale = stored(layer, queries(layer, MOST_TOKENS))
    assert weight is layer.kv_b_proj.weight and scale is layer.kv_b_proj.weight_scale_inv
    assert stored(layer, queries(layer, MOST_TOKENS + 1)) is None
    assert stored(layer, queries(layer).float()) is None
    with torch.enable_grad():
        assert stored_up_projection(layer, queries(layer)) is None


@pytest.mark.parametrize("sizes", [{"nope": 64}, {"value": 64}, {"fp8": False}], ids=str)
def test_where_the_kernels_do_not_take_them(sizes, asked):
    assert stored(make_layer(**sizes)) is None


@pytest.mark.parametrize("name", ["kv_b_proj", "o_proj"])
@pytest.mark.parametrize(
    "change",
    [
        lambda linear: linear.register_forward_hook(lambda module, given, y: y),
        lambda linear: linear.register_forward_pre_hook(lambda module, given: given),
        lambda linear: setattr(linear, "forward", lambda x: x),
        lambda linear: setattr(linear, "__class__", type("Another", (BlockFP8Linear,), {})),
    ],
    ids=["hook", "pre-hook", "forward", "class"],
)
def test_not_where_somebody_sees_or_replaces_a_product(name, change, asked):
    layer = make_layer()
    change(getattr(layer, name))
    assert stored(layer) is None


def test_not_without_kernels():
    assert stored(make_layer()) is None


def test_parts_of_the_heads(asked):
    """Their weights are used where they lie, if their scales are whole blocks', and give a part of the result."""
    layer = make_layer(192, 256)
    q, latents = queries(layer), torch.randn(2, HEADS, 512).bfloat16()
    angles = torch.randn(2, 32)
    with torch.no_grad():
        whole = dsa.mla_absorb_queries(q[..., :192], q[..., 192:], angles, angles, stored(layer))
        values = dsa.mla_values_cast_to_fp8(latents, stored(layer), 256)
        for number, heads in enumerate((slice(0, 2), slice(2, 4))):
            part = OwnPart(number, 2).of(layer)
            kv_b = stored(part)
            assert kv_b[0].untyped_storage().data_ptr() == layer.kv_b_proj.weight.untyped_storage().data_ptr()
            got = dsa.mla_absorb_queries(q[:, heads, :192], q[:, heads, 192:], angles, angles, kv_b)
            torch.testing.assert_close(got, whole[:, heads])
            for one, all_heads in zip(dsa.mla_values_cast_to_fp8(latents[:, heads], kv_b, 256), values, strict=True):
                torch.testing.assert_close(one.float(), all_heads.float().chunk(2, 1)[number], rtol=2**-3, atol=2**-9)
        assert stored(OwnPart(1, 4).of(layer)) is None  # 448 rows: from the middle of a block on
