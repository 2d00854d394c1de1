"""A norm with the cast that the next layers read, and decoder blocks: the bits of their formula, in few kernels."""

import pytest
import torch

from dsa_layers.engine.fuse import fuse
from dsa_layers.engine.fused_block import FusedDecoderBlock
from dsa_layers.engine.joint_linear import norm_and_cast
from dsa_layers.layers.linear import BlockFP8Linear, Linear
from dsa_layers.layers.norm import RMSNorm
from tests.layers.layers import small_layers
from tests.layers.layers.calls import record
from tests.layers.layers.small_layers import BATCH, HIDDEN, ROPE

BF16 = torch.bfloat16


@pytest.fixture
def calls(monkeypatch):
    """Names of the called ops."""
    return record(monkeypatch, "rms_norm", "rms_norm_cast_to_fp8", "add_rms_norm_cast_to_fp8")


def norm(channels=HIDDEN, kind=RMSNorm):
    made = kind(channels)
    torch.nn.init.uniform_(made.weight, 0.5, 1.5)
    return made


@pytest.mark.parametrize("use_ue8m0", [True, False])
@torch.no_grad()
def test_one_op_has_the_bits_of_sum_norm_and_cast(use_ue8m0, calls):
    layer, own = BlockFP8Linear(HIDDEN, 128, use_ue8m0=use_ue8m0), norm()
    x, residual = small_layers.rows(BF16), small_layers.rows(BF16)
    for h, (total, y, cast) in (
        (x, norm_and_cast(own, x, (layer,))),
        (residual + x, norm_and_cast(own, x, (layer,), residual)),
    ):
        assert torch.equal(total, h) and torch.equal(y, own(h))
        q, scale = layer.cast(y)
        assert torch.equal(cast[0].view(torch.int8), q.view(torch.int8)) and torch.equal(cast[1], scale)
    assert calls[:2] == ["rms_norm_cast_to_fp8", "add_rms_norm_cast_to_fp8"]


FP8, OTHER_FP8 = BlockFP8Linear(HIDDEN, 128), BlockFP8Linear(HIDDEN, 128, use_ue8m0=False)
WITHOUT_CAST = {
    "no layer": (norm(), ()),
    "float": (norm(), (Linear(HIDDEN, 8),)),
    "float and FP8": (norm(), (FP8, Linear(HIDDEN, 8))),
    "two scalings": (norm(), (FP8, OTHER_FP8)),
    "another norm": (norm(kind=type("Another", (RMSNorm,), {})), (FP8,)),
    "too wide": (norm(8320), (BlockFP8Linear(8320, 128),)),
}


@pytest.mark.parametrize(("own", "layers"), WITHOUT_CAST.values(), ids=WITHOUT_CAST)
@torch.no_grad()
def test_layers_that_share_no_cast_get_none(own, layers):
    x = torch.randn(2, len(own.weight)).to(BF16)
    total, y, cast = norm_and_cast(own, x, layers)
    assert total is x and cast is None and torch.equal(y, own(x))
    total, y, cast = norm_and_cast(own, x, layers, 2 * x)
    assert cast is None and torch.equal(total, 3 * x) and torch.equal(y, own(total))


@pytest.mark.parametrize("mlp", [small_layers.moe, small_layers.swiglu])
@torch.no_grad()
def test_a_fused_block_has_the_bits_of_its_formula(mlp, calls):
    block, x = fuse(small_layers.decoder_block(mlp, fp8=True, dtype=BF16)), small_layers.rows(BF16)
    found, _ = block(x, *ROPE, BATCH)
    assert type(block) is FusedDecoderBlock
    # One for the block's input and one for the queries' latents. The norm of keys makes no cast.
    assert calls == ["rms_norm_cast_to_fp8", "rms_norm_cast_to_fp8", "rms_norm", "add_rms_norm_cast_to_fp8"]
    y, _ = block.self_attn(block.input_layernorm(x), *ROPE, BATCH)
    h = x + y
    assert torch.equal(found, h + block.mlp(block.post_attention_layernorm(h)))
