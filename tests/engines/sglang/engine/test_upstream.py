"""The pieces of docs/upstream/sglang, inside SGLang's own files."""

import functools
import inspect
from types import SimpleNamespace as Space

import torch

from dsa_engines.sglang import adapters, hooks, seams
from tests.engines import upstream
from tests.engines.sglang.engine.process import module
from tests.engines.sglang.engine.test_layers import MOE, batch, config_of
from tests.engines.test_products import EXPERTS, HIDDEN, INNER, assert_near, cast, expected_of, fp8_weights

piece = functools.partial(upstream.piece, "sglang")


def parameters(function):
    return [*inspect.signature(function).parameters]


def test_experts(served):
    (w13, s13, gate_up), (w2, s2, down) = fp8_weights(EXPERTS, 2 * INNER, HIDDEN), fp8_weights(EXPERTS, HIDDEN, INNER)
    kind = piece("dsa_experts").DsaExperts
    backend = module(f"{MOE}.utils").resolve_moe_runner_backend("dsa")
    config = config_of(routed_scaling_factor=2.5, swiglu_limit=0.25)
    runner = module(f"{MOE}.moe_runner.runner")._CUSTOM_RUNNER_CORE_FACTORIES["dsa"](config)
    assert not inspect.isabstract(kind) and type(runner) is kind and runner.runner_backend == backend
    weights_of = module(f"{MOE}.moe_runner.triton").TritonMoeQuantInfo
    given, x, numbers, weights = batch()
    found = runner.run_from_dispatch(given, weights_of(w13, w2, w13_scale=s13, w2_scale=s2), config)
    assert_near(found.hidden_states, expected_of(x, numbers, 2.5 * weights, gate_up, down, 0.25, False))


def test_linear(served):
    linear = piece("dsa_linear").dsa_w8a8_block_fp8_linear
    utils = module("sglang.srt.layers.quantization.fp8_utils")
    assert parameters(linear) == parameters(utils.triton_w8a8_block_fp8_linear)[:7]
    weight, scale, wide = fp8_weights(192, 256)
    x, bias = torch.randn(2, 3, 256).bfloat16(), torch.randn(192)
    for use_ue8m0 in (False, True):
        y = linear(x, weight, [128, 128], scale, bias=bias, act_scale_ue8m0=use_ue8m0)
        assert_near(y, cast(x.view(6, 256), use_ue8m0).view(2, 3, 256) @ wide.T + bias)


def test_topk(served):
    topk, scores = piece("dsa_topk"), torch.randn(6, 40)
    assert parameters(topk.topk_func) == parameters(module(seams.TOPK).DSATopKBackend.topk_func)[1:]
    starts, lengths = torch.tensor([0, 3, 1, 0, 7, 2]).int(), torch.tensor([20, 9, 33, 40, 1, 0]).int()
    assert torch.equal(topk.topk_func(scores, lengths, 5, starts), adapters.topk(scores, lengths, 5, starts))
    rows, table = torch.tensor([0, 0, 1, 1, 1, 2]).int(), torch.arange(12).int().view(3, 4)
    about = Space(real_page_table=table, page_size=16, token_to_batch_idx=rows)
    expected = adapters.topk_paged(scores, lengths, 5, table, 16, starts, rows)
    for more in ({}, {"batch_idx_list": rows}):
        assert torch.equal(topk.topk_transform_paged(scores, lengths, 5, about, starts, **more), expected)


def test_attention(served):
    method = piece("dsa_attention").DsaAttention._forward_dsa
    assert parameters(method) == seams.SIGNATURES[f"{seams.CLASS}._forward_flashmla_kv"]
    pool = Space(index_kpool=1, qk_rope_head_dim=64, kv_cache_dim=576, dtype=torch.bfloat16)
    backend = Space(token_to_kv_pool=pool, physical_page_size=64, kv_cache_dim=576, num_splits=0)
    layer, metadata = Space(tp_q_head_num=8, head_dim=576), Space(dsa_cache_seqlens_int32=torch.tensor([3, 5]).int())
    q, cache = torch.randn(2, 8, 576).bfloat16(), torch.randn(2, 64, 1, 576).bfloat16()
    given = q, cache, 512, 0.1, layer, metadata, torch.randint(128, (2, 16), dtype=torch.int32)
    assert torch.equal(method(backend, *given), hooks.forward_flashmla_kv(None, backend, *given))
