import json
import re
from dataclasses import replace

import pytest

from dsa_layers.config.model_config import QuantizationConfig, RopeConfig, YarnConfig
from dsa_layers.errors import ConfigError
from dsa_layers.models.family import family, read_config
from tests.layers.io.stand_ins import LFS_POINTER
from tests.layers.models.configs import ABSENT, read, write

NAME = "deepseek_v32"


def test_deepseek_v32_is_read(tmp_path):
    config = read(tmp_path, NAME)
    assert config.rope == RopeConfig(10000.0, YarnConfig(40.0, 4096, 32.0, 1.0, 1.0, 1.0))
    assert config.quantization == QuantizationConfig("ue8m0", "fp8")
    assert (config.bos_token_id, config.eos_token_ids, config.dtype) == (0, (1,), "bfloat16")


@pytest.mark.parametrize("name", [NAME, "glm_5", "glm_5_2", "deepseek_v4_flash", "deepseek_v4_pro"])
def test_transformers_spelling_reads_the_same(tmp_path, name):
    from transformers import AutoConfig

    expected = read(tmp_path, name)
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "rewritten")
    fields = json.loads((tmp_path / "rewritten" / "config.json").read_text())
    assert "rope_parameters" in fields and "rope_scaling" not in fields and "torch_dtype" not in fields
    # Other tools add fields: published names that transformers has renamed, set to null, and flags.
    left = {"rope_scaling": None, "compress_ratios": None, "unsloth_fixed": True}
    (tmp_path / "rewritten" / "config.json").write_text(json.dumps(fields | left))
    # GLM-5's published config has no bos_token_id; transformers writes its default, 0.
    assert replace(read_config(tmp_path / "rewritten"), bos_token_id=expected.bos_token_id) == expected


def test_transformers_spelling_without_yarn_and_quantisation_is_read(tmp_path):
    absent = "rope_scaling", "rope_theta", "torch_dtype", "quantization_config", "num_nextn_predict_layers"
    sizes = {"head_dim": 64, "qk_head_dim": 192, "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 58}
    rope = {"rope_theta": 5e5, "rope_type": "default"}
    changes = dict.fromkeys(absent, ABSENT) | sizes | {"rope_parameters": rope, "dtype": "float32"}
    config = read(tmp_path, NAME, **changes)
    assert config.rope == RopeConfig(5e5, None)
    assert (config.quantization, config.dtype, config.num_nextn_predict_layers) == (None, "float32", 0)
    assert read(tmp_path, NAME, rope_scaling=None, quantization_config=None).rope == RopeConfig(10000.0, None)


@pytest.mark.parametrize("value", ["float", None, ABSENT])
def test_scales_are_floats_unless_the_format_is_ue8m0(tmp_path, value):
    assert read(tmp_path, NAME, **{"quantization_config.scale_fmt": value}).quantization.scale_fmt == "float"


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
def test_eos_token_ids_of_generation_config_go_first(tmp_path, config_eos, generation, expected):
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert read(tmp_path, NAME, eos_token_id=config_eos).eos_token_ids == expected


# {test id: fields that tools write to a config.json}. Only "both ropes" changes the result: it removes YaRN.
LEFT_BY_TOOLS = {
    "indexed": {"layer_types": ["indexed_attention"] * 61},
    "sparse": {"layer_types": ["deepseek_sparse_attention"] * 61},
    "dequantize": {"quantization_config.modules_to_convert": None, "quantization_config.dequantize": False},
    "expert_dtype": {"quantization_config.expert_dtype": "fp8"},
    "not converted": {"quantization_config.modules_to_not_convert": ["lm_head"]},
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
    expected = read(tmp_path, NAME)
    got = read(tmp_path, NAME, **LEFT_BY_TOOLS[tool])
    assert got == replace(expected, rope=got.rope)


def test_unknown_fields_are_named_in_one_warning(tmp_path):
    expected = read(tmp_path, NAME)
    with pytest.warns(UserWarning) as caught:
        assert read(tmp_path, NAME, foo=3, unsloth_fixed=True, bar=[1]) == expected
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
    write(tmp_path, NAME)
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(f"{path}: {problem}")):
        read_config(tmp_path)


def test_deepseek_v4_s_layers_and_ropes_are_read(tmp_path):
    flash, pro = (read(tmp_path, f"deepseek_v4_{release}") for release in ("flash", "pro"))
    kinds = ["compressed_sparse_attention", "heavily_compressed_attention"]
    assert flash.layer_types == ("sliding_attention",) * 2 + tuple(kinds * 20) + (kinds[0],)
    assert pro.layer_types == (kinds[1],) * 2 + tuple(kinds * 29) + (kinds[0],)
    assert flash.rope == RopeConfig(1e4, None)
    assert flash.compress_rope == RopeConfig(1.6e5, YarnConfig(16.0, 65536, 32.0, 1.0, 0.0, 0.0))
    assert flash.quantization == QuantizationConfig("ue8m0", "fp4")
    assert flash.hash_layers == (True,) * 3 + (False,) * 40


def test_the_dtype_of_deepseek_v4_s_experts_may_be_in_the_quantisation_or_unsaid(tmp_path):
    name, in_quantisation = "deepseek_v4_flash", {"quantization_config.expert_dtype": "fp4"}
    for changes in (in_quantisation, in_quantisation | {"expert_dtype": None}):
        assert read(tmp_path, name, **changes) == read(tmp_path, name)
    assert read(tmp_path, name, expert_dtype=None).quantization.expert_dtype is None


def test_glm_5_is_read(tmp_path):
    config = read(tmp_path, "glm_5")
    assert config.indexer_types == ("full",) * 78 and config.indexer_rope_interleave
    assert (config.rms_norm_eps, config.latent_norm_eps) == (1e-5, 1e-6)
    assert config.rope == RopeConfig(1e6, None)
    assert (config.bos_token_id, config.eos_token_ids) == (None, (154820, 154827, 154829))


FULL = {0, 1, 2, 6, 10, 14, 18, 22, 26, 30, 34, 38, 42, 46, 50, 54, 58, 62, 66, 70, 74}
SCHEDULE = tuple("full" if layer in FULL else "shared" for layer in range(78))
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
    assert read(tmp_path, "hy_v4", swiglu_limit=0).swiglu_limit is None
    assert read(tmp_path, "hy_v4").swiglu_limit == 10
