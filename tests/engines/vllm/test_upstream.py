"""The pieces of docs/upstream/vllm, inside vLLM's own files."""

import functools
import inspect
from types import SimpleNamespace as Space

import pytest
import torch

import dsa
from dsa_engines import products
from dsa_engines.vllm import adapters
from tests.engines import upstream
from tests.engines.vllm.engine import needs_vllm

piece = functools.partial(upstream.piece, "vllm")


def fp8(*shape):
    weights, scales = zip(*(dsa.per_block_cast_to_fp8(torch.randn(shape[-2:])) for _ in range(shape[0])), strict=True)
    return torch.stack(weights), torch.stack(scales)


@needs_vllm
def test_linear():
    cls = piece("dsa_linear").DsaFp8BlockScaledMMKernel
    assert not inspect.isabstract(cls) and cls.is_supported() == (False, "The products of dsa are for Hopper.")
    (weight,), (scale,) = fp8(1, 256, 384)
    kernel, x = object.__new__(cls), torch.randn(5, 384).bfloat16()
    kernel.config = Space(out_dtype=torch.bfloat16)
    found = kernel.apply_weights(Space(weight=weight, weight_scale_inv=scale), x, None)
    assert torch.equal(found, products.linear(x, weight, scale))


@needs_vllm
@pytest.mark.parametrize("expert_map", [None, [2, 0, -1, 1]])
def test_experts(expert_map):
    cls = piece("dsa_experts").DsaExperts
    assert not inspect.isabstract(cls)
    (w1, s1), (w2, s2) = fp8(3, 512, 128), fp8(3, 128, 256)
    experts, x = object.__new__(cls), torch.randn(6, 128).bfloat16()
    experts.quant_config = Space(w1_scale=s1, w2_scale=s2, gemm1_clamp_limit=None)
    ids, weights = torch.randint(3, (6, 2), dtype=torch.int32), torch.rand(6, 2)
    table = None if expert_map is None else torch.tensor(expert_map, dtype=torch.int32)
    _, _, shape = experts.workspace_shapes(6, 512, 128, 2, 4, 3, None, None)
    output, none = torch.empty(shape, dtype=torch.bfloat16), torch.empty(1)
    experts.apply(output, x, w1, w2, weights, ids, None, 4, table, None, None, none, none, None, False)
    own = ids if table is None else table[ids.long()]
    assert torch.equal(output, products.routed_experts(x, own, weights, (w1, s1), (w2, s2), None, False))


def test_topk():
    topk, logits = piece("dsa_topk"), torch.randn(6, 40)
    starts, ends = torch.tensor([0, 3, 1, 0, 7, 2], dtype=torch.int32), torch.full((6,), 30, dtype=torch.int32)
    found, expected = (torch.empty(6, 5, dtype=torch.int32) for _ in range(2))
    topk.topk_prefill(logits, starts, ends, found)
    adapters.topk_prefill(logits, starts, ends, expected, 6, 40, 1, 5)
    assert torch.equal(found, expected)
    for lengths in (torch.tensor([20, 9, 33]), torch.tensor([[20, 21], [3, 4], [9, 9]])):
        topk.topk_decode(logits, lengths.int(), 2, found)
        adapters.topk_decode(logits, lengths.int(), 2, expected, 5)
        assert torch.equal(found, expected)
