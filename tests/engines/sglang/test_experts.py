"""SGLang's methods of FP8 and FP4 experts with the plugin, on stand-ins for the methods and the layers."""

from types import SimpleNamespace as Space
from typing import NamedTuple

import pytest
import torch

from dsa_engines import products
from dsa_engines.sglang import experts
from tests.engines.test_products import EXPERTS, HIDDEN, INNER, assert_near, expected_of, fp4_weights, fp8_weights

MOST = 5  # tokens of a batch

pytestmark = pytest.mark.usefixtures("nothing_is_compiled")


class StandardTopKOutput(NamedTuple):
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    router_logits: None = None


class StandardDispatchOutput(NamedTuple):
    hidden_states: torch.Tensor
    topk_output: object


class DeepEPNormalDispatchOutput(StandardDispatchOutput):
    pass


class StandardDispatcher:
    pass


class DeepEPDispatcher:
    pass


def never(*args):
    raise AssertionError("SGLang's own method was called")


def own(*args):
    return "SGLang's own"


def config_of(**more):
    values = {
        "activation": "silu",
        "is_gated": True,
        "apply_router_weight_on_input": False,
        "no_combine": False,
        "silu_mul_keep_fp32": False,
        "gemm1_alpha": None,
        "gemm1_clamp_limit": None,
        "swiglu_limit": None,
        "routed_scaling_factor": None,
        "params_dtype": torch.bfloat16,
        "top_k": 2,
    }
    return Space(**(values | more))


def backend_of(name):
    return Space(is_triton=lambda: name == "triton", is_deep_gemm=lambda: name == "deep_gemm")


def fp8_method(backend="triton", **config):
    runner = Space(runner_backend=backend_of(backend), config=config_of(**config))
    return Space(runner=runner, block_quant=True, use_mxfp8=False, weight_block_size=[128, 128])


def fp8_layer():
    """Return (layer, its gate_up and down in float64)."""
    (w13, s13, gate_up), (w2, s2, down) = fp8_weights(EXPERTS, 2 * INNER, HIDDEN), fp8_weights(EXPERTS, HIDDEN, INNER)
    weights = {"w13_weight": w13, "w13_weight_scale_inv": s13, "w2_weight": w2, "w2_weight_scale_inv": s2}
    return Space(**weights, w13_input_scale=None, should_fuse_routed_scaling_factor_in_topk=False), gate_up, down


def batch(tokens=4):
    """Return (dispatch output, x, experts, weights). One expert is another GPU's."""
    numbers = torch.randint(0, EXPERTS, (tokens, 2), dtype=torch.int32)
    numbers[:1, :1] = -1
    x, weights = torch.randn(tokens, HIDDEN).bfloat16(), torch.rand(tokens, 2)
    return StandardDispatchOutput(x, StandardTopKOutput(weights, numbers)), x, numbers, weights


def apply_of(weights_of):
    return experts.apply(weights_of, lambda hidden_states: Space(hidden_states=hidden_states), lambda: MOST)


@pytest.mark.parametrize("backend", ["triton", "deep_gemm"])
@pytest.mark.parametrize(("limit", "factor"), [(None, None), (0.25, 2.5)])
@pytest.mark.parametrize("tokens", [0, 1, 4])
def test_fp8_experts(tokens, limit, factor, backend):
    layer, gate_up, down = fp8_layer()
    given, x, numbers, weights = batch(tokens)
    method = fp8_method(backend, swiglu_limit=limit, routed_scaling_factor=factor)
    out = apply_of(experts.fp8_weights)(never, method, layer=layer, dispatch_output=given).hidden_states
    assert out.shape == x.shape
    if tokens:
        assert_near(out, expected_of(x, numbers, weights * (factor or 1), gate_up, down, limit, False))


def test_routing_that_the_kernel_does(monkeypatch):
    """SGLang can hand the router's logits to a kernel, with a method that selects the experts."""
    (layer, *_), (given, *_) = fp8_layer(), batch()
    bypassed = given._replace(topk_output=Space(to_standard=lambda: given.topk_output))
    out, expected = (
        apply_of(experts.fp8_weights)(never, fp8_method(), layer, each).hidden_states for each in (bypassed, given)
    )
    assert torch.equal(out, expected)


NOT_SERVED = [
    {"activation": "gelu"},
    {"is_gated": False},
    {"apply_router_weight_on_input": True},
    {"no_combine": True},
    {"silu_mul_keep_fp32": True},
    {"gemm1_alpha": 1.7},
    {"gemm1_clamp_limit": 7.0},
]


