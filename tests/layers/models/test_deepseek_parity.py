"""Parity of DeepSeek-V3.2 and DeepSeek-V4 with transformers' models."""

from typing import ClassVar

from tests.layers.models import hf_models
from tests.layers.models.parity import ParityTests, assert_parity


class TestDeepseekV32(ParityTests):
    build = staticmethod(hf_models.deepseek_v32)


def test_deepseek_v32_agrees_without_groups_and_yarn(tmp_path):
    changes = {
        "n_group": 1, "topk_group": 1, "n_shared_experts": 2, "first_k_dense_replace": 0, "num_hidden_layers": 2,
        "routed_scaling_factor": 1.7, "rope_parameters": {"rope_type": "default", "rope_theta": 5e4},
    }  # fmt: skip
    assert_parity(hf_models.deepseek_v32, tmp_path, **changes)


class TestDeepseekV4(ParityTests):
    build = staticmethod(hf_models.deepseek_v4)
    indexed: ClassVar = {1, 3}
    page_size = 32
    lengths: ClassVar = [1, 3, 4, 5, 8, 15, 16, 17, 33, 70]
    chunks: ClassVar = [[1] * 70, [70], [5, 7, 13, 1, 1, 21, 22], [16] * 4 + [6], [3, 2, 12, 30, 1, 1, 1, 20]]


def test_deepseek_v4_agrees_with_another_schedule_of_layers(tmp_path):
    changes = {
        "compress_ratios": [128, 0, 128], "num_hidden_layers": 3, "num_hash_layers": 0, "hc_mult": 2,
        "rope_parameters": {"rope_type": "default"}, "compress_rope_theta": 5e4, "routed_scaling_factor": 0.7,
    }  # fmt: skip
    assert_parity(hf_models.deepseek_v4, tmp_path, **changes)
