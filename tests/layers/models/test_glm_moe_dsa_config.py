import pytest

from dsa_layers.config.model_config import RopeConfig
from dsa_layers.models.deepseek_v32 import DeepseekV32Config
from dsa_layers.models.glm_moe_dsa import GlmMoeDsaConfig
from tests.layers.models.configs import ABSENT, check_refused, read

FULL = {0, 1, 2, 6, 10, 14, 18, 22, 26, 30, 34, 38, 42, 46, 50, 54, 58, 62, 66, 70, 74}
SCHEDULE = tuple("full" if layer in FULL else "shared" for layer in range(78))


def test_glm_5(tmp_path):
    config = read(tmp_path, "glm_5")
    assert type(config) is GlmMoeDsaConfig and isinstance(config, DeepseekV32Config)
    assert config.indexer_types == ("full",) * 78 and config.indexer_rope_interleave
    assert (config.rms_norm_eps, config.latent_norm_eps) == (1e-5, 1e-6)
    assert config.rope == RopeConfig(1e6, None)
    assert (config.bos_token_id, config.eos_token_ids) == (None, (154820, 154827, 154829))


PATTERN = "".join(kind[0].upper() for kind in SCHEDULE)
NOT_LISTED = {"indexer_types": ABSENT, "index_topk_freq": ABSENT, "index_skip_topk_offset": ABSENT}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, SCHEDULE),
        ({"indexer_types": ABSENT}, SCHEDULE),
        ({"index_topk_freq": ABSENT, "index_skip_topk_offset": ABSENT}, SCHEDULE),
        ({"index_topk_pattern": PATTERN}, SCHEDULE),
        (NOT_LISTED | {"index_topk_pattern": PATTERN}, SCHEDULE),
        (NOT_LISTED, ("full",) * 78),
        (NOT_LISTED | {"index_topk_freq": 1, "index_skip_topk_offset": 0}, ("full",) * 78),
        (NOT_LISTED | {"index_topk_freq": 39}, ("full", "full") + ("shared",) * 38 + ("full",) + ("shared",) * 37),
    ],
)
def test_which_layers_have_an_indexer(tmp_path, changes, expected):
    assert read(tmp_path, "glm_5_2", **changes).indexer_types == expected


FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}


def test_modules_that_fp8_checkpoints_leave_unconverted(tmp_path):
    layer = "model.layers.78."
    kept = ["self_attn.indexers_proj", "self_attn.indexer.k_norm", "self_attn.indexer.k_norm.bias"]
    kept += ["self_attn.q_a_layernorm", "self_attn.kv_a_layernorm", "input_layernorm", "post_attention_layernorm"]
    kept += ["mlp.gate", "mlp.gate.e_score_correction_bias", "eh_proj", "enorm", "hnorm", "shared_head.norm"]
    modules = ["lm_head", "model.embed_tokens", *(layer + name for name in kept)]
    config = read(tmp_path, "glm_5", quantization_config=FP8 | {"modules_to_not_convert": modules})
    assert config.quantization.scale_fmt == "float"
    assert config == read(tmp_path, "glm_5", quantization_config=FP8)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        (
            {"indexer_types": ["full"] * 77},
            ["'indexer_types' is ['full', ", "(77 items)", "78 (num_hidden_layers) items"],
        ),
        ({"indexer_types": ["full"] * 77 + ["none"]}, ["'indexer_types' is ['full', ", "each one of 'full', 'shared'"]),
        ({"indexer_types": ["full"] * 78}, ["'index_topk_freq' makes layer 3 'shared'", "'full', as field 'indexer"]),
        ({"index_topk_freq": 3}, ["'index_topk_freq' makes layer 5 'full'", "'shared', as field 'indexer_types' says"]),
        ({"index_topk_pattern": "F" * 78}, ["'index_topk_pattern' makes layer 3 'full'", "'shared', as field"]),
        ({"index_topk_pattern": "F" * 77 + "X"}, ["'index_topk_pattern' is 'FF", "each one of 'F', 'S'"]),
        (
            NOT_LISTED | {"index_topk_pattern": "S" + "F" * 77},
            ["'index_topk_pattern' makes layer 0 'shared'", "no layer"],
        ),
        (
            NOT_LISTED | {"index_topk_freq": 2, "index_skip_topk_offset": 0},
            ["'index_topk_freq' makes layer 0 'shared'"],
        ),
        ({"rope_interleave": False}, ["'rope_interleave' is false", "accepted: true"]),
        ({"moe_router_dtype": "bfloat16"}, ["'moe_router_dtype' is 'bfloat16'", "accepted: 'float32'"]),
        ({"index_share_for_mtp_iteration": 2}, ["'index_share_for_mtp_iteration' is 2", "accepted: true, false"]),
        ({"head_dim": 128}, ["'head_dim' is 128", "accepted: 64, 192, 256"]),
        ({"rope_parameters": {"rope_theta": 8e6, "rope_type": "linear"}}, ["'rope_parameters.rope_type' is 'linear'"]),
        ({"index_kpool": 4}, ["field 'index_kpool' is 4; accepted: null"]),
    ],
)
def test_refused(tmp_path, changes, parts):
    check_refused(tmp_path, "glm_5_2", changes, parts)