@pytest.mark.parametrize("config", NOT_SERVED)
def test_other_formulas_are_left_to_the_engine(config):
    (layer, *_), (given, *_) = fp8_layer(), batch()
    assert apply_of(experts.fp8_weights)(own, fp8_method(**config), layer, given) == "SGLang's own"
    method, layer, *_ = fp4_case(**config)
    assert layer.set_up_by == [method] and apply_of(experts.fp4_weights)(own, method, layer, given) == "SGLang's own"


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        ("method", "runner", None),
        ("method", "block_quant", False),
        ("method", "use_mxfp8", True),
        ("method", "weight_block_size", [1, 128]),
        ("layer", "w13_weight", torch.zeros(EXPERTS, 2 * INNER, HIDDEN)),
        ("layer", "w13_weight_scale_inv", torch.zeros(EXPERTS, 2, 2, dtype=torch.int32)),
        ("layer", "w13_weight_bias", torch.zeros(EXPERTS, 2 * INNER)),
        ("layer", "w13_input_scale", torch.ones(1)),
    ],
)
def test_other_fp8_experts_are_left_to_the_engine(owner, name, value):
    (layer, *_), method, (given, *_) = fp8_layer(), fp8_method(), batch()
    setattr({"method": method, "layer": layer}[owner], name, value)
    assert apply_of(experts.fp8_weights)(own, method, layer, given) == "SGLang's own"


def test_other_batches_are_left_to_the_engine():
    (layer, *_), (given, x, *_) = fp8_layer(), batch()
    for other in (
        DeepEPNormalDispatchOutput(*given),
        given._replace(hidden_states=x.half()),
        given._replace(topk_output=Space(packed_topk_ids=None)),
    ):
        assert apply_of(experts.fp8_weights)(own, fp8_method(), layer, other) == "SGLang's own"
    assert apply_of(experts.fp8_weights)(own, fp8_method("marlin"), layer, given) == "SGLang's own"


def fp4_layer():
    """Return (layer, its gate_up and down in float64)."""
    (*w13, gate_up), (*w2, down) = fp4_weights(EXPERTS, 2 * INNER, HIDDEN), fp4_weights(EXPERTS, HIDDEN, INNER)
    layer = torch.nn.Module()
    for name, (weight, scale) in (("w13", w13), ("w2", w2)):
        for suffix, value in (("", weight.view(torch.int8)), ("_scale_inv", scale.view(torch.float8_e8m0fnu))):
            layer.register_parameter(f"{name}_weight{suffix}", torch.nn.Parameter(value, requires_grad=False))
    layer.dispatcher, layer.moe_ep_size = StandardDispatcher(), 1
    layer.hidden_size = layer.hidden_size_unpadded = HIDDEN
    layer.should_fuse_routed_scaling_factor_in_topk = True
    layer.set_up_by = []
    return layer, gate_up, down


def fp4_method(**config):
    def apply(self):
        """SGLang's registry leaves `__wrapped__` on what it has replaced."""

    apply.__wrapped__ = never
    return type("Method", (Space,), {"apply": apply})(runner=Space(config=config_of(**config)))


def set_up(method, layer, keeps=True, wants_up_first=False):
    hook = experts.fp4_setup(lambda: keeps, lambda: MOST, wants_up_first)
    hook(lambda method, layer: layer.set_up_by.append(method), method, layer)


def fp4_case(**config):
    method, (layer, gate_up, down) = fp4_method(**config), fp4_layer()
    set_up(method, layer)
    return method, layer, gate_up, down


@pytest.mark.parametrize("limit", [None, 0.25])
def test_fp4_experts(limit):
    """SGLang's top-k multiplies the weights by the factor, and leaves it in the configuration."""
    method, layer, gate_up, down = fp4_case(swiglu_limit=limit, routed_scaling_factor=1.5)
    given, x, numbers, weights = batch()
    out = apply_of(experts.fp4_weights)(never, method, layer, given).hidden_states
    assert_near(out, expected_of(x, numbers, weights, gate_up, down, limit, True))


def test_fp4_weights_are_not_copied():
    method, (layer, *_) = fp4_method(), fp4_layer()
    before = {name: parameter.data_ptr() for name, parameter in layer.named_parameters()}
    for wants_up_first in (True, False):
        set_up(method, layer, wants_up_first=wants_up_first)
    assert {name: parameter.data_ptr() for name, parameter in layer.named_parameters()} == before
    (gate_up, *_), (down, *_) = experts.fp4_weights(method, layer)
    assert (gate_up.data_ptr(), down.data_ptr()) == (before["w13_weight"], before["w2_weight"])


