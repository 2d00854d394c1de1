"""Hooks of linear layers and of experts with SGLang's own classes. The layers are stand-ins: SGLang's need a GPU."""

import ast
import functools
from types import SimpleNamespace as Space

import pytest
import torch

from dsa_engines import first_use
from dsa_engines.sglang import linear, seams
from tests.engines.sglang.engine.process import module
from tests.engines.sglang.engine.test_lookups import functions, source_of
from tests.engines.test_products import EXPERTS, HIDDEN, INNER, assert_near, cast, expected_of, fp4_weights, fp8_weights

MOE = "sglang.srt.layers.moe"
FP4 = {path.partition(":")[2]: path for path in (seams.MARLIN, seams.FLASHINFER)}


@pytest.fixture
def serving(served, monkeypatch):
    monkeypatch.setattr(first_use, "_ready", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    context = module("sglang.srt.runtime_context")
    deterministic = Space(enable_deterministic_inference=False)
    schedule = Space(chunked_prefill_size=-1, max_prefill_tokens=3)
    bags = {"schedule": schedule, "exec": Space(deterministic=deterministic)}
    monkeypatch.setattr(context.get_context(), "_config_bags", bags)
    monkeypatch.setattr(context, "get_model", lambda: Space(load_format="auto"))
    monkeypatch.setattr(context, "process_model_config", lambda: Space(hf_config=Space(model_type="deepseek_v4")))
    monkeypatch.delenv("DSA_BACKEND", raising=False)
    monkeypatch.setattr(seams.backends, "backend", lambda: "cute")
    monkeypatch.setattr(seams.backends, "why_no_kernels", lambda: None)


def config_of(**more):
    config = module(f"{MOE}.moe_runner.base").MoeRunnerConfig
    return config(top_k=2, params_dtype=torch.bfloat16, **more)


def batch():
    numbers = torch.randint(0, EXPERTS, (4, 2), dtype=torch.int32)
    x, weights = torch.randn(4, HIDDEN).bfloat16(), torch.rand(4, 2)
    chosen = module(f"{MOE}.topk").StandardTopKOutput(weights, numbers, None)
    given = module(f"{MOE}.token_dispatcher.standard").StandardDispatchOutput(x, None, chosen)
    return given, x, numbers, weights


def method_of(kind, config, backend, **more):
    method = object.__new__(kind)
    runner = Space(config=config, runner_backend=getattr(module(f"{MOE}.utils").MoeRunnerBackend, backend))
    for name, value in ({"runner": runner} | more).items():
        setattr(method, name, value)
    return method


def fuses(method):
    """Return whether SGLang's top-k multiplies the weights by the scaling factor."""
    return module(f"{MOE}.fused_moe_triton.layer")._fuses_routed_scaling_factor_in_topk(
        method, method.runner.runner_backend
    )


def test_fp8_experts(serving):
    (w13, s13, gate_up), (w2, s2, down) = fp8_weights(EXPERTS, 2 * INNER, HIDDEN), fp8_weights(EXPERTS, HIDDEN, INNER)
    kind = module(seams.FP8).Fp8MoEMethod
    config = config_of(routed_scaling_factor=2.5)
    method = method_of(
        kind,
        config,
        "TRITON",
        block_quant=True,
        use_mxfp8=False,
        weight_block_size=[128, 128],
        moe_runner_config=config,
    )
    layer = Space(w13_weight=w13, w13_weight_scale_inv=s13, w2_weight=w2, w2_weight_scale_inv=s2, w13_input_scale=None)
    layer.should_fuse_routed_scaling_factor_in_topk = fuses(method)
    given, x, numbers, weights = batch()
    out = method.apply(layer=layer, dispatch_output=given)
    assert type(out).__name__ == "StandardCombineInput"
    assert_near(out.hidden_states, expected_of(x, numbers, 2.5 * weights, gate_up, down, None, False))


@pytest.mark.parametrize("name", FP4)
def test_fp4_experts(serving, name):
    (*w13, gate_up), (*w2, down) = fp4_weights(EXPERTS, 2 * INNER, HIDDEN), fp4_weights(EXPERTS, HIDDEN, INNER)
    kind = getattr(module(FP4[name].partition(":")[0]), name)
    method = method_of(kind, config_of(swiglu_limit=0.25, routed_scaling_factor=1.5), "MARLIN")
    layer = torch.nn.Module()
    names = [f"{part}_weight{suffix}" for part in ("w13", "w2") for suffix in ("", "_scale_inv")]
    for key, value in zip(names, [*w13, *w2], strict=True):
        layer.register_parameter(key, torch.nn.Parameter(value, requires_grad=False))
    layer.dispatcher = object.__new__(module(f"{MOE}.token_dispatcher.standard").StandardDispatcher)
    layer.moe_ep_size, layer.hidden_size, layer.hidden_size_unpadded = 1, HIDDEN, HIDDEN
    layer.should_fuse_routed_scaling_factor_in_topk = fuses(method)
    assert not getattr(method, "load_up_proj_weight_first", False)
    method.process_weights_after_loading(layer)
    given, x, numbers, weights = batch()
    out = method.apply(layer=layer, dispatch_output=given).hidden_states
    assert_near(out, expected_of(x, numbers, weights, gate_up, down, 0.25, True))


def test_linear(serving):
    weight, scale, wide = fp8_weights(192, 256)
    utils, method = (
        module("sglang.srt.layers.quantization.fp8_utils"),
        object.__new__(module(seams.FP8).Fp8LinearMethod),
    )
    kernel = getattr(utils, linear.KERNEL)
    method.w8a8_block_fp8_linear = functools.partial(kernel, act_scale_ue8m0=True)
    method.block_fp8_as_mxfp8, method.block_quant, method.weight_block_size = False, True, [128, 128]
    x = torch.randn(3, 256).bfloat16()
    y = method.apply(Space(weight=weight, weight_scale_inv=scale), x)
    assert_near(y, cast(x, True) @ wide.T)


# {SGLang's constructor: attributes that the hooks read}
ATTRIBUTES = {
    (f"{MOE}.fused_moe_triton.layer", "FusedMoE.__init__"): (
        *("dispatcher", "moe_ep_size", "hidden_size", "hidden_size_unpadded", "moe_runner_config"),
        "should_fuse_routed_scaling_factor_in_topk",
    ),
    (seams.FP8, "Fp8LinearMethod.__init__"): (
        *("w8a8_block_fp8_linear", "block_quant", "block_fp8_as_mxfp8", "weight_block_size"),
    ),
    (seams.FP8, "Fp8MoEMethod.__init__"): ("block_quant", "use_mxfp8", "weight_block_size"),
    (seams.FP8, "Fp8MoEMethod.create_moe_runner"): ("runner",),
    **{(*path.partition(":")[::2], "create_moe_runner"): ("runner",) for path in FP4.values()},
}


@pytest.mark.parametrize("place", ATTRIBUTES)
def test_attributes(loaded, place):
    name, function = place[0], ".".join(place[1:])
    node = dict(functions(ast.parse(source_of(name).read_text())))[function]
    assigned = {
        ast.unparse(target)
        for each in ast.walk(node)
        if isinstance(each, ast.Assign | ast.AnnAssign)
        for target in (each.targets if isinstance(each, ast.Assign) else [each.target])
    }
    assert {f"self.{attribute}" for attribute in ATTRIBUTES[place]} <= assigned


def test_routing_by_a_kernel_has_a_method_that_selects(loaded):
    assert callable(module(f"{MOE}.topk").BypassedTopKOutput.to_standard)
