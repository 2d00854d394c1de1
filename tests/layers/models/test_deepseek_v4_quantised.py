"""Loading DeepSeek-V4's published layout: FP8 with E8M0 or F32 scales, and experts in FP4 or FP8."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import dsa
from dsa.reference import dequantize_fp4
from dsa_layers.batch.sequence_batch import SequenceBatch
from dsa_layers.engine.fuse import fuse
from dsa_layers.errors import CheckpointError, ConfigError
from dsa_layers.io.directory import SINGLE_NAME
from dsa_layers.io.loading import load_model
from dsa_layers.models.deepseek_v4 import DeepseekV4ForCausalLM
from dsa_layers.models.family import read_config
from dsa_layers.models.precision import Precision
from tests.layers.models.listings import parts
from tests.layers.models.v4_checkpoints import write_published

TOKENS = torch.randint(0, 256, (150,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module", params=[("fp4", "ue8m0"), ("fp8", "ue8m0"), ("fp8", None)], ids=str)
def checkpoint(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("v4")
    expert_dtype, scale_fmt = request.param
    return directory, write_published(directory, expert_dtype=expert_dtype, scale_fmt=scale_fmt)


@torch.no_grad()
def logits(model):
    return model(TOKENS, SequenceBatch.without_cache([len(TOKENS)]), all_tokens=True)


def test_a_dequantised_model_has_exactly_the_stored_weights(checkpoint):
    """Every weight is what the formats' definitions say, so the logits are equal to the last bit."""
    directory, worth = checkpoint
    got = load_model(directory, dtype=torch.float32, dequantize=True, progress=False)
    expected = DeepseekV4ForCausalLM(read_config(directory), Precision(torch.float32, False, False, "model")).eval()
    for name, tensor in parts(expected).items():
        tensor.copy_(worth[name])
    assert all(torch.equal(tensor, worth[name]) for name, tensor in parts(got).items())
    assert torch.equal(logits(got), logits(fuse(expected)))
    assert logits(got).std() > 0.3


def value(tensors, name):
    """A tensor times its scales."""
    tensor, scale = tensors[name], tensors.get(f"{name}_scale_inv")
    if scale is None:
        return tensor
    if tensor.dtype == torch.int8:
        return dequantize_fp4(tensor, scale)
    return dsa.dequantize_per_block(tensor, scale, torch.float32)


def test_a_quantised_model_has_the_same_weights_in_fp8(checkpoint):
    """Scales are powers of two if the checkpoint's are."""
    directory, worth = checkpoint
    model = load_model(directory, progress=False)
    fp4 = model.config.quantization.expert_dtype == "fp4"
    assert model.precision == Precision(torch.bfloat16, True, True, "fp8", fp4_experts=fp4)
    tensors = parts(model)
    for name, exact in worth.items():
        assert torch.equal(value(tensors, name).to(exact.dtype), exact), name
    kinds = {t.dtype for name, t in tensors.items() if ".experts." in name and name.endswith("proj.weight")}
    assert kinds == {torch.int8 if fp4 else torch.float8_e4m3fn}
    if model.config.quantization.scale_fmt == "ue8m0":
        for name, scale in tensors.items():
            if name.endswith("weight_scale_inv"):
                assert torch.frexp(scale.float()).mantissa.eq(0.5).all(), name
    # Activations are rounded to e4m3, so only close.
    rounded, exact = (
        logits(load_model(directory, dtype=torch.float32, dequantize=dequantize, progress=False))
        for dequantize in (False, True)
    )
    assert torch.nn.functional.cosine_similarity(rounded, exact).mean() > 0.9


def test_widened_experts_give_the_same_logits(checkpoint):
    """FP4 experts then take twice the memory."""
    directory, _ = checkpoint
    kept, widened = (load_model(directory, widen_experts=widen, progress=False) for widen in (False, True))
    assert torch.equal(logits(kept), logits(widened))
    fp4, fp8 = (model.layers[0].ffn.experts.down_proj for model in (kept, widened))
    assert fp8.dtype == torch.float8_e4m3fn and not widened.precision.fp4_experts
    assert fp8.nbytes == (2 if kept.precision.fp4_experts else 1) * fp4.nbytes


@pytest.mark.parametrize("dequantize", [True, False])
def test_experts_and_their_scales_may_be_in_one_tensor(checkpoint, tmp_path, dequantize):
    """As transformers saves quantised experts."""
    directory, _ = checkpoint
    stored = load_file(directory / SINGLE_NAME)
    fused = {name: tensor for name, tensor in stored.items() if not re.match(r"layers\.\d+\.ffn\.experts\.", name)}

    def stack(layer, which, kind):
        """[E, rows, columns] of the experts' matrices `which`, one below the other."""
        names = [[f"layers.{layer}.ffn.experts.{e}.{w}.{kind}" for w in which] for e in range(6)]
        dtype = stored[names[0][0]].dtype
        return torch.stack([torch.cat([stored[n].view(torch.uint8) for n in row]) for row in names]).view(dtype)

    for layer in range(4):
        for name, which in (("gate_up_proj", ("w1", "w3")), ("down_proj", ("w2",))):
            fused[f"model.layers.{layer}.mlp.experts.{name}"] = stack(layer, which, "weight")
            fused[f"model.layers.{layer}.mlp.experts.{name}_scale_inv"] = stack(layer, which, "scale")
    shutil.copy(directory / "config.json", tmp_path)
    save_file(fused, tmp_path / SINGLE_NAME)
    got = load_model(tmp_path, dequantize=dequantize, progress=False).state_dict()
    expected = load_model(directory, dequantize=dequantize, progress=False).state_dict()
    assert got.keys() == expected.keys()
    assert all(torch.equal(t.view(torch.uint8), expected[name].view(torch.uint8)) for name, t in got.items())


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    directory = tmp_path_factory.mktemp("fp4")
    write_published(directory)
    return directory


