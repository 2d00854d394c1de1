"""Wrong values in config.json, or in V4's table of experts per token id, are refused."""

import json
import math

import pytest
import torch

from dsa_layers.config.fields import NO_INFLUENCE
from dsa_layers.errors import CheckpointError, ConfigError
from dsa_layers.io.loading import load_model, unfilled_model
from dsa_layers.models.family import published_config, read_config
from dsa_layers.models.precision import Precision
from tests.layers.io.stand_ins import changed as changed_checkpoint
from tests.layers.models.configs import read

# The test sets each field of config.json to each of VALUES.
HUGE = 10**400
VALUES = [0, -1, 10**18, -(10**18), HUGE, -HUGE, math.nan, math.inf, -math.inf, 0.5, 1e-320, True, "8", None]
VALUES += [[], {}, [1], {"a": 1}, [[[[1]]]], "x" * 100_000]
FAMILIES = ("deepseek_v32", "deepseek_v4_flash", "glm_5_2", "mistral_large4", "dots3_note", "glm5_next")
PUBLISHED = {name: published_config(f"{name}_config.json") for name in FAMILIES}
# last part of the changed field's name -> field that the error may name instead
SAID_ELSEWHERE = {
    "dtype": "torch_dtype",
    "linear_attn_config": "linear_num_heads",
    "num_nextn_predict_layers": "compress_ratios",
    "first_k_dense_replace": "mlp_layer_types",
    "index_skip_topk_offset": "index_topk_freq",
    "rope_parameters": "rope_theta",
    "rope_theta": "rope_theta",
    "rope_scaling": "rope_scaling.rope_type",
    "type": "rope_scaling.rope_type",
    "quantization_config": "quantization_config.quant_method",
}


def fields_of(values, parents=()):
    for name, value in values.items():
        yield (*parents, name)
        if isinstance(value, dict):
            yield from fields_of(value, (*parents, name))


def changed(values, path, value):
    first, *rest = path
    return values | {first: changed(values[first], rest, value) if rest else value}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_of_a_config_is_right_or_refused_by_its_name(tmp_path, family):
    cases = [(path, value) for path in fields_of(PUBLISHED[family]) for value in VALUES]
    for path, value in cases:
        (tmp_path / "config.json").write_text(json.dumps(changed(PUBLISHED[family], path, value)))
        try:
            read_config(tmp_path)
        except ConfigError as error:
            name, other = ".".join(path), SAID_ELSEWHERE.get(path[-1])
            named = (f"field '{name}' ", f"field '{name}.", f"field '{other}' ")  # the second: a field inside an object
            assert any(words in str(error) for words in named), (path, value)
            assert len(str(error)) < 2000
        else:
            unsaid = value in (None, [], {}) or path[0] in NO_INFLUENCE
            small = isinstance(value, int | float) and (0 <= value <= 1 or "theta" in path[-1])
            bound = path[-1] == "gate_lower_bound" and value == -1
            assert unsaid or small or bound or value == [1], (path, value)


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("deepseek_v32", {"hidden_size": 7000}, "in_features: must be a multiple of 128, got 7000; .*dequantize=True"),
        ("deepseek_v32", {"index_head_dim": 96}, "'index_head_dim' is 96; accepted: 128, .*dequantize=True"),
        ("deepseek_v4_flash", {"o_groups": 64, "head_dim": 520}, "must be a multiple of 128, got 520"),
    ],
)
def test_sizes_that_no_fp8_takes_are_refused(tmp_path, family, changes, expected):
    config = read(tmp_path, family, **changes)
    with pytest.raises(ConfigError, match=f"config.json: .*{expected}"):
        unfilled_model(config, Precision.of(config))
    unfilled_model(config, Precision.of(config, dequantize=True))


@pytest.mark.parametrize(
    ("name", "changes"),
    [("deepseek_v32", {"kv_lora_rank": 256}), ("deepseek_v4_flash", {"head_dim": 256}), ("axk2_light", {})],
)
def test_sizes_that_no_fp8_cache_takes_are_refused(tmp_path, name, changes):
    config = read(tmp_path, name, **changes)
    with pytest.raises(ValueError, match=r"^kv_cache: must be .model., because FP8 caches do not have"):
        Precision.of(config, dequantize=True, kv_cache="fp8")
    assert Precision.of(config).kv_cache == "model"


@pytest.mark.parametrize(("low", "high"), [(-1, 3), (0, 8)])
def test_tables_of_experts_that_are_not_there_are_refused(tiny_checkpoint, tmp_path, low, high):
    name = "layers.0.ffn.gate.tid2eid"

    def change(tensors):
        tensors[name].zero_()
        tensors[name].view(-1)[[3, 5]] = torch.tensor([low, high])

    changed_checkpoint(tiny_checkpoint("deepseek_v4"), tmp_path, change)
    expected = f"{name} names the experts {low} to {high}; the model has 0 to 7"
    with pytest.raises(CheckpointError, match=expected):
        load_model(tmp_path, dequantize=True, progress=False)
