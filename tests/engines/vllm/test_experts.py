"""vLLM's methods of FP8 and FP4 experts with the plugin, on stand-ins for the methods and the layers."""

from types import SimpleNamespace as Space

import pytest
import torch

from dsa_engines import products
from dsa_engines.vllm import experts
from tests.engines.test_products import EXPERTS, HIDDEN, INNER, assert_near, expected_of, fp4_weights, fp8_weights
from tests.engines.vllm.stand_in import Original, never

MOST = 5  # tokens of a step


pytestmark = pytest.mark.usefixtures("nothing_is_compiled")


def method_of(backend="DEEPGEMM"):
    parallel = Space(dp_size=1, use_all2all_kernels=False, use_passthrough_all2all=False, enable_eplb=False)
    moe = Space(
        moe_parallel_config=parallel,
        has_bias=False,
        is_lora_enabled=False,
        in_dtype=torch.bfloat16,
        experts_per_token=2,
    )
    return Space(
        moe=moe,
        block_quant=True,
        moe_block_shape=[128, 128],
        fp8_backend=Space(name=backend),
        mxfp4_backend=Space(name="MARLIN"),
        built=[],
    )


def layer_of(**more):
    activation = Space(name="SILU")
    return Space(**{"activation": activation, "apply_router_weight_on_input": False, "expert_map": None} | more)


def fp8_layer(**more):
    """Return (layer, its gate_up and down in float64)."""
    (w13, s13, gate_up), (w2, s2, down) = fp8_weights(EXPERTS, 2 * INNER, HIDDEN), fp8_weights(EXPERTS, HIDDEN, INNER)
    layer = layer_of(w13_weight=w13, w13_weight_scale_inv=s13, w2_weight=w2, w2_weight_scale_inv=s2, **more)
    return layer, gate_up, down


def inputs(count=EXPERTS, tokens=4, chosen=2):
    numbers = torch.randint(0, count, (tokens, chosen), dtype=torch.int32)
    return torch.randn(tokens, HIDDEN).bfloat16(), torch.rand(tokens, chosen), numbers, None, None


def change(method, layer, path, value):
    *owners, name = path.split(".")
    owner = {"method": method, "layer": layer}[owners[0]]
    for each in owners[1:]:
        owner = getattr(owner, each)
    setattr(owner, name, value)


NOT_SERVED = [
    ("layer.activation.name", "GELU"),
    ("layer.apply_router_weight_on_input", True),
    ("layer.swiglu_alpha", 1.7),
    ("layer.swiglu_beta", 1.0),
    ("method.moe.has_bias", True),
    ("method.moe.is_lora_enabled", True),
    ("method.moe.in_dtype", torch.float16),
    ("method.moe.moe_parallel_config.dp_size", 2),
    ("method.moe.moe_parallel_config.use_all2all_kernels", True),
    ("method.moe.moe_parallel_config.use_passthrough_all2all", True),
]
NOT_FP8 = [("method.block_quant", False), ("method.moe_block_shape", [1, 128]), ("method.fp8_backend.name", "MARLIN")]


@pytest.mark.parametrize("backend", ["DEEPGEMM", "TRITON"])
@pytest.mark.parametrize("limit", [{}, {"swiglu_limit": None}, {"swiglu_limit": 0.25}])
def test_fp8_experts(backend, limit):
    layer, gate_up, down = fp8_layer(**limit)
    x, weights, numbers, *shared = inputs()
    out = experts.apply(never, experts.fp8_weights, MOST)(method_of(backend), layer, x, weights, numbers, *shared)
    expected = expected_of(x, numbers, weights, gate_up, down, limit.get("swiglu_limit"), False)
    assert_near(out, expected)


def test_experts_of_other_gpus_add_nothing():
    """`expert_map` gives the number of an expert on this GPU, or -1."""
    mapped = torch.tensor([-1, 2, 0, -1, 1], dtype=torch.int32)
    layer, gate_up, down = fp8_layer(expert_map=mapped)
    x, weights, numbers, *shared = inputs(len(mapped), tokens=5)
    numbers[0] = torch.tensor([0, 3])
    out = experts.apply(never, experts.fp8_weights, MOST)(method_of(), layer, x, weights, numbers, *shared)
    assert not out[0].any()
    assert_near(out, expected_of(x, mapped[numbers.long()], weights, gate_up, down, None, False))


@pytest.mark.parametrize(("path", "value"), NOT_SERVED + NOT_FP8)
def test_other_fp8_experts_are_left_to_the_engine(path, value):
    method, (layer, *_), original = method_of(), fp8_layer(), Original()
    change(method, layer, path, value)
    given = method, layer, *inputs()
    assert experts.apply(original, experts.fp8_weights, MOST)(*given) == "vLLM's own"
    original.assert_called_once(given)


def fp4_setup_of(change_path=None, value=None):
    """Set up a layer's weights. Return (method, layer, float64 weights, vLLM's own method, all arguments)."""
    (w13, s13, gate_up), (w2, s2, down) = fp4_weights(EXPERTS, 2 * INNER, HIDDEN), fp4_weights(EXPERTS, HIDDEN, INNER)
    method, layer, original = method_of(), layer_of(swiglu_limit=0.5), Original()
    method._build_moe_kernel = method.built.append
    if change_path:
        change(method, layer, change_path, value)
    parameters = [torch.nn.Parameter(tensor, requires_grad=False) for tensor in (w13, w2, s13, s2)]
    layer.w13_weight, layer.w2_weight, layer.w13_weight_scale, layer.w2_weight_scale = parameters
    given = method, layer, *parameters
    experts.fp4_setup(original, MOST)(*given)
    return method, layer, (gate_up, down), original, given