@pytest.fixture
def files(written, tmp_path):
    """A copy that a test may change."""
    return shutil.copytree(written, tmp_path / "files")


def add_tensors(directory, tensors):
    save_file(load_file(directory / SINGLE_NAME) | tensors, directory / SINGLE_NAME)


def test_fp4_scales_too_far_apart_for_fp8_are_refused(files):
    stored = load_file(files / SINGLE_NAME)
    stored["layers.1.ffn.experts.2.w2.scale"].view(torch.uint8)[130, 1] = 3
    stored["layers.1.ffn.experts.2.w2.weight"][130, 16:32] = 0x11
    save_file(stored, files / SINGLE_NAME)
    with pytest.raises(CheckpointError) as error:
        load_model(files, progress=False)
    named = "layers.1.ffn.experts.2.down_proj.weight (stored as layers.1.ffn.experts.2.w2.weight): block [1, 0] of"
    assert named in str(error.value) and "scales go from 2^-124 to 2^" in str(error.value)
    model = load_model(files, dequantize=True, dtype=torch.float32, progress=False)
    assert model.layers[1].ffn.experts.down_proj[2, 130, 32] == 2.0**-125


DSPARK = "belongs to the DSpark drafter, which is not supported"
V41 = "belongs to DeepSeek-V4.1, which is not supported"


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (["mtp.0.main_proj", "mtp.2.markov_head.markov_w1"], DSPARK),
        (["layers.1.engram.embed", "layers.3.attn.indexer.wk"], V41),
    ],
)
def test_tensors_of_other_releases_are_named(files, names, reason):
    add_tensors(files, {f"{name}.weight": torch.ones(4, 4) for name in names})
    with pytest.raises(CheckpointError) as error:
        load_model(files, progress=False)
    first, *problems = str(error.value).splitlines()
    assert first.endswith(f"{len(names)} problems, nothing was loaded:")
    assert sorted(problems) == sorted(f"  {SINGLE_NAME}: {name}.weight: {reason}" for name in names)


def scheme(**changes):
    block = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    return {"quantization_config": block | changes}


LAYERS = "is [0, 4, 128, 4, 0]; accepted: 4 (num_hidden_layers) or 11 (with num_nextn_predict_layers=7)"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "deepseek_v41"}, "'model_type' is 'deepseek_v41'; accepted: 'deepseek_v32', 'deepseek_v4"),
        ({"dspark_block_size": 5}, "field 'dspark_block_size' is 5; accepted: null: the DSpark drafter is not"),
        ({"engram_layer_ids": [1]}, "field 'engram_layer_ids' is not supported"),
        (scheme(weight_block_size=[32, 32]), "weight_block_size' is [32, 32]; accepted: [128, 128]"),
        (
            {"compress_ratios": [], "layer_types": ["sliding_attention"]},
            "field 'compress_ratios' and field 'layer_types' are both given; accepted: one of them",
        ),
        ({"compress_ratios": None}, "field 'compress_ratios' and field 'layer_types' are not given; accepted: one of"),
        ({"expert_dtype": "nvfp4"}, "field 'expert_dtype' is 'nvfp4'; accepted: 'fp4', 'fp8'"),
        (scheme(expert_dtype="fp8"), "'expert_dtype' is 'fp4'; accepted: quantization_config.expert_dtype='fp8'"),
        ({"num_nextn_predict_layers": 7}, LAYERS + " items, each one of 0, 4, 128"),
        (
            {"compress_ratios": [0, 4, 5, 4]},
            "field 'compress_ratios' is [0, 4, 5, 4]; accepted: 4 (num_hidden_layers) ",
        ),
    ],
)
def test_unsupported_configurations_are_refused(written, tmp_path, changes, message):
    fields = json.loads((written / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | changes))
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_model(tmp_path, progress=False)


def test_every_spelling_of_the_experts_dtype_reads_the_same(files):
    """transformers writes it in the quantisation, and the earliest published configurations do not say it."""
    expected = read_config(files)
    fields = json.loads((files / "config.json").read_text())
    scheme = fields["quantization_config"]
    added = {"modules_to_not_convert": ["lm_head"], "modules_to_convert": None, "dequantize": False}

    def write(**changes):
        (files / "config.json").write_text(json.dumps(fields | changes))

    write(quantization_config=scheme | added | {"expert_dtype": "fp4"})
    assert read_config(files) == expected
    write(quantization_config=scheme | added | {"expert_dtype": "fp4"}, expert_dtype=None)
    assert read_config(files) == expected
    write(expert_dtype=None)
    assert read_config(files).quantization.expert_dtype is None
    assert load_model(files, progress=False).layers[0].ffn.experts.gate_up_proj.dtype == torch.int8


def test_experts_of_both_kinds_are_widened(files):
    name, q = "layers.2.ffn.experts.3.w2", torch.ones(256, 128).to(torch.float8_e4m3fn)
    add_tensors(files, {f"{name}.weight": q, f"{name}.scale": torch.ones(2, 1).to(torch.float8_e8m0fnu)})
    model = load_model(files, progress=False)
    assert all(layer.ffn.experts.down_proj.dtype == torch.float8_e4m3fn for layer in model.layers)
    assert model.layers[2].ffn.experts.down_proj[3].float().eq(1).all()
