"""Loading quantised DeepSeek-V4 checkpoints: FP8 with E8M0 or F32 scales, and experts in FP4 or FP8."""

import re
from itertools import product

import pytest
import torch

from dsa.cases.gemm import fp4_values
from dsa_layers import Precision, SequenceBatch, convert_checkpoint, fuse, load_model, read_config
from dsa_layers.errors import CheckpointError
from dsa_layers.io.directory import SINGLE_NAME
from dsa_layers.models.deepseek_v4 import DeepseekV4ForCausalLM
from tests.layers.io.stand_ins import assert_same_tensors, changed, fields_of, read_tensors
from tests.layers.models.listings import parts

TOKENS = torch.randint(0, 256, (150,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module", params=["fp4", "fp8", "fp8, fp32 scales"])
def directory(request, tiny_checkpoint, tmp_path_factory):
    directory = tiny_checkpoint("deepseek_v4")
    if request.param == "fp4":
        return directory
    converted = tmp_path_factory.mktemp("fp8")
    convert_checkpoint(directory, converted, "fp8", progress=False)
    if request.param == "fp8":
        return converted

    def widen(tensors):
        scales = {name: 1.1 * tensor.float() for name, tensor in tensors.items() if name.endswith(".scale")}
        tensors |= scales

    scheme = fields_of(directory)["quantization_config"] | {"scale_fmt": None}
    return changed(converted, tmp_path_factory.mktemp("fp32"), widen, quantization_config=scheme)


def dequantised(tensor, scale):
    """Return a stored tensor's values by the definition of its format. scale: its scales; None without quantisation."""
    if scale is None:
        return tensor
    if tensor.dtype == torch.int8:
        return fp4_values(tensor, scale)
    return tensor.float() * scale.float().repeat_interleave(128, 0).repeat_interleave(128, 1)


@pytest.fixture(scope="module")
def worth(directory):
    """Return {name in the model: dequantised values} of every stored tensor that the model reads."""
    config, stored = read_config(directory), read_tensors(directory)
    model = DeepseekV4ForCausalLM(config, Precision(torch.float32, False, False, "model"))
    values = {}
    for name, tensor in stored.items():
        if name.endswith(".scale") or model.skips(name):
            continue
        value = dequantised(tensor, stored.get(name.removesuffix("weight") + "scale"))
        values[model.name_of(name)] = value.to(torch.int64 if tensor.dtype == torch.int64 else torch.float32)
    return values


@torch.no_grad()
def logits(model):
    return model(TOKENS, SequenceBatch.without_cache([len(TOKENS)]), all_tokens=True)


def test_a_dequantised_model_has_exactly_the_stored_weights(directory, worth):
    got = load_model(directory, dtype=torch.float32, dequantize=True, progress=False)
    expected = DeepseekV4ForCausalLM(read_config(directory), Precision(torch.float32, False, False, "model")).eval()
    for name, tensor in parts(expected).items():
        tensor.copy_(worth[name])
    assert all(torch.equal(tensor, worth[name]) for name, tensor in parts(got).items())
    assert torch.equal(logits(got), logits(fuse(expected)))
    assert logits(got).std() > 0.3


def test_a_quantised_model_has_the_same_weights_in_fp8(directory, worth):
    model = load_model(directory, progress=False)
    fp4 = model.config.quantization.expert_dtype == "fp4"
    assert model.precision == Precision(torch.bfloat16, True, True, "fp8", fp4_experts=fp4)
    tensors = parts(model)
    for name, exact in worth.items():
        value = dequantised(tensors[name], tensors.get(f"{name}_scale_inv"))
        assert torch.equal(value.to(exact.dtype), exact), name
    kinds = {t.dtype for name, t in tensors.items() if ".experts." in name and name.endswith("proj.weight")}
    assert kinds == {torch.int8 if fp4 else torch.float8_e4m3fn}
    if model.config.quantization.scale_fmt == "ue8m0":
        for name, scale in tensors.items():
            if name.endswith("weight_scale_inv"):
                assert torch.frexp(scale.float()).mantissa.eq(0.5).all(), name
    # A model with FP8 weights rounds activations to e4m3, so the logits are only close.
    options = {"dtype": torch.float32, "progress": False}
    rounded, exact = (logits(load_model(directory, dequantize=exact, **options)) for exact in (False, True))
    assert torch.nn.functional.cosine_similarity(rounded, exact).mean() > 0.9


def test_widened_experts_give_the_same_logits(directory):
    kept, widened = (load_model(directory, widen_experts=widen, progress=False) for widen in (False, True))
    assert torch.equal(logits(kept), logits(widened))
    fp4, fp8 = (model.layers[0].ffn.experts.down_proj for model in (kept, widened))
    assert fp8.dtype == torch.float8_e4m3fn and not widened.precision.fp4_experts
    assert fp8.nbytes == (2 if kept.precision.fp4_experts else 1) * fp4.nbytes


@pytest.mark.parametrize("dequantize", [True, False])
def test_experts_and_their_scales_may_be_in_one_tensor(directory, tmp_path, dequantize):
    """Under transformers' names, a tensor has the weights or the scales of all experts of a layer."""

    def fuse_experts(tensors):
        for layer, (kind, suffix) in product(range(4), (("weight", ""), ("scale", "_scale_inv"))):
            names = [[f"layers.{layer}.ffn.experts.{e}.{w}.{kind}" for e in range(8)] for w in ("w1", "w3", "w2")]
            dtype = tensors[names[0][0]].dtype
            gate, up, down = (torch.stack([tensors.pop(name).view(torch.uint8) for name in row]) for row in names)
            prefix = f"model.layers.{layer}.mlp.experts."
            tensors[f"{prefix}gate_up_proj{suffix}"] = torch.cat((gate, up), 1).view(dtype)
            tensors[f"{prefix}down_proj{suffix}"] = down.view(dtype)

    changed(directory, tmp_path, fuse_experts)
    got, expected = (load_model(path, dequantize=dequantize, progress=False) for path in (tmp_path, directory))
    assert_same_tensors(got.state_dict(), expected.state_dict())


@pytest.fixture
def with_tensors(tiny_checkpoint, tmp_path):
    def write(tensors=(), **fields):
        return changed(tiny_checkpoint("deepseek_v4"), tmp_path, lambda stored: stored.update(tensors), **fields)

    return write


DSPARK = "belongs to the DSpark drafter, which is not supported"
V41 = "belongs to DeepSeek-V4.1, which is not supported"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mtp.0.main_proj", DSPARK),
        ("mtp.2.markov_head.markov_w1", DSPARK),
        ("layers.1.engram.embed", V41),
        ("layers.3.attn.indexer.wk", V41),
    ],
)
def test_a_tensor_of_another_release_is_named(with_tensors, name, reason):
    told = re.escape(f": 1 problem, nothing was loaded:\n  {SINGLE_NAME}: {name}.weight: {reason}")
    with pytest.raises(CheckpointError, match=told):
        load_model(with_tensors({f"{name}.weight": torch.ones(4, 4)}), progress=False)


def test_fp4_experts_are_found_if_the_configuration_does_not_name_them(with_tensors):
    model = load_model(with_tensors(expert_dtype=None), progress=False)
    assert model.layers[0].ffn.experts.gate_up_proj.dtype == torch.int8


def test_experts_of_both_kinds_are_widened(with_tensors):
    name, q = "layers.2.ffn.experts.3.w2", torch.ones(512, 256).to(torch.float8_e4m3fn)
    scale = torch.ones(4, 2).to(torch.float8_e8m0fnu)
    model = load_model(with_tensors({f"{name}.weight": q, f"{name}.scale": scale}), progress=False)
    assert all(layer.ffn.experts.down_proj.dtype == torch.float8_e4m3fn for layer in model.layers)
    assert model.layers[2].ffn.experts.down_proj[3].float().eq(1).all()
