"""Configurations of newer families: refused fields, a limit of zero, text parts, FP8 caches."""

import json
from dataclasses import replace

import pytest

from dsa_layers.errors import ConfigError
from dsa_layers.models.family import VENDORED, family, published_config, read_config
from dsa_layers.models.precision import Precision

AXK2, HY4, MISTRAL = "axk2_light_config.json", "hy_v4_config.json", "mistral_large4_config.json"
DOTS = "dots3_note_config.json"
YARN = published_config(MISTRAL)["rope_parameters"]
SHARED = "the last layer before it whose own latents others share, and with rope as it has"


@pytest.mark.parametrize(
    ("file", "changes", "told"),
    [
        (AXK2, {"gated_norm_rank": 0}, "'gated_norm_rank' is 0"),
        (AXK2, {"n_group": 3}, "'n_routed_experts' is 128; accepted: a multiple of n_group=3"),
        (AXK2, {"mlp_layer_types": ["dense", "sparse"] * 24}, "'mlp_layer_types' is"),
        (AXK2, {"index_topk_freq": 4}, "'index_topk_freq' is 4"),
        (HY4, {"swiglu_limit": "10"}, "'swiglu_limit' is \"10\"; accepted: a number from"),
        (HY4, {"indexer_types": ["shared"] * 78}, "'indexer_types' is"),
        (HY4, {"gating_type": "headwise"}, "'gating_type' is \"headwise\""),
        (HY4, {"learnable_sink": False}, "'learnable_sink' is false"),
        (HY4, {"hc_sinkhorn_iters": 20}, "'hc_sinkhorn_iters' is 20"),
        (HY4, {"quantization_config": {"quant_method": "modelopt"}}, "'quantization_config.quant_method' is"),
        (MISTRAL, {"q_lora_rank": 1536}, "'q_lora_rank' is 1536; accepted: null"),
        (MISTRAL, {"n_group": 8}, "'n_group' is 8; accepted: 1"),
        (MISTRAL, {"rope_parameters": None}, "'rope_parameters' is null; accepted: an object"),
        (MISTRAL, {"rope_parameters": YARN | {"attention_factor": 1.5}}, "'rope_parameters.attention_factor' is 1.5"),
        (MISTRAL, {"no_rope_layers": [1, 0]}, "accepted: at least 72 (num_hidden_layers) integers from 0 to 1"),
        (MISTRAL, {"kv_source_layers": [0, 0, 1] + [0] * 69}, SHARED),
        (MISTRAL, {"kv_source_layers": [0, 1, 2, 2] + [0] * 68}, SHARED),
        (MISTRAL, {"kv_source_layers": [*range(71), 72]}, "integers from 0 to 71"),
        (DOTS, {"layer_types": ["linear_attention"] * 46}, "'layer_types' is"),
        (DOTS, {"sliding_window_size": 0}, "'sliding_window_size' is 0"),
        (DOTS, {"attention_gate_type": "elementwise"}, "'attention_gate_type' is \"elementwise\""),
        (DOTS, {"apply_mla_qkv_lora_rescale": False}, "'apply_mla_qkv_lora_rescale' is false"),
        (
            DOTS,
            {"swa_head_dim": 320},
            "'swa_head_dim' is 320; accepted: swa_qk_nope_head_dim and 64 channels with rope",
        ),
        (DOTS, {"moe_shared_expert_intermediate_size": 768}, "'moe_shared_expert_intermediate_size' is 768"),
        (DOTS, {"swa_num_key_value_heads": 8}, "'swa_num_key_value_heads' is 8; accepted: 64"),
    ],
)
def test_a_wrong_field_is_refused_by_its_name(file, changes, told, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(published_config(file) | changes))
    with pytest.raises(ConfigError) as error:
        read_config(tmp_path)
    assert told.replace('"', "'") in str(error.value).replace('"', "'")


@pytest.mark.parametrize("model_type", ["mistral_large4", "hy_v4_vl"])
def test_the_text_part_of_a_configuration(model_type, tmp_path):
    """A field at the top level counts if text_config lacks it."""
    text = family(model_type).tiny.fields(quantized=False)
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    whole = {
        "model_type": model_type, "text_config": text | {"model_type": f"{model_type}_text", "bos_token_id": 7},
        "vision_config": {}, "audio_config": {}, "quantization_config": quantization, "bos_token_id": 5,
        "image_token_index": 10,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(whole))
    with pytest.warns(UserWarning, match=r"only the text model is used; left out: vision, audio$"):
        config = read_config(tmp_path)
    assert config.quantization is not None and config.bos_token_id == 7 and config.model_type == model_type
    (tmp_path / "config.json").write_text(json.dumps(whole["text_config"]))
    assert read_config(tmp_path) == replace(config, quantization=None)


def test_a_limit_of_zero_is_no_limit(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(published_config(HY4) | {"swiglu_limit": 0}))
    assert read_config(tmp_path).swiglu_limit is None and read_config(VENDORED / HY4).swiglu_limit == 10


def test_fp8_caches_of_narrow_latents_are_refused():
    config = read_config(VENDORED / AXK2)
    with pytest.raises(ValueError, match=r"^kv_cache: must be 'model', because FP8 caches do not have"):
        Precision.of(config, kv_cache="fp8")
    assert Precision.of(config).kv_cache == "model"
