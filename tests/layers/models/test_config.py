import json
import math
import re
from dataclasses import replace

import pytest

from dsa_layers.config.model_config import QuantizationConfig, RopeConfig, YarnConfig
from dsa_layers.errors import ConfigError
from dsa_layers.models.family import read_config
from tests.layers.io.stand_ins import LFS_POINTER
from tests.layers.models import configs

NAME = "deepseek_v32"


def test_published_config(tmp_path):
    config = configs.read(tmp_path, NAME)
    assert config.rope == RopeConfig(10000.0, YarnConfig(40.0, 4096, 32.0, 1.0, 1.0, 1.0))
    assert config.quantization == QuantizationConfig("ue8m0", "fp8")
    assert (config.bos_token_id, config.eos_token_ids, config.dtype) == (0, (1,), "bfloat16")
    with pytest.raises(AttributeError):
        config.hidden_size = 1


@pytest.mark.parametrize("name", [NAME, "glm_5", "glm_5_2", "deepseek_v4_flash", "deepseek_v4_pro"])
def test_transformers_spelling_reads_the_same(tmp_path, name):
    from transformers import AutoConfig

    expected = configs.read(tmp_path, name)
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "rewritten")
    fields = json.loads((tmp_path / "rewritten" / "config.json").read_text())
    assert "rope_parameters" in fields and "rope_scaling" not in fields and "torch_dtype" not in fields
    # Other tools write the earlier spelling's null beside it.
    left = {"rope_scaling": None, "compress_ratios": None, "unsloth_fixed": True}
    (tmp_path / "rewritten" / "config.json").write_text(json.dumps(fields | left))
    # transformers fills in a beginning-of-sequence id of its own for GLM-5.
    assert replace(read_config(tmp_path / "rewritten"), bos_token_id=expected.bos_token_id) == expected


def test_transformers_spelling_without_yarn_and_quantisation(tmp_path):
    config = configs.read(
        tmp_path,
        NAME,
        **{
            "rope_scaling": configs.ABSENT,
            "rope_theta": configs.ABSENT,
            "torch_dtype": configs.ABSENT,
            "quantization_config": configs.ABSENT,
        },
        rope_parameters={"rope_theta": 5e5, "rope_type": "default"},
        dtype="float32",
        num_nextn_predict_layers=configs.ABSENT,
        mlp_layer_types=["dense"] * 3 + ["sparse"] * 58,
        head_dim=64,
        qk_head_dim=192,
        pad_token_id=None,
    )
    assert config.rope == RopeConfig(5e5, None)
    assert (config.quantization, config.dtype, config.num_nextn_predict_layers) == (None, "float32", 0)


def test_null_scaling_is_plain_rope(tmp_path):
    assert configs.read(tmp_path, NAME, rope_scaling=None, quantization_config=None).rope == RopeConfig(10000.0, None)


@pytest.mark.parametrize("value", ["float", None, configs.ABSENT])
def test_scales_that_are_no_powers_of_two(tmp_path, value):
    assert configs.read(tmp_path, NAME, **{"quantization_config.scale_fmt": value}).quantization.scale_fmt == "float"


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": ["indexed_attention"] * 61},
        {"layer_types": ["deepseek_sparse_attention"] * 61},
        {
            "quantization_config.modules_to_not_convert": ["lm_head"],
            "quantization_config.modules_to_convert": None,
            "quantization_config.dequantize": False,
            "quantization_config.expert_dtype": "fp8",
        },
    ],
)
def test_what_transformers_adds_changes_nothing(tmp_path, changes):
    assert configs.read(tmp_path, NAME, **changes) == configs.read(tmp_path, NAME)


