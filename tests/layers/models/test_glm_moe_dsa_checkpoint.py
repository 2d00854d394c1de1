"""A GLM-5 checkpoint in the published FP8 layout, with a multi-token-prediction layer, loaded and run."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from dsa import dequantize_per_block, per_block_cast_to_fp8
from dsa.testing import calc_diff
from dsa_layers.batch.sequence_batch import SequenceBatch
from dsa_layers.errors import CheckpointError
from dsa_layers.generation.generator import Generator
from dsa_layers.generation.sampling import SamplingParams
from dsa_layers.io.directory import SINGLE_NAME
from dsa_layers.io.loading import load_model
from tests.layers.models import hf_models
from tests.layers.models.parity import assert_same, paged_run

# The widths that FP8 blocks, FP8 pages and the quantised indexer need are the published ones.
CHANGES = {
    "vocab_size": 2048, "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128,
    "num_hidden_layers": 5, "num_attention_heads": 2, "num_key_value_heads": 2, "n_routed_experts": 4,
    "q_lora_rank": 128, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
    "index_head_dim": 128, "index_topk": 16, "index_topk_freq": 2, "rms_norm_eps": 1e-5,
    "eos_token_id": [2045, 2046, 2047],
}  # fmt: skip
TYPES = ("full", "full", "shared", "full", "shared")
KEPT = ("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight", "indexer.weights_proj.weight")
TOKENS = torch.randint(0, 2048, (40,), generator=torch.Generator().manual_seed(2))


def write(directory, tensors, fields):
    directory.mkdir()
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, directory / SINGLE_NAME)
    (directory / "config.json").write_text(json.dumps(fields))
    return directory


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """(FP8 layout, the FP8 weights' values as transformers' own checkpoint)."""
    root = tmp_path_factory.mktemp("glm")
    hf_models.glm_moe_dsa(root / "theirs", **CHANGES)
    tensors = load_file(root / "theirs" / SINGLE_NAME)
    fields = json.loads((root / "theirs" / "config.json").read_text())
    published = fields | {"dtype": "bfloat16", "num_nextn_predict_layers": 1, "indexer_rope_interleave": True}
    shutil.rmtree(root / "theirs")

    fp8, values = {}, {}
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and not name.endswith(KEPT):
            fp8[name], fp8[f"{name}_scale_inv"] = per_block_cast_to_fp8(tensor, use_ue8m0=False)
            values[name] = dequantize_per_block(fp8[name], fp8[f"{name}_scale_inv"], torch.float32)
        else:
            fp8[name] = tensor if name.endswith("e_score_correction_bias") else tensor.bfloat16()
            values[name] = fp8[name].float()
    # As published: a multi-token-prediction layer, which is a decoder layer with an indexer and what joins it.
    fp8 |= {name.replace(".3.", ".5.", 1): t for name, t in fp8.items() if name.startswith("model.layers.3.")}
    fp8 |= {f"model.layers.5.{name}.weight": torch.ones(128) for name in ("enorm", "hnorm", "shared_head.norm")}
    fp8["model.layers.5.eh_proj.weight"] = torch.randn(128, 256)

    kept = ["lm_head", "model.embed_tokens", *(f"model.layers.{i}.mlp.gate" for i in range(1, 6))]
    kept += [f"model.layers.{i}.self_attn.indexers_proj" for i in (0, 1, 3, 5)]
    quantization = {
        "activation_scheme": "dynamic", "fmt": "e4m3", "modules_to_not_convert": kept, "quant_method": "fp8",
        "weight_block_size": [128, 128],
    }  # fmt: skip
    return (
        write(root / "fp8", fp8, published | {"quantization_config": quantization}),
        write(root / "theirs", values, fields),
    )


@pytest.fixture(scope="module")
def expected(checkpoints):
    from transformers import GlmMoeDsaForCausalLM

    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    theirs = GlmMoeDsaForCausalLM.from_pretrained(checkpoints[1], **options).eval()
    with torch.no_grad():
        return theirs(TOKENS[None]).logits[0]


@pytest.fixture(scope="module")
def exact(checkpoints):
    return load_model(checkpoints[0], dtype=torch.float32, dequantize=True, progress=False)


@torch.no_grad()
def test_dequantised_fp8_weights(exact, expected):
    assert exact.config.indexer_types == TYPES
    assert_same(exact(TOKENS, SequenceBatch.without_cache([40]), all_tokens=True), expected)
    assert_same(paged_run(exact, TOKENS, [7, 20, 1, 12]), expected)


@torch.no_grad()
@pytest.mark.parametrize("length", [10, 40])
def test_shared_layers_over_fp8_pages(checkpoints, exact, length):
    """Prefill reads the pages back, decode attends to their slots. 10 tokens are fewer than a layer selects; decode
    over FP8 pages picks them all by index."""
    model = load_model(checkpoints[0], dtype=torch.float32, dequantize=True, kv_cache="fp8", progress=False)
    assert model.make_cache(1).layer(2).latent_is_fp8
    tokens = TOKENS[:length]
    unrounded = exact(tokens, SequenceBatch.without_cache([length]), all_tokens=True)
    for chunks in ([length], [1] * length):
        assert 1e-7 < calc_diff(paged_run(model, tokens, chunks), unrounded) < 1e-2


@torch.no_grad()
def test_fp8_throughout(checkpoints, exact):
    model = load_model(checkpoints[0], progress=False)
    layer, shared = model.model.layers[3].self_attn, model.model.layers[4].self_attn
    assert layer.q_b_proj.weight.dtype == torch.float8_e4m3fn and not layer.q_b_proj.use_ue8m0
    assert layer.indexer.quantize and shared.indexer is None
    assert model.make_cache(1).layer(3).index_is_fp8 and model.make_cache(1).layer(4).index is None
    whole = SequenceBatch.without_cache([40])
    pair = [m(TOKENS, whole, all_tokens=True) for m in (model, exact)]
    assert 1e-6 < calc_diff(*pair) < 0.1  # rounding also moves a random router's choice here and there

    prompts = [TOKENS[:30].tolist(), TOKENS[30:33].tolist()]
    runs = [Generator(model, cache_tokens=256, prefill_chunk=8).generate(prompts, SamplingParams(8)) for _ in range(2)]
    assert [c.tokens for c in runs[0]] == [c.tokens for c in runs[1]] and len(runs[0][0].tokens) == 8


def test_an_indexer_in_a_shared_layer_is_unexpected(checkpoints, tmp_path):
    directory = tmp_path / "damaged"
    shutil.copytree(checkpoints[0], directory)
    fields = json.loads((directory / "config.json").read_text())
    types = ["full", "shared", "shared", "full", "shared"]
    (directory / "config.json").write_text(json.dumps(fields | {"indexer_types": types, "index_topk_freq": None}))
    with pytest.raises(CheckpointError, match=r"unexpected model\.layers\.1\.self_attn\.indexer\.k_norm\.bias"):
        load_model(directory, progress=False)