def test_fp4_experts_stay_as_they_were_loaded():
    method, layer, (gate_up, down), original, (*_, w13, w2, _, _) = fp4_setup_of()
    assert original.calls == [] and len(method.built) == 1 and method.built[0] is layer
    (packed, *_), (packed_down, *_) = experts.fp4_weights(method, layer)
    assert (packed.data_ptr(), packed_down.data_ptr()) == (w13.data_ptr(), w2.data_ptr())
    x, weights, numbers, *shared = inputs()
    out = experts.apply(never, experts.fp4_weights, MOST)(method, layer, x, weights, numbers, *shared)
    assert_near(out, expected_of(x, numbers, weights, gate_up, down, 0.5, True))


NOT_FP4 = [("method.mxfp4_backend.name", "HUMMING"), ("method.moe.moe_parallel_config.enable_eplb", True)]


@pytest.mark.parametrize(("path", "value"), NOT_SERVED + NOT_FP4)
def test_other_fp4_experts_are_left_to_the_engine(path, value):
    method, layer, _, original, given = fp4_setup_of(path, value)
    original.assert_called_once((*given, None, None))
    original, given = Original(), (method, layer, *inputs())
    assert experts.apply(original, experts.fp4_weights, MOST)(*given) == "vLLM's own" and method.built == []
    original.assert_called_once(given)


def test_fp4_weights_that_are_loaded_again():
    """vLLM sets up temporary tensors, and copies them into the layer's. The block scales keep their memory."""
    method, layer, *_ = fp4_setup_of()
    before = [scale.data_ptr() for scale in getattr(layer, products.SCALES)]
    (w13, s13, gate_up), (w2, s2, down) = fp4_weights(EXPERTS, 2 * INNER, HIDDEN), fp4_weights(EXPERTS, HIDDEN, INNER)
    experts.fp4_setup(never, MOST)(method, layer, w13, w2, s13, s2)
    for name, value in (("w13_weight", w13), ("w2_weight", w2), ("w13_weight_scale", s13), ("w2_weight_scale", s2)):
        getattr(layer, name).copy_(value)
    assert [scale.data_ptr() for scale in getattr(layer, products.SCALES)] == before
    x, weights, numbers, *shared = inputs()
    out = experts.apply(never, experts.fp4_weights, MOST)(method, layer, x, weights, numbers, *shared)
    assert_near(out, expected_of(x, numbers, weights, gate_up, down, 0.5, True))


def test_fp4_scales_that_the_products_do_not_take(monkeypatch, caplog):
    def refuses(packed, scale):
        raise ValueError("scale: no")

    monkeypatch.setattr(products, "fp4_block_scales", refuses)
    _, layer, _, original, given = fp4_setup_of()
    original.assert_called_once((*given, None, None))
    assert not hasattr(layer, products.SCALES)
    assert [record.getMessage() for record in caplog.records] == [
        "dsa: vllm: scale: no; experts of a layer stay the engine's own"
    ]


def test_a_lack_of_memory_is_not_remembered(monkeypatch):
    routed = products.routed_experts

    def lacks(*given):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(products, "routed_experts", lacks)
    original, given = Original(), (method_of(), fp8_layer()[0], *inputs())
    assert experts.apply(original, experts.fp8_weights, MOST)(*given) == "vLLM's own"
    monkeypatch.setattr(products, "routed_experts", routed)
    assert experts.apply(never, experts.fp8_weights, MOST)(*given).isfinite().all()


def test_the_first_layer_of_a_shape_compiles_for_all_numbers_of_tokens(monkeypatch):
    tokens, routed = [], products.routed_experts

    def noted(x, *rest):
        tokens.append(len(x))
        return routed(x, *rest)

    monkeypatch.setattr(products, "routed_experts", noted)
    apply = experts.apply(never, experts.fp8_weights, MOST)
    for _ in range(2):
        apply(method_of(), fp8_layer()[0], *inputs())
    assert tokens == [1, 2, 3, 4, 5, 4, 4]
    tokens.clear()
    apply(method_of(), fp8_layer(swiglu_limit=7.0)[0], *inputs())
    assert len(tokens) == 6


def does_not_compile(*given):
    raise RuntimeError("ptxas:\n no room")


def test_experts_whose_kernels_do_not_compile_are_left_to_the_engine(monkeypatch, caplog):
    """FP4 weights are then converted for vLLM's kernel."""
    monkeypatch.setattr(products, "routed_experts", does_not_compile)
    original = Original()
    for _ in range(2):
        assert (
            experts.apply(original, experts.fp8_weights, MOST)(method_of(), fp8_layer()[0], *inputs()) == "vLLM's own"
        )
    method, _, _, converted, given = fp4_setup_of()
    converted.assert_called_once((*given, None, None))
    assert len(original.calls) == 2 and method.built == []
    expected = "dsa: vllm: RuntimeError: ptxas: no room; experts of such layers stays the engine's own"
    assert [record.getMessage() for record in caplog.records] == [expected] * 2


def test_a_capture_waits_for_no_compiler(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    original, apply = Original(), experts.apply
    assert apply(original, experts.fp8_weights, MOST)(method_of(), fp8_layer()[0], *inputs()) == "vLLM's own"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert apply(never, experts.fp8_weights, MOST)(method_of(), fp8_layer()[0], *inputs()).isfinite().all()