@pytest.mark.parametrize(
    ("config_eos", "generation", "expected"),
    [
        (1, None, (1,)),
        ([1, 7], None, (1, 7)),
        (None, None, ()),
        (1, {"eos_token_id": [2, 3]}, (2, 3)),
        (1, {"temperature": 0.6}, (1,)),
    ],
)
def test_eos_token_ids(tmp_path, config_eos, generation, expected):
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert configs.read(tmp_path, NAME, eos_token_id=config_eos).eos_token_ids == expected


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"sliding_window": 4096}, ["field 'sliding_window' is 4096; accepted: null"]),
        ({"quantization": {"group_size": 64, "bits": 4}}, ["field 'quantization' is {", "; accepted: null"]),
        ({"rope_scaling.foo": 1}, ["field 'rope_scaling.foo' is 1; accepted: null"]),
        ({"quantization_config.foo": 1}, ["field 'quantization_config.foo' is 1; accepted: null"]),
        ({"model_type": "llama"}, ["field 'model_type' is 'llama'", "accepted: 'deepseek_v32'"]),
        ({"model_type": configs.ABSENT}, ["field 'model_type' is missing", "accepted: 'deepseek_v32'"]),
        # values that would need other code
        ({"scoring_func": "softmax"}, ["field 'scoring_func' is 'softmax'", "accepted: 'sigmoid'"]),
        ({"attention_bias": 0}, ["field 'attention_bias' is 0", "accepted: false"]),
        ({"ep_size": 8}, ["field 'ep_size' is 8", "accepted: 1"]),
        ({"indexer_rope_interleave": True}, ["field 'indexer_rope_interleave' is true", "accepted: false"]),
        ({"torch_dtype": "int8"}, ["field 'torch_dtype' is 'int8'", "'bfloat16', 'float16', 'float32'"]),
        ({"dtype": "float32"}, ["field 'torch_dtype' is 'bfloat16'", "accepted: 'float32'"]),
        ({"quantization_config.quant_method": "gptq"}, ["'quantization_config.quant_method' is 'gptq'", "'fp8'"]),
        ({"quantization_config.weight_block_size": [64, 64]}, ["weight_block_size' is [64, 64]", "[128, 128]"]),
        ({"quantization_config.scale_fmt": "e8"}, ["scale_fmt' is 'e8'", "'ue8m0', 'float'"]),
        ({"quantization_config": "fp8"}, ["'quantization_config' is 'fp8'", "an object or null"]),
        ({"rope_scaling.type": configs.ABSENT}, ["'rope_scaling.rope_type' and field 'type'", "'yarn'"]),
        ({"rope_scaling.rope_type": "default"}, ["'rope_scaling.rope_type' and field 'type'", "'yarn'"]),
        ({"rope_scaling.factor": 0.5}, ["'rope_scaling.factor' is 0.5", "from 1 to"]),
        ({"rope_scaling.beta_fast": 1}, ["'rope_scaling.beta_fast' is 1", "above beta_slow"]),
        ({"rope_theta": configs.ABSENT}, ["'rope_theta' is missing", "above 0"]),
        (
            {"rope_scaling": None, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
            ["field 'rope_theta' is 10000; accepted: 500000.0"],
        ),
        ({"rope_parameters": {"rope_type": "default"}}, ["'rope_scaling' and field 'rope_parameters' are both"]),
        # types and ranges
        ({"hidden_size": configs.ABSENT}, ["'hidden_size' is missing", "an integer of at least 1"]),
        ({"hidden_size": None}, ["'hidden_size' is null"]),
        ({"hidden_size": "7168"}, ["'hidden_size' is '7168'", "an integer"]),
        ({"hidden_size": 7168.0}, ["'hidden_size' is 7168.0", "an integer"]),
        ({"index_topk": 0}, ["'index_topk' is 0", "at least 1"]),
        ({"routed_scaling_factor": math.nan}, ["'routed_scaling_factor' is nan", "finite"]),
        ({"norm_topk_prob": 1}, ["'norm_topk_prob' is 1", "true, false"]),
        ({"eos_token_id": [1, 129280]}, ["'eos_token_id' is [1, 129280]", "vocab_size=129280"]),
        ({"bos_token_id": [0, 1]}, ["'bos_token_id' is [0, 1]", "one token id"]),
        # fields that contradict each other
        ({"n_group": 7}, ["'n_routed_experts' is 256", "a multiple of n_group=7"]),
        ({"n_group": 256}, ["'n_group' is 256", "groups of 2 experts or more"]),
        ({"topk_group": 9}, ["'topk_group' is 9", "at most n_group=8"]),
        ({"num_experts_per_tok": 129}, ["'num_experts_per_tok' is 129", "at most 128"]),
        ({"first_k_dense_replace": 62}, ["'first_k_dense_replace' is 62", "num_hidden_layers=61"]),
        ({"num_key_value_heads": 8}, ["'num_key_value_heads' is 8", "accepted: 128"]),
        ({"qk_head_dim": 128}, ["'qk_head_dim' is 128", "accepted: 192"]),
        ({"head_dim": 96}, ["'head_dim' is 96", "accepted: 64, 128, 192"]),
        ({"qk_rope_head_dim": 63}, ["'qk_rope_head_dim' is 63", "an even number"]),
        ({"index_head_dim": 32}, ["'index_head_dim' is 32", "at least qk_rope_head_dim=64"]),
        (
            {"mlp_layer_types": ["sparse"] * 61},
            ["'mlp_layer_types' is ['sparse'", "['dense', 'dense', 'dense', 'sparse'"],
        ),
        ({"layer_types": ["full_attention"] * 61}, ["'layer_types' is ['full_attention'", "indexed_attention"]),
    ],
)
def test_refused(tmp_path, changes, parts):
    configs.check_refused(tmp_path, NAME, changes, parts)


# What tools leave in a config.json without a change of its model.
LEFT_BY_TOOLS = {
    "transformers": {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "_experts_implementation": "eager"},
    "transformers 4": {"use_bfloat16": False, "is_decoder": False, "torchscript": False, "problem_type": None},
    "unsloth": {"unsloth_fixed": True, "unsloth_version": "2026.1.2", "pad_token_id": 2, "sliding_window": None},
    "axolotl": {"use_cache": False, "gradient_checkpointing": True, "use_sliding_window": False},
    "both ropes": {"rope_scaling": None, "rope_parameters": {"rope_theta": 10000, "rope_type": "default"}},
    "null": {"foo": None, "quantization_config.foo": None, "qkv_bias": False},
}


@pytest.mark.parametrize("tool", LEFT_BY_TOOLS)
@pytest.mark.filterwarnings("error")
def test_what_tools_leave_changes_nothing(tmp_path, tool):
    expected = configs.read(tmp_path, NAME)
    got = configs.read(tmp_path, NAME, **LEFT_BY_TOOLS[tool])
    assert got == replace(expected, rope=got.rope)


def test_unknown_fields_are_named_in_one_warning(tmp_path):
    expected = configs.read(tmp_path, NAME)
    with pytest.warns(UserWarning) as caught:
        assert configs.read(tmp_path, NAME, foo=3, unsloth_fixed=True, bar=[1]) == expected
    (one,) = caught
    assert str(one.message) == f"{tmp_path / 'config.json'}: unknown fields are ignored: 'foo', 'bar'"


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b'{"eos_token_id": "x", "vocab_size": "x"', "not valid JSON"),
        (b'{"a":' * 100_000, "not valid JSON"),
        (b"[1]", "must hold a JSON object, got [1]"),
        (b"\xff", "cannot be read"),
        (b" " * 2**20 + b"{}", "has 1048578 bytes; accepted: at most 1048576"),
        (LFS_POINTER, "is a git-LFS pointer"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, name, content, problem):
    configs.write(tmp_path, NAME)
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(f"{path}: {problem}")):
        read_config(tmp_path)
