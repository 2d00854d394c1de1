"""Wrong fields of config.json are refused. The message names the file, the field, its value and accepted values."""

import re

import pytest

from dsa_layers.errors import ConfigError
from dsa_layers.models.family import published_config
from tests.layers.models.configs import ABSENT, read
from tests.layers.models.test_config import NOT_LISTED

SPARSE = {"mlp_layer_types": ["sparse"] * 61}
BOTH_ROPES = {"rope_scaling": None, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
SECOND_ROPE = {"rope_parameters": {"rope_type": "default"}}
LINEAR_ROPE = {"rope_parameters": {"rope_theta": 8e6, "rope_type": "linear"}}
SELECTS_LATE = {"index_topk_freq": 2, "index_skip_topk_offset": 0}
LISTED_SHARED = "'index_topk_freq' makes layer 5 'full'; accepted: 'shared', as field 'indexer_types' says"
TWO_SCHEDULES = {"compress_ratios": [], "layer_types": ["sliding_attention"]}
WINDOW_HEAD = "'swa_head_dim' is 320; accepted: swa_qk_nope_head_dim and 64 channels with rope"
YARN = published_config("mistral_large4_config.json")["rope_parameters"]
SHARED = "the last layer before it with latents that others share, and with rope as it has"
DEEPSEEK_V32 = [
    ({"sliding_window": 4096}, "'sliding_window' is 4096; accepted: null"),
    ({"quantization": {"group_size": 64, "bits": 4}}, "is {'bits': 4, 'group_size': 64}; accepted: null"),
    ({"rope_scaling.foo": 1}, "'rope_scaling.foo' is 1; accepted: null"),
    ({"quantization_config.foo": 1}, "'quantization_config.foo' is 1; accepted: null"),
    ({"model_type": "llama"}, "'model_type' is 'llama'; accepted: 'axk2', 'deepseek_v32', 'deepseek_v4', "),
    ({"model_type": ABSENT}, "'model_type' is missing; accepted: 'axk2', 'deepseek_v32', 'deepseek_v4', "),
    ({"attention_bias": 0}, "'attention_bias' is 0; accepted: false"),
    ({"quantization_config": "fp8"}, "'quantization_config' is 'fp8'; accepted: an object or null"),
    ({"rope_scaling.type": ABSENT}, "'rope_scaling.rope_type' and field 'type' hold {'rope_type': null, 'type': null}"),
    ({"rope_scaling.rope_type": "default"}, "hold {'rope_type': 'default', 'type': 'yarn'}; accepted: one of "),
    ({"rope_scaling.factor": 0.5}, "'rope_scaling.factor' is 0.5; accepted: a number from 1 to 1e+06"),
    ({"rope_scaling.beta_fast": 1}, "'rope_scaling.beta_fast' is 1; accepted: a number above beta_slow=1.0"),
    ({"hidden_size": ABSENT}, "'hidden_size' is missing; accepted: an integer of at least 1, up to 1048576"),
    ({"hidden_size": 7168.0}, "'hidden_size' is 7168.0; accepted: an integer of at least 1, up to 1048576"),
    ({"norm_topk_prob": 1}, "'norm_topk_prob' is 1; accepted: true, false"),
    ({"eos_token_id": [1, 129280]}, "'eos_token_id' is [1, 129280]; accepted: token ids in [0, vocab_size=129280)"),
    ({"bos_token_id": [0, 1]}, "'bos_token_id' is [0, 1]; accepted: one token id, or null"),
    ({"dtype": "float32"}, "'torch_dtype' is 'bfloat16'; accepted: 'float32'"),
    (BOTH_ROPES, "'rope_theta' is 10000; accepted: 500000.0"),
    (SECOND_ROPE, "'rope_scaling' and field 'rope_parameters' are both given; accepted: one of them"),
    ({"n_group": 7}, "'n_routed_experts' is 256; accepted: a multiple of n_group=7"),
    ({"n_group": 256}, "'n_group' is 256; accepted: groups of 2 experts or more"),
    ({"topk_group": 9}, "'topk_group' is 9; accepted: at most n_group=8"),
    ({"num_experts_per_tok": 129}, "'num_experts_per_tok' is 129; accepted: at most 128, of 4 groups"),
    ({"first_k_dense_replace": 62}, "'first_k_dense_replace' is 62; accepted: at most num_hidden_layers=61"),
    ({"qk_head_dim": 128}, "'qk_head_dim' is 128; accepted: 192"),
    ({"head_dim": 96}, "'head_dim' is 96; accepted: 64, 128, 192"),
    ({"qk_rope_head_dim": 63}, "'qk_rope_head_dim' is 63; accepted: an even number"),
    ({"index_head_dim": 32}, "'index_head_dim' is 32; accepted: at least qk_rope_head_dim=64"),
    (SPARSE, "(61 items); accepted: ['dense', 'dense', 'dense', 'sparse', 'sparse', "),
    ({"layer_types": ["full_attention"] * 61}, "(61 items); accepted: ['indexed_attention', 'indexed_attention', "),
]
GLM_5_2 = [
    ({"indexer_types": ["full"] * 77}, "(77 items); accepted: 78 (num_hidden_layers) items, each one of 'full', "),
    ({"indexer_types": ["full"] * 77 + ["none"]}, "items, each one of 'full', 'shared', or null"),
    ({"indexer_types": ["full"] * 78}, "'index_topk_freq' makes layer 3 'shared'; accepted: 'full', as field 'indexer"),
    ({"index_topk_freq": 3}, LISTED_SHARED),
    ({"index_topk_pattern": "F" * 78}, "'index_topk_pattern' makes layer 3 'full'; accepted: 'shared', as field "),
    ({"index_topk_pattern": "F" * 77 + "X"}, "accepted: 78 (num_hidden_layers) items, each one of 'F', 'S', or null"),
    (NOT_LISTED | {"index_topk_pattern": "S" + "F" * 77}, "'index_topk_pattern' makes layer 0 'shared'; accepted: "),
    (NOT_LISTED | SELECTS_LATE, "'index_topk_freq' makes layer 0 'shared'; accepted: 'full': no layer before it has"),
    ({"rope_interleave": False}, "'rope_interleave' is false; accepted: true"),
    ({"head_dim": 128}, "'head_dim' is 128; accepted: 64, 192, 256"),
    (LINEAR_ROPE, "'rope_parameters.rope_type' is 'linear'; accepted: 'default', 'yarn'"),
    ({"index_kpool": 4}, "'index_kpool' is 4; accepted: null"),
]
DEEPSEEK_V4 = [
    ({"dspark_block_size": 5}, "'dspark_block_size' is 5; accepted: null: the DSpark drafter is not supported"),
    ({"engram_layer_ids": [1]}, "'engram_layer_ids' is [1]; accepted: null"),
    (TWO_SCHEDULES, "'compress_ratios' and field 'layer_types' are both given; accepted: one of them"),
    ({"compress_ratios": None}, "'compress_ratios' and field 'layer_types' are not given; accepted: one of them"),
    ({"quantization_config.expert_dtype": "fp8"}, "is 'fp4'; accepted: quantization_config.expert_dtype='fp8'"),
    ({"num_nextn_predict_layers": 7}, "or 50 (with num_nextn_predict_layers=7) items, each one of 0, 4, 128, or null"),
    ({"compress_ratios": [0, 4, 5, 4]}, "'compress_ratios' is [0, 4, 5, 4]; accepted: 43 (num_hidden_layers) "),
]
AXK2_LIGHT = [
    ({"gated_norm_rank": 0}, "'gated_norm_rank' is 0"),
    ({"n_group": 3}, "'n_routed_experts' is 128; accepted: a multiple of n_group=3"),
    ({"mlp_layer_types": ["dense", "sparse"] * 24}, "'mlp_layer_types' is"),
    ({"index_topk_freq": 4}, "'index_topk_freq' is 4"),
]
HY_V4 = [
    ({"swiglu_limit": "10"}, "'swiglu_limit' is '10'; accepted: a number from"),
    ({"indexer_types": ["shared"] * 78}, "'indexer_types' is"),
    ({"gating_type": "headwise"}, "'gating_type' is 'headwise'"),
    ({"learnable_sink": False}, "'learnable_sink' is false"),
    ({"hc_sinkhorn_iters": 20}, "'hc_sinkhorn_iters' is 20"),
    ({"quantization_config": {"quant_method": "modelopt"}}, "'quantization_config.quant_method' is"),
]
MISTRAL_LARGE4 = [
    ({"q_lora_rank": 1536}, "'q_lora_rank' is 1536; accepted: null"),
    ({"n_group": 8}, "'n_group' is 8; accepted: 1"),
    ({"rope_parameters": None}, "'rope_parameters' is null; accepted: an object"),
    ({"rope_parameters": YARN | {"attention_factor": 1.5}}, "'rope_parameters.attention_factor' is 1.5"),
    ({"no_rope_layers": [1, 0]}, "accepted: at least 72 (num_hidden_layers) integers from 0 to 1"),
    ({"kv_source_layers": [0, 0, 1] + [0] * 69}, SHARED),
    ({"kv_source_layers": [0, 1, 2, 2] + [0] * 68}, SHARED),
    ({"kv_source_layers": [*range(71), 72]}, "integers from 0 to 71"),
]
DOTS3_NOTE = [
    ({"layer_types": ["linear_attention"] * 46}, "'layer_types' is"),
    ({"sliding_window_size": 0}, "'sliding_window_size' is 0"),
    ({"attention_gate_type": "elementwise"}, "'attention_gate_type' is 'elementwise'"),
    ({"apply_mla_qkv_lora_rescale": False}, "'apply_mla_qkv_lora_rescale' is false"),
    ({"swa_head_dim": 320}, WINDOW_HEAD),
    ({"moe_shared_expert_intermediate_size": 768}, "'moe_shared_expert_intermediate_size' is 768"),
    ({"swa_num_key_value_heads": 8}, "'swa_num_key_value_heads' is 8; accepted: 64"),
]
GLM5_NEXT = [
    ({"index_kpool": 16}, "'index_kpool' is 16; accepted: 4, 8"),
    ({"index_kpool_always_select_tail": False}, "'index_kpool_always_select_tail' is false; accepted: true"),
    ({"index_topk": 2050}, "'index_topk' is 2050; accepted: a multiple of index_kpool=4"),
    ({"index_head_dim": 32}, "'index_head_dim' is 32; accepted: at least 64"),
    ({"indexer_types": ["full"] * 44 + ["shared"]}, "'indexer_types' is"),
    ({"layer_types": ["sliding_attention"] * 45}, "'layer_types' is"),
    ({"linear_attn_config.safe_gate": False}, "'linear_attn_config.safe_gate' is false; accepted: true"),
    ({"linear_attn_config.kda_layers": [0]}, "'linear_attn_config.kda_layers' is [0]"),
    ({"linear_attn_config.gate_lower_bound": 5.0}, "'linear_attn_config.gate_lower_bound' is 5.0"),
    ({"linear_head_dim": 64}, "'linear_head_dim' is 64; accepted: 128"),
    ({"linear_attn_config": None}, "'linear_num_heads' is missing"),
    ({"qk_rope_head_dim": 64}, "'qk_rope_head_dim' is 64; accepted: 0"),
]
REFUSED = {"deepseek_v32": DEEPSEEK_V32, "glm_5_2": GLM_5_2, "deepseek_v4_flash": DEEPSEEK_V4, "axk2_light": AXK2_LIGHT}
REFUSED |= {"hy_v4": HY_V4, "mistral_large4": MISTRAL_LARGE4, "dots3_note": DOTS3_NOTE, "glm5_next": GLM5_NEXT}
CASES = [(name, *case) for name, cases in REFUSED.items() for case in cases]


@pytest.mark.parametrize(("name", "changes", "told"), CASES)
def test_a_field_that_is_wrong_is_refused_by_its_name(tmp_path, name, changes, told):
    with pytest.raises(ConfigError, match=f"^{re.escape(str(tmp_path / 'config.json'))}: .*{re.escape(told)}"):
        read(tmp_path, name, **changes)
