"""Configurations of A.X-K2 and Hy4: refused fields, a limit of zero, and refused FP8 caches."""

import json

import pytest

from dsa_layers.errors import ConfigError
from dsa_layers.models.family import VENDORED, published_config, read_config
from dsa_layers.models.precision import Precision

AXK2, HY4 = "axk2_light_config.json", "hy_v4_config.json"


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
    ],
)
def test_a_wrong_field_is_refused_by_its_name(file, changes, told, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(published_config(file) | changes))
    with pytest.raises(ConfigError) as error:
        read_config(tmp_path)
    assert told.replace('"', "'") in str(error.value).replace('"', "'")


def test_a_limit_of_zero_is_no_limit(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(published_config(HY4) | {"swiglu_limit": 0}))
    assert read_config(tmp_path).swiglu_limit is None and read_config(VENDORED / HY4).swiglu_limit == 10


def test_fp8_caches_of_narrow_latents_are_refused():
    config = read_config(VENDORED / AXK2)
    with pytest.raises(ValueError, match=r"^kv_cache: must be 'model', because FP8 caches do not have"):
        Precision.of(config, kv_cache="fp8")
    assert Precision.of(config).kv_cache == "model"