@pytest.mark.parametrize("count", [EXPERTS, 1, 0])
def test_fp4_weights_that_are_loaded_again(count):
    """SGLang loads all experts, some or none into the same memory. The block scales keep theirs."""
    method, layer, *every = fp4_case()
    other, *loaded = fp4_layer()
    before = [scale.data_ptr() for scale in getattr(layer, products.SCALES)]
    for parameter, value in zip(layer.parameters(), other.parameters(), strict=True):
        parameter.data.view(torch.uint8)[:count].copy_(value.data.view(torch.uint8)[:count])
    set_up(method, layer, wants_up_first=True)
    assert [scale.data_ptr() for scale in getattr(layer, products.SCALES)] == before
    gate_up, down = (torch.cat([new[:count], old[count:]]) for new, old in zip(loaded, every, strict=True))
    given, x, numbers, weights = batch()
    out = apply_of(experts.fp4_weights)(never, method, layer, given).hidden_states
    assert_near(out, expected_of(x, numbers, weights, gate_up, down, None, True))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dispatcher", DeepEPDispatcher()),
        ("moe_ep_size", 2),
        ("hidden_size", HIDDEN + 256),
        ("hidden_size_unpadded", HIDDEN - 64),
        ("w13_weight_bias", torch.zeros(EXPERTS, 2 * INNER)),
    ],
)
def test_other_fp4_experts_are_left_to_the_engine(name, value):
    method, (layer, *_) = fp4_method(), fp4_layer()
    setattr(layer, name, value)
    set_up(method, layer)
    assert layer.set_up_by == [method]
    assert apply_of(experts.fp4_weights)(own, method, layer, batch()[0]) == "SGLang's own"


def test_fp4_experts_of_other_models_are_left_to_the_engine():
    method, (layer, *_) = fp4_method(), fp4_layer()
    set_up(method, layer, keeps=False)
    assert layer.set_up_by == [method]


@pytest.mark.parametrize(("keeps", "wants_up_first"), [(True, True), (True, False), (False, True)])
def test_a_conversion_gets_the_order_that_it_takes(keeps, wants_up_first):
    """If dsa keeps the model's FP4 experts, gate projections are loaded first."""
    method, (layer, *_) = fp4_method(activation="gelu"), fp4_layer()
    before = [layer.w13_weight.clone(), layer.w13_weight_scale_inv.view(torch.uint8).clone()]
    set_up(method, layer, keeps, wants_up_first)
    assert layer.set_up_by == [method]
    for old, new in zip(before, (layer.w13_weight, layer.w13_weight_scale_inv.view(torch.uint8)), strict=True):
        assert torch.equal(torch.cat(old.chunk(2, 1)[::-1], 1) if keeps and wants_up_first else old, new)


def test_other_weights_of_a_kept_layer_are_refused():
    """CUDA graphs read the memory of the first ones."""
    method, layer, *_ = fp4_case()
    layer.w13_weight_bias = torch.zeros(EXPERTS, 2 * INNER)
    with pytest.raises(ValueError, match="FP4 experts that were loaded again must be"):
        set_up(method, layer)
    assert layer.set_up_by == [] and hasattr(layer, products.SCALES)


def test_fp4_weights_are_converted_if_memory_is_lacking(monkeypatch):
    def lacks(*given):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(products, "fp4_block_scales", lacks)
    method, layer, *_ = fp4_case()
    assert layer.set_up_by == [method]


def test_fp4_weights_are_converted_where_nothing_computes_with_them():
    method, (layer, *_) = fp4_method(), fp4_layer()
    del type(method).apply.__wrapped__
    set_up(method, layer)
    assert layer.set_up_by == [method]


def does_not_compile(*given):
    raise RuntimeError("ptxas:\n no room")


def takes_no_scales(*given):
    raise ValueError("scale: no")


@pytest.mark.parametrize(
    ("function", "fails", "message"),
    [
        ("routed_experts", does_not_compile, "RuntimeError: ptxas: no room; experts of such layers stays"),
        ("fp4_block_scales", takes_no_scales, "scale: no; experts of a layer stay"),
    ],
)
def test_fp4_weights_that_the_products_do_not_take(function, fails, message, monkeypatch, caplog):
    monkeypatch.setattr(products, function, fails)
    method, layer, *_ = fp4_case()
    assert layer.set_up_by == [method] and not hasattr(layer, products.SCALES)
    assert [record.getMessage() for record in caplog.records] == [f"dsa: sglang: {message} the engine's own"]


def test_fp8_experts_whose_kernels_do_not_compile_are_left_to_the_engine(monkeypatch):
    monkeypatch.setattr(products, "routed_experts", does_not_compile)
    assert apply_of(experts.fp8_weights)(own, fp8_method(), fp8_layer()[0], batch()[0]) == "SGLang's own"
