"""DeepSeek-V3.2 against transformers' own."""

from tests.layers.models import hf_models
from tests.layers.models.parity import ParityTests, assert_parity


class TestDeepseekV32(ParityTests):
    @staticmethod
    def build(directory):
        return hf_models.deepseek_v32(directory)


def test_logits_agree_without_groups_and_yarn(tmp_path):
    """Another config: one routing group, plain rope, two shared experts, all layers sparse."""
    changes = {
        "n_group": 1, "topk_group": 1, "n_shared_experts": 2, "first_k_dense_replace": 0, "num_hidden_layers": 2,
        "routed_scaling_factor": 1.7, "rope_parameters": {"rope_type": "default", "rope_theta": 5e4},
    }  # fmt: skip
    assert_parity(hf_models.deepseek_v32, tmp_path, **changes)
